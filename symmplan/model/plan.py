"""What was decided: `Plan`, its segments, placements and barriers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from symmplan.errors import OptionError
from symmplan.model.declared import AlgorithmName  # noqa: TC001 (hints are read where plans are)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    import networkx as nx

    from symmplan.model.problem import Problem, Unplanned

__all__ = [
    "Alternative",
    "Barrier",
    "Bound",
    "Budget",
    "Demotion",
    "Placement",
    "Plan",
    "SegmentSpec",
]


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
            ends there.
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
    """Proven minimum of several segments together, whichever of them holds each buffer.

    Signal pads and pairs kept apart can split the buffers of some groups into several segments,
    and groups that could share a segment need not. Then the sum of the segments' own bounds may be
    more than the best plan needs. This bound never is.

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
class Demotion:
    """Collectives of one kind and size that a budget demoted.

    Attributes:
        what: Their name, for people.
        calls: How many of them the captured program has.
        nbytes: Size of one of them in bytes.
        before: How they would run without a budget.
        after: How they run.
        seconds: Measured slowdown of all of them together; None without a measurement.
    """

    what: str
    calls: int
    nbytes: int
    before: AlgorithmName
    after: AlgorithmName
    seconds: float | None = None


@frozen
class Budget:
    """The demotions by which a plan keeps to a budget.

    Attributes:
        capacity: Bytes that all segments may take together.
        wanted_bytes: Bytes that they would have taken without a budget.
        demotions: The demoted collectives, in the order in which they were demoted.
    """

    capacity: int
    wanted_bytes: int
    demotions: tuple[Demotion, ...] = ()


@frozen
class Alternative:
    """Another way to run the program of a plan, for `Plan.advice` to try.

    Attributes:
        unsharded_modules: How many modules may be unsharded at the same time.
        problem: What the program needs if it runs so.
        parameters: Names of the buffers that are the parameters themselves; see
            `symmplan.planner.parameters`.
        slots: Names of the buffers that may have bytes of those.
        demotion: What is demoted; None if nothing is, and the number of modules is another.
    """

    unsharded_modules: int
    problem: Problem
    parameters: frozenset[str]
    slots: frozenset[str] = frozenset()
    demotion: Demotion | None = None


@frozen(repr=False)
class Plan:
    """Where every declared tensor of a program lives.

    A value: plans are equal if their problems and decisions are, and can be hashed.

    Attributes:
        problem: The problem it solves, kept so that the plan can be checked and drawn.
        segments: The symmetric allocations, in canonical order.
        placements: ``{buffer name: Placement}``, in canonical order.
        barriers: The barriers that must run besides the program. See [Note: peers count].
        bounds: Bounds that replace those of the segments of their groups: one for each set of
            groups that could share segments and have several.
        budget: What a budget demoted; None if nothing had to. No part of the fingerprint.
        unsharded_modules: How many modules may be unsharded at the same time; None where
            there are no modules. No part of the fingerprint, nor of the plan's JSON; nor is what
            follows.
        alternatives: The same program with fewer and with more unsharded modules, planned by
            `advice`.
    """

    problem: Problem
    segments: tuple[SegmentSpec, ...]
    placements: Mapping[str, Placement]
    barriers: tuple[Barrier, ...] = ()
    bounds: tuple[Bound, ...] = ()
    budget: Budget | None = field(default=None, eq=False)
    unsharded_modules: int | None = field(default=None, eq=False)
    alternatives: tuple[Alternative, ...] = field(default=(), eq=False)

    def __hash__(self) -> int:
        return hash((self.problem, self.segments, frozenset(self.placements.items())))

    def __repr__(self) -> str:
        from symmplan.report.text import plan_line

        return f"<Plan: {plan_line(self)}>"

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
    def optimal(self) -> bool:
        """Whether `peak_bytes` is proven minimal, as it equals `lower_bound_bytes`."""
        return self.peak_bytes == self.lower_bound_bytes

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

    def conflict_graph(self) -> nx.Graph[str]:
        """Which buffers may not share bytes, as a graph: an edge joins two that may not.

        Nodes are names of buffers, in the order in which they were listed, each with its `Buffer`
        as the attribute ``buffer``. Two buffers conflict if neither's accesses all happen before
        those of the other in `Problem.graph`, or if one is persistent. Buffers that must share
        their offset count as one, and do not conflict with each other. The graph is the caller's
        to change. It is computed from the problem alone, whichever segments the buffers lie in; for
        some thousand buffers it takes seconds.

        >>> import networkx as nx
        >>> from symmplan import Problem, plan
        >>> rows = [("a", 0, 2, 8), ("b", 1, 3, 8), ("c", 2, 4, 8)]
        >>> graph = plan(Problem.from_intervals(rows)).conflict_graph()
        >>> sorted(graph.edges)
        [('a', 'b'), ('b', 'c')]
        >>> nx.greedy_color(graph)["a"] == nx.greedy_color(graph)["c"]
        True
        """
        from symmplan.planner.graphs import conflict_graph_of

        return conflict_graph_of(self.problem)

    def verify(self) -> None:
        """Check the plan with code that did not make it.

        Raises:
            VerificationError: A rule is broken; ``kind`` says which.
        """
        from symmplan.planner.uncollected import uncollected
        from symmplan.planner.verify import verify

        with uncollected():
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

    def summary(self, choices: Iterable[Any] = ()) -> str:
        """A few lines for people: segments, bytes against the bound, what was left out and why.

        Args:
            choices: ``choices`` of the handle, session or backend that runs the plan. Each is a
                line with the collective's algorithm and the milliseconds that were measured.
        """
        from symmplan.report.text import plan_summary

        return plan_summary(self, choices)

    def to_html(
        self,
        path: str | os.PathLike[str],
        beside: Plan | None = None,
        choices: Iterable[Any] = (),
    ) -> None:
        """Write a self-contained HTML page: segments as byte-over-time rectangles.

        Args:
            path: Where to; the folder must exist.
            beside: Another plan to be drawn beside it, on the same scale of bytes.
            choices: As for `summary`; a table of the page.

        Raises:
            OptionError: ``beside`` is no plan.
        """
        if beside is not None and not isinstance(beside, Plan):
            raise OptionError(
                f"beside is {beside!r}",
                expected="a symmplan.Plan",
                got=type(beside).__name__,
                fix="read a saved plan with symmplan.Plan.from_json(text)",
            )
        from symmplan.report.html import write_plan_html

        write_plan_html(self, path, beside, choices)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from symmplan.report.html import plan_frame

        return plan_frame(self)

    def advice(self) -> tuple[Any, ...]:
        """Changes that save bytes and give nothing up, the largest saving first.

        They are `symmplan.planner.advice.Advice`, each verified by planning again.
        """
        from symmplan.planner.advice import advise

        return advise(self)

    def trades(self) -> tuple[Any, ...]:
        """What gives up speed for bytes, or bytes for speed.

        They are `symmplan.planner.advice.Advice`, each verified by planning again: algorithms that
        take fewer bytes, and one unsharded module less or more, which saves less than 0 bytes.
        """
        from symmplan.planner.advice import trades

        return trades(self)
