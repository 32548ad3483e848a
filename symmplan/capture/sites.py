"""The decisions of capture about each declared tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from attrs import field, frozen

from symmplan.capture.graphs import unequal_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx

    from symmplan.capture.graphs import LiveRange, Path, Value, Values
    from symmplan.capture.producers import Write
    from symmplan.model import OpSpec, Problem, Requirement

#: ``"bind"``: no copy. ``"stage"``: copied.
How: TypeAlias = Literal["bind", "stage"]

#: The copies that a program makes of its declared tensors.
CopyKind: TypeAlias = Literal["copy in", "copy out", "copy back"]


@frozen(eq=False)
class Site:
    """One declared tensor of one declared op, and how it gets into symmetric memory.

    Attributes:
        node: The declared op's node.
        head: Name of the argument, or ``"return"``.
        index: Where in the argument or the result it is, if that is a list.
        kind: Whether it is an argument or a result.
        source: The node that holds the value (of an argument), or the op's node (of a result).
        requirement: What is declared of it.
        path: Where the value sits in the result of ``source``.
        how: How it gets there, or None if it was left out.
        buffer: Name of its buffer, or None if it was left out.
        reason: Why it is staged or left out.
        by_producer: Whether it is staged because what makes it cannot write it in place.
        writes: Whether the op writes it (arguments only).
        viewed: Whether the op writes a copy of it, and other views of it are used later.
        stays: Whether a staged result is copied into its placement rather than out of it.
    """

    node: fx.Node
    head: str
    index: Path
    kind: Literal["argument", "result"]
    source: fx.Node
    requirement: Requirement
    path: Path = ()
    how: How | None = None
    buffer: str | None = None
    reason: str = ""
    by_producer: bool = False
    writes: bool = False
    viewed: bool = False
    stays: bool = False

    @property
    def value(self) -> Value:
        """The tensor."""
        return self.source, self.path

    @property
    def where(self) -> str:
        """Both as text: ``"input"``, ``"inputs.0"``, ``"return"``, ``"return.1"``, ..."""
        return ".".join([self.head, *map(str, self.index)])

    @property
    def live_range(self) -> LiveRange | None:
        """What the ranks have agreed on for the tensor of a call of unequal parts, if they have."""
        parts = unequal_parts(self.node)
        if parts is None:
            return None
        return parts.sent if self.head == "input" else parts.received

    @property
    def leaves(self) -> bool:
        """Whether it is a result that is copied out of its placement."""
        return self.kind == "result" and self.how == "stage" and not self.stays


@frozen(eq=False)
class PlacedStorage:
    """A storage made in the graph that lives in a placement from its first byte."""

    buffer: str  # name of its buffer
    node: fx.Node  # the node that makes it
    path: tuple[int, ...]  # where it sits in the node's result
    #: How the producer writes there; ``"declared"`` if it is a declared op, ``"given"`` if it lies
    #: there before the graph begins.
    write: Write | Literal["given"]


@frozen(eq=False)
class Kept:
    """An input that is to lie in symmetric memory from run to run."""

    node: fx.Node  # its placeholder
    index: int  # which input
    buffer: str  # name of its buffer
    group: str  # the process group
    op: str  # the first op that takes it
    where: str  # as which argument
    written: bool = False  # whether the graph writes it


@frozen(eq=False)
class Step:
    """The purpose of an operation of a captured problem.

    Attributes:
        kind: ``"launch"`` runs a declared op on its placements. The copies move one of its tensors:
            in before the op (a staged argument, or the input of an op that works in place) or after
            it (a result that is made elsewhere), out of its placement, or back to the program's
            tensor. ``"use"`` is any other access of a buffer. ``"given"`` begins a backward,
            ``"saved"`` ends a forward. ``"release"`` is the moment at which the program drops a
            tensor, or asks for its memory. ``"poison"`` overwrites a buffer after its live range.
        node: The node to which it belongs, if there is one; that of the declared op, for copies.
        site: The tensor that is copied.
        buffer: The buffer that is released or overwritten.
    """

    kind: Literal["launch", "use", "given", "saved", "release", "poison"] | CopyKind
    node: fx.Node | None = None
    site: Site | None = None
    buffer: str = ""


@frozen(eq=False)
class Captured:
    """What capture found: the problem, and how the graph has to change to follow a plan of it.

    Attributes:
        problem: The input of the planner.
        sites: Every declared tensor, in graph order.
        steps: ``{operation of the problem: what it does}``; marks of streams do nothing.
        placed_storages: Every storage that is made in its placement.
        specs: The declarations of the nodes that have sites.
        groups: The process group that each of them runs over; empty if none can be told.
        waits: ``{asynchronous node: {path of a result: its wait node}}``.
        values: The graph's tensors.
        prefix: The prefix of the names of operations and buffers.
        kept: The inputs that lie in symmetric memory from run to run.
        residence: Their problem; None if there are none. See [Note: pinned inputs].
        saved: ``{output: its buffer}`` of outputs that its backward reads in their placements.
        given: ``{input: its buffer}`` of inputs that its forward left in placements.
    """

    problem: Problem
    sites: tuple[Site, ...]
    steps: Mapping[str, Step]
    placed_storages: tuple[PlacedStorage, ...]
    specs: dict[fx.Node, OpSpec]
    groups: Mapping[fx.Node, str]
    waits: dict[fx.Node, dict[tuple[int, ...], fx.Node]]
    values: Values
    prefix: str = ""
    kept: tuple[Kept, ...] = ()
    residence: Problem | None = None
    saved: Mapping[int, str] = field(factory=dict)
    given: Mapping[fx.Node, str] = field(factory=dict)

    def at(self, node: fx.Node) -> list[Site]:
        """The sites of one node, in the order of its schema."""
        return [s for s in self.sites if s.node is node]
