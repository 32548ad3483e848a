"""Print what a program needs as one rank of a simulated cluster.

PROGRAM is module:function or path/to/file.py:function, a training script without arguments: see
symmplan.simulate. It runs on fake tensors, on any machine.
"""

from __future__ import annotations

import argparse
import functools
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symmplan.bench.parts.programs import program_of
from symmplan.cli.files import write_all, write_text, written_lines
from symmplan.errors import UsageError
from symmplan.report.format import size, table
from symmplan.report.progress import ProgressLine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from symmplan.simulation import SimulationReport

__all__ = ["add_arguments", "render", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan simulate``."""
    parser.add_argument("program", metavar="PROGRAM")
    world = parser.add_mutually_exclusive_group(required=True)
    world.add_argument("--ranks", type=int, help="how many ranks the world has")
    world.add_argument(
        "--sweep",
        type=_sweep,
        metavar="ranks=N,N,...",
        help="simulate worlds of several sizes, and print how bytes grow",
    )
    parser.add_argument("--rank", type=int, default=0, help="the rank to plan for (default: 0)")
    parser.add_argument(
        "--memory",
        choices=("auto", "nccl", "cuda", "nvshmem", "shm"),
        default="auto",
        help="memory backend to plan for (default: the one that devices get)",
    )
    parser.add_argument(
        "--ranks-per-host", type=int, metavar="N", help="ranks on each host (default: one host)"
    )
    parser.add_argument(
        "--ranks-per-domain", type=int, metavar="N", help="ranks that NVLink joins across hosts"
    )
    parser.add_argument("--choices", metavar="FILE", help="tuning table, measured elsewhere")
    parser.add_argument("--html", metavar="OUT", type=Path, help="write the report as a page")
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help="write the report as JSON")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Simulate, write.

    Raises:
        UsageError: A page or a report was asked for of several worlds.
    """
    line = ProgressLine()
    if args.sweep is None:
        report, took = _simulated(args, args.ranks, line.mark)
        writers: dict[str, Callable[[Path], object]] = {
            "html": lambda path: write_text(path, report.to_html()),
            "report": lambda path: write_text(path, report.to_json()),
        }
        written = write_all(args, writers)
        about = {**report.facts(), **took, "written": written, "summary": report.summary()}
        return {"ok": True, **about}
    if args.html is not None or args.output is not None:
        raise UsageError("--sweep writes no files", fix="use --json, or --ranks with one number")
    worlds = []
    for done, ranks in enumerate(args.sweep):
        of = f"{ranks:,} ranks, world {done + 1} of {len(args.sweep)}"
        report, took = _simulated(args, ranks, functools.partial(_mark, line, of))
        worlds.append({**report.facts(), **took})
    return {"ok": True, "worlds": worlds, "summary": "\n".join(_growth(worlds)), "written": {}}


def _simulated(
    args: argparse.Namespace, ranks: int, progress: Callable[[str], None]
) -> tuple[SimulationReport, dict[str, Any]]:
    """One world, and what it took."""
    from symmplan.simulation import simulate

    begin = time.process_time()
    report = simulate(
        program_of(args.program, "trains"),
        ranks=ranks,
        rank=args.rank,
        memory=args.memory,
        ranks_per_host=args.ranks_per_host,
        ranks_per_domain=args.ranks_per_domain,
        choices=args.choices,
        progress=progress,
    )
    return report, {
        "cpu_s": round(time.process_time() - begin, 3),
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _mark(line: ProgressLine, of: str, what: str) -> None:
    """Say of a sweep how far it is."""
    line.mark(f"{of}: {what}")


def _growth(worlds: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each world, with its bytes."""
    rows: list[tuple[str, ...]] = [("ranks", "symmetric", "ordinary", "device")]
    for world in worlds:
        symmetric, device = (size(world[key]) for key in ("peak_bytes", "device_bytes"))
        ordinary = size(world["ordinary_bytes"]["total"])
        rows.append((f"{world['ranks']:,}", symmetric, ordinary, device))
    return table(rows, range(len(rows[0])))


def render(result: dict[str, Any]) -> str:
    """The summary, and what it took."""
    all_ = result.get("worlds", [result])
    cpu, most = sum(w["cpu_s"] for w in all_), max(w["resident_bytes"] for w in all_)
    took = f"{cpu:.1f} s of CPU, {most / (1 << 30):.2f} GiB"
    return "\n".join([result["summary"], f"simulated in {took}", *written_lines(result)])


def _sweep(text: str) -> tuple[int, ...]:
    """Numbers of ranks from ``"ranks=64,512"``."""
    what, _, numbers = text.partition("=")
    try:
        found = tuple(map(int, numbers.split(",")))
    except ValueError:
        found = ()
    if what != "ranks" or not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no sweep; say ranks=64,512,4096")
    return found
