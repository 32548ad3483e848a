"""The vocabulary: what a program needs (`Problem`) and what was decided (`Plan`).

Pure Python and frozen: values flow through the stages, no stage mutates what it was given. Sizes,
offsets and alignments are bytes everywhere. Nothing here imports torch.

[Note: happens-before]
    A `Problem` is a list of operations. Operations of one *stream* run in the order in which they
    are listed; ``edges`` add the rest (events, waits of asynchronous work). Their transitive
    closure is *happens-before*. Two buffers may share bytes only if every access of one strictly
    happens-before the first access of the other.

[Note: peers count]
    Ranks run the same program, each at its own pace. An access with ``remote=True`` is one where
    ranks touch each other's bytes of the buffer, besides their own. Order on one rank says nothing
    about them. What does are facts of the *call*, which begins at its operation and ends at the
    operation that lists it in ``ends`` (the wait of asynchronous work), or else at once:

    ``meets``      its end on a rank comes after its start on every rank of its group. So what
                   precedes the peers' start precedes what follows my end; what lies between a
                   start and its end is ordered with no peer.
    ``handshake``  it touches no symmetric byte, also none of this rank's own, before every rank of
                   its group has started it.
    ``release``    it ends, on any rank, when the accesses of all ranks are over.
    ``enters``     (of one access) peers touch a rank's bytes only after that rank has started.
    ``releases``   (of one access) and no more after that rank's end.

    All accesses of a call, own and peers', lie between its start and its end on the rank that
    makes them, at any time, in any order; what is not stated is not assumed. Two accesses of the
    same bytes of one rank, at least one of them a write, whoever makes them, need an order. Where
    the program has none the plan lists a `Barrier`, and whoever runs the plan must run it. A
    program repeats, so this holds from its end to its start, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

__all__ = [
    "Access",
    "Barrier",
    "Bound",
    "Buffer",
    "OpSpec",
    "Operation",
    "Placement",
    "Plan",
    "Problem",
    "Requirement",
    "SegmentSpec",
    "Unplanned",
]

#: Alignment in bytes of a placement unless something asks for more: a vector store of the widest
#: kind (TMA) wants 256 between input and output, so this keeps every pair congruent.
DEFAULT_ALIGN = 256


@frozen
class Requirement:
    """What an op declares of one of its arguments or results.

    Attributes:
        where: ``"name"`` of an argument, ``"return"`` or ``"return.0"``, ... of a result.
        align: Alignment of the placement in bytes, a power of two.
        signal_pad: Whether the op uses the signal pad of the segment that holds this tensor.
        enters: Peers touch a rank's bytes of it only after that rank has started the op. See
            [Note: peers count].
        releases: No peer touches a rank's bytes of it after the op has ended on that rank.
    """

    where: str
    align: int = DEFAULT_ALIGN
    signal_pad: bool = False
    enters: bool = False
    releases: bool = False


@frozen
class OpSpec:
    """All that is declared of one op.

    Attributes:
        op: Qualified name with overload, such as ``"_c10d_functional::all_reduce.default"``.
        requirements: The arguments and results that must be symmetric, ordered as in the schema.
        group: Name of the schema argument that names the process group.
        handshake: No symmetric byte, also none of this rank's own, is touched before all ranks of
            the group have started the op. See [Note: peers count], also for the next two.
        release: The op (or its wait, if asynchronous) ends only after all ranks' accesses ended.
        meets: Its end on a rank comes after its start on every rank of the group. Every op that
            handshakes or releases does.
        asynchronous: The op only starts the work; ``wait_tensor`` of its result ends it.
        out: Qualified name of the variant that writes its results into given tensors, if any.
        origin: Who declared it: ``"catalogue"``, ``"user"`` or ``"torch"`` (upstream's registry).
        fills: Pairs (argument, result): before the op is started the argument is copied into the
            result, where the op then works in place.
    """

    op: str
    requirements: tuple[Requirement, ...]
    group: str
    handshake: bool = False
    release: bool = False
    meets: bool = False
    asynchronous: bool = False
    out: str | None = None
    origin: str = "user"
    fills: tuple[tuple[str, str], ...] = ()


@frozen
class Operation:
    """One step of a program.

    Attributes:
        name: Unique in its problem.
        stream: Operations of one stream run in the order listed.
        group: Process group that the facts below are about, if any.
        handshake: See [Note: peers count], as for the next three.
        release: Of the call that begins here.
        meets: The same. A call that handshakes or releases meets, whether this says so or not.
        ends: Names of operations before it: the calls that began there end here. It states no facts
            of its own then.
        op: Qualified op name, for people; takes no part in planning.
    """

    name: str
    stream: str = "main"
    group: str | None = None
    handshake: bool = False
    release: bool = False
    meets: bool = False
    ends: tuple[str, ...] = ()
    op: str = ""


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


@frozen
class Unplanned:
    """A declared tensor that was left out, and why.

    Attributes:
        name: The tensor's name in the program.
        op: Qualified name of the op that declared it.
        where: The argument or result it is.
        reason: One clause for people.
        nbytes: Its size in bytes, or None where it is not known.
    """

    name: str
    op: str
    where: str
    reason: str
    nbytes: int | None = None


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


@frozen
class Problem:
    """What a program does with the tensors that must be symmetric.

    Attributes:
        buffers: What has to be placed.
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

    @staticmethod
    def from_intervals(intervals: Iterable[tuple[str, int, int, int]]) -> Problem:
        """A totally ordered problem in one segment from ``(name, begin, end, nbytes)``, half-open.

        Raises:
            ProblemError: An interval is empty, a size is not positive, or a name appears twice.
        """
        from symmplan.planner.intervals import problem_from_intervals

        return problem_from_intervals(intervals)

    @staticmethod
    def from_csv(path: str | os.PathLike[str]) -> Problem:
        """The same from a CSV file with the columns ``id,lower,upper,size``, half-open.

        This is the format of the public static-allocation benchmarks.

        Raises:
            ProblemError: A column is missing or a value is not a whole number (the line is named).
        """
        from symmplan.planner.intervals import problem_from_csv

        return problem_from_csv(path)

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


@frozen
class Placement:
    """Where a buffer lies: bytes ``[offset, offset + nbytes)`` of a segment."""

    segment: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """First byte after the placement."""
        return self.offset + self.nbytes


@frozen
class SegmentSpec:
    """One symmetric allocation to be made.

    Attributes:
        name: Unique in its plan.
        groups: Process groups that it is rendezvoused with, once each; usually one.
        nbytes: Its size in bytes.
        lower_bound_bytes: Proven minimum of its bytes.
        signal_pad: Whether an op in it uses the signal pad.
        witness: Buffers that prove the bound; of buffers that share an offset, the first.
        proof: ``"clique"``: the witnesses conflict pairwise and their sizes, rounded up to the
            segment's least alignment, sum to the bound. ``"pin"``: the one witness is pinned and
            ends there. ``"search"``: a complete search found nothing lower; the witnesses are
            the heaviest set known, and their sum is less than the bound.
    """

    name: str
    groups: tuple[str, ...]
    nbytes: int
    lower_bound_bytes: int
    signal_pad: bool = False
    witness: tuple[str, ...] = ()
    proof: str = "clique"


@frozen
class Bound:
    """What several segments need together, however their buffers are dealt to them.

    Where signal pads or pairs kept apart split the buffers of some groups into several segments,
    or groups that could share a segment do not, the sum of the segments' own bounds may be more
    than the best plan needs; this is not.

    Attributes:
        groups: The process groups that the segments serve, sorted.
        nbytes: Proven minimum of the sum of their bytes.
        witness: Buffers that conflict pairwise and whose sizes sum to it, as in `SegmentSpec`.
    """

    groups: tuple[str, ...]
    nbytes: int
    witness: tuple[str, ...] = ()


@frozen
class Barrier:
    """A barrier over ``group`` that must run right before ``before`` starts.

    Several before one operation run in the order in which the plan lists them.

    Attributes:
        before: Name of the operation.
        group: Process group.
        buffers: Names of the buffers whose bytes it protects.
    """

    before: str
    group: str
    buffers: tuple[str, ...] = ()


@frozen
class Plan:
    """Where every declared tensor of a program lives.

    Attributes:
        problem: The problem it solves, kept so that the plan can be checked and drawn.
        segments: The symmetric allocations, in canonical order.
        placements: ``{buffer name: Placement}``, in canonical order.
        barriers: What must be run besides the program. See [Note: peers count].
        effort: ``"fast"`` or ``"optimal"``.
        optimal: Whether ``peak_bytes`` is proven minimal: it equals ``lower_bound_bytes``.
        bounds: Bounds that replace those of the segments of their groups: one for each set of
            groups that could share segments and have several.
    """

    problem: Problem
    segments: tuple[SegmentSpec, ...]
    placements: Mapping[str, Placement]
    barriers: tuple[Barrier, ...] = ()
    effort: str = "fast"
    optimal: bool = False
    bounds: tuple[Bound, ...] = ()

    @property
    def unplanned(self) -> tuple[Unplanned, ...]:
        """Every declared tensor left out, and why."""
        return self.problem.unplanned

    @property
    def peak_bytes(self) -> int:
        """Sum of the segments' bytes."""
        return sum(s.nbytes for s in self.segments)

    @property
    def lower_bound_bytes(self) -> int:
        """Proven minimum of `peak_bytes`."""
        joint = {g for b in self.bounds for g in b.groups}
        return sum(b.nbytes for b in self.bounds) + sum(
            s.lower_bound_bytes for s in self.segments if not joint.intersection(s.groups)
        )

    @property
    def gap(self) -> float:
        """By which factor `peak_bytes` exceeds the proven minimum; 1.0 for an optimal plan."""
        return self.peak_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 1.0

    @property
    def unshared_bytes(self) -> int:
        """Bytes that one buffer per tensor would take."""
        return sum(b.nbytes for b in self.problem.buffers)

    @property
    def fingerprint(self) -> str:
        """Hash of the canonical plan; equal on all ranks before anything is registered."""
        from symmplan.planner.fingerprint import fingerprint

        return fingerprint(self)

    def verify(self) -> None:
        """Check the plan with code that did not make it.

        Raises:
            VerificationError: A rule is broken; ``kind`` says which.
        """
        from symmplan.planner.verify import verify

        verify(self)

    def to_json(self) -> str:
        """Canonical JSON of the plan and its problem."""
        from symmplan.planner.serialize import plan_to_json

        return plan_to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read and verify what `to_json` wrote.

        Raises:
            PlanFormatError: The text is not a plan of this format.
            VerificationError: It is one, but wrong.
        """
        from symmplan.planner.serialize import plan_from_json

        return plan_from_json(text)

    def summary(self) -> str:
        """A few lines for people: segments, bytes against the bound, what was left out and why."""
        from symmplan.report.text import plan_summary

        return plan_summary(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained HTML page: segments as byte-over-time rectangles."""
        from symmplan.report.html import write_plan_html

        write_plan_html(self, path)

    def advice(self) -> tuple[Any, ...]:
        """What would save bytes, largest saving first; each piece verified by planning again."""
        from symmplan.planner.advice import advise

        return advise(self)
