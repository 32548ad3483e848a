"""Sharded gathers beside tensor-parallel sums: is the measured choice as good as the best forced?

Two programs of two groups of the same ranks. In the compiled one each layer's weight is gathered
over one group, two layers ahead, while the layers before run matrix products and sum their results
over the other, as tensor parallelism does; ``inner`` is what compiles it alone. The other is FSDP2,
forward and backward, with such sums in its blocks. The sides are the same program with other
``choose=``. They alternate, a round is over when its slowest rank is, and the median counts. All
sides get the same inputs and must give the same results, up to the order of sums.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from symmplan.report.format import count
from symmplan_bench.machine import hardware
from symmplan_bench.processes import check_peers, compared, meet, rounds_of, run_ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    import torch

__all__ = ["add_arguments", "render", "run"]

_PROGRAMS = ("compiled", "FSDP2")
#: How much slower than the best forced side the choice may be.
_WITHIN = 1.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan bench company``."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--ranks", type=int, default=2, help="processes to start (default 2)")
    add(
        "--tokens",
        type=int,
        nargs="+",
        help="rows of the activations (default 64, on cuda 2048 8192)",
    )
    add("--width", type=int, help="width of the layers (default 256, on cuda 4096)")
    add("--layers", type=int, default=6, help="default 6")
    add("--rounds", type=int, default=20, help="timed rounds (default 20)")
    add(
        "--programs",
        nargs="+",
        choices=_PROGRAMS,
        default=_PROGRAMS,
        metavar="NAME",
        help="compiled or FSDP2 (default both)",
    )
    add("--inner", choices=("inductor", "eager"), default="eager", help="default eager")
    add("--timeout", type=float, default=500.0, help="seconds for everything (default 500)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, time all sides, compare.

    Raises:
        CommandError: A rank failed or did not finish in time, or there are no peers.
    """
    check_peers(args.ranks)
    cuda = args.device == "cuda"
    options = {
        "device": args.device,
        "ranks": args.ranks,
        "tokens": args.tokens or ([2048, 8192] if cuda else [64]),
        "width": args.width or (4096 if cuda else 256),
        "layers": args.layers,
        "rounds": args.rounds,
        "programs": list(args.programs),
        "inner": args.inner,
        "threads": max(1, (os.cpu_count() or 1) // args.ranks),
    }
    ranks = run_ranks(
        _measure, options, ranks=args.ranks, device=args.device, timeout=args.timeout, connect=False
    )
    return compared(ranks, options, _row)


def _row(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One size, over all ranks."""
    rounds = rounds_of(found)
    ms = {side: statistics.median(times) for side, times in rounds.items()}
    best = min((side for side in ms if side not in ("plain", "measure")), key=ms.__getitem__)
    return {
        "ms": {side: round(t, 3) for side, t in ms.items()},
        "best": best,
        # Rounds are compared in pairs: other load hits both sides alike.
        "ratio": round(
            statistics.median(a / b for a, b in zip(rounds["measure"], rounds[best], strict=True)),
            3,
        ),
        "within": ms["measure"] <= _WITHIN * ms[best],
    }


def render(result: dict[str, Any]) -> str:
    """A table for people."""
    lines = [
        (
            f"{result['ranks']} ranks, {count(result['layers'], 'layer')} of width "
            f"{result['width']}; "
            f"{result['machine']}, torch {result['torch']}"
        ),
    ]
    for row in result["results"]:
        lines.append(f"{row['program']}, {row['tokens']} tokens")
        lines += [f"  {side:12} {ms:>10.3f} ms" for side, ms in row["ms"].items()]
        lines += [f"  {side:12} left out: {why}" for side, why in row["skipped"].items()]
        lines.append(
            f"  measured / best forced ({row['best']}): {row['ratio']:.3f}; results "
            f"{'agree' if row['equal'] else 'DIFFER'}"
        )
        lines += [
            f"    {c['op'].rpartition('::')[2]:36} {c['nbytes']:>12,} bytes: {c['way']}, of "
            + ", ".join(f"{way} {s * 1e6:.0f} us" for way, s in c["seconds"].items())
            + (f", beside {c['company']}" if c["company"] else "")
            for c in row["choices"]
        ]
    return "\n".join(lines)


def _measure(rank: int, _ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """What every rank runs."""
    import torch
    import torch.distributed as dist

    cuda = options["device"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    other = dist.new_group(range(options["ranks"]))
    if cuda:
        dist.barrier(group=other, device_ids=[rank])
    groups = dist.group.WORLD, other
    return {
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(device) if cuda else hardware()["cpu"],
        "rows": [
            _compare(program, tokens, groups, device, options)
            for program in options["programs"]
            for tokens in options["tokens"]
        ],
    }


def _compare(
    program: str,
    tokens: int,
    groups: Sequence[Any],
    device: torch.device,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Seconds of each round on each side, and whether all sides gave the same."""
    import torch
    import torch.distributed as dist

    from symmplan.errors import SymmplanError
    from symmplan_bench.company_sides import FORCED, PROGRAMS

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(tokens, options["width"], generator=generator).to(device, dtype)
    # Once: sides that were there before would be compiled again while they are timed.
    torch._dynamo.reset()
    sides: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for side in ("plain", "measure", *FORCED[program]):
        made = PROGRAMS[program]
        try:
            sides[side] = made(side, options, groups, x)
        except SymmplanError as error:
            skipped[side] = str(error).splitlines()[0]
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    order = list(sides)
    results = {}
    for number in range(options["rounds"]):
        for side in (*order[number % len(order) :], *order[: number % len(order)]):
            meet()
            _synchronize(device)
            begin = time.perf_counter()
            results[side] = sides[side]()
            _synchronize(device)
            seconds[side].append(time.perf_counter() - begin)
    want = results["plain"].float()
    most = 0.05 if dtype is torch.bfloat16 else 1e-4
    equal = all(
        float((r.float() - want).abs().max()) <= most * float(want.abs().max())
        for r in results.values()
    )
    choices = sides["measure"].choices
    for side in sides.values():
        side.end()
    return {
        "program": program,
        "tokens": tokens,
        "seconds": seconds,
        "skipped": skipped,
        "equal": equal,
        "choices": [
            {
                "op": c.op,
                "nbytes": c.nbytes,
                "way": c.way,
                "seconds": dict(c.seconds),
                "company": c.company,
            }
            for c in choices
        ],
    }


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
