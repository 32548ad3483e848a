"""The segments of a compile backend, which are parts of the pool's.

See [Note: turns] in `symmplan.integrate.compile.turns`.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from symmplan.coordination.agreement import agree
from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.own import at_drop
from symmplan.coordination.world import current
from symmplan.errors import RunError
from symmplan.integrate.compile.crossing import Crossings
from symmplan.integrate.compile.places import PinnedPart, Place
from symmplan.integrate.compile.plans import group_names, structure_of
from symmplan.integrate.compile.progress import Progress
from symmplan.integrate.compile.turns import Shared, released
from symmplan.memory.streams import synchronize
from symmplan.place.engines import again, having, known_of, register
from symmplan.planner.fingerprint import visible
from symmplan.process import PROCESS
from symmplan.report.log import LOG
from symmplan.runtime.sleep import all_may_sleep, give_back, take_back_replaced, tell
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import torch

    from symmplan.integrate.compile.parts import Record
    from symmplan.memory.arena import Arena
    from symmplan.model import Placement, Plan
    from symmplan.runtime.prepare import Preparation


@define(eq=False)
class Pool:
    """All segments of one backend.

    Attributes:
        preparation: What the graphs' ranks agree on, and how they get memory.
        rendezvous: How many (segment, group) pairs were rendezvoused.
        released: Whether `release` ran.
        copies: How many crossing tensors were copied, by reason.
        planned: Bytes of the plans of each structure, as they take turns.
        kept: Bytes of the plans of pinned inputs.
        pinned: Where those lie.
        pinnings: Which placements the inputs of graphs have, on all ranks alike: the process group,
            and each one's number.
        missed: How often a pinned input was not in its placement and was copied there.
        away: What was not in its placement when it was last used; as `CompileBackend.staged`.
        rooms: How many bytes plans may take, by their process groups.
        exchanged: Sizes of each all-to-all that all ranks had alike, or why it stays in ordinary
            memory; see `symmplan.integrate.compile.exchanged`.
        bounds: The largest size that was planned last, by Dynamo's frame and the size's name.
    """

    preparation: Preparation
    rendezvous: int = field(init=False, default=0)
    released: bool = field(init=False, default=False)
    copies: Counter[str] = field(init=False, factory=Counter)
    bounds: dict[tuple[int | None, str], int] = field(init=False, factory=dict)
    planned: dict[Any, int] = field(init=False, factory=dict)
    kept: int = field(init=False, default=0)
    pinned: list[PinnedPart] = field(init=False, factory=list)
    pinnings: set[tuple[Any, tuple[int | None, ...]]] = field(init=False, factory=set)
    missed: int = field(init=False, default=0)
    away: dict[Any, tuple[str, str, str, str]] = field(init=False, factory=dict)
    rooms: dict[tuple[Any, ...], int] = field(init=False, factory=dict)
    exchanged: dict[Any, set[Any] | str] = field(init=False, factory=dict)
    progress: Progress = field(init=False)
    _shared: dict[Any, Shared] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.progress = Progress(self.preparation.options.timeout)
        at_drop(self, self.progress.release)

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """What is allocated."""
        return tuple(shared.arena for shared in self._shared.values())

    def room(self, names: Iterable[str], memory: str, device: torch.device) -> int | None:
        """Bytes that all plans may take; None if a rank cannot tell, see `preparation`.

        Args:
            names: Of the groups of a new plan.
            memory: Name of the memory backend.
            device: Where the segments lie.

        Collective: yes, over the groups of these names, the first time for them.
        """
        self._forget()
        found = {n: g.process_group for n, g in resolve_groups(names).items()}
        groups = {n: g for n, g in found.items() if g is not None}
        key = tuple(groups.values())
        if key not in self.rooms:
            waits = groups if current() is None else {}
            if waits:
                self.progress.gather(waits)
            mine = (*self.arenas, *(part.arena for part in self.pinned))
            besides = sum(arena.segment_bytes for arena in mine)

            def ask() -> int | None:
                if self.preparation.refusal is not None:
                    return None
                return self.preparation.room(memory, device, groups, besides=besides).nbytes

            room = self.preparation.attempt(ask, waits)
            if room is None:
                return None
            self.rooms[key] = room
        return self.rooms[key]

    def taken(self, plan: Plan) -> int:
        """Bytes of all plans with this one."""
        mine = structure_of(plan)
        others = sum(nbytes for structure, nbytes in self.planned.items() if structure != mine)
        return others + self.kept + max(plan.peak_bytes, self.planned.get(mine, 0))

    def take(
        self,
        plan: Plan,
        memory: str,
        device: torch.device,
        barriers: Iterable[tuple[int, str]],
        *,
        engines: Collection[str],
        crosses: bool,
    ) -> tuple[Shared, Plan] | None:
        """Agree on a plan, and find or make segments for it.

        Args:
            plan: The plan.
            memory: Name of the memory backend.
            device: Where the segments lie.
            barriers: What its graphs run besides the program; as for
                `symmplan.planner.fingerprint.visible`.
            engines: Names of the communicators over which copy engines run its collectives.
            crosses: Whether something that its graphs leave in placements outlives their runs.

        Returns:
            The segments, and the first plan that showed peers the same; None if a rank cannot have
            them, which `preparation` knows then.

        Raises:
            AgreementError: The ranks' plans differ, or a peer runs an old graph meanwhile.
            BackendError, PeerTimeoutError, PeerLostError: As `symmplan.memory.realize`.

        Collective: yes, over the plan's groups, unless its like was agreed before.
        """
        if self.released:
            raise released()
        key = (memory, device, structure_of(plan))
        named = {n: g.process_group for n, g in resolve_groups(group_names(plan)).items()}
        groups = list(named.values())
        shared = self._shared.get(key)
        if shared is not None and shared.asleep and not self.wake(shared):
            return None
        shown = visible(plan, barriers)
        # Names of groups, which fingerprints leave out, are this rank's own affair.
        problem = shown.problem
        names = (*(b.group for b in problem.buffers), *(o.group for o in problem.operations))
        like = (shown.fingerprint, names)
        if shared is not None and like in shared.agreed:
            return shared, shared.agreed[like]
        with self.progress.planning(named) as watch:
            agree(shown, timeout=self.preparation.options.timeout, watch=watch)
        found = self.preparation.attempt(
            functools.partial(self._room_for, shared, shown, memory, device, named, alone=crosses),
            named,
            lambda made: made.give_back(),
        )
        if self.preparation.refusal is not None:
            return None
        if found is not None:
            self._tell(found)
            self.progress.add(found)
        if shared is None:
            assert found is not None
            shared = Shared(found, device, groups, Crossings(self.copies), self.progress)
            self._shared[key] = shared
        elif found is not None:
            shared.move(found)
            take_back_replaced(named, device, self.preparation.options.timeout)
        shared.align = max((shared.align, *(b.align for b in plan.problem.buffers)))
        shared.crosses = shared.crosses or crosses
        shared.engines.update(engines)
        if shared.engines:
            self.rendezvous += self._meet_engines(shared, named)
        shared.agreed[like] = plan
        return shared, plan

    def _tell(self, new: Arena) -> None:
        """Say what functions hold that other backends compiled, and that may be of no use."""
        mine = (new, *self.arenas, *(part.arena for part in self.pinned))
        found = [a for a in PROCESS.arenas.values() if a not in mine and not a.released]
        nbytes = sum(a.segment_bytes for a in found if a.user == self.preparation.user)
        if nbytes:
            LOG.info(
                "compiled functions of other backends hold %s bytes until they and their backends "
                "are dropped, torch.compiler.reset() is called, and torch's flight recorder has "
                "forgotten their collectives (TORCH_FR_BUFFER_SIZE)",
                f"{nbytes:,}",
            )

    def _forget(self) -> None:
        """Give back what belongs to process groups that are gone; others may have their names."""
        for key, shared in list(self._shared.items()):
            if not _are_known(shared.groups):
                del self._shared[key]
                shared.clear()
                self.progress.remove(shared.arena)
                shared.arena.give_back()
        for part in self.pinned:
            if not _are_known(place.process_group for place in part.places.values()):
                part.release()
        self.pinned = [part for part in self.pinned if not part.arena.released]
        self.pinnings = {pinning for pinning in self.pinnings if _are_known(pinning[:1])}
        self.rooms = {groups: room for groups, room in self.rooms.items() if _are_known(groups)}

    def _room_for(
        self,
        shared: Shared | None,
        plan: Plan,
        memory: str,
        device: torch.device,
        groups: dict[str, Any],
        *,
        alone: bool,
    ) -> Arena | None:
        """Other segments for a plan that all ranks have agreed on; None if it fits, or is refused.

        ``alone``: not in a suballocation.
        """
        if self.preparation.refusal is not None:
            return None
        if shared is not None:
            have = {name: segment.nbytes for name, segment in shared.arena.segments.items()}
            larger = [evolve(s, nbytes=max(s.nbytes, have[s.name])) for s in plan.segments]
            moves = alone and shared.is_tenant
            if not moves and all(s.nbytes == have[s.name] for s in larger):
                return None
            synchronize(shared.device)  # before all ranks meet: then nobody uses the old ones
            plan = evolve(plan, segments=tuple(larger))
        arena, rendezvous = self.preparation.obtain(plan, device, groups, memory=memory)
        self.rendezvous += rendezvous
        return arena

    def reserved(self, structure: Any, but: Record) -> list[tuple[Placement, str]]:
        """What `Shared.reserved` says of the segments of a structure."""
        mine = (s for (*_, known), s in self._shared.items() if known == structure)
        return [place for shared in mine for place in shared.reserved(but)]

    def places(self, process_group: Any) -> list[Place]:
        """The placements of pinned inputs of one process group."""
        places = (place for part in self.pinned for place in part.places.values())
        return [place for place in places if place.process_group is process_group]

    def pin(self, arena: Arena, buffers: Iterable[str], process_group: Any) -> list[Place]:
        """New placements of pinned inputs, those of some buffers of an arena's plan.

        Collective: yes, over the arena's groups, the first time for each.
        """
        self.progress.add(arena)
        made = {}
        for number, buffer in enumerate(buffers, len(self.places(process_group))):
            made[buffer] = place = Place(number, process_group)
            place.lie(arena, buffer)
        self.pinned.append(PinnedPart(arena, made, self.progress))
        self.pinnings.add((process_group, tuple(place.number for place in made.values())))
        return [*made.values()]

    @property
    def asleep(self) -> bool:
        """Whether segments were given back that no run has needed since."""
        return any(shared.asleep for shared in self._shared.values())

    def sleep(self) -> bool:
        """Give all segments back until graphs run again, but for those of pinned inputs.

        Returns:
            Whether there were any.

        Raises:
            RunError: On some rank they are in use; raised on all of them.

        Collective: yes, over the groups of all graphs, if there are any.
        """
        self._forget()
        awake = [shared for shared in self._shared.values() if not shared.asleep]
        groups = {name: group for shared in awake for name, group in _named(shared).items()}
        if not groups:
            return False
        timeout = self.preparation.options.timeout
        why = (shared.why_awake() for shared in awake)
        if not all_may_sleep(next(filter(None, why), None), groups, timeout):
            return False
        for device in dict.fromkeys(shared.device for shared in awake):
            arenas = [shared.leave_for_sleep() for shared in awake if shared.device == device]
            give_back(self.preparation.user, arenas, groups, device, timeout)
        return True

    def wake(self, shared: Shared) -> bool:
        """Let graphs have segments again that were given back; False if some rank cannot.

        Collective: yes, over their groups.
        """
        named, last = _named(shared), shared.arena
        given = last.plan, shared.device, named
        made = self.preparation.obtain_together(*given, memory=last.memory)
        if made is None:
            return False
        shared.wake(made[0])
        tell(self.preparation.user, made[0].segment_bytes, asleep=False)
        self.rendezvous += made[1]
        if shared.engines:
            self.rendezvous += self._meet_engines(shared, named)
        return True

    def wake_all(self) -> None:
        """`wake` for all segments. Collective: yes, over the groups of all graphs."""
        for shared in self._shared.values():
            if shared.asleep:
                self.wake(shared)

    def _meet_engines(self, shared: Shared, groups: dict[str, Any]) -> int:
        """Register segments with the communicators for copy engines; how many rendezvous it took.

        Collective: yes, over the groups.
        """
        needed = having(groups, shared.engines)
        again(needed, shared.arena.memory, shared.device, self.preparation.options.timeout)
        found = known_of(groups)
        gone = shared.engines - {c10d.group_name(group) for group in found.values()}
        if gone:
            raise RunError(
                f"a graph was compiled for communicators that are gone: {sorted(gone)}",
                expected="the process groups that it was compiled for",
                got="new process groups with the same names",
                fix="call torch.compiler.reset(), and compile the model again",
            )
        return register(shared.arena, found)

    def release(self) -> None:
        """Give all segments back. Idempotent. Collective: no."""
        self.released = True
        for part in self.pinned:
            part.release()
        for shared in self._shared.values():
            if not (shared.released or shared.asleep):
                shared.release()
            shared.released = True
        self.progress.release()


def _named(shared: Shared) -> dict[str, Any]:
    """The process groups of segments, by name."""
    return {c10d.group_name(group): group for group in shared.groups if group is not None}


def _are_known(groups: Iterable[Any]) -> bool:
    """Whether process groups are those of this process yet."""
    return all(group is None or c10d.is_registered(group) for group in groups)
