"""Plans that keep to a budget: which collectives are demoted, and what that costs.

[Note: demotions]
    If a plan takes more bytes than there are, one kind of collective gets an algorithm that takes
    fewer bytes, and the program is planned again: a push becomes symmetric or a shared push, and
    all others become ordinary. The planner demotes the kind with the smallest slowdown per byte
    freed at the peak, until the plan fits. Then it tries each demoted kind once more, the one with
    the largest slowdown first, because later demotions may have freed enough bytes for it.

    Slowdowns are measured. Without a measurement a collective is assumed to gain seconds in
    proportion to its bytes. So bytes that are used rarely are freed first: of two buffers, the one
    that serves fewer bytes of collectives in a step. Ops that need symmetric memory are demoted
    last.
"""

from __future__ import annotations

import re
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from attrs import evolve, field, frozen

from symmplan.errors import OptionError
from symmplan.model import Budget, Demotion
from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from symmplan.model import AlgorithmName, Plan

__all__ = ["Demotable", "bytes_of", "together", "within"]

_Rest = TypeVar("_Rest")

#: Seconds that a byte of a collective is taken to save where nothing was measured.
_NOMINAL = 1e-11

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)


def bytes_of(given: int | str | None) -> int | None:
    """A number of bytes as people give it: a whole number, or text with a unit.

    Args:
        given: Bytes, or text such as ``"40GiB"``, ``"512 MiB"`` (powers of 1024) or ``"10MB"``
            (powers of 1000). None stays None.

    Raises:
        OptionError: It is not such a number, or negative.

    >>> bytes_of("40GiB"), bytes_of("512 MiB"), bytes_of("10MB"), bytes_of("1.5 KiB"), bytes_of(7)
    (42949672960, 536870912, 10000000, 1536, 7)
    """
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    found = _SIZE.fullmatch(given) if isinstance(given, str) else None
    # "40Gi" is a size; "40i" is none, and "40Gb" are bits.
    bits = found is not None and found[2].isupper() and found[4] == "b"
    if found is None or bits or (found[3] and not found[2]):
        raise OptionError(
            f"capacity is {given!r}",
            expected="bytes as an integer, or text with a unit such as '40GiB' or '512 MiB'",
            got=repr(given),
            fix="write B for bytes: b means bits"
            if bits
            else "pass a number of bytes, or such a text",
        )
    power = " kmgt".index(found[2].lower() or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


@frozen(eq=False)
class Demotable:
    """The collectives of one kind and size, and what they have in symmetric memory.

    Attributes:
        key: By what it is told from others; equal in all plans of a program.
        what: What it is, for people.
        algorithm: How they run.
        calls: How many there are.
        nbytes: Bytes of one of them.
        buffers: Their buffers in the plan.
        less: ``{another algorithm: share of the bytes that it still takes}``, most first.
        seconds: ``{algorithm: seconds of one of them}``; empty if nothing was measured.
        known: ``{another algorithm: seconds that one of them takes more}`` where nobody has to
            measure that.
        needed: Whether it is an op that needs symmetric memory.
    """

    key: Hashable
    what: str
    algorithm: AlgorithmName
    calls: int
    nbytes: int
    buffers: frozenset[str]
    less: Mapping[AlgorithmName, float] = field(factory=lambda: {"ordinary": 0.0})
    seconds: Mapping[str, float] = field(factory=dict)
    known: Mapping[AlgorithmName, float] = field(factory=dict)
    needed: bool = False

    def costs(self, algorithm: AlgorithmName) -> float | None:
        """Seconds in all that another algorithm costs more; None if they were not measured."""
        if algorithm in self.known:
            return self.calls * self.known[algorithm]
        if self.algorithm in self.seconds and algorithm in self.seconds:
            return self.calls * (self.seconds[algorithm] - self.seconds[self.algorithm])
        return None

    def lost(self, algorithm: AlgorithmName) -> float:
        """Seconds in all that another algorithm is taken to cost more."""
        costs = self.costs(algorithm)
        if costs is not None:
            return costs
        return self.calls * self.nbytes * _NOMINAL * (1 - self.less[algorithm])

    def demoted(self, algorithm: AlgorithmName) -> Demotion:
        """What it gives up with another algorithm."""
        return Demotion(
            what=self.what,
            calls=self.calls,
            nbytes=self.nbytes,
            before=self.algorithm,
            after=algorithm,
            seconds=self.costs(algorithm),
        )


def together(demotables: Iterable[Demotable]) -> list[Demotable]:
    """What all collectives of one kind and size have, given what each of them has."""
    found: dict[Hashable, Demotable] = {}
    for demotable in demotables:
        known = found.get(demotable.key)
        if known is None:
            found[demotable.key] = demotable
        else:
            found[demotable.key] = evolve(
                known,
                calls=known.calls + demotable.calls,
                buffers=known.buffers | demotable.buffers,
            )
    return list(found.values())


def within(
    capacity: int | None,
    make: Callable[[Mapping[Hashable, AlgorithmName]], tuple[Plan, Sequence[Demotable], _Rest]],
    taken: Callable[[Plan, _Rest], int] = lambda plan, _: plan.peak_bytes,
) -> tuple[Plan, _Rest]:
    """A plan that takes no more than ``capacity`` bytes. See [Note: demotions].

    Args:
        capacity: Bytes that all segments may take together; None for no limit.
        make: Plans with ``{key of what can be demoted: algorithm that it must take instead}``;
            gives the plan, what can be demoted in it, and whatever the caller wants besides.
        taken: How many bytes are taken with a plan, given what ``make`` gave besides.

    Returns:
        The plan, with `Plan.budget` where something was demoted, and what else ``make`` gave. It
        takes more than ``capacity`` only if so much is left where nothing can be demoted.
    """
    plan, demotables, rest = make({})
    if capacity is None or taken(plan, rest) <= capacity:
        return plan, rest
    wanted, first = taken(plan, rest), {d.key: d for d in demotables}
    gave: dict[Hashable, AlgorithmName] = {}
    while taken(plan, rest) > capacity:
        found = _next(plan, demotables)
        if found is None:
            break
        demoted, algorithm = found
        gave[demoted.key] = algorithm
        plan, demotables, rest = make(gave)
    # What was given up first may have become needless; a single one has not.
    for key in sorted(gave, key=lambda k: -first[k].lost(gave[k])):
        if len(gave) == 1:
            break
        without = {k: algorithm for k, algorithm in gave.items() if k != key}
        other, _, others = make(without)
        if taken(other, others) <= capacity:
            gave, plan, rest = without, other, others
    paid = tuple(first[key].demoted(algorithm) for key, algorithm in gave.items())
    return evolve(plan, budget=Budget(capacity, wanted, paid)), rest


def _next(plan: Plan, demotables: Sequence[Demotable]) -> tuple[Demotable, AlgorithmName] | None:
    """What is demoted next, and to which algorithm; None if nothing can be."""
    size = {b.name: b.nbytes for b in plan.problem.buffers}
    for names in (_fullest(plan), frozenset(size)):
        found = []
        for place, demotable in enumerate(demotables):
            there = [size[name] for name in demotable.buffers & names if name in size]
            # Those of one kind share bytes where they are not live together.
            held = sum(there) if names != frozenset(size) else max(there, default=0)
            for step, (algorithm, share) in enumerate(demotable.less.items()):
                freed = held * (1 - share)
                if freed <= 0 or (demotable.seconds and demotable.costs(algorithm) is None):
                    continue
                score = (demotable.needed, demotable.lost(algorithm) / freed, place, step)
                found.append((score, demotable, algorithm))
        if found:
            _, demotable, algorithm = min(found, key=itemgetter(0))
            return demotable, algorithm
    return None


def _fullest(plan: Plan) -> frozenset[str]:
    """The buffers that are live at the moment when most bytes are, in the canonical order."""
    problem = plan.problem
    index = order_of(problem).index
    live: dict[str, tuple[int, int]] = {}
    for access in problem.accesses:
        at = index[access.operation]
        begin, end = live.get(access.buffer, (at, at))
        live[access.buffer] = (min(begin, at), max(end, at))
    size = {b.name: b.nbytes for b in problem.buffers}
    always = {b.name for b in problem.buffers if b.persistent or b.name not in live}
    change = [0] * (len(index) + 1)
    for name, (begin, end) in live.items():
        if name not in always:
            change[begin] += size[name]
            change[end + 1] -= size[name]
    most = total = moment = 0
    for at, by in enumerate(change):
        total += by
        if total > most:
            most, moment = total, at
    return frozenset(always | {n for n, (b, e) in live.items() if b <= moment <= e})
