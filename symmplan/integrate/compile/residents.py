"""The inputs of one compiled graph that live in symmetric memory from run to run.

Which inputs those are and which barriers they need is known when the graph is compiled; see
[Note: residents]. Where they live is decided when the graph first runs, because only then it is
known which tensors they are: one that lives in symmetric memory already, on all ranks at the same
place, stays there, so that several graphs use one placement. The others get new ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field, frozen

from symmplan._compat import is_registered
from symmplan._compat_autograd import static_inputs
from symmplan.errors import ReleasedError
from symmplan.memory import realize
from symmplan.memory.groups import resolve_groups
from symmplan.memory.tell import tell
from symmplan.planner import plan as plan_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import fx

    from symmplan.capture import Captured
    from symmplan.capture.sites import Kept
    from symmplan.integrate.compile.places import Copy, Place
    from symmplan.integrate.compile.pool import Pool
    from symmplan.model import Barrier, Plan, Problem

__all__ = ["Residents"]


@frozen(eq=False)
class _Guest:
    """An input of a part: its index, its name in all parts, its buffer's name in the problem."""

    index: int
    name: str
    buffer: str
    kept: Kept


@frozen(eq=False)
class _Part:
    """What is known of a part before it runs."""

    guests: tuple[_Guest, ...]
    plans: Mapping[str, Plan]
    memory: str


@define(eq=False)
class Residents:
    """What one graph keeps in symmetric memory.

    Attributes:
        pool: The backend's segments.
        device: Where they lie.
        timeout: Seconds that ranks wait for each other.
        plans: Filled with the plan of each part and group.
    """

    pool: Pool
    device: torch.device
    timeout: float
    plans: dict[str, Plan]
    _parts: dict[str, _Part] = field(init=False, factory=dict)
    _static: set[str] = field(init=False, factory=set)
    _places: dict[tuple[str, str], Place] = field(init=False, factory=dict)
    _tables: dict[str, list[tuple[int, Place, _Guest]]] = field(init=False, factory=dict)

    def candidates(self, module: fx.GraphModule, part: str) -> frozenset[fx.Node]:
        """The inputs of a part that keep their address from call to call."""
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        if part != "backward":  # whose inputs have the names that they have in the forward part
            self._static.update(inputs[i].name for i in static_inputs() if i < len(inputs))
        return frozenset(n for n in inputs if n.name in self._static)

    def plan(self, captured: Captured, part: str, memory: str) -> None:
        """Plan the kept inputs of a part, before it is rewritten."""
        if captured.residence is None:
            return
        index = {
            n: i
            for i, n in enumerate(
                n for n in captured.kept[0].node.graph.nodes if n.op == "placeholder"
            )
        }
        guests = tuple(
            _Guest(index[k.node], k.node.name, captured.prefix + k.node.name, k)
            for k in captured.kept
        )
        plans = {}
        for group in dict.fromkeys(g.kept.group for g in guests):
            mine = [g for g in guests if g.kept.group == group]
            plans[group] = _planned(captured.residence, mine)
            new = [g for g in mine if not self._planned_before(g)]
            if new:
                fewer = plans[group] if new == mine else _planned(captured.residence, new)
                self.plans[f"{part} {group}"] = fewer
        self._parts[part] = _Part(guests, plans, memory)

    def _planned_before(self, guest: _Guest) -> bool:
        """Whether another part of the same graph has the same input."""
        return any(
            (g.name, g.kept.group) == (guest.name, guest.kept.group)
            for part in self._parts.values()
            for g in part.guests
        )

    def barriers(self, part: str) -> Iterable[Barrier]:
        """The barriers that a part's kept inputs need."""
        known = self._parts.get(part)
        return () if known is None else [b for p in known.plans.values() for b in p.barriers]

    def settle(self, part: str, args: Sequence[Any]) -> None:
        """Before a part first runs: find or make the placements of its kept inputs.

        Args:
            part: The part.
            args: Its inputs.

        Collective: yes, over the groups of the kept inputs, unless all of them lie where the inputs
        of another graph did on all ranks.
        """
        if part in self._parts and part not in self._tables:
            self._tables[part] = self._settle(part, args)

    def forget(self, part: str) -> None:
        """Let `settle` find the placements of a part anew, those of groups that are gone."""
        self._tables.pop(part, None)
        for key, place in list(self._places.items()):
            if not is_registered(place.process_group):
                del self._places[key]

    def groups(self, part: str) -> list[str]:
        """Names of the process groups of a part's kept inputs."""
        return list(self._parts[part].plans) if part in self._parts else []

    def enter(self, part: str, args: list[Any]) -> list[Copy]:
        """Before a part runs: see that its kept inputs lie in their placements.

        Args:
            part: The part.
            args: Its inputs; where one cannot live in its placement, a copy there replaces it.

        Returns:
            The copies that `leave` has to end.
        """
        if part not in self._parts:
            return []
        table = self._tables[part]
        if self.pool.released:
            raise ReleasedError(
                "a compiled graph ran after its backend was released",
                fix="compile the model again, with a new symmplan.backend()",
            )
        copies: list[Copy] = []
        for index, place, guest in table:
            if args[index].data_ptr() != place.address:
                self._admit(part, args, place, guest, copies)
        if copies:
            self.pool.places.check_others(copies, args)
        return copies

    def _admit(
        self, part: str, args: list[Any], place: Place, guest: _Guest, copies: list[Copy]
    ) -> None:
        copy, reason = place.admit(args[guest.index], written=guest.kept.written)
        row = None
        if copy is not None:
            copies.append(copy)
            args[guest.index] = copy.placed
            row = (f"{part}.{guest.name}", guest.kept.op, guest.kept.where, reason)
        elif self.device.type == "cuda":
            # The old memory may belong to another stream.
            torch.cuda.current_stream(self.device).synchronize()
        self.pool.places.note((id(self), part, guest.name), row)

    def leave(self, copies: Sequence[Copy], results: Any) -> Any:
        """After a part ran: end its copies. Returns the results as they would be without them."""
        for copy in reversed(copies):
            copy.end()
        for copy in copies:
            if isinstance(results, (list, tuple)):
                results = type(results)(copy.of_original(r) for r in results)
            else:
                results = copy.of_original(results)
        return results

    # -- the first run -----------------------------------------------------------------------

    def _settle(self, part: str, args: Sequence[Any]) -> list[tuple[int, Place, _Guest]]:
        """Find or make a placement for each kept input of a part."""
        known = self._parts[part]
        for group, plan in known.plans.items():
            mine = [
                g
                for g in known.guests
                if g.kept.group == group and (g.name, group) not in self._places
            ]
            if mine:
                self._find(part, group, plan, mine, args)
        return [(g.index, self._places[(g.name, g.kept.group)], g) for g in known.guests]

    def _find(
        self, part: str, group: str, plan: Plan, mine: list[_Guest], args: Sequence[Any]
    ) -> None:
        process_group = resolve_groups([group])[group].process_group
        places = self.pool.places
        here = {p.address: p for p in places.of(process_group)}
        if here:
            numbers = []
            for guest in mine:
                place = here.get(args[guest.index].data_ptr())
                fits = (
                    place is not None
                    and place.bytes.numel() == plan.placements[guest.buffer].nbytes
                )
                numbers.append(place.number if place is not None and fits else None)
            if not places.were_used(process_group, numbers):
                self.pool.progress.gather({group: process_group})
                (said,) = tell(
                    "places", {group: numbers}, {group: process_group}, self.timeout
                ).values()
                numbers = [
                    n if all(_same(other, numbers, i) for other in said) else None
                    for i, n in enumerate(numbers)
                ]
                places.use(process_group, numbers)
            by_number = {p.number: p for p in here.values()}
            for guest, number in zip(mine, numbers, strict=True):
                if number is not None:
                    self._places[(guest.name, group)] = by_number[number]
        new = [g for g in mine if (g.name, group) not in self._places]
        key = f"{part} {group}"
        if not new:
            self.plans.pop(key, None)
            return
        final = _planned(plan.problem, new)
        self.plans[key] = final
        self.pool.progress.gather({group: process_group})
        arena = realize(
            final,
            memory=self._parts[part].memory,
            device=self.device,
            timeout=self.timeout,
            debug=self.pool.debug,
            user="kept inputs",
        )
        self.pool.progress.add(arena)
        self.pool.rendezvous += arena.rendezvous
        made = places.add(process_group, [arena.tensor(g.buffer) for g in new], arena)
        for guest, place in zip(new, made, strict=True):
            self._places[(guest.name, group)] = place


def _same(other: Any, mine: list[int | None], index: int) -> bool:
    return isinstance(other, list) and len(other) == len(mine) and other[index] == mine[index]


def _planned(problem: Problem, guests: Iterable[_Guest]) -> Plan:
    """A verified plan of some buffers of a problem."""
    names = {g.buffer for g in guests}
    plan = plan_problem(
        evolve(
            problem,
            buffers=[b for b in problem.buffers if b.name in names],
            accesses=[a for a in problem.accesses if a.buffer in names],
        )
    )
    plan.verify()
    return plan
