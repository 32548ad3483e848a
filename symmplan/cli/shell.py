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
import ast
import contextlib
import difflib
import importlib
import importlib.util
import json
import os
import signal
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from symmplan import __version__
from symmplan.cli.mistakes import check_outputs, meant, program_error, unusable
from symmplan.cli.screen import fitted, write
from symmplan.errors import CommandError, SymmplanError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType, ModuleType

__all__ = ["COMMANDS", "EXIT_CODES", "benches", "load", "main"]

#: Name -> one line for ``--help``, in the order in which a newcomer needs them.
COMMANDS = {
    "demo": "train a small transformer on two local ranks, with and without symmplan",
    "plan": "plan a problem from a CSV or JSON file",
    "show": "check, print and draw a plan from its JSON file",
    "simulate": "print what a program needs as one rank of a simulated cluster",
    "ops": "list every op with declared symmetric arguments and results",
    "doctor": "print what this machine and this torch can do",
    "bench": "run a benchmark",
    "completion": "print a script with which bash, zsh or fish completes this command",
}

EXIT_CODES = (
    "exit codes: 0 done; 1 an error, or a check that failed; 2 wrong usage; "
    "130 interrupted; 143 terminated"
)


def benches() -> dict[str, str]:
    """The benchmarks that exist: name -> first line of the module's docstring.

    The files are parsed, not imported, so that listing them costs nothing and cannot fail.
    """
    found: dict[str, str] = {}
    for path in sorted((Path(__file__).parent.parent / "bench").glob("[!_]*.py")):
        try:
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        except (OSError, SyntaxError, ValueError):
            doc = None
        found[path.stem] = (doc or "").partition("\n")[0]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after ``symmplan``; those of the process if None.

    Returns:
        The exit code: see `symmplan.cli.shell`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = _find(words)
    debug = "--debug" in words
    try:
        module = load(command) if command else None
        parser = _parser(command, module)
        try:
            _check_names(words, parser)
            args, unknown = parser.parse_known_args(words)
            if unknown:  # the command's usage says what it knows
                known = getattr(args, "parser", parser)
                known.error(f"unknown: {' '.join(unknown)}{meant(unknown, known)}")
        except SystemExit as stop:  # argparse has printed help or the version
            return stop.code if isinstance(stop.code, int) else 2
        if module is None:
            parser.print_help(sys.stderr)
            return 2
        check_outputs(args)
        with _ending_on_signals():
            return _print(module, args, module.run(args))
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


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        """A mistake in the words."""
        raise UsageError(message, fix=self.format_usage().strip())


def _fail(message: str, words: Sequence[str], error: SymmplanError, *, code: int = 1) -> int:
    """Say what is wrong: on stderr, or with ``--json`` as the result."""
    if "--json" in words:
        parts = {k: getattr(error, k) for k in ("what", "expected", "got", "fix")}
        told: dict[str, Any] = {"kind": type(error).__name__, "rule": error.rule}
        told |= {k: None if v is None else str(v) for k, v in parts.items()}
        print(json.dumps({"ok": False, "error": told}, indent=2))
        return code
    print(fitted(f"symmplan: {message}", stream=sys.stderr), file=sys.stderr)
    return code


class _Help(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs to the width of the terminal; what is indented or listed stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = []
        for part in text.strip().split("\n\n"):
            lines = part.splitlines()
            plain = not any(line.startswith((" ", "- ", "|")) for line in lines)
            parts.append(textwrap.fill(part, width) if plain else part)
        return textwrap.indent("\n\n".join(parts), indent)


def _check_names(words: list[str], parser: argparse.ArgumentParser) -> None:
    """Refuse a command that is not there, with the name of one that may be meant."""
    names = [word for word in words if not word.startswith("-")]
    what, known = "command", list(COMMANDS)
    if names[:1] == ["bench"]:
        what, known, names = "benchmark", list(benches()), names[1:]
    if names and names[0] not in known:
        close = difflib.get_close_matches(names[0], known, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        parser.error(f"there is no {what} {names[0]!r}: {hint}")


def _find(words: list[str]) -> str:
    """The command that ``words`` name, such as ``"bench planner"``.

    Empty for ``--help``, ``--version`` and mistakes.
    """
    names = [word for word in words if not word.startswith("-")]
    if names[:1] == ["bench"]:
        return f"bench {names[1]}" if len(names) > 1 and names[1] in benches() else ""
    return names[0] if names and names[0] in COMMANDS else ""


def load(command: str) -> ModuleType:
    """The module of a command, such as ``"plan"`` or ``"bench planner"``.

    Raises:
        CommandError: It is not there, or cannot be imported.
    """
    bench = command.partition(" ")[2]
    name = f"symmplan.bench.{bench}" if bench else f"symmplan.cli.{command}"
    if importlib.util.find_spec(name) is None:
        raise CommandError(
            f"symmplan {command} is not part of this installation",
            expected=f"a module {name}",
            fix="install symmplan again: python -m pip install --force-reinstall symmplan",
        )
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CommandError(
            f"symmplan {command} needs something that cannot be imported: {error}",
            fix="install what is missing, or see `symmplan doctor`",
        ) from error


def _parser(command: str, module: ModuleType | None) -> argparse.ArgumentParser:
    """The whole parser, with the options of the one command that will run."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print the result as JSON")
    common.add_argument("--debug", action="store_true", help="show tracebacks of reported errors")

    def add(to: Any, words: str, line: str, *parents: argparse.ArgumentParser) -> Any:
        chosen = module if words == command else None
        parser = to.add_parser(
            words.rpartition(" ")[2],
            help=line,
            description=(chosen.__doc__ if chosen else None) or line,
            epilog=EXIT_CODES,
            formatter_class=_Help,
            parents=parents,
        )
        if chosen is not None:
            chosen.add_arguments(parser)
            parser.set_defaults(parser=parser)
        return parser

    parser = _Parser(
        prog="symmplan",
        description="Declare, plan and place tensors in symmetric memory.",
        epilog=EXIT_CODES,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"symmplan {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, line in COMMANDS.items():
        if name != "bench":
            add(commands, name, line, common)
            continue
        bench = add(commands, name, line)
        names = bench.add_subparsers(dest="bench", metavar="NAME", required=True)
        for each, about in benches().items():
            add(names, f"bench {each}", about, common)
    return parser


def _print(module: ModuleType, args: argparse.Namespace, result: dict[str, Any] | None) -> int:
    if result is None:
        return 0
    if args.json:
        print(json.dumps(result, indent=2), flush=True)
    elif hasattr(module, "render"):
        write(fitted(str(module.render(result))))
    else:
        write("\n".join(f"{key}: {value}" for key, value in result.items()))
    return 0 if result.get("ok", True) else 1
