"""Serves FSDP2's collectives: records the first step, freezes a plan, follows it.

[Note: a plan that places nothing]
    Where nothing fits, or nothing gains, FSDP2 runs as without a plan, and its steps are not
    recorded. Only what it does is compared with the plan. If that does not know it all, the next
    step is recorded, and planned behind it.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

from symmplan.coordination.own import own_work
from symmplan.errors import CaptureError, RunError
from symmplan.integrate.fsdp import reasons
from symmplan.integrate.fsdp.lacking import Lacking
from symmplan.integrate.fsdp.plans import Planning
from symmplan.integrate.fsdp.recorder import PATIENCE, StepEnds, StepRecorder
from symmplan.integrate.fsdp.segments import Memory
from symmplan.integrate.fsdp.sleep import wake
from symmplan.integrate.fsdp.slots import Slot
from symmplan.process import PROCESS
from symmplan.runtime.executor import Executor
from symmplan.runtime.observe import checking, launching
from symmplan.runtime.tenants import forget
from symmplan.torch_private import c10d, fsdp2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    import torch.distributed as dist

    from symmplan.capture.fsdp_recording import Key, Recording
    from symmplan.integrate.fsdp.layout import Asked
    from symmplan.integrate.fsdp.schedule import Schedule, ScheduledCollective
    from symmplan.integrate.fsdp.zero_copy import ZeroCopyUnshard
    from symmplan.place.expected import Expected
    from symmplan.runtime.options import Options
    from symmplan.runtime.tenants import Tenant

__all__ = ["PATIENCE", "REPLANS", "Runtime"]

#: How often a program that keeps doing something new is planned again.
REPLANS = 8


class Runtime:
    """All FSDP modules of one model, in one plan.

    Args:
        options: The options of `apply`.
        modules: How many FSDP modules there are.
        live: How many of them may be unsharded at once; see `symmplan.capture.fsdp_unsharded`.

    Attributes:
        options: The same.
        memory: The plan's memory.
        planning: Makes the plan.
        counts: How many collectives were what, as `Stats` counts them.
        reasons: Why they were not in their placements, and how often.
        schedule: The plan's collectives; None while recording.
        executor: Runs the collectives.
        recorder: Records what the program does.
        idle: Whether FSDP2 runs as without a plan; see [Note: a plan that places nothing].
        gradients_move: See [Note: blocks of gradients] in `symmplan.capture.fsdp_reserved`.
        asleep: Whether the plan's memory was given back until the next collective.
    """

    def __init__(self, options: Options, modules: int, live: int | None = None) -> None:
        self.options = options
        self.memory = Memory(options)
        self.planning = Planning(options, self.memory, live)
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.executor = Executor()
        self._modules = modules
        self.recorder = StepRecorder()
        self.schedule: Schedule | None = None
        self.idle = self.asleep = self.gradients_move = False
        #: By site the modules that are unsharded in placements, or about to be.
        self._unsharded: dict[str, ZeroCopyUnshard] = {}
        self._waiting: list[ZeroCopyUnshard] = []
        self._arrived: Key | None = None
        self._ends = StepEnds()
        self._outside = False
        self._lacking = Lacking(self.memory, REPLANS)
        self._tries = 0
        PROCESS.watchers.add(self)
        fsdp2.watch_copy_in()

    def tenant_ran(self, tenant: Tenant) -> None:
        """Somebody's graph begins to run. See [Note: tenants] in `symmplan.runtime.tenants`."""
        forget(self.memory.tenants)
        log = self.recorder.log
        if log is None:
            return
        tenants = self.memory.tenants
        if tenant not in tenants:  # who comes late is planned for when all ranks come to it
            tenants.append(tenant)
        log.tenant(tenants.index(tenant))

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
        known = self.schedule
        scheduled = None if known is None else known.follow(key, self.counts)
        place = None if scheduled is None or not self.executor.serves else scheduled.place
        lease = send = shared = None
        if place is None or scheduled is None or scheduled.zero_copy:
            base = plain()
        elif scheduled.pushed:
            base = self.memory.element(place, dtype)
            send = functools.partial(self.memory.pushes(scheduled).send, slot=place)
            if scheduled.algorithm.name == "shared push":
                shared = functools.partial(self.memory.take, place)
        else:
            lease = self.memory.take(place)
            base = plain() if lease is None else self.memory.at(place, dtype)
        slot = Slot(key, base, plain, scheduled=scheduled, lease=lease, send=send)
        slot.pushed, slot.take_shared = send is not None, shared
        slot.expected = None if PROCESS.launched is None else self.expected(key, scheduled)
        slot.log, slot.index = self.recorder.begin(key, key.nbytes, outside=self._outside)
        if slot.log is not None and self.memory.program.looks:
            self.memory.look(own=True)
        if slot.pushed:
            return base.expand(key.numel), slot
        slot.hold = functools.partial(self.executor.hold, key)
        tensor, slot.base = self.executor.lease_out(base, slot.drop)
        self.executor.buffer(key, tensor)
        return tensor, slot

    def arrive(self, key: Key, device: torch.device, *, outside: bool = False) -> None:
        """The program comes to a collective, for which it may ask `open` for a buffer next.

        ``outside`` if that is a gather outside of the program's training passes.

        Collective: at the end of the first step yes, else no.
        """
        if self.asleep:
            wake(self)
        self.memory.arrive(device, self.recorder.log, planned=not self.idle)
        assert self.memory.facade is not None
        captured = self.memory.facade.is_capturing()
        if captured and self.schedule is None:
            raise RunError(
                "a CUDA graph is being captured before FSDP2's collectives are planned",
                expected="a plan",
                got="a step that would have to be recorded or planned",
                fix="run a step before the capture, and then handle.freeze()",
                module=key.site,
            )
        if captured:
            self.memory.capture = self.memory.facade.capture_of()
        if self._ends.before(key) and not captured:
            self._turn()
        self._arrived, self._outside = key, outside

    def runs_plainly(self, key: Key, device: torch.device) -> bool:
        """Whether the next collective runs as without a plan. Collective: as `arrive`."""
        if self._arrived != key:
            self.arrive(key, device)
        if not self.idle or checking():
            return False
        self._arrived = None
        assert self.schedule is not None
        scheduled = self.schedule.follow(key, self.counts)
        if scheduled is None:
            self._lacking.note(reasons.NOT_PLANNED, key)
        why = reasons.NOT_PLANNED if scheduled is None else scheduled.algorithm.reason
        self._count("plain", why)
        self._ends.ran(key)
        return True

    def gathering(
        self, unshard: ZeroCopyUnshard, key: Key, others: Sequence[str], asked: Asked | None
    ) -> bool:
        """Parameters are gathered: ``others`` as `crowding` says, ``asked`` if that had to wait.

        Returns whether that is outside of the program's training passes.
        """
        self._arrived = None
        if others:
            self.reasons[reasons.CROWDED] += 1
        outside = self._outside if asked is None else asked.outside
        if asked is not None and self.planning.live is None:
            if not others:
                self.reasons[reasons.PUT_OFF] += 1
            others = [*others, *asked.crowding]
        for site in others:
            self._lacking.note(reasons.CROWDED, unshard.site, site)
        self._unsharded[unshard.site] = unshard
        if self.schedule is not None:
            self.schedule.follow(key, self.counts)
        self._ends.ran(key)
        self.counts["served"] += 1
        return outside

    def put_off(self, asked: Asked, unshard: ZeroCopyUnshard) -> None:
        """A module's parameters were wanted before there was room for them."""
        if self.planning.live is not None:
            self._waiting.append(unshard)
        self.recorder.put_off(asked.key, outside=asked.outside)

    def released(self, site: str, *, after_forward: bool) -> None:
        """A module is done with its parameters, ``after_forward`` if because that was done.

        Collective: yes, if other modules wait for its bytes.
        """
        self.recorder.released(site, after_forward=after_forward)
        if self._unsharded.pop(site, None) is not None:
            while self._waiting and self._waiting[0].start_early():
                self._waiting.pop(0)

    def crowding(self, unshard: ZeroCopyUnshard) -> list[str]:
        """Names of the modules that are to have some of the bytes where one's parameters live.

        By FSDP2's calls, which all ranks make alike: so it may decide whether a prefetch begins.
        What is held on one rank may differ; see [Note: somebody is in the bytes] in `zero_copy`.
        """
        mine = unshard.storage
        assert mine is not None
        found = []
        for other in self._unsharded.values():
            storage = other.storage
            there = other is not unshard and storage is not None and storage.overlaps(mine)
            if there and other.has_bytes:
                found.append(other.site)
        return found

    def expected(self, key: Key, scheduled: ScheduledCollective | None = None) -> Expected | None:
        """How a collective is to run; None if it is not planned."""
        known = self.schedule
        return None if known is None else known.expected(key, self.memory.name, scheduled)

    def run(
        self,
        slot: Slot | None,
        buffer: torch.Tensor,
        group: dist.ProcessGroup,
        in_place: Callable[..., Callable[[], Any] | None],
        plain: Callable[[torch.Tensor], Any],
        *,
        result: bool,
    ) -> Any:
        """Run a collective where its buffer lies.

        Args:
            slot: The result of `open`.
            buffer: The all-gather's output or the reduce-scatter's input.
            group: Over which it runs.
            in_place: Given the placement's bytes, like ``buffer``, and the process group, runs the
                collective there; None if that is not possible. Also given, if there is such,
                ``pushes``, what has pushed the input.
            plain: Given ``buffer`` under another storage, runs it through the process group.
            result: Whether ``buffer`` is the output.

        Returns:
            The work to wait for, None if there is none.

        Collective: yes.
        """
        base = None if slot is None else self.executor.leased(slot.base, buffer)
        if slot is None or base is None:
            self._count("plain", reasons.NOT_OURS)
            return plain(buffer)
        name = c10d.group_name(group)
        self.memory.groups.setdefault(name, group)
        if slot.log is not None:
            slot.log.run(slot.index, name)
            if slot.key.kind == "all_gather":
                self.recorder.ran(slot.key.site, slot.log, slot.index)
        self._ends.ran(slot.key)
        reason, act = self._algorithm(slot, name, in_place)
        if act is None and slot.pushed:
            raise RunError(
                f"the gradients of FSDP module {slot.key.site!r} were pushed to its peers",
                expected="a sum or an average over the group of the plan",
                got=f"{reason}, over group {name!r}",
                fix="call handle.remove() and symmplan.fsdp.apply(model) before it changes",
                module=slot.key.site,
            )
        if act is None:
            nbytes = buffer.numel() * buffer.element_size()
            called = self.executor.call(slot.key, slot.key.kind, nbytes, name)
            # FSDP2's, not the program's: an eager session must not plan what will be placed here.
            with own_work, launching(slot.expected, reason), called:
                work = plain(base if slot.flat is None else slot.flat)
            if self.schedule is None:
                self.counts["recorded"] += 1
            else:
                self._count("plain", reason)
        else:
            with launching(slot.expected):
                if slot.lease is not None or slot.pushed:
                    work = act()
                else:
                    work = None
                    assert slot.scheduled is not None
                    assert slot.scheduled.place is not None
                    self.memory.stage(slot.scheduled.place, slot.base, act, result=result)
            if slot.pushed and work is not None:  # a rank could not push
                work = None
                self._lacking.note(reasons.WIDER, slot.key)
                self._count("plain", reasons.WIDER)
            else:
                self.counts["served"] += 1
                if slot.lease is None and (slot.take_shared is not None or not slot.pushed):
                    self._count("copies", reasons.IN_USE)
        slot.ran(work, done=slot.key.kind == "reduce_scatter")
        return work

    def _count(self, how: str, why: str) -> None:
        """Count a collective that did not simply run in its placement."""
        self.counts[how] += 1
        self.reasons[why] += 1

    def _algorithm(
        self, slot: Slot, group: str, in_place: Callable[..., Callable[[], Any] | None]
    ) -> tuple[str, Callable[[], Any] | None]:
        """How to run a collective in its placement, or why not; the same on all ranks."""
        if self.schedule is None:
            return "", None
        scheduled, memory = slot.scheduled, self.memory
        if scheduled is None:
            self._lacking.note(reasons.NOT_PLANNED, slot.key)
            return reasons.NOT_PLANNED, None
        if scheduled.place is None:
            return scheduled.algorithm.reason, None
        if scheduled.call.group != group:
            self._lacking.note(reasons.OTHER_GROUP, slot.key, group)
            return reasons.OTHER_GROUP, None
        if not self.executor.serves:
            return "", None
        if scheduled.zero_copy:
            self._lacking.note(reasons.FLAT, slot.key)
            return reasons.FLAT, None
        if scheduled.pushed and not slot.pushed:
            self._lacking.note(reasons.WIDER, slot.key)
            return reasons.WIDER, None
        over, dtype = memory.over(scheduled.call, scheduled.algorithm), slot.base.dtype
        if slot.pushed:
            return reasons.OTHER_OP, in_place(slot.base, over, pushes=memory.pushes(scheduled))
        return reasons.OTHER_OP, in_place(memory.at(scheduled.place, dtype), over)

    # Freezing.

    def _turn(self) -> None:
        log = self.recorder.log
        if self.schedule is None:
            ran = 0 if log is None else len(log.ran)
            if self._ends.trained or ran >= PATIENCE * self._modules:
                self.freeze()
        elif self._lacking and self.counts["replans"] < REPLANS and log is not None:
            self._tries += 1  # asking costs time, too
            if self._tries <= 8 * REPLANS and self.planning.can_move():
                self.recorder.release_all()  # what is there leaves for a new plan
                self._plan(log)
        if self.schedule is not None or self.recorder.log is None:  # it is to be recorded again
            self.memory.let_go()
            self.begin_stretch()
        self._lacking.begin()
        self._ends.backward = False
        moves, unshards = self.planning.gradients_move, self.planning.unshards
        self.gradients_move = moves and not any(u.has_gradients for u in unshards)

    def begin_stretch(self) -> None:
        """Record what comes, unless nothing is placed. See [Note: a plan that places nothing]."""
        nothing = self.schedule is not None and self.schedule.places_nothing
        self.idle = nothing and self.executor.serves and not self._lacking
        if self.idle:
            self.recorder.rest()
        else:
            there = [unshard for unshard in self._unsharded.values() if unshard.has_bytes]
            self.recorder.begin_stretch(there, self.planning.unshards)

    def _plan(self, log: Recording) -> None:
        """Collective: yes. If it fails, FSDP2's collectives run in torch's own way."""
        last, self.schedule, self.recorder.log = self.schedule, None, None
        self.schedule = made = self.planning.make(log, last)
        self.counts["replans"] += last is not None and made is not last
        if self.planning.left:
            self.reasons[reasons.NO_ROOM] += 1
        elif made is last:
            self.reasons[reasons.SAME_PLAN] += 1
        if self.schedule is None:  # see [Note: another program] in `symmplan.integrate.fsdp.plans`
            self._ends.begin()
        else:
            self._lacking.planned_for()

    @property
    def recorded(self) -> bool:
        """Whether a collective was recorded that is in no plan yet."""
        log = self.recorder.log
        return log is not None and bool(log.ran)

    def freeze(self) -> None:
        """Plan what was recorded so far; later collectives follow it.

        Raises:
            CaptureError: Nothing was recorded.
            AgreementError: Ranks recorded different programs.

        Collective: yes.
        """
        if self.schedule is not None:
            return
        log = self.recorder.log
        if log is None or not self.recorded:
            raise CaptureError(
                "no FSDP collective has run yet",
                expected="one forward and backward pass over more than one rank",
                got="none",
                fix="run a step first; groups of one rank have nothing to plan",
            )
        for unshard in self.planning.unshards:
            if not unshard.has_bytes:  # FSDP2 has forgotten what it did not wait for
                self.recorder.released(unshard.site)
        self._plan(log)
        self.begin_stretch()

    # Ending.

    def release(self) -> None:
        """Give the segments back. Collective: no."""
        PROCESS.watchers.discard(self)
        for unshard in self.planning.unshards:
            unshard.remove()
        self.planning.unshards.clear()
        self.memory.release()
