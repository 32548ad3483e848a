"""Time expert-parallel layers, and their dispatch and combine alone, with and without symmplan.

``plain`` is what such programs do: an all-to-all of the counts, then ``all_to_all_single`` with
splits that are known only then. ``symmplan`` is `symmplan.expert_parallel` as it chooses by itself,
``push`` the same with rows pushed into the peers' memory. All sides get the same rows, and must
give the same bits.

``exchange``: one dispatch and one combine, with the exchange of counts. ``layers``: forward and
backward of layers whose experts are two matrix products. Routes are uneven and change in each
round; sides alternate; a round is over when its slowest rank is, and the median counts.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from symmplan.report.format import count, size
from symmplan_bench.machine import hardware
from symmplan_bench.processes import check_peers, compared, rounds_of, run_ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    import torch

__all__ = ["add_arguments", "render", "run"]

_SIDES = ("plain", "symmplan", "push")
_WARM_UP = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan bench moe``."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=None,
        help="rows that each rank sends in a call (default 256 2048, on cuda 4096 16384 65536)",
    )
    parser.add_argument(
        "--width", type=int, default=None, help="elements of a row (default 512, on cuda 4096)"
    )
    parser.add_argument("--layers", type=int, default=4, help="layers (default 4)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default 15)")
    parser.add_argument(
        "--capacity", type=float, default=1.5, help="capacity factor of the plan (default 1.5)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for everything (default 600)"
    )


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
        "tokens": args.tokens or ([4096, 16384, 65536] if cuda else [256, 2048]),
        "width": args.width or (4096 if cuda else 512),
        "layers": args.layers,
        "rounds": args.rounds,
        "capacity": args.capacity,
        "threads": max(1, (os.cpu_count() or 1) // args.ranks),
    }
    ranks = run_ranks(_measure, options, ranks=args.ranks, device=args.device, timeout=args.timeout)
    return compared(ranks, options, _slowest)


def _slowest(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row for all ranks."""
    milliseconds = {side: statistics.median(ms) for side, ms in rounds_of(found).items()}
    return {
        "ms": {side: round(ms, 3) for side, ms in milliseconds.items()},
        "speedup": round(milliseconds["plain"] / milliseconds["symmplan"], 3),
    }


def render(result: dict[str, Any]) -> str:
    """A table for people."""
    what = f"rows of {result['width']} elements, {count(result['layers'], 'layer')}"
    head = f"{'what':8} {'tokens':>6} {'plain ms':>9} {'symmplan ms':>11} {'push ms':>8} "
    lines = [
        f"{count(result['ranks'], 'rank')}, {what}; {result['machine']}, torch {result['torch']}",
        f"{head}{'speedup':>7}  {'way':8} {'segment':>9} equal",
    ]
    lines += [
        f"{row['what']:8} {row['tokens']:>6} {row['ms']['plain']:>9.3f} "
        f"{row['ms']['symmplan']:>11.3f} {row['ms']['push']:>8.3f} {row['speedup']:>6.2f}x  "
        f"{row['way']:8} {size(row['segment_bytes']):>9} "
        f"{'yes' if row['equal'] else 'NO'}"
        for row in result["results"]
    ]
    return "\n".join(lines)


def _measure(rank: int, _ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """What every rank runs."""
    import torch

    cuda = options["device"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    kinds = ((what, n) for n in options["tokens"] for what in ("exchange", "layers"))
    rows = [_compare(what, tokens, rank, device, options) for what, tokens in kinds]
    return {
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(device) if cuda else hardware()["cpu"],
        "rows": rows,
    }


def _compare(
    what: str, tokens: int, rank: int, device: torch.device, options: dict[str, Any]
) -> dict[str, Any]:
    """Seconds of each round on each side, and whether all sides gave the same."""
    import torch
    import torch.distributed as dist

    import symmplan

    size, width = options["ranks"], options["width"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(rank)
    source = torch.randn(tokens, width, generator=generator).to(device, dtype)
    experts = [
        [torch.randn(width, width, generator=generator).to(device, dtype) / width**0.5] * 2
        for _ in range(options["layers"])
    ]
    rounds = [_counts(tokens, size, generator) for _ in range(options["rounds"] + _WARM_UP)]
    bound = int(options["capacity"] * tokens)
    made: dict[str, Any] = {
        "plain": _Plain(size),
        "symmplan": symmplan.expert_parallel(max_tokens=bound),
        "push": symmplan.expert_parallel(max_tokens=bound, choose="push"),
    }
    work = _exchange if what == "exchange" else _layers
    seconds: dict[str, list[float]] = {side: [] for side in _SIDES}
    equal = True
    for number, counts in enumerate(rounds):
        results = {}
        order = [_SIDES[(number + i) % len(_SIDES)] for i in range(len(_SIDES))]
        for side in order:
            given = torch.tensor(counts, device=device)
            dist.barrier()
            results[side], taken = _timed(partial(work, made[side], source, given, experts), device)
            if number >= _WARM_UP:
                seconds[side].append(taken)
        equal &= all(torch.equal(results["plain"], result) for result in results.values())
    stats = made["symmplan"].stats
    way = "push" if stats.served else "ordinary"
    for side in ("symmplan", "push"):
        made[side].release()
    return {
        "what": what,
        "tokens": tokens,
        "seconds": seconds,
        "equal": equal,
        "way": way,
        "replans": stats.replans,
        "segment_bytes": stats.segment_bytes,
    }


def _counts(tokens: int, size: int, generator: torch.Generator) -> list[int]:
    """How many rows go to each rank: uneven, by up to a half."""
    import torch

    shares = torch.rand(size, generator=generator) + 1.0
    counts = [int(x) for x in (shares / shares.sum() * tokens)]
    counts[0] += tokens - sum(counts)
    return counts


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - begin


def _exchange(via: Any, source: torch.Tensor, counts: torch.Tensor, _experts: Any) -> torch.Tensor:
    routes = via.routes(counts)
    back: torch.Tensor = via.combine(via.dispatch(source, routes), routes)
    return back


def _layers(via: Any, source: torch.Tensor, counts: torch.Tensor, experts: Any) -> torch.Tensor:
    import torch

    rows = source.clone().requires_grad_()
    x = rows
    for up, down in experts:
        routes = via.routes(counts)
        inside = via.dispatch(x, routes)
        x = x + via.combine(torch.relu(inside @ up) @ down, routes)
    x.sum().backward()
    assert rows.grad is not None
    return rows.grad


class _Plain:
    """What programs do without symmplan."""

    def __init__(self, size: int) -> None:
        self._size = size

    def routes(self, counts: torch.Tensor) -> tuple[list[int], list[int]]:
        import torch
        import torch.distributed as dist

        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        return counts.tolist(), received.tolist()

    def dispatch(self, rows: torch.Tensor, routes: tuple[list[int], list[int]]) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        made: torch.Tensor = all_to_all_single_autograd(rows, routes[1], routes[0], _world())
        return made

    def combine(self, rows: torch.Tensor, routes: tuple[list[int], list[int]]) -> torch.Tensor:
        return self.dispatch(rows, (routes[1], routes[0]))


def _world() -> Any:
    import torch.distributed as dist

    return dist.group.WORLD
