"""Serves FSDP2's collectives: records the first step, freezes a plan, follows it.

[Note: when the plan is frozen]
    FSDP2 says nothing of steps, and all ranks must freeze at the same moment. So that moment is
    read from the sequence of collectives: the first one outside a backward pass that follows a
    backward pass in which gradients were reduced. A program that reduces no gradients is frozen
    after `PATIENCE` collectives for each FSDP module, when one outside a backward pass comes again.
    Such moments divide later steps, too: at one of them, a program that has used collectives that
    the plan does not know is planned again.

[Note: bytes in use]
    The schedule says where a collective's buffer lies, on all ranks alike. If on this rank somebody
    still holds a buffer there (a hook kept a tensor, the program changed its order), FSDP2 gets
    ordinary memory instead, and the collective is *staged*: the held bytes are saved, it runs in
    the placement as the peers expect, its result is copied, the bytes are put back. It is slow,
    counted, and no other rank needs to know. All work that FSDP2 and this thread have queued on
    the held bytes is done before, so it is right unless another thread reads them meanwhile.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmplan import _compat
from symmplan.capture.fsdp import Key, Recording, Way, problem_of
from symmplan.errors import BackendError, CaptureError, RunError
from symmplan.integrate.fsdp_agree import merged, telling
from symmplan.integrate.fsdp_arenas import fits, give_back, obtain, synchronize
from symmplan.integrate.fsdp_bytes import Bytes, Tenant, lend
from symmplan.integrate.fsdp_choice import Bench, Choices
from symmplan.integrate.fsdp_direct import Direct
from symmplan.integrate.fsdp_home import Home
from symmplan.integrate.fsdp_engines import Engines, engines_of
from symmplan.integrate.fsdp_offsets import plan_with_homes
from symmplan.integrate.fsdp_schedule import Schedule
from symmplan.integrate.fsdp_slots import Counts, Options, Slot, Where
from symmplan.memory import agree
from symmplan.model import DEFAULT_ALIGN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.capture.fsdp import Call, Planned
    from symmplan.integrate.fsdp_layout import Layout
    from symmplan.integrate.fsdp_schedule import Spot
    from symmplan.memory import Arena
    from symmplan.model import Placement, Plan

__all__ = ["PATIENCE", "REPLANS", "Runtime"]

#: After how many collectives per module a program that reduces no gradients is planned.
PATIENCE = 8
#: How often a program that keeps doing something new is planned again.
REPLANS = 8
#: More collectives than this without an end of the step are no longer recorded.
_LONGEST = 1 << 17

_NOT_PLANNED = "the plan does not know this collective"
_LEFT = "other modules' parameters were needed at the same time"
_NOT_OURS = "its buffer came from elsewhere"
_OTHER_GROUP = "it ran over another group than planned"
_OTHER_OP = "the memory backend has no such reduction"
_IN_USE = "its bytes were still in use"


class Runtime:
    """All FSDP modules of one model, in one plan.

    Attributes:
        options: How `apply` was asked to work.
        modules: How many FSDP modules there are.
        plan: The frozen plan, None while recording.
        counts: See `Counts`.
        choices: What was measured.
    """

    def __init__(self, options: Options, modules: int) -> None:
        self.options = options
        self.modules = modules
        self.plan: Plan | None = None
        self.counts = Counts()
        self.choices: Choices | None = None
        self._groups: dict[str, Any] = {}
        self._device: torch.device | None = None
        self._kept: list[Recording] = []
        self._log: Recording | None = Recording()
        self._schedule: Schedule | None = None
        self._arena: list[Arena] = []
        self._bytes: dict[str, Bytes] = {}
        self._views: dict[tuple[Placement, torch.dtype], torch.Tensor] = {}
        self._engines: dict[str, Engines] = {}
        self.directs: list[Direct] = []
        #: ``{module: layout}`` of those whose parameters can lie in a placement.
        self.layouts: dict[str, Layout] = {}
        # The recording of each module's last all-gather, and its index there.
        self._last: dict[str, tuple[Recording, int]] = {}
        self._arrived: Key | None = None
        # What decides when to freeze. See [Note: when the plan is frozen].
        self._seen: set[Key] = set()
        self._reduced = False
        self._was_backward = False
        self._strange = False
        # Not a method of this object, which must be able to end.
        weakref.finalize(self, give_back, self._arena).atexit = False

    @property
    def arena(self) -> Arena | None:
        """The memory of the plan."""
        return self._arena[0] if self._arena else None

    @property
    def memory(self) -> str:
        """Name of the memory backend, once the plan has its memory."""
        return self._arena[0].memory

    # Handing out buffers.

    def open(
        self, key: Key, dtype: torch.dtype, device: torch.device, plain: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, Slot]:
        """The buffer for the program's next collective.

        Args:
            key: The collective.
            dtype: Its element type.
            device: Where the buffer must lie.
            plain: Makes the buffer in ordinary memory.

        Collective: at the end of the first step yes, else no.
        """
        if self._arrived != key:
            self.arrive(key, device)
        self._arrived = None
        spot = self._follow(key)
        tenant = None if spot is None else self._move_in(spot, device)
        if tenant is None:
            base = plain()
        else:
            assert spot is not None
            assert spot.place is not None
            base = self._placed(spot.place, dtype)
        slot = Slot(key, base, spot=spot, tenant=tenant)
        if self._log is not None:
            slot.log, slot.index = self._log, self._log.begin(key, key.numel * dtype.itemsize)
            if len(self._log.collectives) > _LONGEST:
                self._log = None
        return lend(base, slot.drop), slot

    def arrive(self, key: Key, device: torch.device) -> None:
        """The program comes to a collective, for which it may ask `open` for a buffer next.

        Collective: at the end of the first step yes, else no.
        """
        self._check_device(device)
        if self._turns(key):
            self._turn()
        self._arrived = key

    def gathered(self, key: Key, group: str) -> None:
        """A module's parameters were gathered where they live."""
        self._arrived = None
        self._follow(key)
        self._was_backward = key.backward
        self.counts.bound += 1
        if self._log is not None:
            index = self._log.begin(key, key.numel * _itemsize(key.dtype))
            self._log.run(index, group)
            self._last[key.site] = (self._log, index)

    def released(self, site: str) -> None:
        """A module is done with its parameters."""
        log, index = self._last.pop(site, (None, 0))
        if log is not None:
            log.release(index)

    def left(self, site: str) -> None:
        """A module's gathers are flat from now on."""
        self.layouts.pop(site, None)

    def _follow(self, key: Key) -> Spot | None:
        if self._schedule is None:
            return None
        spot, in_order = self._schedule.follow(key)
        if spot is not None and not in_order:
            self.counts.departures += 1
        return spot

    def _move_in(self, spot: Spot, device: torch.device) -> Tenant | None:
        """Take the bytes of ``spot``; None if it has none, or somebody still uses them."""
        if spot.place is None or spot.direct:
            return None
        begin, end = spot.place.offset, spot.place.end
        users = self._bytes[spot.place.segment]
        if users.held(begin, end):
            return None
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        tenant = Tenant(stream)
        users.take(begin, end, tenant)
        return tenant

    def _placed(self, place: Placement, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """The bytes at ``place``; made once, as slicing is slow on the host."""
        made = self._views.get((place, dtype))
        if made is None:
            segment = self._arena[0].segments[place.segment]
            made = segment.tensor[place.offset : place.end].view(dtype)
            self._views[place, dtype] = made
        return made

    def _check_device(self, device: torch.device) -> None:
        if self._device is None:
            self._device = device
        elif self._device != device:
            raise CaptureError(
                "FSDP modules of one model lie on different devices",
                expected=self._device,
                got=device,
                fix="call symmplan.fsdp.apply for the modules of each device",
            )

    # Running collectives.

    def run(
        self,
        slot: Slot | None,
        buffer: torch.Tensor,
        group: dist.ProcessGroup,
        in_place: Callable[[Where], Callable[[], Any] | None],
        plain: Callable[[torch.Tensor], Any],
        *,
        result: bool,
    ) -> Any:
        """Run a collective where its buffer lies.

        Args:
            slot: What `open` gave.
            buffer: The all-gather's output or the reduce-scatter's input.
            group: Over which it runs.
            in_place: What runs the collective in symmetric memory; None if this cannot be done.
            plain: Given ``buffer`` under another storage, runs it through the process group.
            result: Whether ``buffer`` is the output.

        Returns:
            The work to wait for, None if there is none.

        Collective: yes.
        """
        if slot is None or slot.base.data_ptr() != buffer.data_ptr():
            self.counts.plain += 1
            self.counts.because(_NOT_OURS)
            return plain(buffer)
        name = _compat.group_name(group)
        self._groups.setdefault(name, group)
        slot.run(name)
        if slot.log is not None and slot.key.kind == "all_gather":
            self._last[slot.key.site] = (slot.log, slot.index)
        self._was_backward = slot.key.backward
        self._reduced = self._reduced or slot.key.kind == "reduce_scatter"
        reason, act = self._way(slot, name, in_place)
        done = slot.key.kind == "reduce_scatter"
        if act is None:
            work = plain(slot.base)
            if self._schedule is None:
                self.counts.recorded += 1
            else:
                self.counts.plain += 1
                self.counts.because(reason)
        elif slot.tenant is not None:
            work = act()
            self.counts.bound += 1
        else:
            work = None
            self._stage(slot, act, result=result)
            self.counts.staged += 1
            self.counts.because(_IN_USE)
        if slot.tenant is not None:
            slot.tenant.ran(work, done=done)
        return work

    def _way(
        self,
        slot: Slot,
        group: str,
        in_place: Callable[[Where], Callable[[], Any] | None],
    ) -> tuple[str, Callable[[], Any] | None]:
        """How to run a collective in its placement, or why not; the same on all ranks."""
        if self._schedule is None:
            return "", None
        if slot.spot is None:
            self._strange = True
            return _NOT_PLANNED, None
        if slot.spot.place is None:
            return slot.spot.way.reason, None
        if slot.spot.direct:
            self._strange = True
            return _LEFT, None
        if slot.spot.call.group != group:
            self._strange = True
            return _OTHER_GROUP, None
        act = in_place(self._where(slot.spot, slot.base))
        if act is not None and slot.spot.received is not None:
            act = self._receiving(slot.spot.received, act)
        return ("", act) if act is not None else (_OTHER_OP, None)

    def _where(self, spot: Spot, base: torch.Tensor) -> Where:
        assert spot.place is not None
        group = self._over(spot.call, spot.way)
        received = None if spot.received is None else self._placed(spot.received, base.dtype)
        return Where(self._placed(spot.place, base.dtype), base, group, received)

    def _over(self, call: Call, way: Way) -> Any:
        """The process group over which a collective runs."""
        engines = self._engines.get(call.group) if way.name == "copy engine" else None
        if engines is None:
            return self._groups[call.group]
        return engines.gather if call.key.kind == "all_gather" else engines.exchange

    def _receiving(self, place: Placement, act: Callable[[], Any]) -> Callable[[], Any]:
        """``act`` with the bytes at ``place`` to itself. See [Note: bytes in use]."""

        def alone() -> Any:
            assert self._device is not None
            users = self._bytes[place.segment]
            stream = torch.cuda.current_stream() if self._device.type == "cuda" else None
            if users.held(place.offset, place.end):
                target = self._placed(place)
                synchronize(self._device)
                saved = target.clone()
                work = act()
                target.copy_(saved)
                synchronize(self._device)
                return work
            tenant = Tenant(stream)
            users.take(place.offset, place.end, tenant)
            work = act()
            tenant.ran(work, done=True)
            tenant.drop()
            return work

        return alone

    def _stage(self, slot: Slot, act: Callable[[], Any], *, result: bool) -> None:
        """See [Note: bytes in use]."""
        assert slot.spot is not None
        assert slot.spot.place is not None
        buffer = slot.base
        target = self._placed(slot.spot.place)
        synchronize(buffer.device)
        saved = target.clone()
        if not result:
            target.view(buffer.dtype).copy_(buffer)
        work = act()
        if work is not None:
            work.wait()
        if result:
            buffer.copy_(target.view(buffer.dtype))
        target.copy_(saved)
        synchronize(buffer.device)

    # Freezing.

    def _turns(self, key: Key) -> bool:
        """Whether a new round of the program begins with ``key``."""
        if key.backward:
            return False
        turns = self._was_backward or key in self._seen
        if turns:
            self._seen.clear()
        self._seen.add(key)
        return turns

    def _turn(self) -> None:
        if self._schedule is None:
            ran = 0 if self._log is None else len(self._log.ran)
            if (self._reduced and self._was_backward) or ran >= PATIENCE * self.modules:
                self.freeze()
        elif self._strange and self.counts.replans < REPLANS and self._log is not None:
            self.counts.replans += 1
            self._make([*self._kept, self._log])
        if self._schedule is not None:
            self._log = Recording()
        self._strange = False
        self._was_backward = False

    def freeze(self) -> None:
        """Plan what was recorded so far; later collectives follow it.

        Raises:
            CaptureError: Nothing was recorded.
            AgreementError: Ranks recorded different programs.

        Collective: yes.
        """
        if self._schedule is not None:
            return
        if self._log is None or not self._log.ran:
            raise CaptureError(
                "no FSDP collective has run yet",
                expected="one forward and backward pass over more than one rank",
                got="none",
                fix="run a step first",
            )
        self._make([self._log])
        self._log = Recording()

    def _make(self, recordings: Sequence[Recording]) -> None:
        with telling(self._groups, self.options.timeout):
            self._make_alike(recordings)

    def _make_alike(self, recordings: Sequence[Recording]) -> None:
        assert self._device is not None
        if self.choices is None:
            self.choices = Choices(self._device, self.options.timeout, self.options.choose)
        recordings = merged(recordings, self._groups, self.options.timeout)
        plan, stretches = self._planned(recordings, again=False)
        if self.options.choose == "measure":
            new = [p.call for s in stretches for p in s if not self.choices.measured(p.call)]
            if new and self._measure(new):
                plan, stretches = self._planned(recordings, again=True)
        self.plan = plan
        self._kept = list(recordings)
        self._schedule = Schedule(plan, stretches)
        self._settle(plan, [p for stretch in stretches for p in stretch if p.direct])

    def _settle(self, plan: Plan, gathers: Sequence[Planned]) -> None:
        """Let parameters live where the plan puts them."""
        homes: dict[str, Home] = {}
        for p in gathers:
            if p.call.key.site not in homes:
                assert p.buffer is not None
                place = plan.placements[p.buffer]
                with torch.inference_mode(mode=False):
                    homes[p.call.key.site] = Home(
                        p.call.key.site,
                        self.layouts[p.call.key.site],
                        self._placed(place),
                        self._bytes[place.segment],
                        place.offset,
                        self._over(p.call, p.way),
                        self.memory,
                    )
        for direct in self.directs:
            if not direct.settled:
                direct.settle(homes.get(direct.site))

    def _measure(self, calls: Sequence[Call]) -> bool:
        """Measure in the bytes of the segments. What lies there is saved and put back."""
        assert self._device is not None
        assert self.choices is not None
        benches = [bench for call in calls if (bench := self._bench(call)) is not None]
        if not benches:
            return False
        synchronize(self._device)
        saved = [
            (tensor, tensor.clone())
            for name, users in self._bytes.items()
            for tensor in (self._arena[0].segments[name].tensor[b:e] for b, e in users.live())
        ]
        synchronize(self._device)
        self.choices.measure(self.memory, benches, self._groups, self._engines)
        for tensor, copy in saved:
            tensor.copy_(copy)
        synchronize(self._device)
        return True

    def _bench(self, call: Call) -> Bench | None:
        """Bytes to measure a collective in, which need not be those of its placement."""
        assert self.choices is not None
        if not self.choices.worth(call):
            return None
        dtype = getattr(torch, call.key.dtype.removeprefix("torch."))
        room = next(
            (s for s in self._arena[0].segments.values() if call.group in s.spec.groups), None
        )
        size = -(-call.nbytes // DEFAULT_ALIGN) * DEFAULT_ALIGN
        if room is None or room.nbytes < call.nbytes:
            return None
        received = None
        if call.key.kind == "reduce_scatter" and size + call.nbytes <= room.nbytes:
            received = room.tensor[size : size + call.nbytes].view(dtype)
        return Bench(call, room.tensor[: call.nbytes].view(dtype), received)

    def _planned(
        self, recordings: Sequence[Recording], *, again: bool
    ) -> tuple[Plan, tuple[tuple[Planned, ...], ...]]:
        """Plan what was not left out, and give the plan its memory."""
        assert self.choices is not None
        ranks = {name: tuple(dist.get_process_group_ranks(g)) for name, g in self._groups.items()}
        settled = {direct.site for direct in self.directs if direct.settled}
        direct = {site: x.nbytes for site, x in self.layouts.items() if site not in settled}

        def way_of(call: Call) -> Way:
            assert self.choices is not None
            if call.key.kind == "all_gather" and call.key.site in settled:
                return Way("default", "its parameters stay where an earlier plan put them")
            return self.choices.way(call)

        problem, stretches = problem_of(recordings, ranks, way_of, direct)
        homes = frozenset(p.buffer for s in stretches for p in s if p.direct and p.buffer)
        plan = plan_with_homes(problem, homes, self.options.effort)
        plan.verify()
        self._hold(plan, may_reuse=again or not settled)
        return plan, stretches

    def _hold(self, plan: Plan, *, may_reuse: bool) -> None:
        """Give the plan memory: what this model has if it fits, else other."""
        if may_reuse and self.arena is not None and fits(plan, self.arena):
            agree(plan, self._groups, self.options.timeout)
            return
        assert self._device is not None
        # Peers may reach into the old segments until their work is done, too.
        synchronize(self._device)
        arena, made = obtain(
            plan,
            self._groups,
            memory=self.options.memory,
            device=self._device,
            timeout=self.options.timeout,
        )
        if not any(direct.settled for direct in self.directs):
            give_back(self._arena)  # else parameters live there
        self._arena.insert(0, arena)
        met = 0 if made else arena.rendezvous
        self._engines = {}
        if self.options.choose != "placed":
            self._engines = engines_of(self._groups, arena.memory, self.options.timeout)
        more = {name: engines.groups for name, engines in self._engines.items()}
        self._check_engines(arena.memory)
        arena.join(
            {
                spec.name: {n: g for group in spec.groups for n, g in more.get(group, {}).items()}
                for spec in plan.segments
            }
        )
        self.counts.rendezvous += arena.rendezvous - met
        self._bytes = {name: Bytes() for name in arena.segments}
        self._views.clear()

    def _check_engines(self, memory: str) -> None:
        """What was asked for must be what runs. Shared memory has no kernels to avoid."""
        without = [name for name in self._groups if name not in self._engines]
        if self.options.choose == "copy engine" and memory != "shm" and without:
            raise BackendError(
                f"choose='copy engine': memory={memory!r} has no copy engines for group "
                f"{without[0]!r}",
                expected="memory='nccl' with NCCL 2.28 or newer, and ranks that are in equally "
                "many process groups",
                fix="use choose='measure'",
                group=without[0],
                memory=memory,
            )

    def check_removable(self) -> None:
        """Raise if parameters cannot leave their placements now.

        Raises:
            RunError: A backward pass is running or still to come.
        """
        running = _compat.in_backward()
        sites = [direct.site for direct in self.directs if direct.awaits_backward]
        if not running and not sites:
            return
        raise RunError(
            "handle.remove() was called "
            + (
                "inside a backward pass"
                if running
                else f"between a forward pass and its backward pass, which reads {sites[0]!r}"
            ),
            expected="a call between steps",
            got="a backward pass that is running" if running else "a graph that is still alive",
            fix="call it after backward(), or let go of the forward pass's results first",
            module=sites[0] if sites else None,
        )

    def release(self) -> None:
        """Give the segments back.

        Collective: no.
        """
        for direct in self.directs:
            direct.remove()
        self.directs.clear()
        self._views.clear()
        if self._device is not None:
            synchronize(self._device)
        give_back(self._arena)


def _itemsize(dtype: str) -> int:
    result: int = getattr(torch, dtype.removeprefix("torch.")).itemsize
    return result
