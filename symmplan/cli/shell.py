"""Find a command's module, run it, print its result.

A command is a module ``symmplan.cli.<name>`` (a benchmark: ``symmplan.bench.<name>``) with

- ``add_arguments(parser)``: its options,
- ``run(args) -> dict``: the work; progress goes to stderr, the result is plain data for JSON;
  None where another process of the group has it,
- ``render(result) -> str`` (optional): the same for people.

Only the module of the command that was asked for is imported, so that ``symmplan --help`` is fast
and a command that cannot be imported does not break the others.

Exit codes:
    0: the command did what it was asked to do.
    1: an error that symmplan reports on purpose, a file that cannot be read or written, an error
       of the user's program that the command runs, or a result that says ``"ok": false`` (a check
       that failed). The message is on stderr, or with ``--json`` an object under ``"error"`` on
       stdout.
    2: wrong usage.
    130: interrupted by Ctrl-C; 143: ended by SIGTERM.

    Anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from symmplan import __version__
from symmplan.cli.failures import program_error, unusable
from symmplan.cli.files import check_outputs
from symmplan.errors import CommandError, SymmplanError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

__all__ = ["BENCHES", "COMMANDS", "load", "main", "parser_of", "perform"]

#: Name -> one line for ``--help``, in the order in which a newcomer needs them.
COMMANDS = {
    "demo": "train a small transformer on two local ranks, with and without symmplan",
    "plan": "plan a problem from a CSV or JSON file",
    "show": "check, print and draw a plan from its JSON file",
    "simulate": "print what a program needs as one rank of a simulated cluster",
    "ops": "list every op with declared symmetric arguments and results",
    "doctor": "print what this machine and this torch can do",
    "bench": "run a benchmark",
}
BENCHES = {
    "comm": "time collectives in shared memory and gloo's; write a tuning table",
    "fsdp": "train under FSDP2 with and without symmplan, and compare",
    "moe": "time expert-parallel layers with and without symmplan",
}

_EXIT_CODES = """\
exit codes: 0 done; 1 an error, or a check that failed; 2 wrong usage;
130 interrupted; 143 terminated"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after ``symmplan``; those of the process if None.

    Returns:
        The exit code: see `symmplan.cli.shell`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    prog, names, rest = "symmplan", COMMANDS, words
    if words[:1] == ["bench"]:
        prog, names, rest = "symmplan bench", BENCHES, words[1:]

    def act() -> int:
        if not rest or rest[0] not in names:
            _listing(prog, names).parse_args(rest)
            return 2
        return _run(f"{prog} {rest[0]}", load(prog, rest[0]), rest[1:])

    return _reported(act, words)


def perform(prog: str, module: Any, words: Sequence[str]) -> int:
    """Run a module that is written as a command; the exit code.

    Args:
        prog: What the user calls, for the usage: ``"python benchmarks/planner.py"``.
        module: It has ``add_arguments`` and ``run``, and may have ``render``.
        words: The words after ``prog``.
    """
    return _reported(lambda: _run(prog, module, words), words)


def _reported(act: Callable[[], int], words: Sequence[str]) -> int:
    """Do it; report an error in the command's way."""
    debug = "--debug" in words
    try:
        return act()
    except SystemExit as stop:  # argparse has printed help or the version; a signal
        if not isinstance(stop.code, int):
            raise
        return stop.code
    except UsageError as error:
        if "--json" not in words:
            print(error.fix, file=sys.stderr)
        return _fail(f"{error.rule}: {error.what}", words, error, code=2)
    except SymmplanError as error:
        if debug:
            print(getattr(error, "traceback", ""), file=sys.stderr)  # of another process
            raise
        return _fail(str(error), words, error)
    except BrokenPipeError:
        # `symmplan show plan.json | head`: the reader has seen enough. Python would complain once
        # more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug:
            raise
        told = unusable(error)
        return _fail(str(told), words, told)
    except KeyboardInterrupt:
        print("symmplan: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        failure = None if debug else program_error(error)
        if failure is None:  # a bug of symmplan
            raise
        return _fail(str(failure), words, failure)


def _run(prog: str, module: Any, words: Sequence[str]) -> int:
    args = parser_of(prog, module).parse_args(words)
    check_outputs(args)
    with _ending_on_signals():
        result = module.run(args)
    if result is None:
        return 0
    if args.json:
        text = json.dumps(result, indent=2)
    elif hasattr(module, "render"):
        text = str(module.render(result))
    else:
        text = "\n".join(f"{key}: {value}" for key, value in result.items())
    print(text, flush=True)
    return 0 if result.get("ok", True) else 1


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, so that what a command started ends with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fail(message: str, words: Sequence[str], error: SymmplanError, *, code: int = 1) -> int:
    """Say what is wrong: on stderr, or with ``--json`` as the result."""
    if "--json" in words:
        parts = {k: getattr(error, k) for k in ("what", "expected", "got", "fix")}
        told: dict[str, Any] = {"kind": type(error).__name__, "rule": error.rule}
        told |= {k: None if v is None else str(v) for k, v in parts.items()}
        print(json.dumps({"ok": False, "error": told}, indent=2))
        return code
    print(f"symmplan: {message}", file=sys.stderr)
    return code


def load(prog: str, name: str) -> Any:
    """The module of a command: ``load("symmplan", "plan")``, ``load("symmplan bench", "comm")``.

    Raises:
        CommandError: It cannot be imported.
    """
    try:
        return importlib.import_module(f"symmplan.{'bench' if ' ' in prog else 'cli'}.{name}")
    except ImportError as error:
        raise CommandError(
            f"{prog} {name} needs something that cannot be imported: {error}",
            fix="install what is missing, or see `symmplan doctor`",
        ) from error


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit."""

    def __init__(self, prog: str, about: str | None) -> None:
        shape = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=about, epilog=_EXIT_CODES, formatter_class=shape)

    def error(self, message: str) -> NoReturn:
        """A mistake in the words."""
        raise UsageError(message, fix=self.format_usage().strip())


def parser_of(prog: str, module: Any) -> argparse.ArgumentParser:
    """The parser of a command; ``args.parser`` is this parser.

    Args:
        prog: As in `perform`.
        module: As in `perform`.
    """
    parser = _Parser(prog, module.__doc__)
    module.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of reported errors")
    parser.set_defaults(parser=parser)
    return parser


def _listing(prog: str, names: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser where no command is named: it has their names, and none of their options."""
    parser = _Parser(prog, "Declare, plan and place tensors in symmetric memory.")
    parser.add_argument("--version", action="version", version=f"symmplan {__version__}")
    add = parser.add_subparsers(metavar="NAME", required=True, parser_class=argparse.ArgumentParser)
    for name, line in names.items():
        add.add_parser(name, help=line)
    return parser
