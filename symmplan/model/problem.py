"""A program's needs: `Problem`, its buffers, its operations and their accesses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from symmplan.model.declared import DEFAULT_ALIGN

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    import networkx as nx

__all__ = ["Access", "Buffer", "Operation", "Problem", "Unplanned"]


@frozen
class Operation:
    """One step of a program.

    Attributes:
        name: Unique in its problem.
        stream: Operations of one stream run in the order listed.
        group: Process group that the facts below are about, if any.
        handshake: Whether the call that begins here touches no symmetric byte before every rank has
            started it. See [Note: peers count], also for the next two.
        release: Whether that call ends only when all ranks' accesses for it are over.
        synchronizes: Whether its end on a rank comes after its start on every rank. A call that
            handshakes or releases synchronizes, whether this says so or not.
        ends: Names of operations before it: the calls that began there end here. It states no facts
            of its own then.
        op: Qualified op name, for people; takes no part in planning.
        stack: Where the program calls it, ``"file:line in function"``, the innermost last; for
            people.
        time: ``(begin, end)`` on the program's own clock, half-open, if it has one; for people.
    """

    name: str
    stream: str = "main"
    group: str | None = None
    handshake: bool = False
    release: bool = False
    synchronizes: bool = False
    ends: tuple[str, ...] = ()
    op: str = ""
    stack: tuple[str, ...] = ()
    time: tuple[int, ...] = ()


@frozen
class Access:
    """An operation touches a buffer, directly or through any alias.

    A call that ends at another operation touches the buffer there, too: both are one access, over
    all that lies between, with the facts of the first.

    Attributes:
        operation: Name of the operation.
        buffer: Name of the buffer.
        write: Whether bytes may change.
        remote: Whether ranks touch each other's bytes. See [Note: peers count].
        enters: Peers touch a rank's bytes only after that rank has started the call.
        releases: No peer touches a rank's bytes after the call has ended on that rank.
    """

    operation: str
    buffer: str
    write: bool = False
    remote: bool = False
    enters: bool = False
    releases: bool = False


@frozen
class Buffer:
    """A tensor's storage that must live in symmetric memory.

    Attributes:
        name: Unique in its problem.
        nbytes: Size in bytes, more than zero.
        group: Process group over which it must be symmetric.
        align: Alignment of its offset in bytes, a power of two.
        offset: Fixed offset in bytes inside its segment, or None to leave it to the planner.
        persistent: Bound for the whole program: live in every operation, shares with nothing.
        signal_pad: An op that touches it uses its segment's signal pad. Two such buffers whose
            operations are unordered must lie in different segments.
        op: Qualified name of the op that asked for it, for people.
        where: The argument or result it is, for people.
        dtype: Element type, for people; takes no part in planning.
        shape: Shape in elements, for people; takes no part in planning.
        label: Name in the program, for people: a module, such as ``"layers.3.attention.wq"``, or
            the line that makes the tensor, such as ``"forward, model.py:26"``; empty if neither is
            known.
    """

    name: str
    nbytes: int
    group: str = "default"
    align: int = DEFAULT_ALIGN
    offset: int | None = None
    persistent: bool = False
    signal_pad: bool = False
    op: str = ""
    where: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    label: str = ""


@frozen
class Unplanned:
    """A declared tensor that was left out, and why.

    Attributes:
        name: The tensor's name in the program.
        op: Qualified name of the op that declared it.
        where: The argument or result it is.
        reason: One clause for people.
        nbytes: Its size in bytes, or None where it is not known.
        needed: Whether something is lost by that. False where the collective runs in symmetric
            memory wherever this tensor lies, or was measured to be no faster there.
    """

    name: str
    op: str
    where: str
    reason: str
    nbytes: int | None = None
    needed: bool = True


# Typed converters: any iterable will do to construct a `Problem`, tuples are kept.


def _buffers(values: Iterable[Buffer]) -> tuple[Buffer, ...]:
    return tuple(values)


def _operations(values: Iterable[Operation]) -> tuple[Operation, ...]:
    return tuple(values)


def _accesses(values: Iterable[Access]) -> tuple[Access, ...]:
    return tuple(values)


def _unplanned(values: Iterable[Unplanned]) -> tuple[Unplanned, ...]:
    return tuple(values)


def _pairs(values: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple(values)


def _names(values: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(values)


@frozen(repr=False)
class Problem:
    """What a program does with the tensors that must be symmetric.

    A value: problems are equal if their `to_json` is, however they were listed, and can be hashed.

    Attributes:
        buffers: The tensors to be placed.
        operations: The steps; see [Note: happens-before].
        accesses: Which operation touches which buffer.
        edges: Pairs ``(earlier, later)`` of operation names, beyond the order of streams.
        together: Pairs of buffers that must share their offset (in-place updates).
        apart: Pairs of buffers that must not share a segment.
        shared_groups: Sets of groups whose ranks all run this plan, so that one segment may serve
            all groups of a set.
        unplanned: Declared tensors that capture left out, and why.

    Raises:
        ProblemError: A name is unknown or used twice, a size or an alignment makes no sense, a
            buffer is never accessed, a call ends twice, before it began or without its buffers, or
            the order has a cycle.
    """

    buffers: tuple[Buffer, ...] = field(converter=_buffers)
    operations: tuple[Operation, ...] = field(converter=_operations)
    accesses: tuple[Access, ...] = field(converter=_accesses)
    edges: tuple[tuple[str, str], ...] = field(default=(), converter=_pairs)
    together: tuple[tuple[str, str], ...] = field(default=(), converter=_pairs)
    apart: tuple[tuple[str, str], ...] = field(default=(), converter=_pairs)
    shared_groups: tuple[tuple[str, ...], ...] = field(default=(), converter=_names)
    unplanned: tuple[Unplanned, ...] = field(default=(), converter=_unplanned)
    #: Derived from the rest on first use, so that checking and planning sort only once.
    _order: Any = field(default=None, init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        from symmplan.planner.check import check_problem

        check_problem(self)

    def __eq__(self, other: object) -> bool:
        """Whether the canonical JSON is equal."""
        if not isinstance(other, Problem):
            return NotImplemented
        if self is other:
            return True
        return hash(self) == hash(other) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(frozenset(self.buffers))

    def __repr__(self) -> str:
        from symmplan.report.text import problem_line

        return f"<Problem: {problem_line(self)}>"

    @staticmethod
    def from_intervals(
        intervals: Iterable[tuple[str, int, int, int]], *, align: int = 1
    ) -> Problem:
        """A totally ordered problem in one segment from ``(name, begin, end, nbytes)``, half-open.

        Args:
            intervals: One for each buffer; numbers of NumPy will do.
            align: Alignment in bytes of all buffers, a power of two.

        Raises:
            ProblemError: An interval is empty, a size is not positive, a name appears twice, or
                ``align`` is no power of two.
        """
        from symmplan.planner.intervals import problem_from_intervals

        return problem_from_intervals(intervals, align=align)

    @staticmethod
    def from_csv(path: str | os.PathLike[str]) -> Problem:
        """A totally ordered problem from a CSV file: columns ``id,lower,upper,size``, half-open.

        This is the format of the public static-allocation benchmarks.

        Raises:
            ProblemError: A column is missing or a value is not a whole number (the line is named).
        """
        from symmplan.planner.intervals import problem_from_csv

        return problem_from_csv(path)

    def graph(self) -> nx.DiGraph[str]:
        """Happens-before as a graph: operation ``a`` precedes ``b`` if a path leads there.

        Nodes are names of operations, in the order in which they were listed, each with its
        `Operation` as the attribute ``operation``. Edges are those of the streams' own order
        (``kind="stream"``) and the problem's ``edges`` (``kind="edge"``); it has no cycle. What the
        calls of ranks order between ranks is not in it; see [Note: peers count]. The graph is the
        caller's to change.
        """
        from symmplan.planner.graphs import graph_of

        return graph_of(self.operations, self.edges)

    def to_json(self) -> str:
        """Canonical JSON: equal problems give equal texts, however they were listed."""
        from symmplan.planner.serialize import problem_to_json

        return problem_to_json(self)

    @staticmethod
    def from_json(text: str) -> Problem:
        """Read what `to_json` wrote.

        Raises:
            PlanFormatError: The text is not such a problem.
        """
        from symmplan.planner.serialize import problem_from_json

        return problem_from_json(text)
