"""Measure the planner: hard instances, real program shapes, scale, order.

Seconds are CPU seconds of this process, so other load on the machine changes them little; memory
is the peak of a fresh process. Peaks are compared with the proven lower bound in bytes. Every plan
is verified, and the offsets of others are checked the same way.
"""

from __future__ import annotations

import importlib.metadata
import math
import multiprocessing
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from symmplan.errors import SymmplanError
from symmplan.model import Placement, Problem
from symmplan.planner import plan
from symmplan.planner.items import conflicts_of, items_of
from symmplan.planner.packing.task import task_of
from symmplan_bench import instances
from symmplan_bench.machine import hardware

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from symmplan.model import Plan

__all__ = ["add_arguments", "render", "run"]

#: Layers and micro-batches of the program shapes, in the full and in the quick run.
_SHAPES = {"full": ((32, 1), (64, 8), (126, 8), (126, 64)), "quick": ((32, 1),)}
_SCALE = {"full": (1_000, 3_000, 10_000, 30_000, 100_000), "quick": (300, 600)}
_ORDER = {"full": 100_000, "quick": 5_000}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan bench planner``."""
    parser.add_argument(
        "--csv",
        nargs="+",
        default=None,
        metavar="FILE",
        help="instances with the columns id,lower,upper,size (half-open) instead of generated ones",
    )
    parser.add_argument(
        "--effort", choices=("fast", "optimal", "both"), default="both", help="default: both"
    )
    parser.add_argument("--quick", action="store_true", help="a few small cases only")
    parser.add_argument(
        "--omnimalloc-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="time limit of omnimalloc's branch and bound per instance (default 10)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that the options ask for.

    Raises:
        ProblemError: A CSV file cannot be read.
    """
    efforts = ("fast", "optimal") if args.effort == "both" else (args.effort,)
    size = "quick" if args.quick else "full"
    found = [
        _instance(name, rows, efforts, args.omnimalloc_seconds)
        for name, rows in (_files(args.csv) if args.csv else _generated(size))
    ]
    result: dict[str, Any] = {
        "command": _command(args),
        "machine": _machine(),
        "instances": found,
        "summary": _summary(found, efforts),
    }
    if not args.csv:
        result["programs"] = [_program(*shape) for shape in _programs(size)]
        result["scale"] = _scale(size)
        result["order"] = _order(_ORDER[size])
    return result


def _command(args: argparse.Namespace) -> str:
    words = ["symmplan bench planner", f"--effort {args.effort}"]
    if args.quick:
        words.append("--quick")
    if args.csv:
        words.append("--csv " + " ".join(args.csv))
    return " ".join(words)


def _machine() -> dict[str, Any]:
    packages = ("symmplan", "numpy", "networkx", "omnimalloc")
    return {**hardware(), "versions": {p: _version(p) for p in packages}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# Instances ----------------------------------------------------------------------------------------


def _files(paths: list[str]) -> list[tuple[str, Problem]]:
    """All of them at once: a bad file must not cost the minutes of those before it."""
    return [(Path(path).name, Problem.from_csv(path)) for path in paths]


def _generated(size: str) -> Iterator[tuple[str, Problem]]:
    if size == "quick":
        shapes: tuple[tuple[int, int], ...] = ((40, 64),)
    else:
        shapes = ((150, 512), (200, 128), (250, 256), (300, 600), (350, 1000), (400, 256))
    for k, (pieces, width) in enumerate(shapes):
        rows = instances.cut_rectangle(pieces, seed=k, width=width)
        yield f"cut into {pieces}", Problem.from_intervals(rows)
    if size == "quick":
        return
    for k, (pieces, width) in enumerate(((154, 100), (250, 300), (300, 256), (400, 256))):
        rows = instances.cut_rectangle(pieces, seed=100 + k, width=width)
        rows = instances.loosened(rows, seed=k, per_mille=5 + 5 * (k % 2))
        yield f"loosened {pieces}", Problem.from_intervals(rows)
    for k, buffers in enumerate((200, 300, 454)):
        yield (
            f"waves of {buffers}",
            Problem.from_intervals(instances.waves(buffers, seed=k, sections=2 + k)),
        )


def _instance(
    name: str, problem: Problem, efforts: tuple[str, ...], seconds: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "buffers": len(problem.buffers)}
    made = None
    for effort in efforts:
        made, row[effort] = _timed(problem, effort)
        row["lower_bound_bytes"] = made.lower_bound_bytes
    assert made is not None
    for packer, offsets_of in _others(seconds).items():
        row[packer] = _other(made, offsets_of)
    return row


def _timed(problem: Problem, effort: Any) -> tuple[Plan, dict[str, Any]]:
    begin = time.process_time()
    made = plan(problem, effort=effort)
    seconds = time.process_time() - begin
    made.verify()
    return made, {
        "peak_bytes": made.peak_bytes,
        "lower_bound_bytes": made.lower_bound_bytes,
        "ratio": round(made.gap, 4),
        "optimal": made.optimal,
        "proof": [s.proof for s in made.segments],
        "cpu_seconds": round(seconds, 3),
    }


def _others(seconds: float) -> dict[str, Callable[[Problem], dict[str, int]]]:
    """The default allocator of omnimalloc and its branch and bound, where it is installed."""
    try:
        import omnimalloc
        from omnimalloc.allocators.supermalloc import SupermallocAllocator
    except ImportError:
        return {}

    def with_allocator(allocator: Any) -> Callable[[Problem], dict[str, int]]:
        def offsets(problem: Problem) -> dict[str, int]:
            place = {o.name: i for i, o in enumerate(problem.operations)}
            live: dict[str, list[int]] = {}
            for a in problem.accesses:
                live.setdefault(a.buffer, []).append(place[a.operation])
            wanted = [
                omnimalloc.Allocation(b.name, b.nbytes, min(live[b.name]), max(live[b.name]) + 1)
                for b in problem.buffers
            ]
            placed = omnimalloc.allocate(wanted, allocator)
            return {str(a.id): a.offset or 0 for a in placed}

        return offsets

    return {
        "omnimalloc": with_allocator("omni"),
        "omnimalloc_branch_and_bound": with_allocator(SupermallocAllocator(timeout=seconds)),
    }


def _other(made: Plan, offsets_of: Callable[[Problem], dict[str, int]]) -> dict[str, Any]:
    begin = time.process_time()
    wall = time.perf_counter()
    try:
        offsets = offsets_of(made.problem)
    except Exception as e:  # noqa: BLE001 - somebody else's code; the comparison goes on
        return {"error": f"{type(e).__name__}: {e}"[:200]}
    seconds = time.process_time() - begin
    wall = time.perf_counter() - wall
    size = {b.name: b.nbytes for b in made.problem.buffers}
    peak = max(offset + size[name] for name, offset in offsets.items())
    segment = evolve(made.segments[0], nbytes=peak)
    theirs = evolve(
        made,
        segments=(segment,),
        placements={n: Placement(segment.name, offsets[n], size[n]) for n in sorted(offsets)},
        barriers=(),
        optimal=peak == made.lower_bound_bytes,
    )
    try:
        theirs.verify()
    except SymmplanError as e:
        return {"error": str(e).partition("\n")[0], "cpu_seconds": round(seconds, 3)}
    return {
        "peak_bytes": peak,
        "ratio": round(peak / made.lower_bound_bytes, 4),
        "cpu_seconds": round(seconds, 3),
        "wall_seconds": round(wall, 3),
    }


def _summary(rows: list[dict[str, Any]], efforts: tuple[str, ...]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for packer in (*efforts, "omnimalloc", "omnimalloc_branch_and_bound"):
        cells = [r[packer] for r in rows if packer in r and "ratio" in r[packer]]
        if cells:
            ratios = [c["ratio"] for c in cells]
            summary[packer] = {
                "instances": len(cells),
                "mean_ratio": round(sum(ratios) / len(ratios), 4),
                "worst_ratio": max(ratios),
                "at_the_bound": sum(r == 1.0 for r in ratios),
                "worst_cpu_seconds": max(c["cpu_seconds"] for c in cells),
            }
    return summary


# Programs, scale, order ---------------------------------------------------------------------------


def _programs(size: str) -> Iterator[tuple[str, Problem]]:
    makers: dict[str, Callable[..., Problem]] = {
        "FSDP": instances.fsdp_program,
        "tensor parallel": instances.tensor_parallel_program,
        "mixture of experts": instances.moe_program,
    }
    for layers, steps in _SHAPES[size]:
        for name, make in makers.items():
            yield f"{name}, {layers} layers x {steps}", make(layers, steps=steps)


def _program(name: str, problem: Problem) -> dict[str, Any]:
    _, row = _timed(problem, "fast")
    return {"name": name, "buffers": len(problem.buffers), **row}


def _scale(size: str) -> dict[str, Any]:
    """Time and memory at fixed overlap, each size in a process of its own."""
    points = [_fresh(_scale_point, count) for count in _SCALE[size]]
    x = [math.log(p["buffers"]) for p in points]
    y = [math.log(max(p["cpu_seconds"], 1e-6)) for p in points]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )
    return {"overlap": 100, "points": points, "log_log_slope": round(slope, 3)}


def _scale_point(count: int) -> dict[str, Any]:
    problem = Problem.from_intervals(instances.steady_stream(count, overlap=100))
    _, row = _timed(problem, "fast")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kib = used // 1024 if sys.platform == "darwin" else used
    return {"buffers": count, **row, "max_rss_mib": round(kib / 1024, 1)}


def _order(count: int) -> dict[str, Any]:
    """Order and interference alone, on four streams with random waits."""
    problem = instances.stream_program(count, streams=4)
    begin = time.process_time()
    # A fresh copy: the order is kept with the problem once it is known.
    problem = evolve(problem)
    items = items_of(problem)
    ordered = time.process_time()
    task = task_of(items, np.arange(len(items)))
    conflicts = conflicts_of(task)
    end = time.process_time()
    return {
        "operations": count,
        "streams": 4,
        "edges": len(problem.edges),
        "conflicts": len(conflicts.neighbours) // 2,
        "order_cpu_seconds": round(ordered - begin, 3),
        "interference_cpu_seconds": round(end - ordered, 3),
    }


def _fresh(function: Callable[[int], dict[str, Any]], argument: int) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (argument,))


# For people ---------------------------------------------------------------------------------------


def render(result: dict[str, Any]) -> str:
    """Tables for people."""
    machine = result["machine"]
    versions = ", ".join(f"{k} {v or '-'}" for k, v in machine["versions"].items())
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {versions}",
        result["command"],
        "",
        "peak / proven lower bound (CPU seconds)",
    ]
    packers = list(result["summary"])
    lines.append(f"{'instance':24} {'buffers':>7}  " + "  ".join(f"{p:>16.16}" for p in packers))
    for row in result["instances"]:
        cells = "  ".join(f"{_cell(row.get(p)):>16}" for p in packers)
        lines.append(f"{row['name']:24.24} {row['buffers']:>7}  {cells}")
    means = "  ".join(f"{result['summary'][p]['mean_ratio']:>16.4f}" for p in packers)
    lines.append(f"{'mean':24} {'':>7}  {means}")
    if "programs" in result:
        lines += ["", f"{'program':40} {'buffers':>7}  {'fast':>16}"]
    lines += [
        f"{row['name']:40} {row['buffers']:>7}  {_cell(row):>16}"
        for row in result.get("programs", ())
    ]
    if "scale" in result:
        lines.append("")
        lines += [
            f"overlap 100: {p['buffers']:>7} buffers {p['cpu_seconds']:>7.2f} s "
            f"{p['max_rss_mib']:>7.0f} MiB  ratio {p['ratio']:.4f}"
            for p in result["scale"]["points"]
        ]
        lines.append(f"log-log slope {result['scale']['log_log_slope']}")
    if "order" in result:
        o = result["order"]
        lines.append(
            f"{o['operations']} operations on {o['streams']} streams: order "
            f"{o['order_cpu_seconds']:.2f} s, {o['conflicts']} conflicts "
            f"{o['interference_cpu_seconds']:.2f} s"
        )
    return "\n".join(lines)


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    if "ratio" not in cell:
        return "error"
    return f"{cell['ratio']:.4f} ({cell['cpu_seconds']:.2f})"
