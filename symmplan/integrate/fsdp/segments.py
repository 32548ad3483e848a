"""The memory of an FSDP2 model's plan: its segments, who uses which bytes, and over which groups.

[Note: bytes in use]
    The schedule says where a collective's buffer is, on all ranks alike. If a tensor on this rank
    still uses these bytes (a hook kept it, or the program changed its order), FSDP2 gets ordinary
    memory instead, and the collective is *staged*: its rank saves the bytes in use, runs the
    collective in the placement as the peers expect, copies the result, and restores the bytes. This
    is slow and counted, and no other rank needs to know. All work that FSDP2 and this thread have
    queued on these bytes ends first. So it is correct unless another thread reads them meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.own import at_drop
from symmplan.coordination.world import current
from symmplan.device import device_of
from symmplan.errors import CaptureError
from symmplan.integrate.fsdp.program_usage import ProgramUsage
from symmplan.integrate.fsdp.push import Pushes
from symmplan.integrate.fsdp.sums import warm_up
from symmplan.memory import agree
from symmplan.memory.beyond import counting
from symmplan.memory.cache import cached, fits
from symmplan.memory.device_memory import empty_cache
from symmplan.memory.held import bytes_beside
from symmplan.memory.streams import synchronize
from symmplan.place.engines import known_of, register
from symmplan.process import PROCESS
from symmplan.runtime.leases import Lease, Ledger, in_use, set_aside
from symmplan.runtime.prepare import Preparation
from symmplan.runtime.sleep import give_back, take_back_replaced
from symmplan.runtime.watching import Watching
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from symmplan.capture.fsdp_recording import Call, Recording
    from symmplan.device import Device
    from symmplan.integrate.fsdp.schedule import ScheduledCollective
    from symmplan.memory import Arena
    from symmplan.memory.room import Room
    from symmplan.model import Algorithm, Placement, Plan
    from symmplan.runtime.options import Options
    from symmplan.runtime.resting import TurnTaker
    from symmplan.runtime.tenants import Tenant

__all__ = ["Memory"]


class Memory:
    """What a model's plan lies in.

    Args:
        options: How `apply` was asked to work.

    Attributes:
        groups: ``{name: process group}`` in the order of first use.
        levels: Those that are served in two levels.
        unreached: ``{name: why}`` of those that no segment can serve.
        engines: ``{name of a group: its communicator for copy engines}``.
        rendezvous: How many rendezvous were made.
        tenants: Who was seen to run, in that order, None for those that are over; see
            `symmplan.runtime.tenants`.
        turns: Who lies in the segments between steps; see `symmplan.runtime.resting`.
        capture: The last CUDA graph that has the addresses; 0 if none may have them.
        preparation: What the ranks agree on, and how they get memory.
        recording: What is being recorded.
        program: What the program had before the first plan.
        facade: The facade of the device, once a collective was seen.
    """

    def __init__(self, options: Options) -> None:
        self.groups: dict[str, Any] = {}
        self.levels: frozenset[str] = frozenset()
        self.unreached: Mapping[str, str] = {}
        self.engines: dict[str, Any] = {}
        self.rendezvous = 0
        self.tenants: list[Tenant | None] = []
        self.turns: TurnTaker | None = None
        self.capture = 0
        self.preparation = Preparation(options, "symmplan.fsdp", "FSDP2")
        self.program = ProgramUsage(options.timeout)
        self.facade: Device | None = None
        self.recording: Recording | None = None
        self._options = options
        # What races are looked for in: this thread's ops, until the memory is released.
        self._watching = contextlib.ExitStack()
        if options.debug and current() is None:
            self._watching.enter_context(Watching(options.timeout))
        self._device: torch.device | None = None
        self._arenas: list[Arena] = []
        self._older: list[Arena] = []  # in which somebody has kept buffers
        self._met: dict[str, Any] = {}
        self._views: dict[tuple[Placement, torch.dtype], torch.Tensor] = {}
        self._pushes: dict[str, Pushes] = {}
        # Not a method of this object, which must be able to end.
        at_drop(self, functools.partial(_end, self._arenas, self._older, self.program))
        PROCESS.resting.add(self)

    @property
    def reached(self) -> dict[str, Any]:
        """The groups that segments can serve."""
        return {n: g for n, g in self.groups.items() if n not in self.unreached}

    @property
    def met(self) -> dict[str, Any]:
        """The groups, and those of tenants that live: all that have met in segments."""
        found = self.groups | self._met
        return {n: g for n, g in found.items() if g is not None and c10d.is_registered(g)}

    @property
    def arena(self) -> Arena | None:
        """The segments; None before the first plan."""
        return self._arenas[0] if self._arenas else None

    @property
    def segment_bytes(self) -> int:
        """Bytes of all segments that are held, also of those that buffers are kept in."""
        return sum(a.segment_bytes for a in (*self._arenas, *self._older))

    @property
    def name(self) -> str:
        """Name of the memory backend, once there are segments."""
        return self._arenas[0].memory

    @property
    def device(self) -> torch.device:
        """Where it lies, once a collective was seen."""
        assert self._device is not None
        return self._device

    def arrive(self, device: torch.device, recording: Recording | None, *, planned: bool) -> None:
        """The program comes to a collective whose buffer must lie on ``device``.

        Args:
            device: Where.
            recording: Where the collective is recorded; None if it is not.
            planned: Whether a plan may have been made that places anything.

        Raises:
            CaptureError: Other buffers lie elsewhere.

        Collective: yes, over the groups of which a reduction failed before its meeting; and where
        a tenant's turn ends.
        """
        self.recording = recording
        PROCESS.owners_ran += 1
        if self.turns is not None:
            self.turns.end_turn()
        if self._device is None:
            self._device, self.facade = device, device_of(device)
        if planned:
            if self.program.looks:
                self.look()
            # The ranks meet where a reduction failed between its push and its meeting.
            for pushes in self._pushes.values():
                if pushes.unmet:
                    pushes.meet()
        if self._device != device:
            raise CaptureError(
                "FSDP modules of one model are on different devices",
                expected=self._device,
                got=device,
                fix="call symmplan.fsdp.apply for the modules of each device",
            )

    # Bytes.

    def at(self, place: Placement, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """The bytes at ``place``; made once, as slicing is slow on the host."""
        made = self._views.get((place, dtype))
        if made is None:
            segment = self._arenas[0].segments[place.segment]
            with torch.inference_mode(mode=False):  # it outlives the program's mode
                made = segment.tensor[place.offset : place.end].view(dtype)
            self._views[place, dtype] = made
        return made

    def users(self, place: Placement) -> Ledger:
        """Who uses the bytes of its segment."""
        return Ledger(self._arenas[0].segments[place.segment].leases)

    def take(self, place: Placement) -> Lease | None:
        """Take the bytes at ``place`` for a buffer; None if somebody still uses them."""
        users = self.users(place)
        if users.holders(place.offset, place.end):
            return None
        lease = Lease(stream=device_of(self.device).current_stream())
        users.take(place.offset, place.end, lease)
        return lease

    def stage(
        self, place: Placement, buffer: torch.Tensor, act: Callable[[], Any], *, result: bool
    ) -> None:
        """Run ``act`` at ``place`` for a buffer elsewhere. See [Note: bytes in use].

        Args:
            place: Where it runs.
            buffer: Its input, or its output if ``result``.
            act: Runs it.
            result: Whether ``buffer`` is the output.
        """
        target = self.at(place, buffer.dtype)
        with set_aside(target):
            # An all-gather's input is a part of its output: it runs there, as on the peers.
            target.copy_(buffer)
            work = act()
            if work is not None:
                work.wait()
            if result:
                buffer.copy_(target)

    # Groups.

    def over(self, call: Call, algorithm: Algorithm) -> Any:
        """The process group over which a collective runs."""
        group = self.groups[call.group]
        return self.engines.get(call.group, group) if algorithm.name == "copy engine" else group

    def element(self, place: Placement, dtype: torch.dtype) -> torch.Tensor:
        """One element that looks like all of a buffer to which nothing is copied."""
        segment = self._arenas[0].segments[place.segment].tensor
        try:
            return torch.empty(1, dtype=dtype, device=segment.device)
        except torch.OutOfMemoryError:  # whoever keeps that of the segment sees it change
            return segment[: dtype.itemsize].view(dtype)

    def pushes(self, scheduled: ScheduledCollective) -> Pushes:
        """What reduces over a collective's group by pushes."""
        assert scheduled.place is not None
        group = scheduled.call.group
        if group not in self._pushes:
            segment = self._arenas[0].segments[scheduled.place.segment]
            synchronizes = segment.meeting(self.groups[group])
            peers, rank = segment.peers(self.groups[group]), self.groups[group].rank()
            self._pushes[group] = Pushes(peers, synchronizes, rank, self.device)
        return self._pushes[group]

    # Segments.

    def look(self, *, own: bool = False) -> None:
        """Write down what the device has now, until the program is planned.

        Args:
            own: As in `symmplan.capture.fsdp_recording.Look`.

        Collective: no.
        """
        if self.recording is not None:
            self.program.look(self.recording, self.device, own=own)

    @contextlib.contextmanager
    def unsharding(self, recording: Recording | None, index: int) -> Iterator[None]:
        """FSDP2 has parameters of its own from now on. Collective: no.

        Args:
            recording: Of their gather; None where nothing is recorded.
            index: Of that.
        """
        self.look()
        yield
        if recording is not None:
            recording.filled.setdefault(index, len(recording.events))
            self.look(own=True)

    def room(self, *, below: bool, reserve: int = 0) -> Room:
        """How many bytes a plan may take; the same on all ranks.

        Args:
            below: Whether the program may have no more of its device than it had without a plan.
            reserve: Bytes of the device that something else will take before.

        Collective: yes, over all groups.
        """
        self.let_go()
        held = sum(a.segment_bytes for a in self._arenas)
        stays = self.segment_bytes - held
        if any(in_use(arena.segments.values()) for arena in self._arenas):
            stays, held = stays + held, 0
        # Of what was made since the step was recorded, tenants may come to live here.
        tenants = [tenant.arena for tenant in self.tenants if tenant is not None]
        others = bytes_beside([*self._arenas, *self._older, *tenants])
        usage, preparation = self.program.agreed(self.groups, others), self.preparation
        return preparation.room(
            preparation.memory,
            self.device,
            self.groups,
            held=held,
            stays=stays,
            usage=usage,
            below=below,
            reserve=reserve,
        )

    def keeps_for(self, plan: Plan) -> bool:
        """Whether segments that nobody uses any more have room for a plan.

        Collective: yes, over all groups.
        """
        given: dict[str, Any] = {"device": self.device, "timeout": self._options.timeout}
        return cached(plan, self.groups, memory=self.preparation.memory, **given) is not None

    def prepare(self, plan: Plan, by_engines: Collection[str]) -> tuple[Arena, int] | None:
        """Make room for ``plan``: in the present segments if it fits, else in other ones.

        Args:
            plan: What must fit.
            by_engines: Names of the groups of which copy engines run some collective. Segments are
                registered with no other communicators, as that takes bytes of the device.

        Returns:
            The other segments and how many rendezvous these took, for `adopt` or `undo`; None if it
            fits.

        Raises:
            AgreementError, BackendError, PeerTimeoutError: As `symmplan.memory.realize`.

        Collective: yes, over all groups.
        """
        more = [g for s in plan.segments for g in s.groups if g not in self.groups]
        tenants = {n: g.process_group for n, g in resolve_groups(more).items()}
        groups = {**self.groups, **tenants}
        self._met.update(groups)
        engines = known_of({n: g for n, g in self.reached.items() if n in by_engines})
        if self.arena is not None and fits(plan, self.arena):
            synchronize(self.device)  # peers may push to where other bytes were, without asking
            if not self.preparation.keeps_cache:  # it has blocks for what the program did before
                empty_cache(self.device)
            agree(plan, groups, self._options.timeout)
            self.rendezvous += register(self.arena, engines)
            if self.arena.races is not None:
                self.arena.races.follow(plan.placements)
            return None
        # Peers may reach into the old segments until their work is done, too.
        synchronize(self.device)

        def with_engines(arena: Arena) -> None:
            if not arena.segments:  # nothing runs there
                return
            register(arena, engines)
            with counting("kernels", self.device):
                warm_up(self.device)

        return self.preparation.obtain(plan, self.device, groups, with_engines)

    def undo(self, held: tuple[Arena, int] | None) -> None:
        """Give back what `prepare` made. Collective: no."""
        if held is not None:
            synchronize(self.device)
            held[0].give_back()

    def adopt(self, held: tuple[Arena, int] | None) -> None:
        """Live in what `prepare` made from now on, which all ranks have.

        Collective: no.
        """
        self.engines = known_of(self.reached)
        if held is None:
            return
        arena, rendezvous = held
        self._dismiss()
        for group in filter(None, self.reached.values()):
            PROCESS.segments_made[group] = PROCESS.segments_made.get(group, 0) + 1
        self._retire()
        self._arenas.append(arena)
        self.rendezvous += rendezvous

    def let_go(self) -> None:
        """Give older segments back once no buffers are left in them.

        No other plan gets them, as the present ones are larger. What is registered of them is taken
        back when all ranks have let go, and plan again.

        Collective: no.
        """
        free = [arena for arena in self._older if not in_use(arena.segments.values())]
        if free:
            self._older[:] = [arena for arena in self._older if arena not in free]
            synchronize(self.device)
            for arena in free:
                arena.give_back(together=True)

    def take_back_replaced(self) -> None:
        """Have the driver get what all ranks have let go. Collective: yes, over all groups."""
        take_back_replaced(self.groups, self.device, self._options.timeout)

    def begin_again(self) -> None:
        """Have no segments, and look at the device again. Collective: yes, over all groups."""
        self.program.begin(self.device, self.segment_bytes)
        self.leave()
        empty_cache(self.device)

    def leave(self) -> None:
        """Give back what nobody uses, where no rank works. Collective: yes, over all groups."""
        self._retire()
        self.take_back_replaced()

    def _retire(self) -> None:
        """The segments are older ones from now on. Collective: no."""
        self._older += self._arenas
        self._arenas.clear()
        self._views.clear()
        self._pushes.clear()
        self.let_go()

    def _dismiss(self) -> None:
        """Let a tenant look for other memory when it next runs. Collective: no."""
        if self.turns is not None:
            self.turns.move_out()

    def sleep(self) -> None:
        """Give the segments back to the driver. Nobody has anything in them.

        Collective: yes, over all that have `met`.
        """
        self._dismiss()
        self._views.clear()
        self._pushes.clear()
        arenas = [*self._arenas, *self._older]
        self._arenas.clear()
        self._older.clear()
        give_back(self.preparation.user, arenas, self.met, self.device, self._options.timeout)

    def release(self) -> None:
        """Give the segments back. Tenants keep what they live in.

        Collective: no.
        """
        self._watching.close()
        self._views.clear()
        self._pushes.clear()
        if self._device is not None:
            synchronize(self._device)
        _end(self._arenas, self._older, self.program)


def _end(arenas: list[Arena], older: list[Arena], program: ProgramUsage) -> None:
    program.end()
    for arena in (*arenas, *older):
        arena.give_back()
    arenas.clear()
    older.clear()
