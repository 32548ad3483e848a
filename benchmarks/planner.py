"""Measure the planner: hard instances, shapes of real programs, scale, order.

Seconds are CPU seconds of this process, so other load on the machine changes them little. Memory is
the peak of a fresh process. Peaks are divided by the proven lower bound in bytes. Every plan is
verified, and the offsets of other planners are checked in the same way.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import instances
import numpy as np
from attrs import evolve

from symmplan.bench.parts import command
from symmplan.errors import SymmplanError
from symmplan.model import Placement, Problem
from symmplan.planner import plan
from symmplan.planner.items import conflicts_of, items_of
from symmplan.planner.packing.task import task_of
from symmplan.report.progress import ProgressLine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from symmplan.model import Plan

__all__ = ["add_arguments", "render", "run"]

#: What the full and the quick run measure. Rectangles: pieces and instants. Loosened ones, waves:
#: pieces. Shapes of programs: layers and micro-batches. Scale: buffers. Order: operations.
_FULL: dict[str, Any] = {
    "cut": ((150, 512), (200, 128), (250, 256), (300, 600), (350, 1000), (400, 256)),
    "loosened": ((154, 100), (250, 300), (300, 256), (400, 256)),
    "waves": (200, 300, 454),
    "shapes": ((32, 1), (64, 8), (126, 8), (126, 64)),
    "scale": (1_000, 3_000, 10_000, 30_000, 100_000),
    "order": 100_000,
}
_QUICK: dict[str, Any] = {
    "cut": ((40, 64),),
    "loosened": (),
    "waves": (),
    "shapes": ((32, 1),),
    "scale": (300, 600),
    "order": 5_000,
}
_OTHERS = ("omnimalloc", "omnimalloc_branch_and_bound")
#: Time limit of omnimalloc's branch and bound for each instance.
_OMNIMALLOC_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmarks/planner.py``."""
    add = parser.add_argument
    about = "instances with the columns id,lower,upper,size (half-open) instead of generated ones"
    add("--csv", nargs="+", metavar="FILE", help=about)
    add("--quick", action="store_const", const=True, help="a few small cases only")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that the options ask for.

    Raises:
        ProblemError: A CSV file cannot be read.
    """
    sizes = _QUICK if args.quick else _FULL
    # All files first: a bad one must not cost the minutes of those before it.
    files = [(Path(path).name, Problem.from_csv(path)) for path in args.csv or ()]
    others = _others()
    progress, found = ProgressLine(), []
    instances = files or list(_generated(sizes))
    for i, given in enumerate(instances):
        progress.mark(f"{given[0]}, {len(given[1].buffers):,} buffers", i / len(instances))
        found.append(_instance(*given, others))
    progress.mark("programs and scale")
    result: dict[str, Any] = {
        "command": command.words_of(args),
        "machine": {**command.hardware(), "versions": _versions()},
        "instances": found,
        "summary": _summary(found, ("symmplan", *_OTHERS)),
    }
    if not args.csv:
        result["programs"] = [
            {"name": name, "buffers": len(problem.buffers), **_planned(problem)[1]}
            for name, problem in _programs(sizes)
        ]
        result["scale"] = _scale(sizes)
        result["order"] = _order(sizes["order"])
    return result


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = dict.fromkeys(("symmplan", "numpy", "networkx", "omnimalloc"))
    for package in found:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # noqa: PERF203
            continue
    return found


# Instances ----------------------------------------------------------------------------------------


def _generated(sizes: dict[str, Any]) -> Iterator[tuple[str, Problem]]:
    made: dict[str, list[Any]] = {}
    for k, (pieces, width) in enumerate(sizes["cut"]):
        made[f"cut into {pieces}"] = instances.cut_rectangle(pieces, seed=k, width=width)
    for k, (pieces, width) in enumerate(sizes["loosened"]):
        rows = instances.cut_rectangle(pieces, seed=100 + k, width=width)
        rows = instances.loosened(rows, seed=k, per_mille=5 + 5 * (k % 2))
        made[f"loosened {pieces}"] = rows
    for k, buffers in enumerate(sizes["waves"]):
        made[f"waves of {buffers}"] = instances.waves(buffers, seed=k, sections=2 + k)
    for name, rows in made.items():
        yield name, Problem.from_intervals(rows)


def _instance(name: str, problem: Problem, others: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    made, ours = _planned(problem)
    theirs = {packer: _other(made, offsets) for packer, offsets in others.items()}
    bound = made.lower_bound_bytes
    about = {"name": name, "buffers": len(problem.buffers), "lower_bound_bytes": bound}
    return {**about, "symmplan": ours, **theirs}


def _planned(problem: Problem) -> tuple[Plan, dict[str, Any]]:
    begin = time.process_time()
    made = plan(problem)
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


def _others() -> dict[str, Callable[[Problem], dict[str, int]]]:
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

    allocators = ("omni", SupermallocAllocator(timeout=_OMNIMALLOC_SECONDS))
    return dict(zip(_OTHERS, map(with_allocator, allocators), strict=True))


def _other(made: Plan, offsets_of: Callable[[Problem], dict[str, int]]) -> dict[str, Any]:
    begin, wall = time.process_time(), time.perf_counter()
    try:
        offsets = offsets_of(made.problem)
    except Exception as e:  # noqa: BLE001 - somebody else's code; the comparison goes on
        return {"error": f"{type(e).__name__}: {e}"[:200]}
    taken = {
        "cpu_seconds": round(time.process_time() - begin, 3),
        "wall_seconds": round(time.perf_counter() - wall, 3),
    }
    size = {b.name: b.nbytes for b in made.problem.buffers}
    peak = max(offset + size[name] for name, offset in offsets.items())
    segment = evolve(made.segments[0], nbytes=peak)
    placements = {n: Placement(segment.name, offsets[n], size[n]) for n in sorted(offsets)}
    theirs = evolve(made, segments=(segment,), placements=placements, barriers=())
    try:
        theirs.verify()
    except SymmplanError as e:
        return {"error": str(e).partition("\n")[0], **taken}
    return {"peak_bytes": peak, "ratio": round(peak / made.lower_bound_bytes, 4), **taken}


def _summary(rows: list[dict[str, Any]], packers: tuple[str, ...]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for packer in packers:
        cells = [r[packer] for r in rows if packer in r and "ratio" in r[packer]]
        if cells:
            ratios = [c["ratio"] for c in cells]
            summary[packer] = {
                "instances": len(cells),
                "mean_ratio": round(statistics.mean(ratios), 4),
                "worst_ratio": max(ratios),
                "at_the_bound": ratios.count(1.0),
                "worst_cpu_seconds": max(c["cpu_seconds"] for c in cells),
            }
    return summary


# Programs, scale, order ---------------------------------------------------------------------------


def _programs(sizes: dict[str, Any]) -> Iterator[tuple[str, Problem]]:
    makers: dict[str, Callable[..., Problem]] = {
        "FSDP": instances.fsdp_program,
        "tensor parallel": instances.tensor_parallel_program,
        "mixture of experts": instances.moe_program,
    }
    for layers, steps in sizes["shapes"]:
        for name, make in makers.items():
            yield f"{name}, {layers} layers x {steps}", make(layers, steps=steps)


def _scale(sizes: dict[str, Any]) -> dict[str, Any]:
    """Time and memory at fixed overlap, each size in a process of its own."""
    points = []
    for count in sizes["scale"]:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            points.append(pool.apply(_scale_point, (count,)))
    x, y = (np.log([max(p[key], 1e-6) for p in points]) for key in ("buffers", "cpu_seconds"))
    slope = statistics.linear_regression(x.tolist(), y.tolist()).slope
    return {"overlap": 100, "points": points, "log_log_slope": round(slope, 3)}


def _scale_point(count: int) -> dict[str, Any]:
    problem = Problem.from_intervals(instances.steady_stream(count, overlap=100))
    _, row = _planned(problem)
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
    conflicts = conflicts_of(task_of(items, np.arange(len(items))))
    end = time.process_time()
    return {
        "operations": count,
        "streams": 4,
        "edges": len(problem.edges),
        "conflicts": len(conflicts.neighbours) // 2,
        "order_cpu_seconds": round(ordered - begin, 3),
        "interference_cpu_seconds": round(end - ordered, 3),
    }


# For people ---------------------------------------------------------------------------------------


def render(result: dict[str, Any]) -> str:
    """Tables for people."""
    machine, summary = result["machine"], result["summary"]
    versions = ", ".join(f"{k} {v or '-'}" for k, v in machine["versions"].items())
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {versions}",
        result["command"],
        "peak / proven lower bound (CPU seconds)",
    ]
    rows = [
        [row["name"], row["buffers"], *(_cell(row.get(packer)) for packer in summary)]
        for row in result["instances"]
    ]
    rows.append(["mean", "", *(f"{cells['mean_ratio']:.4f}" for cells in summary.values())])
    short = (packer.replace("omnimalloc_branch_and_bound", "its search") for packer in summary)
    lines += command.cells(["instance", "buffers", *short], rows)
    if "programs" not in result:
        return "\n".join(lines)
    rows = [[row["name"], row["buffers"], _cell(row)] for row in result["programs"]]
    lines += ["", *command.cells(["program", "buffers", "symmplan"], rows)]
    scale, order = result["scale"], result["order"]
    points = [[p["buffers"], _cell(p), p["max_rss_mib"]] for p in scale["points"]]
    lines += [f"overlap 100, log-log slope {scale['log_log_slope']}"]
    lines += command.cells(["buffers", "symmplan", "MiB"], points)
    return "\n".join([*lines, _ORDER.format(**order)])


_ORDER = """\
{operations} operations on {streams} streams: order {order_cpu_seconds:.2f} s, \
{conflicts} conflicts {interference_cpu_seconds:.2f} s"""


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    return f"{cell['ratio']:.4f} ({cell['cpu_seconds']:.2f})" if "ratio" in cell else "error"


if __name__ == "__main__":
    from symmplan.cli.shell import perform

    sys.exit(perform("python benchmarks/planner.py", sys.modules[__name__], sys.argv[1:]))
