"""Plan what a program needs as one rank of a world that is not there.

PROGRAM is module:function or path/to/file.py:function, a training script without arguments: see
symmplan.simulate. It runs on fake tensors, on any machine.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symmplan.bench.parts.programs import program_of
from symmplan.cli.files import write_all, write_text, written_lines
from symmplan.report.progress import ProgressLine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

__all__ = ["add_arguments", "render", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan simulate``."""
    parser.add_argument("program", metavar="PROGRAM")
    parser.add_argument("--ranks", type=int, required=True, help="how many ranks the world has")
    parser.add_argument("--rank", type=int, default=0, help="which one is planned (default: 0)")
    parser.add_argument(
        "--memory",
        choices=("nccl", "cuda", "nvshmem", "shm"),
        default="nccl",
        help="memory backend for which is planned (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks-per-host", type=int, metavar="N", help="ranks on each host (default: one host)"
    )
    parser.add_argument(
        "--ranks-per-domain", type=int, metavar="N", help="ranks that NVLink joins across hosts"
    )
    parser.add_argument("--choices", metavar="FILE", help="algorithms that were measured elsewhere")
    parser.add_argument("--html", metavar="OUT", type=Path, help="write the report as a page")
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help="write it as JSON")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Simulate, write."""
    from symmplan.simulation import simulate

    begin = time.process_time()
    report = simulate(
        program_of(args.program, "trains"),
        ranks=args.ranks,
        rank=args.rank,
        memory=args.memory,
        ranks_per_host=args.ranks_per_host,
        ranks_per_domain=args.ranks_per_domain,
        choices=args.choices,
        progress=ProgressLine().mark,
    )
    writers: dict[str, Callable[[Path], object]] = {
        "html": lambda path: write_text(path, report.to_html()),
        "report": lambda path: write_text(path, report.to_json()),
    }
    written = write_all(args, writers)
    return {
        "ok": True,
        **report.facts(),
        "cpu_s": round(time.process_time() - begin, 3),
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "written": written,
        "summary": report.summary(),
    }


def render(result: dict[str, Any]) -> str:
    """The summary, and what it took."""
    took = f"{result['cpu_s']:.1f} s of CPU, {result['resident_bytes'] / (1 << 30):.2f} GiB"
    return "\n".join([result["summary"], f"simulated in {took}", *written_lines(result)])
