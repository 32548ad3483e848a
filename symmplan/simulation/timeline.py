"""When the calls of a simulated program would run, given the speed of a machine.

[Note: exposed time]
    Products run one after the other, in the order of the program. FSDP2's gathers run beside them,
    one after the other. Each begins together with the products that had waited for the previous
    gather: the next module's parameters come while this one computes. The reduce-scatters run
    beside both. Each begins when the earlier products are done, and all are over at the end. The
    program waits for every other collective immediately. The time that products wait is exposed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from symmplan.coordination.world import Planner, SimulatedCall, World
    from symmplan.model import AlgorithmName
    from symmplan.simulation.links import Links, Span

__all__ = ["Collective", "Exposure", "Ran", "Times", "predicted", "seconds_of"]

#: Algorithms of collectives within one domain.
_WITHIN: tuple[AlgorithmName, ...] = ("ordinary", "symmetric", "copy engine", "push")
_GATHER, _REDUCE = "all_gather", "reduce_scatter"  # FSDP2's


@frozen
class Collective:
    """The program's collectives of one kind.

    Attributes:
        op: Name of the op; ``"all_gather"`` and ``"reduce_scatter"`` are FSDP2's,
            ``"all_to_all"`` is of experts.
        count: How often it ran.
        nbytes: Bytes of the largest tensor of one collective, on this rank.
        group: Name of the process group.
        ranks: Number of ranks of the group.
        algorithm: Its algorithm in the plan.
        seconds: ``{algorithm: predicted seconds of one collective}``, for all algorithms that it
            may have; empty without links.
    """

    op: str
    count: int
    nbytes: int
    group: str
    ranks: int
    algorithm: AlgorithmName
    seconds: Mapping[str, float] = field(factory=dict, hash=False)


@frozen
class Exposure:
    """The time of a program, given the speed of a machine.

    Attributes:
        products: Seconds of matrix products.
        collectives: Seconds of collectives, all together.
        exposed: Seconds in which products wait for collectives.
    """

    products: float
    collectives: float
    exposed: float


@define
class Ran:
    """The calls of a simulated program, in their order.

    Attributes:
        world: Where.
        calls: The collectives: ``(planner, the planner's key of it, the collective)``. A collective
            without a planner has None, and whether it runs in a placement.
    """

    world: World
    calls: list[tuple[Planner | None, Any, SimulatedCall]] = field(factory=list)
    #: Of products their floating-point operations; of collectives their number.
    _events: list[tuple[Literal["products", "collective"], float]] = field(factory=list)
    _known: int = 0

    def planned(self) -> None:
        """Take over the collectives that planners were told of."""
        for call in self.world.calls[self._known :]:
            self._add(call)
        self._known = len(self.world.calls)

    def other(self, call: SimulatedCall, *, placed: bool) -> None:
        """A collective ran that nobody plans."""
        self._add((None, placed, call))

    def products(self, flops: float) -> None:
        """Matrix products ran, of so many floating-point operations."""
        if self._events and self._events[-1][0] == "products":
            flops += self._events.pop()[1]
        self._events.append(("products", flops))

    def exposure(self, flops: float, took: Callable[[int], float]) -> Exposure:
        """What all of it takes.

        Args:
            flops: Floating-point operations a second; 0 if products take no time.
            took: The seconds of a collective, by its number.
        """
        now = gathers = reductions = may_begin = products = all_of_them = 0.0
        for what, value in self._events:
            if what == "products":
                seconds = value / flops if flops else 0.0
                now += seconds
                products += seconds
                continue
            seconds, op = took(int(value)), self.calls[int(value)][2].op
            all_of_them += seconds
            if op == _GATHER:
                gathers = max(gathers, may_begin) + seconds
                now = may_begin = max(now, gathers)
            elif op == _REDUCE:
                reductions = max(reductions, now) + seconds
            else:
                now += seconds
        return Exposure(products, all_of_them, max(now, reductions) - products)

    def _add(self, call: tuple[Planner | None, Any, SimulatedCall]) -> None:
        self._events.append(("collective", len(self.calls)))
        self.calls.append(call)


def seconds_of(
    call: SimulatedCall,
    algorithm: AlgorithmName,
    span: Span,
    machine: Links,
    *,
    levels: bool = False,
) -> dict[str, float]:
    """``{algorithm: seconds}`` of those that a collective may have, of its own first.

    What stays ordinary in the plan has nothing else, but for two levels, which nobody measured.

    Args:
        call: The collective.
        algorithm: Its own.
        span: Where its ranks are.
        machine: Its links.
        levels: Whether it could run in two levels.
    """
    others: tuple[AlgorithmName, ...] = ("ordinary",)
    if levels:
        others = ("ordinary", "two-level")
    elif span.domains == 1 and algorithm != "ordinary":
        others = _WITHIN
    return {a: machine.seconds(call.op, call.nbytes, span, a) for a in (algorithm, *others)}


@frozen
class Times:
    """Predicted times of a program on a machine.

    Attributes:
        machine: Links of the machine.
        planned: Times with the algorithms of the plans.
        forced: ``{algorithm: times if all collectives that can use it do}``.
    """

    machine: Links
    planned: Exposure
    forced: Mapping[str, Exposure]


def predicted(machine: Links, ran: Ran, collectives: Sequence[Collective]) -> Times:
    """What a program takes on a machine, as it is planned and by each algorithm."""

    def exposure(algorithm: str) -> Exposure:
        def took(number: int) -> float:
            known = collectives[number].seconds
            return known.get(algorithm, known[collectives[number].algorithm])

        return ran.exposure(machine.flops, took)

    occur = [collective.algorithm for collective in collectives]
    could = [a for one in collectives if one.algorithm == "ordinary" for a in one.seconds]
    every = dict.fromkeys(("ordinary", *occur, *could))
    return Times(machine, exposure(""), {a: exposure(a) for a in every})
