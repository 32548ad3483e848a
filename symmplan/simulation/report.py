"""The report of a simulation."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING

from attrs import asdict, frozen

from symmplan.planner.advice import advise, trades
from symmplan.planner.budget import bytes_of
from symmplan.report import plan_facts
from symmplan.report.format import count, size, table, visible
from symmplan.report.html import page, plan_frame, tiles

if TYPE_CHECKING:
    from typing import Any

    from symmplan.model import AlgorithmName, Plan

__all__ = ["Answer", "Collective", "Ordinary", "SimulationReport"]


@frozen
class Ordinary:
    """Bytes of ordinary memory on this rank, at their peak.

    Attributes:
        parameters: Parameters that the optimizer has, sharded.
        gradients: Their gradients.
        optimizer: State of optimizers. It counts from the beginning, because every step but the
            first has it.
        activations: All other bytes, including buffers of collectives that are not planned.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of them, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations


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
    """

    op: str
    count: int
    nbytes: int
    group: str
    ranks: int
    algorithm: AlgorithmName


@frozen
class Answer:
    """One answer about a simulated program.

    Attributes:
        kind: ``"fits"``, ``"peak"``, ``"cost"``, ``"saves"`` or ``"trade"``.
        text: One sentence for people.
        nbytes: The bytes that it is about.
    """

    kind: str
    text: str
    nbytes: int


def _costs(plan: Plan) -> list[Answer]:
    """The demotions of a plan's budget."""
    budget = plan.budget
    if budget is None:
        return []
    head = f"{size(budget.capacity)} instead of {size(budget.wanted_bytes)} cost"
    found = []
    for g in budget.demotions:
        seconds = "" if g.seconds is None else f", {g.seconds:.3g} s in all"
        text = (
            f"{head}: {g.calls:,} x {visible(g.what)} as {g.after} instead of {g.before}{seconds}"
        )
        found.append(Answer("cost", text, budget.wanted_bytes - plan.peak_bytes))
    return found


@frozen(repr=False)
class SimulationReport:
    """The needs of one rank of a simulated world; `symmplan.simulate` returns it.

    Attributes:
        ranks: Number of ranks of the world.
        rank: The simulated rank.
        memory: The memory backend of the plans.
        plans: The plans that the rank would have.
        peak_bytes: Bytes of symmetric memory that the rank holds. Bytes of sessions and experts
            count even after these have ended, but not those of sessions that lie in segments of
            FSDP2.
        lower_bound_bytes: Proven minimum of the plans' segments, in bytes.
        ordinary_bytes: Bytes of ordinary memory, without the tensors in placements.
        cached_bytes: Bytes that torch's allocator has of a device besides, at most: it rounds
            sizes, keeps free blocks, and loses some to fragments. 0 in memory of the host.
        beyond_bytes: Bytes that communicators for copy engines, windows and rendezvous of NCCL
            take. The program's own communicators, which it has without symmplan, too, do not count.
        asleep_bytes: What stays of `peak_bytes` and `beyond_bytes` while all programs sleep, at
            most: what the first rendezvous of a group sets up in its communicator, and segments
            that cannot be given back, with theirs for copy engines.
        device_bytes_without: Peak of the rank's device memory without symmplan, counted like
            `device_bytes`.
        collectives: The program's collectives, by op, size, group and algorithm.
    """

    ranks: int
    rank: int
    memory: str
    plans: tuple[Plan, ...]
    peak_bytes: int
    lower_bound_bytes: int
    ordinary_bytes: Ordinary
    cached_bytes: int
    beyond_bytes: int
    asleep_bytes: int
    device_bytes_without: int
    collectives: tuple[Collective, ...]

    def __repr__(self) -> str:
        symmetric, ordinary = size(self.peak_bytes), size(self.ordinary_bytes.total)
        return (
            f"<SimulationReport: rank {self.rank:,} of {self.ranks:,}, {symmetric} symmetric and "
            f"{ordinary} ordinary memory, {count(len(self.plans), 'plan')}>"
        )

    @property
    def device_bytes(self) -> int:
        """Peak of what the rank's device has to have, in bytes."""
        tensors = self.peak_bytes + self.ordinary_bytes.total
        return tensors + self.cached_bytes + self.beyond_bytes

    def to_json(self) -> str:
        """The report as JSON, with the facts and fingerprints of the plans."""
        return json.dumps(self.facts(), indent=2)

    def facts(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "ranks": self.ranks,
            "rank": self.rank,
            "memory": self.memory,
            "peak_bytes": self.peak_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "device_bytes": self.device_bytes,
            "device_bytes_without": self.device_bytes_without,
            "ordinary_bytes": {**asdict(self.ordinary_bytes), "total": self.ordinary_bytes.total},
            "cached_bytes": self.cached_bytes,
            "beyond_bytes": self.beyond_bytes,
            "asleep_bytes": self.asleep_bytes,
            "collectives": [asdict(c) for c in self.collectives],
            "plans": [plan_facts(plan) for plan in self.plans],
        }

    def advice(self, capacity: int | str | None = None) -> tuple[Answer, ...]:
        """What fits, what determines the peak, what a budget costs, and what would save bytes.

        Args:
            capacity: Memory of a device, in bytes or as text such as ``"80GB"``; None to leave out
                what fits.

        Returns:
            Answers of five kinds. A ``"peak"`` names for each plan the group that sets its peak,
            and that group's largest buffer. A ``"cost"`` names collectives that a ``capacity=`` of
            the program demoted, and their algorithm. A ``"saves"`` is advice of `Plan.advice`, a
            ``"trade"`` one of `Plan.trades` that saves bytes. A ``"fits"`` says how much room
            ``capacity`` leaves, and by which factor activations (with the sequence or the batch)
            and layers (with their parameters, state and symmetric memory) may grow until it is
            full. The factor is extrapolated from this run; simulate that size to confirm it.

        Raises:
            OptionError: ``capacity`` is not a number of bytes.
        """
        there = bytes_of(capacity)
        found: list[Answer] = []
        for plan in self.plans:
            groups: dict[str, int] = {}
            ends: dict[str, int] = {}
            for b in plan.problem.buffers:
                groups[b.group] = max(groups.get(b.group, 0), b.nbytes)
                ends[b.group] = max(ends.get(b.group, 0), plan.placements[b.name].end)
            if ends:
                group = max(ends, key=lambda g: (ends[g], g))
                text = (
                    f"group {visible(group)} sets the peak of {size(plan.peak_bytes)}; its largest "
                    f"buffer has {size(groups[group])}"
                )
                found.append(Answer("peak", text, plan.peak_bytes))
            found += _costs(plan)
            found += [Answer("saves", a.text, a.saves) for a in advise(plan)]
            found += [Answer("trade", a.text, a.saves) for a in trades(plan) if a.saves > 0]
        if there is not None:
            found += self._fits(there)
        return tuple(found)

    def _fits(self, capacity: int) -> list[Answer]:
        ordinary = self.ordinary_bytes
        all_ = self.device_bytes
        text = f"{size(all_)} are needed, {size(capacity)} are there: "
        if all_ > capacity:
            return [Answer("fits", f"{text}{size(all_ - capacity)} too much", capacity - all_)]
        found = [Answer("fits", f"{text}{size(capacity - all_)} are left", capacity - all_)]
        grows = {"sequences": ordinary.activations, "layers": all_ - ordinary.activations}
        for what, nbytes in grows.items():
            if nbytes:
                factor = 1 + (capacity - all_) / nbytes
                text = f"{what} may be {factor:.2f} times as large until {size(capacity)} are full"
                found.append(Answer("fits", text, int(nbytes * (factor - 1))))
        return found

    def _parts(self) -> dict[str, int]:
        """What the device has beside symmetric memory, in bytes."""
        beside = {"cached": self.cached_bytes, "beyond": self.beyond_bytes}
        return {**asdict(self.ordinary_bytes), **beside}

    def to_html(self) -> str:
        """A self-contained HTML page with the picture of each plan."""
        ordinary = self.ordinary_bytes
        bound = f"at least {size(self.lower_bound_bytes)}"
        facts = [
            ("symmetric memory", size(self.peak_bytes), bound),
            ("ordinary memory", size(ordinary.total), "at its peak"),
            ("device", size(self.device_bytes), f"without {size(self.device_bytes_without)}"),
            *((name, size(nbytes), "") for name, nbytes in self._parts().items()),
        ]
        rows = "".join(
            f'<tr><td class="n">{c.count:,}<td>{escape(visible(c.op))}'
            f'<td class="n">{size(c.nbytes)}<td>{escape(visible(c.group))}'
            f'<td class="n">{c.ranks:,}<td>{escape(c.algorithm)}</tr>'
            for c in self.collectives
        )
        names = '<th class="n">count<th>op<th class="n">bytes<th>group<th class="n">ranks'
        names += "<th>algorithm"
        advice = "".join(f"<li>{escape(a.text)}</li>" for a in self.advice())
        plans = (f"<h2>Plan {i + 1}</h2>{plan_frame(plan)}" for i, plan in enumerate(self.plans))
        what = f"Rank {self.rank:,} of {self.ranks:,}"
        return page(
            f"symmplan: rank {self.rank} of {self.ranks}",
            f"<header><h1>{what} <code>memory={escape(repr(self.memory))}</code></h1>"
            f"{tiles(facts)}</header><main><h2>Collectives</h2>"
            f'<div class="scroll"><table><tr>{names}</tr>{rows}</table></div>'
            f"<h2>Advice</h2><ul>{advice}</ul>{''.join(plans)}</main>",
        )

    def summary(self) -> str:
        """A text for a terminal."""
        ordinary = self.ordinary_bytes
        lines = [
            f"rank {self.rank:,} of {self.ranks:,}, planned for memory={self.memory!r}",
            f"symmetric memory  {size(self.peak_bytes)} in {count(len(self.plans), 'plan')}",
            f"                  {size(self.lower_bound_bytes)} at least",
            f"ordinary memory   {size(ordinary.total)} at its peak",
            *table([(n, size(b)) for n, b in asdict(ordinary).items()]),
            f"cached            {size(self.cached_bytes)} by torch's allocator",
            f"beyond            {size(self.beyond_bytes)} by communicators and windows",
            f"asleep            {size(self.asleep_bytes)} stay of symmetric memory and beyond",
            f"device            {size(self.device_bytes)} at its peak",
            f"                  {size(self.device_bytes_without)} without symmplan",
            "collectives",
            *table(
                [
                    (
                        f"{c.count:,} x",
                        visible(c.op),
                        size(c.nbytes),
                        f"{c.ranks:,} ranks",
                        c.algorithm,
                    )
                    for c in self.collectives
                ]
            ),
            *(f"plan {plan.fingerprint}" for plan in self.plans),
        ]
        return "\n".join(lines)
