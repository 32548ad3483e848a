"""One tree of errors. Every message has the same shape, every value is also an attribute.

The first line stands alone::

    <rule broken>: <what happened, with names and bytes>
      expected <x>; got <y>
      fix: <one action>

A message that comes out of a distributed call starts with ``[group g, rank r]``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "AgreementError",
    "BackendError",
    "CapacityError",
    "CaptureError",
    "CommandError",
    "DeclarationError",
    "MissingSeamError",
    "NotSymmetricError",
    "OneProcessError",
    "OptionError",
    "OutOfSharedMemoryError",
    "PeerLostError",
    "PeerTimeoutError",
    "PlanFormatError",
    "PlanningError",
    "ProblemError",
    "RaceError",
    "RanksFailedError",
    "ReleasedError",
    "RunError",
    "SessionError",
    "SimulationError",
    "SymmplanError",
    "TrainerVersionError",
    "UnknownOpError",
    "UsageError",
    "VerificationError",
]


class SymmplanError(Exception):
    """Base of every error that symmplan raises on purpose.

    Args:
        what: What happened, in one clause, with the names and bytes involved.
        expected: What the rule asks for.
        got: What was found instead.
        fix: One action that mends it.
        group: Name of the process group, for errors of distributed calls.
        rank: Rank inside that group, for errors of distributed calls.
        fields: Anything else worth keeping; each becomes an attribute.
    """

    rule = "symmplan error"

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        got: object = None,
        fix: str | None = None,
        group: str | None = None,
        rank: int | None = None,
        **fields: Any,
    ) -> None:
        self.what = what
        self.expected = expected
        self.got = got
        self.fix = fix
        self.group = group
        self.rank = rank
        self.fields = fields
        for name, value in fields.items():
            setattr(self, name, value)
        super().__init__(self._text())

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross process boundaries whole, with their text written once."""
        named = {k: getattr(self, k) for k in ("expected", "got", "fix", "group", "rank")}
        return functools.partial(type(self), **self.fields, **named), (self.what,)

    def _text(self) -> str:
        where = ""
        if self.group is not None or self.rank is not None:
            where = f"[group {self.group}, rank {self.rank}] "
        lines = [f"{where}{self.rule}: {self.what}"]
        values = {"expected": self.expected, "got": self.got}
        told = [f"{name} {value}" for name, value in values.items() if value is not None]
        if told:
            lines.append("  " + "; ".join(told))
        if self.fix is not None:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


def closest(given: object, names: Iterable[object]) -> str | None:
    """The one of ``names`` that was probably meant, if one is close.

    >>> [closest(given, ("nccl", "shm")) for given in ("shmem", "shn", "tape")]
    ['shm', 'shm', None]
    """
    import difflib

    texts = [name for name in names if isinstance(name, str)]
    return next(iter(difflib.get_close_matches(str(given), texts, n=1, cutoff=0.6)), None)


class DeclarationError(SymmplanError, ValueError):
    """A declaration does not fit the op's schema, or contradicts an earlier one."""

    rule = "declaration does not fit the op"


class UnknownOpError(DeclarationError):
    """A name names no op that this process has, or none that is declared."""

    rule = "no such op"


class CaptureError(SymmplanError, ValueError):
    """A program cannot be turned into a `Problem` (no shapes, unknown node, ...)."""

    rule = "program cannot be captured"


class ProblemError(SymmplanError, ValueError):
    """A `Problem` contradicts itself (unknown name, cycle, bad size, ...)."""

    rule = "problem is not well formed"


class PlanningError(SymmplanError):
    """No plan meets the constraints of the problem."""

    rule = "no plan meets the constraints"


class CapacityError(PlanningError):
    """The buffers do not fit into the capacity; ``buffers`` names a small set that cannot."""

    rule = "buffers do not fit into the capacity"


class PlanFormatError(SymmplanError, ValueError):
    """A text is not a plan, or a problem, that this version of symmplan wrote."""

    rule = "not a symmplan plan or problem"


class VerificationError(SymmplanError):
    """`Plan.verify` found a broken rule; ``kind`` names which."""

    rule = "plan is wrong"


class BackendError(SymmplanError, RuntimeError):
    """A memory backend cannot serve this device, group or machine."""

    rule = "memory backend does not fit"


class OptionError(BackendError, ValueError):
    """An option of an entry point has a value that no program can be run with."""

    rule = "option is refused"


class OutOfSharedMemoryError(BackendError):
    """The host has too little shared memory left for a segment."""

    rule = "shared memory is full"


class MissingSeamError(BackendError):
    """This torch lacks a private name that symmplan needs; ``missing`` names it."""

    rule = "torch lacks a name that symmplan needs"


class TrainerVersionError(SymmplanError, ImportError):
    """A trainer is of another version than the adapter to it was tested with.

    Attributes:
        package: Name of the trainer's package.
        tested: The version that is tested.
        installed: The version that is installed.
    """

    rule = "trainer of another version"


class AgreementError(SymmplanError, RuntimeError):
    """Ranks of a group made different plans; raised on every one of them."""

    rule = "ranks disagree on the plan"


class PeerTimeoutError(SymmplanError, TimeoutError):
    """Peers did not arrive within the timeout."""

    rule = "peers did not arrive in time"


class PeerLostError(SymmplanError, ConnectionError):
    """A peer process ended while this rank waited for it."""

    rule = "a peer is gone"


class ReleasedError(SymmplanError, RuntimeError):
    """A segment was used after its release."""

    rule = "segment was released"


class RunError(SymmplanError, RuntimeError):
    """A program diverges from its plan at run time."""

    rule = "program diverges from its plan"


class NotSymmetricError(RunError, ValueError):
    """A tensor that must lie in a segment does not."""

    rule = "tensor is not in symmetric memory"


class SessionError(RunError, ReleasedError):
    """An eager session is used outside its with-block, or inside another one's."""

    rule = "eager session is not open"


class CommandError(SymmplanError):
    """A command of ``symmplan`` cannot run here, or was given the wrong file."""

    rule = "command cannot run"


class UsageError(CommandError):
    """The words of a command line make no sense."""

    rule = "wrong usage"


class RanksFailedError(CommandError, RuntimeError):
    """A local rank that was started for a command failed, or all together took too long.

    Attributes:
        others: What became of the other ranks, one line each.
        traceback: Of the rank whose error is told, or where each was that took too long.
        exit_codes: Of all ranks; None of those that had to be ended, or did.
    """

    rule = "local ranks failed"
    others: tuple[str, ...] = ()
    traceback: str = ""
    exit_codes: tuple[int | None, ...] = ()

    def _text(self) -> str:
        return "\n".join([super()._text(), *(f"  then: {other}" for other in self.others)])


class RaceAccess(NamedTuple):
    """One of the two accesses of a race.

    Attributes:
        rank: Who made it; ranks are those of the default process group.
        op: In which op; ``"aten::copy_ in mylib::push"`` for what an op does inside.
        line: Where in the program or in the op, ``"file:line"``; empty if that is not known.
        segment: Name of the segment.
        owner: Whose bytes of the segment.
        low: First byte.
        high: One behind the last byte.
        buffer: The buffers that lie there; empty if that is not known.
        write: Whether it wrote.
    """

    rank: int
    op: str
    line: str
    segment: str
    owner: int
    low: int
    high: int
    buffer: str
    write: bool

    def __str__(self) -> str:
        what = f"rank {self.rank} {'writes' if self.write else 'reads'} bytes [{self.low}, "
        what += f"{self.high}) of rank {self.owner}'s segment {self.segment!r}"
        what += f" (buffer {self.buffer})" if self.buffer else ""
        return f"{what} in {self.op}" + (f" at {self.line}" if self.line else "")


class OneProcessError(SymmplanError, TypeError):
    """An object was pickled whose memory and peers are those of its process."""

    rule = "object belongs to its process"


class SimulationError(SymmplanError):
    """A program cannot be simulated: it reads values, or asks for what is not there."""

    rule = "simulation not possible"


class RaceError(RunError):
    """Two accesses of the same bytes, at least one of them a write, have no order.

    Raised with ``debug=True`` on shared memory. ``accesses`` has both, see `RaceAccess`; the
    first is the one that was found last.
    """

    rule = "race on symmetric memory"

    def __init__(self, what: str, **fields: Any) -> None:
        # They may have come from a peer as plain tuples.
        pairs = fields.pop("accesses", ())
        super().__init__(what, accesses=tuple(RaceAccess(*pair) for pair in pairs), **fields)
