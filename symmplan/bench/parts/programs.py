"""A user's program that a command names: ``train.py:build``, ``package.module:build``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from symmplan.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["check_program", "import_from_here", "program_of"]

_EXPECTED = "module:function, or path/to/file.py:function"


def import_from_here(module: str) -> ModuleType:
    """Import a user's module as ``python -m`` would: the current folder counts."""
    _look_here()
    return importlib.import_module(module)


def program_of(text: str, does: str) -> Callable[[], Any]:
    """The function that ``module:function`` or ``path/to/file.py:function`` names.

    Args:
        text: The name.
        does: What such a function does, for advice: "trains".

    Raises:
        CommandError: It is not there, or needs arguments.
    """
    name, function = _parts(text)
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
        raise _absent(text, error) from error
    found = getattr(module, function, None)
    if not callable(found):
        raise CommandError(
            f"module {name!r} has no function {function!r}",
            expected="a function without arguments",
            got=repr(found),
            fix=_advice(name, module, does),
        )
    needed = _needed(found)
    if needed:
        raise CommandError(
            f"function {function!r} of {name!r} needs arguments",
            expected="a function without arguments",
            got=f"{function}({', '.join(needed)})",
            fix=_advice(name, module, does),
        )
    return found  # type: ignore[no-any-return]


def check_program(text: str) -> None:
    """Look for a program without running any of it: its module may begin to train, or use a device.

    Raises:
        CommandError: There is no such file, it is no Python, or nothing in it has the name.
    """
    name, function = _parts(text)
    try:
        source = _source_of(name)
        code = compile(source.read_text(encoding="utf-8"), str(source), "exec")
    except (ImportError, OSError, ValueError, SyntaxError) as error:
        raise _absent(text, error) from error
    # The names of the module's own code, not of its functions; `import *` may bind any.
    if {function, "__getattr__"}.isdisjoint(code.co_names) and ("*",) not in code.co_consts:
        own = [part.co_name for part in code.co_consts if isinstance(part, CodeType)]
        there = ", ".join(f"{name}:{k}" for k in own if k.isidentifier() and k[0] != "_")
        raise CommandError(
            f"module {name!r} has no function {function!r}",
            expected="a function without arguments",
            got=f"no {function!r} in {source}",
            fix=f"name one that is there: {there}" if there else f"write {function}() in {source}",
        )


def _parts(text: str) -> tuple[str, str]:
    name, _, function = text.rpartition(":")
    if not name or not function.isidentifier():
        raise CommandError(
            f"{text!r} names no function",
            expected=_EXPECTED,
            got=repr(text),
            fix=f"say which one: {(name or text).rstrip(':')}:FUNCTION",
        )
    return name, function


def _absent(text: str, error: Exception) -> CommandError:
    return CommandError(
        f"there is no program {text!r}: {error}",
        expected=_EXPECTED,
        got=repr(text),
        fix="check the name and the current folder",
    )


def _source_of(name: str) -> Path:
    """The file of a module, without importing it.

    Raises:
        ImportError: There is none.
    """
    if name.endswith(".py"):
        return Path(name)
    _look_here()
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ImportError(f"no module named {name!r}")
    return Path(spec.origin)


def _look_here() -> None:
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))


def _needed(function: Callable[..., Any]) -> list[str]:
    """The arguments without which a function cannot be called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it is not written in Python
        return []
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in any_number]


def _advice(name: str, module: ModuleType, does: str) -> str:
    """Which functions of a module are programs."""
    own = {f.__name__: f for f in vars(module).values() if inspect.isfunction(f)}
    there = [
        f"{name}:{known}"
        for known, f in own.items()
        if f.__module__ == module.__name__ and not known.startswith("_") and not _needed(f)
    ]
    if there:
        return f"name one that is there: {', '.join(there)}"
    return f"write a function in {name} that takes no arguments and {does}"
