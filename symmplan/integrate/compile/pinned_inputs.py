"""The inputs of one compiled graph that live in symmetric memory from run to run.

Which inputs those are and which barriers they need is known when the graph is compiled; see
[Note: pinned inputs]. Where they live is decided when the graph first runs, because only then it is
known which tensors they are: one that lives in symmetric memory already, on all ranks at the same
place, stays there, so that several graphs use one placement. The others get new ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from symmplan.coordination.all_gather import all_gather_json
from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.world import address_of
from symmplan.device import device_of
from symmplan.integrate.compile.places import check_others
from symmplan.integrate.compile.plans import group_names
from symmplan.integrate.compile.turns import released
from symmplan.memory.held_segment import PINNED
from symmplan.place.engines import register_known
from symmplan.runtime.prepare import checked_plan
from symmplan.torch_private.c10d import is_registered
from symmplan.torch_private.compilers import static_inputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import fx

    from symmplan.capture import Captured
    from symmplan.capture.sites import Kept
    from symmplan.integrate.compile.places import Place, RunCopy
    from symmplan.integrate.compile.pool import Pool
    from symmplan.model import Barrier, Plan, Problem


@define(eq=False)
class PinnedInputs:
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
    #: ``{part: {(name, group): input}}``; names and groups are the same in all parts.
    _inputs: dict[str, dict[tuple[str, str], Kept]] = field(init=False, factory=dict)
    _by_group: dict[str, dict[str, Plan]] = field(init=False, factory=dict)
    _memory: str = field(init=False, default="")
    _static: set[str] = field(init=False, factory=set)
    _places: dict[tuple[str, str], Place] = field(init=False, factory=dict)

    def candidates(self, module: fx.GraphModule, part: str) -> frozenset[fx.Node]:
        """The inputs of a part that keep their address from call to call."""
        inputs = module.graph.find_nodes(op="placeholder")
        if part != "backward":  # whose inputs have the names that they have in the forward part
            self._static.update(inputs[i].name for i in static_inputs() if i < len(inputs))
        return frozenset(n for n in inputs if n.name in self._static)

    def plan(self, captured: Captured, part: str, memory: str) -> None:
        """Plan the pinned inputs of a part, before it is rewritten."""
        if captured.residence is None:
            return
        inputs = {(kept.node.name, kept.group): kept for kept in captured.kept}
        before = {key for known in self._inputs.values() for key in known}
        plans = {}
        for group in dict.fromkeys(group for _, group in inputs):
            mine = [kept for kept in inputs.values() if kept.group == group]
            plans[group] = _planned(captured.residence, mine)
            new = [i for key, i in inputs.items() if key[1] == group and key not in before]
            if new:
                fewer = plans[group] if new == mine else _planned(captured.residence, new)
                self.pool.kept += fewer.peak_bytes
                self.plans[f"{part} {group}"] = fewer
        self._inputs[part], self._by_group[part], self._memory = inputs, plans, memory

    def barriers(self, part: str) -> Iterable[Barrier]:
        """The barriers that a part's pinned inputs need."""
        return [b for plan in self._by_group.get(part, {}).values() for b in plan.barriers]

    def groups(self, part: str, plan: Plan) -> dict[str, Any]:
        """``{name: process group}`` of a part's plan and pinned inputs."""
        found = resolve_groups([*group_names(plan), *self._by_group.get(part, ())])
        return {name: group.process_group for name, group in found.items()}

    def settle(self, part: str, args: Sequence[Any], engines: bool) -> bool:
        """Before a part first runs: find or make the placements of its pinned inputs.

        Args:
            part: Its name.
            args: Of its first run.
            engines: Whether copy engines run collectives of its graph, which read them.

        Returns:
            Whether they have some; if not, the pool says why.

        Collective: yes, over the groups of the pinned inputs, unless all of them lie where the
        inputs of another graph did on all ranks, in segments that copy engines know if they run.
        """
        for group in self._by_group.get(part, ()):
            unplaced = {
                key: kept
                for key, kept in self._inputs[part].items()
                if kept.group == group and key not in self._places
            }
            if unplaced and not self._find(part, group, unplaced, args):
                return False
        if engines:
            mine = {self._places[key] for key in self._inputs.get(part, ())}
            self.pool.rendezvous += sum(
                register_known(made.arena)
                for made in self.pool.pinned
                if not mine.isdisjoint(made.places.values())
            )
        return True

    def forget(self) -> None:
        """Let `settle` find those placements anew whose groups are gone."""
        for key, place in list(self._places.items()):
            if not is_registered(place.process_group):
                del self._places[key]

    def enter(self, part: str, args: list[Any]) -> list[RunCopy]:
        """Before a part runs: see that its pinned inputs lie in their placements.

        Where one cannot live in its placement, a copy there replaces it, which `leave` has to end.
        """
        inputs = self._inputs.get(part, {})
        if inputs and self.pool.released:
            raise released()
        copies: list[RunCopy] = []
        for key, kept in inputs.items():
            place, name = self._places[key], key[0]
            if address_of(args[kept.index]) == place.address:
                continue
            copy, reason = place.admit(args[kept.index], written=kept.written)
            at = (id(self), part, name)
            if copy is not None:
                copies.append(copy)
                args[kept.index] = copy.placed
                self.pool.missed += 1
                self.pool.away[at] = (f"{part}.{name}", kept.op, kept.where, reason)
                continue
            self.pool.away.pop(at, None)
            there = device_of(self.device)
            if there.is_accelerator:  # the old memory may belong to another stream
                there.current_stream().synchronize()
        if copies:
            check_others(copies, args)
        return copies

    def leave(self, copies: Sequence[RunCopy], results: Any) -> Any:
        """After a part ran: end its copies. Returns the results as they would be without them."""
        for copy in reversed(copies):
            copy.end()
        for copy in copies:
            if isinstance(results, (list, tuple)):
                results = type(results)(copy.of_original(r) for r in results)
            else:
                results = copy.of_original(results)
        return results

    def _find(
        self, part: str, group: str, inputs: dict[tuple[str, str], Kept], args: Sequence[Any]
    ) -> bool:
        """Find or make placements for inputs that have none yet; False if they cannot be had."""
        process_group = resolve_groups([group])[group].process_group
        plan, key = self._by_group[part][group], f"{part} {group}"
        here = {p.address: p for p in self.pool.places(process_group)}
        if here:
            by_number = {p.number: p for p in here.values()}
            found = [here.get(address_of(args[i.index])) for i in inputs.values()]
            sizes = [plan.placements[i.buffer].nbytes for i in inputs.values()]
            numbers = [
                place.number if place is not None and place.lease.tensor.numel() == nbytes else None
                for place, nbytes in zip(found, sizes, strict=True)
            ]
            # One rank may compile a graph alone whose like all ranks have: then nobody is asked.
            if None in numbers or (process_group, tuple(numbers)) not in self.pool.pinnings:
                self.pool.progress.gather({group: process_group})
                said = all_gather_json(
                    "places", {group: numbers}, {group: process_group}, self.timeout
                )
                numbers = [
                    n if all(_same(other, numbers, i) for other in said[group]) else None
                    for i, n in enumerate(numbers)
                ]
                self.pool.pinnings.add((process_group, tuple(numbers)))
            for known, number in zip(inputs, numbers, strict=True):
                if number is not None:
                    self._places[known] = by_number[number]
        new = {k: kept for k, kept in inputs.items() if k not in self._places}
        if not new:
            self.plans.pop(key, None)
            return True
        self.plans[key] = final = _planned(plan.problem, new.values())
        self.pool.progress.gather({group: process_group})

        obtained = self.pool.preparation.obtain_together(
            final, self.device, {group: process_group}, memory=self._memory, user=PINNED
        )
        if obtained is None:
            self.plans.pop(key, None)
            return False
        arena, rendezvous = obtained
        self.pool.rendezvous += rendezvous
        made = self.pool.pin(arena, [i.buffer for i in new.values()], process_group)
        self._places.update(zip(new, made, strict=True))
        return True


def _same(other: Any, mine: list[int | None], index: int) -> bool:
    return isinstance(other, list) and len(other) == len(mine) and other[index] == mine[index]


def _planned(problem: Problem, inputs: Iterable[Kept]) -> Plan:
    """A verified plan of some buffers of a problem."""
    names = {i.buffer for i in inputs}
    part = evolve(
        problem,
        buffers=[b for b in problem.buffers if b.name in names],
        accesses=[a for a in problem.accesses if a.buffer in names],
    )
    return checked_plan(part)
