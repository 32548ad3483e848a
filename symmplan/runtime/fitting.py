"""A captured program on its way to a plan: how its collectives run, and what is demoted.

The first capture puts every tensor into a placement that can have one. When it is known how each
collective runs and how many bytes the plan may take, the program is captured again, without the
tensors that stay in ordinary memory. See [Note: demotions] in `symmplan.planner.budget`; calls of
one op over one group with tensors of the same sizes are demoted together.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from symmplan.capture.steps import plan_poison
from symmplan.choose.choice import DEMOTED, NO_ROOM
from symmplan.choose.chooser import Chosen
from symmplan.choose.op_cases import cases_of
from symmplan.coordination.groups import resolve_groups
from symmplan.device import kind_of
from symmplan.memory.meeting.topology import served
from symmplan.place.algorithms import ONE_HOST
from symmplan.planner import plan as plan_problem
from symmplan.planner.budget import Demotable, together, within
from symmplan.runtime.measure import choose_algorithms

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping

    import torch
    from torch import fx

    from symmplan.capture import Captured
    from symmplan.capture.graphs import Value
    from symmplan.choose.cases import Case
    from symmplan.model import Plan
    from symmplan.place.algorithms import Lowerings
    from symmplan.runtime.prepare import Preparation


@define(eq=False, slots=False)
class Fitting:
    """A program that is captured again until its placements fit.

    Args:
        capture: Captures it without some calls, ``refused={call: reason}``.
        lowerings: The forms of ops on the memory backend.
        device: Where its tensors lie.
        preparation: The preparation of its memory.
        refused: The calls that stay in ordinary memory in any case.

    Attributes:
        chosen: How its collectives run.
    """

    _capture: Callable[..., Captured]
    lowerings: Lowerings
    _device: torch.device
    _preparation: Preparation
    _refused: Mapping[fx.Node, str] = field(factory=dict)
    chosen: Chosen[fx.Node] = field(init=False, factory=Chosen)
    _kinds: dict[fx.Node, Hashable] = field(init=False, factory=dict)

    @cached_property
    def whole(self) -> Captured:
        """The program with every possible tensor in a placement."""
        return self._captured(self._refused)

    @property
    def _calls(self) -> dict[fx.Node, str]:
        """The calls with a tensor in a placement, if every possible one is, and their groups."""
        found = (s.node for s in self.whole.sites if s.buffer is not None)
        return {node: self.whole.groups[node] for node in found}

    @property
    def placed(self) -> list[fx.Node]:
        """The calls with a placed tensor, before the budget."""
        left = self._left_out
        sites = (s for s in self.whole.sites if s.buffer is not None)
        return [node for node in dict.fromkeys(s.node for s in sites) if node not in left]

    @property
    def _left_out(self) -> Mapping[fx.Node, str]:
        reason = self._preparation.reason
        if reason:
            return dict.fromkeys((s.node for s in self.whole.sites if s.buffer), reason)
        return self.chosen.ordinary

    def choose(
        self,
        gather: Callable[[Mapping[str, Any]], object] = lambda _: None,
        *,
        compiled: bool = False,
    ) -> None:
        """Decide how its collectives run, if anything is placed.

        Args:
            gather: As for `choose_algorithms`.
            compiled: Whether the host takes as long for each algorithm.

        Raises:
            AgreementError, BackendError: As `choose_algorithms`.

        Collective: yes, over groups whose topology is not known yet; and as `choose_algorithms`.
        """
        if self._preparation.refusal is not None:
            return
        memory = self.lowerings.memory
        groups = resolve_groups(self._calls.values())
        known = {name: group.process_group for name, group in groups.items()}
        levels, why = served(known, memory, self._device, self._preparation.options.timeout)
        if levels:
            self.lowerings = evolve(self.lowerings, levels=levels)
            del self.whole  # it may need other placements
        whole, calls = self.whole, self._calls
        rows = {n: self.lowerings.row(whole.specs[n], g) for n, g in calls.items()}
        flat = {n for n, row in rows.items() if row is None or not row.two_levels}
        why |= dict.fromkeys(levels, ONE_HOST)
        apart = {n: why[g] for n, g in calls.items() if g in why and (g not in levels or n in flat)}
        several = {n: row for n, row in rows.items() if row is not None and n not in apart}
        sizes = {n: g.size for n, g in groups.items()}
        cases = cases_of(whole, several, memory, sizes, levels)
        given = (apart, self._device, self._preparation)

        def choose(cases: Mapping[fx.Node, Case]) -> Chosen[fx.Node]:
            return choose_algorithms(cases, *given, memory=memory, gather=gather)

        self.chosen = choose(cases)
        alone = any(case.lone_all_reduce for case in cases.values())
        if compiled and alone and kind_of(self._device).is_accelerator:
            self._choose_without_barriers(cases, choose)

    def _choose_without_barriers(
        self,
        cases: Mapping[fx.Node, Case],
        choose: Callable[[Mapping[fx.Node, Case]], Chosen[fx.Node]],
    ) -> None:
        """Choose again; all-reduces are charged with barriers where the plan has any.

        In a chain of all-reduces, as of a tensor-parallel decoder, each is a meeting for the bytes
        of the one before. So the choice is made as if there were no barriers, then with those that
        the plan has over their group. All was measured, so nobody is asked. Other collectives, and
        what overlaps with products, gain too little where they gain less than barriers take.
        """
        charged, where = self.chosen, set[str]()
        while True:
            self.chosen = choose(
                {
                    n: evolve(case, barriers=case.group in where or not case.lone_all_reduce)
                    for n, case in cases.items()
                }
            )
            self.__dict__.pop("captured", None)
            if self.chosen.algorithms == charged.algorithms:
                return
            barriers = {b.group for b in plan_problem(self.captured.problem).barriers}
            if barriers <= where:
                return
            where |= barriers

    @cached_property
    def captured(self) -> Captured:
        """The program with the chosen algorithms, before anything is demoted."""
        return self._without(())

    def fit(
        self,
        room: int | None,
        plan: Callable[[Captured], Plan],
        taken: Callable[[Plan, Captured], int] = lambda plan, _: plan.peak_bytes,
        **others: Any,
    ) -> tuple[Plan, Captured]:
        """A plan of at most ``room`` bytes, and the program that it places.

        Args:
            room: Bytes; None for no limit.
            plan: Plans a captured program.
            taken: How many bytes are taken with a plan.
            others: Other arguments of the program's capture.
        """

        def planned(gave: Collection[Hashable]) -> tuple[Plan, list[Demotable], Captured]:
            captured = self._without(gave, **others) if gave or others else self.captured
            return plan(captured), self._demotables(captured), captured

        return within(room, planned, taken)

    def _without(self, gave: Collection[Hashable], **others: Any) -> Captured:
        """The program without what stays in ordinary memory, and without what was demoted."""
        why = NO_ROOM if self._preparation.options.capacity is None else DEMOTED
        gone = {node: why for node, kind in self._kinds.items() if kind in gave}
        more = {**self._left_out, **gone}
        made = self._captured({**self._refused, **more}, **others) if more or others else self.whole
        return plan_poison(made) if self._preparation.options.debug else made

    def _captured(self, refused: Mapping[fx.Node, str], **others: Any) -> Captured:
        ordinary: set[Value] = set()
        while True:
            run = self.lowerings
            captured = self._capture(
                as_run=run.as_run,
                skip=run.skip,
                anywhere=run.anywhere,
                refused=refused,
                slower=self.chosen.slower,
                ordinary=ordinary,
                **others,
            )
            partly, ends = run.partly(captured), run.stray_ends(captured) - ordinary
            if not (partly.keys() - refused.keys() or ends):
                return captured
            refused, ordinary = {**partly, **refused}, ordinary | ends

    def _demotables(self, captured: Captured) -> list[Demotable]:
        """The symmetric bytes of its calls, which a budget may demote."""
        problems = [p for p in (captured.problem, captured.residence) if p is not None]
        buffers = {b.name: b for p in problems for b in p.buffers}
        there: dict[fx.Node, list[str]] = {}
        for site in captured.sites:
            if site.buffer is not None:
                there.setdefault(site.node, []).append(site.buffer)
        demotables = []
        for node, names in there.items():
            spec, sizes = captured.specs[node], tuple(buffers[name].nbytes for name in names)
            kind = self._kinds.setdefault(node, (spec.op, buffers[names[0]].group, sizes))
            choice = self.chosen.of.get(node)
            demotables.append(
                Demotable(
                    key=kind,
                    what=f"{spec.op} with {sum(sizes):,} bytes",
                    algorithm=self.chosen.placed(node),
                    calls=1,
                    nbytes=sum(sizes),
                    buffers=frozenset(names),
                    seconds={} if choice is None else choice.seconds,
                    needed=self.lowerings.row(spec, captured.groups[node]) is None,
                )
            )
        return together(demotables)
