"""The segments of a compile backend: its graphs take turns in them.

[Note: turns]
    Nothing in a placement outlives the run of its graph: what leaves a graph is copied out, and
    work that the graph does not wait for is not planned. So all graphs of a backend (pieces between
    graph breaks, forwards, backwards, several models, recompilations) can use the same bytes, one
    after the other, and the segments need be no larger than for the one that needs most.

    A graph that needs more than there is makes all ranks, which have agreed on its plan, allocate
    larger segments and give the old ones back, before it first runs. Segments are inputs of the
    compiled code, so all graphs use the new ones from their next run on.

    A plan's barriers cover its own repetition. Where another graph had the bytes before, and one of
    the two has accesses that do not meet all ranks before and after, a barrier lies between them;
    where it ran on another stream, this one waits for that.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field

from symmplan.errors import ReleasedError, RunError
from symmplan.integrate.places import Places
from symmplan.memory import realize
from symmplan.memory.agreement import agree
from symmplan.memory.groups import resolve_groups

if TYPE_CHECKING:
    from symmplan.memory.arena import Arena
    from symmplan.model import Plan

__all__ = ["Pool", "Shared"]


@define(eq=False)
class Shared:
    """Segments that plans of one structure take turns in.

    Attributes:
        arena: The segments; replaced when they must grow.
        device: Where they lie.
        groups: The process groups that they met.
    """

    arena: Arena
    device: torch.device
    groups: list[Any]
    _turn: Any = field(init=False, factory=threading.Lock)
    _last: Plan | None = field(init=False, default=None)
    _stream: Any = field(init=False, default=None)

    def enter(self, plan: Plan) -> None:
        """Begin a run of a graph that follows ``plan``. See [Note: turns].

        Raises:
            RunError: A graph that uses the same segments is running: inside it, or in another
                thread.
        """
        if not self._turn.acquire(blocking=False):
            raise RunError(
                "a compiled graph started while another one was using the same segments",
                expected="graphs of one backend that run one after the other",
                got="one inside the other, or two threads",
                fix="compile one of them with a symmplan.backend() of its own",
            )
        try:
            self._pass_on(plan)
        except BaseException:
            self._turn.release()
            raise

    def leave(self) -> None:
        """End it."""
        self._turn.release()

    def _pass_on(self, plan: Plan) -> None:
        last = self._last
        if last is not None and last is not plan and (_unmet(last) or _unmet(plan)):
            for segment in self.arena.segments.values():
                for group in segment.spec.groups:
                    segment.meeting(group).barrier()
        self._last = plan
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream


@define(eq=False)
class Pool:
    """All segments of one backend.

    Attributes:
        timeout: Seconds that ranks wait for each other.
        rendezvous: How many (segment, group) pairs were rendezvoused.
        released: Whether `release` ran.
        places: Where inputs live from run to run.
        bounds: The largest size that was planned last, by Dynamo's frame and the size's name.
    """

    timeout: float
    rendezvous: int = field(init=False, default=0)
    released: bool = field(init=False, default=False)
    places: Places = field(init=False, factory=Places)
    bounds: dict[tuple[int | None, str], int] = field(init=False, factory=dict)
    _shared: dict[Any, Shared] = field(init=False, factory=dict)

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """What is allocated."""
        return tuple(shared.arena for shared in self._shared.values())

    def take(self, plan: Plan, memory: str, device: torch.device) -> Shared:
        """Agree on a plan, and find or make segments for it.

        Collective: yes, over the plan's groups.
        """
        if self.released:
            raise ReleasedError(
                "a compiled graph ran after its backend was released",
                fix="compile the model again, with a new symmplan.backend()",
            )
        structure = tuple((s.name, s.groups, s.signal_pad) for s in plan.segments)
        key = (memory, device, structure)
        groups = [g.process_group for g in resolve_groups(_groups_of(plan)).values()]
        shared = self._shared.get(key)
        if shared is not None and shared.groups != groups:
            shared.arena.release()  # of a process group that is gone; another has its name
            shared = None
        if shared is None:
            arena = realize(plan, memory=memory, device=device, timeout=self.timeout)
            shared = self._shared[key] = Shared(arena, device, groups)
            self.rendezvous += arena.rendezvous
            return shared
        have = {name: segment.nbytes for name, segment in shared.arena.segments.items()}
        larger = [evolve(s, nbytes=max(s.nbytes, have[s.name])) for s in plan.segments]
        wanted = evolve(plan, segments=tuple(larger))
        if all(s.nbytes == have[s.name] for s in larger):
            agree(wanted, timeout=self.timeout)
            return shared
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # before all ranks meet: then nobody uses the old ones
        arena = realize(wanted, memory=memory, device=device, timeout=self.timeout)
        old, shared.arena = shared.arena, arena
        self.rendezvous += arena.rendezvous
        old.release()
        return shared

    def release(self) -> None:
        """Give all segments back. Idempotent.

        Collective: no.
        """
        self.released = True
        self.places.release()
        for arena in self.arenas:
            arena.release()


def _groups_of(plan: Plan) -> list[str]:
    return [group for spec in plan.segments for group in spec.groups]


def _unmet(plan: Plan) -> bool:
    """Whether an operation touches peers' bytes without meeting all ranks before and after."""
    operations = {o.name: o for o in plan.problem.operations}
    found = (operations[a.operation] for a in plan.problem.accesses if a.remote)
    return any(not (o.handshake and o.release) for o in found)
