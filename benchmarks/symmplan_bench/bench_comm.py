"""Time the one-sided collectives of memory="shm" against gloo's, on this machine.

Both run in the same processes on the same tensors, alternating, so that other load hits both
alike; a repetition's time is the slowest rank's, and medians are compared. Every result is checked
against gloo's. Bytes are those of one rank's part: the input of an all-gather, the output of a
reduce-scatter, the whole tensor of an all-reduce.

With -o, FSDP2's collectives are timed instead in every way that the device's memory has, as a job
does that measures, and the choices written to a table: for choose= of later jobs, and for
symmplan simulate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symmplan.errors import CommandError
from symmplan.place.table import Table, TuningRow
from symmplan.report.format import count
from symmplan.testing.ranks import mark
from symmplan_bench.machine import hardware
from symmplan_bench.processes import check_peers, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["add_arguments", "render", "run"]

_OPS = ("all_gather", "reduce_scatter", "all_reduce")
_DEFAULT_SIZES = "64K,256K,1M,4M,16M,64M"
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan bench comm``."""
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=_sizes(_DEFAULT_SIZES),
        metavar="N[K|M],...",
        help=f"bytes of one rank's part (default {_DEFAULT_SIZES})",
    )
    parser.add_argument(
        "--repetitions", type=int, default=15, help="timed runs of each (default 15)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="with -o")
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help="write a table of choices")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for everything (default 300)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, collect their times, compare.

    Raises:
        CommandError: A rank failed or did not finish in time.
    """
    check_peers(args.ranks)
    if args.output is not None:
        return _write_choices(args)
    if args.device != "cpu":
        raise CommandError("gloo has no collectives of devices", fix="add -o choices.json")
    options = {
        "ranks": args.ranks,
        "sizes": args.sizes,
        "repetitions": args.repetitions,
        "dtype": args.dtype,
        "threads": max(1, (os.cpu_count() or 1) // args.ranks),
    }
    measured = run_ranks(_times, options, ranks=args.ranks, device="cpu", timeout=args.timeout)
    rows = []
    for op in _OPS:
        for size in args.sizes:
            cell = [rank["times"][op][str(size)] for rank in measured]
            # One repetition is over when its slowest rank is.
            slowest = {
                side: [max(run) for run in zip(*(c[side] for c in cell), strict=True)]
                for side in ("gloo", "shm")
            }
            gloo, shm = (statistics.median(slowest[side]) for side in ("gloo", "shm"))
            rows.append(
                {
                    "op": op,
                    "bytes": size,
                    "gloo_us": round(gloo * 1e6, 1),
                    "shm_us": round(shm * 1e6, 1),
                    "speedup": round(gloo / shm, 2),
                    "best_speedup": round(min(slowest["gloo"]) / min(slowest["shm"]), 2),
                    "equal": all(c["equal"] for c in cell),
                }
            )
    return {
        "ok": all(row["equal"] for row in rows),
        "command": _command(args),
        "ranks": args.ranks,
        "threads_per_rank": options["threads"],
        "dtype": args.dtype,
        "repetitions": args.repetitions,
        "results": rows,
        "machine": {**hardware(), "torch": measured[0]["torch"]},
    }


def _write_choices(args: argparse.Namespace) -> dict[str, Any]:
    """Measure as a job does, on all ranks alike; write the table."""
    options = {"sizes": args.sizes, "dtype": args.dtype, "device": args.device}
    ranks = args.ranks
    measured = run_ranks(_choices, options, ranks=ranks, device=args.device, timeout=args.timeout)
    memory, rows = measured[0]
    table = Table(memory, tuple(TuningRow(**row) for row in rows))
    args.output.write_text(table.to_json(), encoding="utf-8")
    return {"ok": True, "written": str(args.output), "memory": memory, "rows": rows}


def _choices(rank: int, _ranks: int, options: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """What FSDP2's collectives of some sizes run as, over all ranks."""
    import torch
    import torch.distributed as dist

    from symmplan.capture.fsdp_recording import Key, Recording
    from symmplan.integrate.fsdp.memory import Memory
    from symmplan.integrate.fsdp.planning import Planning
    from symmplan.place.options import Options
    from symmplan.torch_private.c10d import group_name

    cuda = options["device"] == "cuda"
    group = dist.group.WORLD
    assert group is not None
    memory = Memory(Options(choose="measure"))
    memory.groups[group_name(group)] = group
    memory.expect(torch.device("cuda", rank) if cuda else torch.device("cpu"))
    dtype = getattr(torch, options["dtype"])
    recording = Recording()
    for kind in ("all_gather", "reduce_scatter"):
        for size in options["sizes"]:
            nbytes = size * group.size()
            key = Key("bench", kind, nbytes // dtype.itemsize, str(dtype), backward=False)
            recording.run(recording.begin(key, nbytes), group_name(group))
    name, choices = Planning(Options(choose="measure"), memory).measured(recording)
    rows = [
        {
            "op": choice.op,
            "ranks": choice.ranks,
            "nbytes": choice.nbytes,
            "way": choice.way,
            "seconds": dict(choice.seconds),
        }
        for choice in choices
    ]
    return name, rows


def _command(args: argparse.Namespace) -> str:
    return (
        f"symmplan bench comm --ranks {args.ranks} --repetitions {args.repetitions} "
        f"--dtype {args.dtype} --sizes {','.join(map(str, args.sizes))}"
    )


def render(result: dict[str, Any]) -> str:
    """A table for people."""
    if "written" in result:
        rows = [f"{r['op']:15} {r['nbytes']:>12}  {r['way']}" for r in result["rows"]]
        return "\n".join([*rows, f"wrote {result['written']}"])
    machine = result["machine"]
    lines = [
        (
            f"{result['ranks']} ranks, {count(result['threads_per_rank'], 'thread')} each, "
            f"{result['dtype']}; {machine['cpu']}, {machine['cores']} cores, "
            f"torch {machine['torch']}"
        ),
        f"{'op':15} {'bytes':>10} {'gloo us':>10} {'shm us':>10} {'speedup':>8}  equal",
    ]
    lines += [
        f"{row['op']:15} {row['bytes']:>10} {row['gloo_us']:>10.0f} {row['shm_us']:>10.0f} "
        f"{row['speedup']:>7.1f}x  {'yes' if row['equal'] else 'NO'}"
        for row in result["results"]
    ]
    return "\n".join(lines)


def _sizes(text: str) -> list[int]:
    sizes = []
    for part in text.upper().split(","):
        unit = _UNITS.get(part[-1:], 1)
        digits = part[:-1] if part[-1:] in _UNITS else part
        if not digits.isdecimal() or not int(digits):
            raise argparse.ArgumentTypeError(f"{part!r} is no size; say 4096, 64K or 16M")
        # Whole cache lines, so that every type and number of ranks divides it.
        sizes.append(max(64, int(digits) * unit // 64 * 64))
    return sizes


def _times(rank: int, _ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures; the first one says how far it is."""
    import torch

    total = len(_OPS) * len(options["sizes"])
    times: dict[str, Any] = {}
    done = 0
    for op in _OPS:
        times[op] = {}
        for size in options["sizes"]:
            mark(f"{op} of {size} bytes, {done + 1}/{total}")
            done += 1
            times[op][str(size)] = _measure(op, size, rank, options)
    return {"torch": torch.__version__, "times": times}


def _measure(op: str, size: int, rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Times in seconds of one op at one size, and whether both sides agree."""
    import torch
    import torch.distributed as dist

    from symmplan.memory import realize

    world = options["ranks"]
    dtype = getattr(torch, options["dtype"])
    count = size // dtype.itemsize
    with realize(_plan(size * world), memory="shm", timeout=60.0) as arena:
        # Small whole numbers: sums are exact, so equal means equal whatever the order.
        generator = torch.Generator().manual_seed(rank)
        large = arena.tensor("large", dtype)
        small = arena.tensor("small", dtype)[:count]
        part = torch.randint(-8, 8, (count,), generator=generator).to(dtype)
        whole = torch.randint(-8, 8, (count * world,), generator=generator).to(dtype)
        want: torch.Tensor
        got: torch.Tensor
        gloo: Callable[[], Any]
        shm: Callable[[], Any]
        if op == "all_gather":
            want, got = torch.empty_like(large), large
            gloo = lambda: dist.all_gather_into_tensor(want, part)  # noqa: E731
            shm = lambda: torch.ops.symmplan.all_gather_out(  # noqa: E731
                part, world, "default", out=got
            )
        elif op == "reduce_scatter":
            want, got = torch.empty_like(part), torch.empty_like(part)
            large.copy_(whole)
            gloo = lambda: dist.reduce_scatter_tensor(want, large)  # noqa: E731
            shm = lambda: torch.ops.symmplan.reduce_scatter_out(  # noqa: E731
                large, "sum", world, "default", out=got
            )
        else:
            want, got = part.clone(), small
            small.copy_(part)
            gloo = lambda: dist.all_reduce(want)  # noqa: E731
            shm = lambda: torch.ops.symmplan.all_reduce_out(  # noqa: E731
                small, "sum", "default", out=got
            )
        gloo()
        shm()
        equal = bool(torch.equal(want, got))
        times = {side: [0.0] * options["repetitions"] for side in ("gloo", "shm")}
        for repetition in range(options["repetitions"]):
            for side, call in (("gloo", gloo), ("shm", shm)):
                if op == "all_reduce":  # in place: without this sums would overflow
                    want.fill_(1)
                    small.fill_(1)
                arena.segments["s0"].barrier()
                begin = time.perf_counter()
                call()
                times[side][repetition] = time.perf_counter() - begin
        return {**times, "equal": equal}


def _plan(nbytes: int) -> Any:
    """A plan with two buffers side by side; no program, so it is written by hand."""
    from symmplan.model import Placement, Plan, Problem, SegmentSpec

    problem = Problem.from_intervals([("large", 0, 1, nbytes), ("small", 0, 1, nbytes)])
    return Plan(
        problem=problem,
        segments=(SegmentSpec("s0", ("default",), 2 * nbytes, 2 * nbytes),),
        placements={
            "large": Placement("s0", 0, nbytes),
            "small": Placement("s0", nbytes, nbytes),
        },
    )
