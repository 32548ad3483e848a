"""Plan what a program needs as one rank of a world that is not there.

PROGRAM is module:function or path/to/file.py:function, a training script without arguments: see
symmplan.simulate. It runs on fake tensors, on any machine.
"""

from __future__ import annotations

import importlib.util
import inspect
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symmplan.cli.files import import_from_here, write_all, write_text, written_lines
from symmplan.errors import SimulationError
from symmplan.report.progress import ProgressLine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from types import ModuleType

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
        _program(args.program),
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


def _program(text: str) -> Callable[[], Any]:
    """The function that ``module:function`` names."""
    name, _, function = text.rpartition(":")
    if not name:
        raise SimulationError(
            f"{text!r} names no function",
            expected="module:function, or path/to/file.py:function",
            got=repr(text),
            fix=f"say which one: {text}:FUNCTION",
        )
    try:
        if name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(name).stem, name)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module.__name__] = module
            spec.loader.exec_module(module)
        else:
            module = import_from_here(name)
    except (ImportError, FileNotFoundError, ValueError) as error:
        raise SimulationError(
            f"there is no program {text!r}: {error}",
            expected="module:function, or path/to/file.py:function",
            got=repr(text),
            fix="check the name and the current folder",
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        raise SimulationError(
            f"module {name!r} has no function {function!r}",
            expected="a function without arguments",
            got=repr(found),
            fix=_advice(name, module),
        )
    needed = _needed(found)
    if needed:
        raise SimulationError(
            f"function {function!r} of {name!r} needs arguments",
            expected="a function without arguments",
            got=f"{function}({', '.join(needed)})",
            fix=_advice(name, module),
        )
    return found  # type: ignore[no-any-return]


def _needed(function: Callable[..., Any]) -> list[str]:
    """The arguments without which a function cannot be called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it is not written in Python
        return []
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in any_number]


def _advice(name: str, module: ModuleType) -> str:
    """Which functions of a module are programs."""
    own = {f.__name__: f for f in vars(module).values() if inspect.isfunction(f)}
    there = [
        f"{name}:{known}"
        for known, f in own.items()
        if f.__module__ == module.__name__ and not known.startswith("_") and not _needed(f)
    ]
    if there:
        return f"name one that is there: {', '.join(there)}"
    return f"write a function in {name} that takes no arguments and trains"
