"""The segments of a compile backend: its graphs take turns in them.

[Note: turns]
    Nothing in a placement outlives the run of its graph, but what a forward saves for its backward.
    So all graphs of a backend (pieces between graph breaks, forwards, backwards, several models,
    recompilations) use the same bytes, one after the other, and the segments need be no larger than
    for the one that needs most. One that needs more makes all ranks, which have agreed on its plan,
    allocate larger segments and give the old ones back, before it first runs. Segments are inputs
    of the compiled code, so all graphs use the new ones from their next run on.

    A graph that is planned between a forward and its backward keeps away from what was saved, so
    that between graph breaks everything stays where it is. Where graphs meet in another order than
    they were planned in, what was saved is evacuated (see [Note: crossing tensors]). Whether a
    backward is due is told from the order of runs, which is the same on all ranks, and not from
    what is still alive, which need not be.

    A plan's barriers cover its own repetition. Where another graph had the bytes before, and one of
    the two has accesses that do not meet all ranks before and after, a barrier lies between them;
    where it ran on another stream, this one waits for that. Once something crosses, such a barrier
    lies before each run: what is copied on entry must be so before peers touch the bytes. Where a
    graph may copy back on entry what it needs in place, another lies before that: peers may still
    read what was there.

    Plans that show peers the same (see [Note: what peers see] in `symmplan.planner.fingerprint`)
    count as one graph here: a rank may have compiled its own for a smaller batch, and no peer
    knows.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field

from symmplan.coordination.agreement import agree
from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.world import current
from symmplan.errors import ReleasedError, RunError
from symmplan.integrate.compile.crossing import Crossing, Reservation
from symmplan.integrate.compile.places import Places
from symmplan.integrate.compile.plans import group_names, is_unmet, structure_of
from symmplan.integrate.compile.progress import Progress
from symmplan.memory.cache import give_back
from symmplan.memory.streams import capture_of, synchronize
from symmplan.planner.fingerprint import visible
from symmplan.runtime.engines import known_of, register, register_known
from symmplan.runtime.leases import Lease, Run
from symmplan.runtime.tenants import Suballocation, let_go, ran, synchronizes_once

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from symmplan.integrate.compile.parts import PlannedPart
    from symmplan.memory.arena import Arena
    from symmplan.model import Placement, Plan
    from symmplan.runtime.prepare import Preparation

__all__ = ["Pool", "Shared", "released"]


@define(eq=False)
class Shared:
    """Segments that plans of one structure take turns in.

    Attributes:
        arena: The segments; replaced when they must grow.
        device: Where they lie.
        groups: The process groups that they met.
        crossing: What crosses in them.
        progress: How far the ranks are.
        agreed: The first plan of each kind that all ranks have agreed on.
        released: Whether the segments were given back.
        engines: Names of communicators over which copy engines run collectives in them.
        align: What the segments must begin at a multiple of, in bytes.
        crosses: Whether something in them outlives a run of its graph.
        lock: Held while a graph runs in them.
    """

    lasts = False

    arena: Arena | Suballocation
    device: torch.device
    groups: list[Any]
    crossing: Crossing
    progress: Progress
    agreed: dict[Any, Plan] = field(init=False, factory=dict)
    released: bool = field(init=False, default=False)
    engines: set[str] = field(init=False, factory=set)
    align: int = field(init=False, default=1)
    crosses: bool = field(init=False, default=False)
    lock: Any = field(init=False, factory=threading.Lock)
    _unmet: dict[int, tuple[Plan, bool]] = field(init=False, factory=dict)
    _last: Plan | None = field(init=False, default=None)
    _run: Run | None = field(init=False, default=None)
    _stream: tuple[Any, int] = field(init=False, default=(None, 0))

    def enter(self, part: PlannedPart, args: list[Any]) -> None:
        """Begin a run of a part; some of its inputs may be replaced. See [Note: turns].

        Raises:
            RunError: A graph that uses the same segments is running: inside it, or in another
                thread.
            ReleasedError: The backend was released.
        """
        if self.released:
            raise released()
        if not self.lock.acquire(blocking=False):
            raise RunError(
                "a compiled graph started while another one was using the same segments",
                expected="graphs of one backend that run one after the other",
                got="one inside the other, or two threads",
                fix="compile one of them with a symmplan.backend() of its own",
            )
        try:
            ran(self)
            self.progress.run(part.groups or ())
            self._follow()
            if part.copies_back and self._is_unmet(part.agreed):
                self._barrier()
            self._run = Run(Lease(stream=self._stream[0] if self._hosted else None))
            self.crossing.enter(part, args, self._run)
            self._meet(part.agreed)
        except BaseException:
            self.leave()
            raise

    def finish(self, plan: Plan) -> None:
        """A run has ended well: whoever has the bytes next may touch its peers'.

        Collective: in a suballocation, if accesses of the plan do not meet all ranks.
        """
        if self._hosted and self._is_unmet(plan):
            self._barrier()

    def leave(self) -> None:
        """End it."""
        run, self._run = self._run, None
        try:
            if run is not None:
                run.over()
        finally:
            self.lock.release()

    @property
    def _hosted(self) -> bool:
        """Whether others are in the segments, by their plan."""
        return isinstance(self.arena, Suballocation)

    @property
    def movable(self) -> bool:
        """See `Tenant`."""
        return synchronizes_once(self.arena) and not (self.released or self.crosses)

    def move_in(self, there: Suballocation) -> None:
        """Live there from now on; see [Note: tenants] in `symmplan.runtime.tenants`."""
        self.progress.add(there)
        if self.engines:
            register_known(there)
        self.move(there)

    def _follow(self) -> None:
        if self.device.type == "cuda":
            stream, capture = torch.cuda.current_stream(self.device), capture_of()
            last, its_capture = self._stream
            if last is not None and last != stream and its_capture == capture:
                stream.wait_stream(last)
            self._stream = stream, capture

    def _meet(self, plan: Plan) -> None:
        last = self._last or plan
        shares = last is not plan or self.crossing.by_place or self._hosted
        if (last is not plan and self._is_unmet(last)) or (shares and self._is_unmet(plan)):
            self._barrier()
        self._last = plan

    def _barrier(self) -> None:
        meetings = {
            group: segment.meeting(group)
            for segment in self.arena.segments.values()
            for group in segment.spec.groups
        }
        # Whoever one group has met may have yet to meet another: each comes before each other once.
        groups = list(meetings)
        for group in (*groups, *groups[:-1]):
            meetings[group].barrier()

    def _is_unmet(self, plan: Plan) -> bool:
        if id(plan) not in self._unmet:
            self._unmet[id(plan)] = (plan, is_unmet(plan))
        return self._unmet[id(plan)][1]

    def move(self, arena: Arena | Suballocation) -> None:
        """Use other segments, as large or larger; what was saved moves, and the old ones go."""
        old, self.arena = self.arena, arena
        self.crossing.move_to(arena.segments)
        if self.crossing.by_place:
            synchronize(self.device)  # what was saved has been copied
        self.progress.remove(old)
        let_go(old)

    def release(self) -> None:
        """Give the segments back; what was saved is copied out. Collective: no."""
        self.crossing.clear()
        self.released = True
        self.progress.remove(self.arena)
        synchronize(self.device)
        let_go(self.arena)


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
        rooms: How many bytes plans may take, by their process groups.
        bounds: The largest size that was planned last, by Dynamo's frame and the size's name.
    """

    preparation: Preparation
    rendezvous: int = field(init=False, default=0)
    released: bool = field(init=False, default=False)
    places: Places = field(init=False, factory=Places)
    copies: Counter[str] = field(init=False, factory=Counter)
    bounds: dict[tuple[int | None, str], int] = field(init=False, factory=dict)
    planned: dict[Any, int] = field(init=False, factory=dict)
    kept: int = field(init=False, default=0)
    rooms: dict[tuple[Any, ...], int] = field(init=False, factory=dict)
    progress: Progress = field(init=False)
    _shared: dict[Any, Shared] = field(init=False, factory=dict)
    _reservations: list[Reservation] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        self.progress = Progress(self.preparation.options.timeout)

    @property
    def arenas(self) -> tuple[Arena | Suballocation, ...]:
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
        found = {n: g.process_group for n, g in resolve_groups(names).items()}
        groups = {n: g for n, g in found.items() if g is not None}
        key = tuple(groups.values())
        if key not in self.rooms:
            waits = groups if current() is None else {}
            if waits:
                self.progress.gather(waits)
            besides = sum(a.segment_bytes for a in (*self.arenas, *self.places.arenas))

            def ask() -> int | None:
                if self.preparation.refusal is not None:
                    return None
                return self.preparation.room(memory, device, groups, besides=besides)

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
        if shared is not None and shared.groups != groups:
            del self._shared[key]
            shared.crossing.clear()
            self.progress.remove(shared.arena)
            shared.arena.release()  # of a process group that is gone; another has its name
            shared = None
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
            give_back,
        )
        if self.preparation.refusal is not None:
            return None
        if found is not None:
            self.progress.add(found)
        if shared is None:
            assert found is not None
            crossing = Crossing(found.segments, self.copies)
            shared = self._shared[key] = Shared(found, device, groups, crossing, self.progress)
        elif found is not None:
            shared.move(found)
        shared.align = max((shared.align, *(b.align for b in plan.problem.buffers)))
        shared.crosses = shared.crosses or crosses
        shared.engines.update(engines)
        if shared.engines:
            self.rendezvous += _meet_engines(shared, named)
        shared.agreed[like] = plan
        return shared, plan

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
            moves = alone and shared._hosted
            if not moves and all(s.nbytes == have[s.name] for s in larger):
                return None
            synchronize(shared.device)  # before all ranks meet: then nobody uses the old ones
            plan = evolve(plan, segments=tuple(larger))
        arena, rendezvous = self.preparation.obtain(plan, device, groups, memory=memory)
        self.rendezvous += rendezvous
        return arena

    def reserve(self, reservation: Reservation) -> None:
        """Remember where the forward of a graph leaves what its backward reads."""
        self._reservations.append(reservation)

    def reserved(self, structure: Any, but: Reservation | None) -> list[tuple[Placement, str]]:
        """``(placement, group)`` of what other graphs' forwards saved whose backwards are due."""
        due = (r for r in self._reservations if r is not but and r.due and r.structure == structure)
        return list(dict.fromkeys(place for r in due for place in r.places))

    def release(self) -> None:
        """Give all segments back. Idempotent. Collective: no."""
        self.released = True
        for arena in self.places.arenas:
            self.progress.remove(arena)
        self.places.release()
        for shared in self._shared.values():
            if not shared.released:
                shared.release()
        self.progress.release()


def released() -> ReleasedError:
    """What is raised where a graph runs too late."""
    return ReleasedError(
        "a compiled graph ran after its backend was released",
        fix="compile the model again, with a new symmplan.backend()",
    )


def _meet_engines(shared: Shared, groups: dict[str, Any]) -> int:
    found = known_of(groups)
    gone = shared.engines - {name for engines in found.values() for name in engines.groups}
    if gone:
        raise RunError(
            f"a graph was compiled for communicators that are gone: {sorted(gone)}",
            expected="the process groups that it was compiled for",
            got="others under their names",
            fix="compile the model again, after torch.compiler.reset()",
        )
    return register(shared.arena, found)
