"""Torch's private names that symmplan uses: what depends on each, and whether torch has it.

[Note: seams]
    A seam is a place where symmplan relies on a name that torch may change. Each is a row of
    `symmplan.torch_private.table`, which says what depends on it. Every entry point (compiling a
    graph, opening a session, applying FSDP2) first calls `require` for the rows that matter for
    correctness. If torch lacks one of these, that is an error, never a silent change. Rows that
    matter only for speed or reports are checked where they are used, and symmplan can do without
    them. Modules that import names from torch require their rows before the import.

    `Seam.replaced` replaces attributes of torch and restores them. If a replacement must last
    longer, such as for a session or a handle, ``undone`` says when it is restored.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
from typing import TYPE_CHECKING, Any, Literal

from attrs import frozen

from symmplan.errors import MissingSeamError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

__all__ = ["ALL", "GRAPHS", "RUNS", "Carries", "Seam", "Serves", "has", "names"]

#: What depends on a seam: correct numbers, speed or bytes, or symmplan's reports.
Carries = Literal["correctness", "speed", "reporting"]

#: What asks for seams when it starts.
Serves = Literal[
    "capture", "graphs", "inductor", "sessions", "fsdp", "experts", "segments", "simulate"
]


GRAPHS: tuple[Serves, ...] = ("graphs", "inductor")
RUNS: tuple[Serves, ...] = (*GRAPHS, "sessions", "fsdp", "experts", "segments")
ALL: tuple[Serves, ...] = ("capture", *RUNS, "simulate")


def names(where: str, text: str) -> tuple[str, ...]:
    """Targets of a `Seam`.

    Args:
        where: A module, or ``"module:attribute"``.
        text: What is in it, divided by spaces; ``|`` stands between names of which a torch has one.

    >>> names("torch._ops:OpOverload", "_handle _op|_call")
    ('torch._ops:OpOverload._handle', 'torch._ops:OpOverload._op | torch._ops:OpOverload._call')
    """
    before = where + ("." if ":" in where else ":")
    return tuple(" | ".join(before + n for n in one.split("|")) for one in text.split())


#: What a class had in the place of an attribute that is not its own.
_INHERITED = object()


@frozen
class Seam:
    """Private names of torch on which one feature depends.

    Attributes:
        name: What it is, in a few words.
        carries: See `Carries`.
        rests: What holds if torch has them.
        serves: Who needs it.
        targets: The names, ``"module:attribute.attribute"``, the last also one that a class's
            methods set; ``" | "`` stands between names of which a torch has one.
        undone: Of what is replaced: when it is put back, or why not; empty if nothing is.
        only_with: A name without which a torch needs none of this; empty if all do.
    """

    name: str
    carries: Carries
    rests: str
    serves: tuple[Serves, ...]
    targets: tuple[str, ...]
    undone: str = ""
    only_with: str = ""

    def missing(self) -> tuple[str, ...]:
        """The names that this torch has not."""
        if self.only_with and not has(self.only_with):
            return ()
        return tuple(t for t in self.targets if not any(map(has, t.split(" | "))))

    def require(self) -> None:
        """Nothing, if it is there.

        Raises:
            MissingSeamError: It is not.
        """
        missing = self.missing()
        if missing:
            raise self.error(*missing)

    def error(self, *missing: str) -> MissingSeamError:
        """That these names are not there."""
        import torch

        names = ", ".join(missing).replace(":", ".")
        return MissingSeamError(
            f"torch {torch.__version__} has no {names} ({self.name}); with it, {self.rests}",
            expected="torch 2.11 to 2.15",
            got=f"torch {torch.__version__}",
            fix="install torch 2.11 to 2.15, or a newer symmplan",
            seam=self.name,
            missing=missing,
            torch=str(torch.__version__),
        )

    @contextlib.contextmanager
    def replaced(self, **values: Any) -> Iterator[None]:
        """Other attributes for a while.

        Args:
            values: The last parts of targets, and what is there while inside. Where correctness
                does not depend on the seam, names that this torch lacks are left out.

        Raises:
            MissingSeamError: One of them is missing, and correctness depends on it.
        """
        before = [
            (owner, name.rpartition(".")[2], value)
            for name, value in values.items()
            for owner in self._owners(name)
        ]
        with contextlib.ExitStack() as stack:
            for owner, name, value in before:
                stack.callback(_put_back, owner, name, vars(owner).get(name, _INHERITED))
                setattr(owner, name, value)
            yield

    def _owners(self, name: str) -> list[Any]:
        """What has the attribute that targets end with."""
        known = (one for target in self.targets for one in target.split(" | "))
        targets = [t for t in known if t.replace(":", ".").endswith(f".{name}")]
        assert targets, f"no target of {self.name!r} ends with {name}"
        there = [t for t in targets if has(t)]
        if self.carries == "correctness" and len(there) < len(targets):
            raise self.error(*(t for t in targets if t not in there))
        return [_find(t.rpartition("." if "." in t.partition(":")[2] else ":")[0]) for t in there]


def _put_back(owner: Any, name: str, value: Any) -> None:
    if value is _INHERITED:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _find(path: str) -> Any:
    """What is at ``"module"`` or ``"module:attribute.attribute"``."""
    module, _, inside = path.partition(":")
    names = inside.split(".") if inside else []
    return functools.reduce(getattr, names, importlib.import_module(module))


def has(target: str) -> bool:
    """Whether this torch has a name, which is written as in `Seam.targets`."""
    module, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return False
    for name in path.split("."):
        if not hasattr(owner, name):
            return isinstance(owner, type) and _sets(owner, name) and path.endswith(f".{name}")
        owner = getattr(owner, name)
    return True


def _sets(kind: type, name: str) -> bool:
    """Whether objects of a class have an attribute: it is declared, or a method sets it."""
    return any(
        name in vars(base).get("__annotations__", {})
        or any(name in _stored(code) for code in map(_code, vars(base).values()) if code)
        for base in kind.__mro__
    )


def _code(method: Any) -> CodeType | None:
    return getattr(getattr(method, "__wrapped__", method), "__code__", None)


@functools.cache
def _stored(code: CodeType) -> frozenset[str]:
    """Names of the attributes that a function sets."""
    steps = dis.get_instructions(code)
    return frozenset(str(step.argval) for step in steps if step.opname == "STORE_ATTR")
