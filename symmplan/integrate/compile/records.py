"""What is known of a compiled graph: how it was asked for, its parts, what was decided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import define, field, frozen

from symmplan.place.options import Options, known

if TYPE_CHECKING:
    from symmplan.capture import Captured
    from symmplan.integrate.compile.crossing import Given
    from symmplan.integrate.compile.emit import SegmentInput
    from symmplan.integrate.compile.unit import Unit
    from symmplan.model import Placement, Plan
    from symmplan.place.choice import Choice

__all__ = ["CompileOptions", "Record", "Rewritten"]


@frozen(kw_only=True)
class CompileOptions(Options):
    """How a compile backend was asked to work; see `Options`.

    Attributes:
        inner: Who compiles the rewritten graphs, ``"inductor"`` or ``"eager"``.
        bind: Keep static inputs of declared ops in symmetric memory.
    """

    inner: Literal["inductor", "eager"]
    bind: bool

    def __attrs_post_init__(self) -> None:
        known("inner compiler", self.inner, ("inductor", "eager"))
        super().__attrs_post_init__()


@frozen(eq=False)
class Rewritten:
    """A part that follows a plan.

    Attributes:
        part: ``"forward"``, ``"backward"`` or ``"inference"``.
        inputs: What it takes of the segments after its own inputs, in order.
        saved: ``{output: where it stays}`` of what its backward reads in its placement.
        given: Its inputs that its forward left in placements.
        writes: The bytes that it writes.
        owner: Of which graph it is a part.
        calls: How many declared calls run in placements.
        copies: How many copies it makes into and out of placements.
    """

    part: str
    inputs: tuple[SegmentInput, ...]
    saved: dict[int, Placement]
    given: tuple[Given, ...]
    writes: tuple[Placement, ...]
    owner: Unit
    calls: int
    copies: int

    @property
    def copies_back(self) -> bool:
        """Whether its entry may copy into placements what it needs there."""
        return any(given.needed for given in self.given)


@define(eq=False)
class Record:
    """What is remembered of a graph, also when its code is gone.

    Attributes:
        plans: The plan of each part.
        kept: Plans of inputs that lie in symmetric memory from run to run.
        sites: ``(operation, op, argument or result, how, reason)`` of every declared tensor.
        choices: What was measured.
        outgrown: Of each size that had become too large for an earlier plan, what was logged.
        seconds: Symmplan's part of compiling it.
        crossing_bytes: Bytes that stay in their placements between forward and backward.
        runs: How often its parts ran.
        served: How many declared calls ran in placements.
        copies: How many copies they made into and out of placements.
    """

    plans: dict[str, Plan] = field(init=False, factory=dict)
    kept: dict[str, Plan] = field(init=False, factory=dict)
    sites: list[tuple[str, str, str, str | None, str]] = field(init=False, factory=list)
    choices: list[Choice] = field(init=False, factory=list)
    outgrown: list[str] = field(init=False, factory=list)
    seconds: float = field(init=False, default=0.0)
    crossing_bytes: int = field(init=False, default=0)
    runs: int = field(init=False, default=0)
    served: int = field(init=False, default=0)
    copies: int = field(init=False, default=0)

    def ran(self, part: Rewritten) -> None:
        """Count a run."""
        self.runs += 1
        self.served += part.calls
        self.copies += part.copies

    def add(self, captured: Captured) -> None:
        """Remember the declared tensors of a part."""
        self.sites += [
            (
                f"{captured.prefix}{s.node.name}",
                captured.specs[s.node].op,
                s.where,
                s.how,
                s.reason,
            )
            for s in captured.sites
        ]
