"""The segments that graphs of a compile backend use in turn, and the tensors that cross in them.

[Note: turns]
    Only tensors that a forward saves for its backward outlive the run of a graph in placements. So
    all graphs of a backend (pieces between graph breaks, forwards, backwards, several models,
    recompilations) use the same bytes, one after the other. The segments are as large as the
    largest graph needs. If a new graph needs more, all ranks, which have agreed on its plan,
    allocate larger segments and release the old ones before the graph first runs. Segments are
    inputs of the compiled code, so all graphs use the new segments from their next run on.

    A graph that is planned between a forward and its backward avoids the bytes of saved tensors, so
    between graph breaks these stay in place. If graphs run in another order than they were planned
    in, saved tensors are evacuated (see [Note: crossing tensors]). The order of runs tells whether
    a backward is still to come. It is the same on all ranks, while lifetimes of tensors may differ.

    A plan's barriers cover repetitions of the same graph. If another graph used the bytes before,
    and one of the two has accesses without a meeting of all ranks before and after them, a barrier
    separates the two. If the other graph ran on another stream, this graph waits for that stream.
    Once tensors cross, such a barrier precedes each run, because copies on entry must be complete
    before peers touch the bytes. If a graph may copy saved tensors back on entry, another barrier
    precedes these copies, because peers may still read the old bytes. Once CUDA graphs have
    been captured, they may be replayed between any two runs, which is not seen. Then, and where
    others are in the segments, such a barrier precedes and follows each run of a graph that has
    such accesses.

    Plans that look the same to peers ([Note: what peers see] in `symmplan.planner.fingerprint`)
    count as one graph here, since a rank may have a separate graph for a smaller batch.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from attrs import define, field

from symmplan.device import device_of
from symmplan.errors import ReleasedError, RunError
from symmplan.integrate.compile.plans import is_unmet
from symmplan.memory.held import keep
from symmplan.memory.streams import synchronize
from symmplan.place.engines import register_known
from symmplan.runtime.leases import Lease, Run
from symmplan.runtime.sleep import in_capture
from symmplan.runtime.tenants import ran, synchronizes_once

if TYPE_CHECKING:
    import torch

    from symmplan.integrate.compile.crossing import Crossings
    from symmplan.integrate.compile.parts import PlannedPart, Record
    from symmplan.integrate.compile.progress import Progress
    from symmplan.memory.arena import Arena
    from symmplan.model import Placement, Plan
    from symmplan.runtime.sleep import WhyNot


@define(eq=False)
class Shared:
    """Segments that plans of one structure take turns in.

    Attributes:
        arena: The segments; replaced when they must grow.
        device: Where they lie.
        groups: The process groups that they met.
        crossings: The tensors in them that outlive a run of their graph.
        progress: How far the ranks are.
        agreed: The first plan of each kind that all ranks have agreed on.
        released: Whether the segments were given back.
        asleep: Whether they were given back until the next run.
        engines: Names of communicators over which copy engines run collectives in them.
        align: What the segments must begin at a multiple of, in bytes.
        crosses: Whether something in them outlives a run of its graph.
        captured: Of which segments CUDA graphs have addresses: these, or former ones.
        lock: Held while a graph runs in them.
        taken_by: The parts that have inputs in the segments.
    """

    arena: Arena
    device: torch.device
    groups: list[Any]
    crossings: Crossings
    progress: Progress
    agreed: dict[Any, Plan] = field(init=False, factory=dict)
    released: bool = field(init=False, default=False)
    asleep: bool = field(init=False, default=False)
    engines: set[str] = field(init=False, factory=set)
    align: int = field(init=False, default=1)
    crosses: bool = field(init=False, default=False)
    captured: list[Arena] = field(init=False, factory=list)
    lock: Any = field(init=False, factory=threading.Lock)
    _unmet: dict[int, tuple[Plan, bool]] = field(init=False, factory=dict)
    _last: Plan | None = field(init=False, default=None)
    _run: Run | None = field(init=False, default=None)
    _stream: tuple[Any, int] = field(init=False, default=(None, 0))
    taken_by: WeakSet[PlannedPart] = field(init=False, factory=WeakSet)

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
                expected="one running graph of each backend",
                got="a graph inside another one, or in another thread",
                fix="compile one of them with a separate symmplan.backend()",
            )
        try:
            ran(self)
            self.progress.run(part.groups or ())
            self._follow()
            if part.copies_back and self._is_unmet(part.agreed):
                self._barrier()
            self._run = Run(Lease(stream=self._stream[0] if self.is_tenant else None))
            self.crossings.make_room(self.arena, part, args, self._run)
            self._meet(part.agreed)
        except BaseException:
            self.leave()
            raise

    def finish(self, plan: Plan) -> None:
        """A run has ended well: whoever has the bytes next may touch its peers'.

        Collective: if others may have them next, and accesses of the plan do not meet all ranks.
        """
        if self._others and self._is_unmet(plan):
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
    def is_tenant(self) -> bool:
        """Whether others are in the segments, by their plan."""
        return self.arena.timed

    @property
    def _others(self) -> bool:
        """Whether others may be in them between two runs: tenants, replays of CUDA graphs."""
        return self.is_tenant or self.arena in self.captured

    @property
    def movable(self) -> bool:
        """See `Tenant`."""
        return synchronizes_once(self.arena) and not (self.released or self.crosses)

    def move_in(self, there: Arena) -> None:
        """Live there from now on; see [Note: tenants] in `symmplan.runtime.tenants`."""
        self.progress.add(there)
        if self.engines:
            register_known(there)
        self.move(there)

    def _follow(self) -> None:
        there = device_of(self.device)
        if there.is_accelerator:
            stream, capture = there.current_stream(), there.capture_of()
            last, its_capture = self._stream
            if last is not None and last != stream and its_capture == capture:
                stream.wait_stream(last)
            self._stream = stream, capture
            if capture and self.arena not in self.captured:
                self.captured.append(self.arena)
                keep(self.arena)

    def _meet(self, plan: Plan) -> None:
        last = self._last or plan
        shares = last is not plan or self.crossings.used or self._others
        if (last is not plan and self._is_unmet(last)) or (shares and self._is_unmet(plan)):
            self._barrier()
        self._last = plan

    def _barrier(self) -> None:
        segments = self.arena.segments.values()
        meetings = {group: s.meeting(group) for s in segments for group in s.spec.groups}
        # Whoever one group has met may have yet to meet another: each comes before each other once.
        groups = list(meetings)
        for group in (*groups, *groups[:-1]):
            meetings[group].barrier()

    def _is_unmet(self, plan: Plan) -> bool:
        if id(plan) not in self._unmet:
            self._unmet[id(plan)] = (plan, is_unmet(plan))
        return self._unmet[id(plan)][1]

    def move(self, arena: Arena) -> None:
        """Use other segments, as large or larger; what was saved moves, and the old ones go.

        They stay where a CUDA graph has their addresses, and nobody else gets them until `release`.
        """
        old, self.arena = self.arena, arena
        self.crossings.move(arena)
        self._forget_inputs()
        self.progress.remove(old)
        if old not in self.captured:
            old.give_back(together=True)

    def _forget_inputs(self) -> None:
        for part in self.taken_by:
            part.taken = (None, ())
        self.taken_by.clear()

    def reserved(self, but: Record) -> list[tuple[Placement, str]]:
        """``(placement, group)`` of what other graphs' forwards saved whose backwards are due."""
        segments = self.arena.segments
        due = self.crossings.due(but)
        return [(place, segments[place.segment].spec.groups[0]) for place in due]

    def why_awake(self) -> WhyNot:
        """Why the segments cannot be given back now on this rank; None if they can."""
        if self.arena in self.captured:
            name, segment = next(iter(self.arena.segments.items()))
            return in_capture("backend", f"segment {name!r} at {segment.address:#x}")
        if self.lock.locked():
            what = "backend.sleep() was called while a compiled graph runs"
            return what, "a graph inside this one, or in another thread", "call it between steps"
        place = self.crossings.held()
        if place is not None:
            return (
                "backend.sleep() was called between a compiled forward and its backward",
                f"saved tensors in bytes [{place.offset}, {place.end}) of {place.segment!r}",
                "call it after backward(), or drop the results of the forward",
            )
        return None

    def leave_for_sleep(self) -> Arena:
        """The segments, in which nobody has anything any more. Collective: no."""
        self.clear()
        self.progress.remove(self.arena)
        self.asleep = True
        return self.arena

    def wake(self, arena: Arena) -> None:
        """Be in other segments from now on. Collective: no."""
        self.arena, self.asleep = arena, False
        self.progress.add(arena)

    def clear(self) -> None:
        """Leave the segments: what was saved is copied out. Collective: no."""
        self._forget_inputs()
        self.crossings.clear()

    def release(self) -> None:
        """Give the segments back. Collective: no."""
        self.clear()
        self.released = True
        self.progress.remove(self.arena)
        synchronize(self.device)
        for arena in (self.arena, *self.captured):
            arena.give_back()
        self.captured.clear()


def released() -> ReleasedError:
    """What is raised where a graph runs too late."""
    return ReleasedError(
        "a compiled graph ran after its backend was released",
        expected="a backend that still has its segments",
        got="one whose memory is given back",
        fix="compile the model again, with a new symmplan.backend()",
    )
