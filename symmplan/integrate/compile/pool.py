"""The segments of a compile backend: its graphs take turns in them.

[Note: turns]
    Nothing in a placement outlives the run of its graph, but what a forward saves for its backward:
    other results are copied out, and work that the graph does not wait for is not planned. So all
    graphs of a backend (pieces between graph breaks, forwards, backwards, several models,
    recompilations) can use the same bytes, one after the other, and the segments need be no larger
    than for the one that needs most.

    A graph that is planned between a forward and its backward keeps away from what was saved, so
    that between graph breaks everything stays where it is. Where graphs meet in another order than
    they were planned in, what was saved is evacuated (see [Note: crossing tensors]). Whether a
    backward is due is told from the order of runs, which is the same on all ranks, and not from
    what is still alive, which need not be.

    A graph that needs more than there is makes all ranks, which have agreed on its plan, allocate
    larger segments and give the old ones back, before it first runs. Segments are inputs of the
    compiled code, so all graphs use the new ones from their next run on.

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

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field

from symmplan.errors import ReleasedError, RunError
from symmplan.integrate.compile.crossing import Lane, Zone, overlap
from symmplan.integrate.compile.places import Places
from symmplan.integrate.compile.progress import Progress
from symmplan.integrate.compile.structure import group_names, is_unmet, structure_of
from symmplan.memory.agreement import agree
from symmplan.memory.groups import resolve_groups
from symmplan.memory.spares import obtain
from symmplan.memory.streams import synchronize
from symmplan.place.engines import known, register
from symmplan.place.guests import CarveOut, let_go, ran
from symmplan.planner.fingerprint import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from symmplan.integrate.compile.records import Rewritten
    from symmplan.memory.arena import Arena
    from symmplan.model import Placement, Plan

__all__ = ["Pool", "Shared"]


@define(eq=False)
class Shared:
    """Segments that plans of one structure take turns in.

    Attributes:
        arena: The segments; replaced when they must grow.
        device: Where they lie.
        groups: The process groups that they met.
        copies: How many crossing tensors were copied, by reason.
        progress: How far the ranks are.
        agreed: The first plan of each kind that all ranks have agreed on.
        lanes: The bytes of each crossing buffer that a graph has had so far.
        released: Whether the segments were given back.
        engines: Names of communicators over which copy engines run collectives in them.
        align: What the segments must begin at a multiple of, in bytes.
        crosses: Whether something in them outlives a run of its graph.
    """

    arena: Arena | CarveOut
    device: torch.device
    groups: list[Any]
    copies: Counter[str]
    progress: Progress
    agreed: dict[Any, Plan] = field(init=False, factory=dict)
    lanes: dict[Placement, Lane] = field(init=False, factory=dict)
    released: bool = field(init=False, default=False)
    engines: set[str] = field(init=False, factory=set)
    align: int = field(init=False, default=1)
    crosses: bool = field(init=False, default=False)
    _overlaps: dict[Rewritten, tuple[int, list[Lane]]] = field(init=False, factory=dict)
    _unmet: dict[int, tuple[Plan, bool]] = field(init=False, factory=dict)
    _turn: Any = field(init=False, factory=threading.Lock)
    _last: Plan | None = field(init=False, default=None)
    _vacate: Callable[[], None] | None = field(init=False, default=None)
    _stream: Any = field(init=False, default=None)

    def enter(
        self,
        plan: Plan,
        prepare: Callable[[], None] = lambda: None,
        *,
        writes: bool = False,
        groups: Collection[Any] = (),
    ) -> None:
        """Begin a run of a graph that follows ``plan``. See [Note: turns].

        Args:
            plan: The plan, as `Pool.take` returned it.
            prepare: What this rank has to do before peers touch the bytes.
            writes: Whether that may write them.
            groups: The process groups of whatever the graph has in symmetric memory.

        Raises:
            RunError: A graph that uses the same segments is running: inside it, or in another
                thread.
            ReleasedError: The backend was released.
        """
        if self.released:
            raise _released()
        if not self._turn.acquire(blocking=False):
            raise RunError(
                "a compiled graph started while another one was using the same segments",
                expected="graphs of one backend that run one after the other",
                got="one inside the other, or two threads",
                fix="compile one of them with a symmplan.backend() of its own",
            )
        try:
            ran(self)
            self.progress.run(groups)
            self._follow()
            if writes and self._is_unmet(plan):
                self._barrier()
            prepare()
            self._meet(plan)
        except BaseException:
            self.leave()
            raise

    def occupy(self, args: list[Any]) -> None:
        """Take the bytes, if they are a carve-out; what of the inputs lies there is replaced."""
        if isinstance(self.arena, CarveOut):
            self._vacate = self.arena.occupy(args)

    def finish(self, plan: Plan) -> None:
        """A run has ended well: whoever has the bytes next may touch its peers'.

        Collective: if the bytes are a carve-out, and accesses of the plan do not meet all ranks.
        """
        if self._vacate is not None and self._is_unmet(plan):
            self._barrier()

    def leave(self) -> None:
        """End it."""
        vacate, self._vacate = self._vacate, None
        try:
            if vacate is not None:
                vacate()
        finally:
            self._turn.release()

    @property
    def hostable(self) -> bool:
        """See `Guest`."""
        segments = self.arena.segments.values()
        alone = all(len(s.spec.groups) == 1 and not s.spec.signal_pad for s in segments)
        return alone and not (self.released or self.crosses or self.arena.races)

    def move_in(self, carved: CarveOut) -> None:
        """Live there from now on; see [Note: guests] in `symmplan.place.guests`."""
        old = self.arena
        self.progress.add(carved)
        self.progress.remove(old)
        if self.engines:
            met = [r for s in carved.segments.values() for r in s.rendezvous.items()]
            found = ((n, known(r.group.process_group)) for n, r in met)
            register(carved, {name: engines for name, engines in found if engines is not None})
        self.move(carved)
        let_go(old)

    def _follow(self) -> None:
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream

    def _meet(self, plan: Plan) -> None:
        last = self._last
        changed = last is not None and last is not plan
        if (changed and last is not None and self._is_unmet(last)) or (
            (changed or self.lanes or self._vacate) and self._is_unmet(plan)
        ):
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

    def lane(self, place: Placement) -> Lane:
        """The bytes of a crossing buffer."""
        lane = self.lanes.get(place)
        if lane is None:
            segment = self.arena.segments[place.segment].tensor
            lane = self.lanes[place] = Lane.of(place, segment)
        return lane

    def evacuate(self, part: Rewritten, here: Collection[Placement]) -> None:
        """Copy what was saved out of the bytes that a graph is about to write.

        Args:
            part: The graph.
            here: Where it finds what was saved for this run of it.
        """
        count, lanes = self._overlaps.get(part, (0, []))
        if count != len(self.lanes):
            lanes = [
                lane
                for place, lane in self.lanes.items()
                if any(overlap(place, written) for written in part.writes)
            ]
            self._overlaps[part] = (len(self.lanes), lanes)
        for lane in lanes:
            if lane.place not in here and lane.held:
                lane.evacuate()
                self.copies["again" if lane.owner is part.owner else "other"] += 1

    def move(self, arena: Arena | CarveOut) -> None:
        """Use other segments, as large or larger; what was saved moves with them."""
        old, self.lanes = self.lanes, {}
        self.arena = arena
        self._overlaps.clear()
        for place, lane in old.items():
            lane.move_to(self.lane(place))

    def release(self) -> None:
        """Give the segments back; what was saved is copied out.

        Collective: no.
        """
        self.clear()
        self.released = True
        self.progress.remove(self.arena)
        synchronize(self.device)
        let_go(self.arena)

    def clear(self) -> None:
        """Copy everything out that was saved."""
        for lane in self.lanes.values():
            if lane.held:  # what cannot move keeps the memory that it lies in
                lane.move(lane.tensor.clone())
                self.copies["released"] += 1


@define(eq=False)
class Pool:
    """All segments of one backend.

    Attributes:
        timeout: Seconds that ranks wait for each other.
        debug: Whether to look for races.
        rendezvous: How many (segment, group) pairs were rendezvoused.
        released: Whether `release` ran.
        copies: How many crossing tensors were copied, by reason.
        bounds: The largest size that was planned last, by Dynamo's frame and the size's name.
    """

    timeout: float
    debug: bool = False
    rendezvous: int = field(init=False, default=0)
    released: bool = field(init=False, default=False)
    places: Places = field(init=False, factory=Places)
    copies: Counter[str] = field(init=False, factory=Counter)
    bounds: dict[tuple[int | None, str], int] = field(init=False, factory=dict)
    progress: Progress = field(init=False)
    _shared: dict[Any, Shared] = field(init=False, factory=dict)
    _zones: list[Zone] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        self.progress = Progress(self.timeout)

    @property
    def arenas(self) -> tuple[Arena | CarveOut, ...]:
        """What is allocated."""
        return tuple(shared.arena for shared in self._shared.values())

    def take(
        self,
        plan: Plan,
        memory: str,
        device: torch.device,
        barriers: Iterable[tuple[int, str]] | None = None,
        *,
        engines: Collection[str] = (),
        crosses: bool = False,
    ) -> tuple[Shared, Plan]:
        """Agree on a plan, and find or make segments for it.

        Args:
            plan: The plan.
            memory: Name of the memory backend.
            device: Where the segments lie.
            barriers: What its graphs run besides the program, if that is more than the plan says;
                as for `symmplan.planner.fingerprint.visible`.
            engines: Names of the communicators over which copy engines run its collectives.
            crosses: Whether something that its graphs leave in placements outlives their runs.

        Returns:
            The segments, and the first plan that showed peers the same.

        Raises:
            AgreementError: The ranks' plans differ, or a peer runs an old graph meanwhile.
            BackendError, PeerTimeoutError, PeerLostError: As `symmplan.memory.realize`.

        Collective: yes, over the plan's groups, unless its like was agreed before.
        """
        if self.released:
            raise _released()
        key = (memory, device, structure_of(plan))
        named = {n: g.process_group for n, g in resolve_groups(group_names(plan)).items()}
        groups = list(named.values())
        shared = self._shared.get(key)
        if shared is not None and shared.groups != groups:
            del self._shared[key]
            shared.clear()
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
        agree(shown, timeout=self.timeout, watch=self.progress.plan(named))
        if shared is None:
            arena = self._obtain(shown, memory, device, named)
            shared = self._shared[key] = Shared(arena, device, groups, self.copies, self.progress)
        else:
            self._grow(shared, shown, memory, named, alone=crosses)
        aligns = [b.align for b in plan.problem.buffers]
        shared.align = max((shared.align, *aligns))
        shared.crosses = shared.crosses or crosses
        shared.engines.update(engines)
        if shared.engines:
            self.rendezvous += _meet_engines(shared, named)
        shared.agreed[like] = plan
        return shared, plan

    def _grow(
        self, shared: Shared, plan: Plan, memory: str, groups: dict[str, Any], *, alone: bool
    ) -> None:
        """Make room for a plan that all ranks have agreed on; ``alone``: not in a carve-out."""
        have = {name: segment.nbytes for name, segment in shared.arena.segments.items()}
        larger = [evolve(s, nbytes=max(s.nbytes, have[s.name])) for s in plan.segments]
        moves = alone and isinstance(shared.arena, CarveOut)
        if not moves and all(s.nbytes == have[s.name] for s in larger):
            return
        device = shared.device
        synchronize(device)  # before all ranks meet: then nobody uses the old ones
        arena = self._obtain(evolve(plan, segments=tuple(larger)), memory, device, groups)
        old = shared.arena
        shared.move(arena)
        if shared.lanes:
            synchronize(device)  # what was saved has been copied
        self.progress.remove(old)
        let_go(old)

    def _obtain(
        self, plan: Plan, memory: str, device: torch.device, groups: dict[str, Any]
    ) -> Arena:
        arena, made = obtain(
            plan,
            groups,
            memory=memory,
            device=device,
            timeout=self.timeout,
            user="compiled graphs",
            debug=self.debug,
        )
        self.rendezvous += arena.rendezvous if made else 0
        self.progress.add(arena)
        return arena

    def zone(self, zone: Zone) -> None:
        """Remember where the forward of a graph leaves what its backward reads."""
        self._zones.append(zone)

    def kept(self, structure: Any, but: Zone | None) -> list[tuple[Placement, str]]:
        """``(placement, group)`` of what was saved by forwards whose backwards are due.

        Args:
            structure: Of the plan that is being made.
            but: The graph's own zone, if it has one already.
        """
        due = (z for z in self._zones if z is not but and z.ahead and z.structure == structure)
        return list(dict.fromkeys(place for zone in due for place in zone.places))

    def release(self) -> None:
        """Give all segments back. Idempotent.

        Collective: no.
        """
        self.released = True
        for arena in self.places.arenas:
            self.progress.remove(arena)
        self.places.release()
        for shared in self._shared.values():
            if not shared.released:
                shared.release()
        self.progress.release()


def _released() -> ReleasedError:
    return ReleasedError(
        "a compiled graph ran after its backend was released",
        fix="compile the model again, with a new symmplan.backend()",
    )


def _meet_engines(shared: Shared, groups: dict[str, Any]) -> int:
    found = {name: e for name, group in groups.items() if (e := known(group)) is not None}
    gone = shared.engines - {name for engines in found.values() for name in engines.groups}
    if gone:
        raise RunError(
            f"a graph was compiled for communicators that are gone: {sorted(gone)}",
            expected="the process groups that it was compiled for",
            got="others under their names",
            fix="compile the model again, after torch._dynamo.reset()",
        )
    return register(shared.arena, found)
