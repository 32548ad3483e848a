"""Turn a plan into memory: agree, allocate, rendezvous, all or nothing."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from symmplan.coordination.agreement import compare_notes
from symmplan.coordination.exchange import Exchange
from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.own import at_drop, own_work
from symmplan.device import device_of
from symmplan.errors import OptionError, ReleasedError
from symmplan.memory.backends.resolve import resolve_backend
from symmplan.memory.backends.shm import ShmBackend
from symmplan.memory.beyond import counting
from symmplan.memory.device_memory import require_left
from symmplan.memory.health import Health
from symmplan.memory.held_segment import note_released
from symmplan.memory.leased import lease_again
from symmplan.memory.placed_tensor import placement_of, view_of
from symmplan.memory.races import RaceDetector
from symmplan.memory.segment import Segment
from symmplan.model import Plan
from symmplan.process import PROCESS
from symmplan.torch_private.c10d import has_process_groups, world
from symmplan.torch_private.table import require

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from typing_extensions import Self


__all__ = ["DEFAULT_TIMEOUT", "Arena", "realize"]

#: Seconds that ranks wait for each other unless told otherwise.
DEFAULT_TIMEOUT = 300.0


class Arena:
    """The memory of a plan. A context manager: leaving it releases everything.

    Attributes:
        plan: What it realizes.
        memory: Name of the backend.
        segments: ``{name: Segment}`` in the plan's order.
        rendezvous: How many (segment, group) pairs were rendezvoused.
        timeout: Seconds that a barrier may take.
        user: What plans in it, for people; empty if nothing does.
        tenants: What has leased it, for people: its user, and the users of its parts.
        parent: The arena whose segments its own are parts of; None if it has its own.
        released: Whether `release` ran.
        races: The race detector; None unless it was asked for and is possible.
        number: Its number in this process; ``numbered`` if it is equal on all of its ranks.
    """

    def __init__(
        self,
        plan: Plan,
        memory: str,
        segments: dict[str, Segment],
        *,
        timeout: float,
        user: str = "",
        races: RaceDetector | None = None,
        parent: Arena | None = None,
        number: int | None = None,
    ) -> None:
        self.plan = plan
        self.memory = memory
        self.segments = segments
        self.timeout = timeout
        self.rendezvous = sum(len(spec.groups) for spec in plan.segments)
        self.user = user
        self.tenants = [user]
        self.parent = parent
        if parent is not None:
            parent.tenants.append(user)
        self.races = races
        # {segment: the storage of its tensors that the program has}
        self._leased: WeakValueDictionary[str, torch.UntypedStorage] = WeakValueDictionary()
        self.released = False
        self.numbered = number is not None
        self.number = PROCESS.number_arena() if number is None else number
        self.know()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = ", released" if self.released else ""
        return (
            f"<Arena {self.memory}: {len(self.segments)} segments, "
            f"{self.segment_bytes} bytes{state}>"
        )

    def know(self) -> None:
        """Register with this process, which gives the memory back once nothing refers to it."""
        PROCESS.arenas[self.number] = self
        self._drop = at_drop(self, copy.copy(self).dropped)

    def dropped(self) -> None:
        """Take the place of an equal arena that was dropped, and end its use."""
        self.know()
        segments = self.segments.values()
        if any(s.health.reason and device_of(s.tensor.device).is_accelerator for s in segments):
            PROCESS.kept.append(self)  # a kernel may wait there for a peer, for ever
            return
        self.tenants.clear()
        self.give_back()

    @property
    def segment_bytes(self) -> int:
        """Bytes of all segments on this rank."""
        return sum(segment.nbytes for segment in self.segments.values())

    @property
    def frees(self) -> bool:
        """Whether a release gives the memory back, on each rank by itself, if only to a parent."""
        segments = self.segments.values()
        return all(segment.parent is not None or segment.backend.frees for segment in segments)

    @property
    def frees_together(self) -> bool:
        """Whether a release gives the memory back once all ranks take back what is registered."""
        segments = self.segments.values()
        return all(s.parent is not None or s.backend.frees_together for s in segments)

    @property
    def timed(self) -> bool:
        """Whether other programs may use its bytes while its own does not run."""
        return self.parent is not None

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        shape: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """A view of a placement. It keeps the arena, as do all tensors on its storage.

        Args:
            name: Name of the buffer in the plan.
            dtype: Element type; uint8 if None.
            shape: Shape in elements; one dimension over the whole placement if None.

        Raises:
            ReleasedError: The arena was released.
            RunError: The plan has no such buffer, it is too small for that shape, or
                ``dtype`` is no type.

        Collective: no.
        """
        if self.released:
            raise ReleasedError(
                f"buffer {name!r} was asked for after the arena's release",
                expected="an arena that still has its segments",
                got="one whose memory is given back",
                fix="keep the arena until nothing uses its tensors, or realize the plan again",
                buffer=name,
            )
        placement = placement_of(self.plan, name)
        whole = self.segments[placement.segment].tensor
        bytes_ = lease_again(whole, self._leased, placement.segment, self._end_of_leases)
        return view_of(bytes_, placement, name, dtype, shape)

    def _end_of_leases(self) -> None:
        """What a storage of tensors holds, and this arena with it."""

    @own_work
    def join(self, more: Mapping[str, Mapping[str, Any]]) -> int:
        """Register segments with further groups: the same ranks over other communicators.

        Args:
            more: ``{segment: {name of a group: process group}}``. Groups that a segment has met
                already cost nothing.

        Returns:
            How many rendezvous were made.

        Raises:
            BackendError: A segment cannot be registered; raised on every rank of the group, and
                none of them has met any group of the call.
            PeerTimeoutError, PeerLostError: As `realize`.

        Collective: yes, over those groups.
        """
        new = [
            (self.segments[segment], name, group)
            for segment, groups in more.items()
            for name, group in groups.items()
            if name not in (met := self.segments[segment].rendezvous)
            or met[name].group.process_group is not group
        ]
        if not new:
            return 0
        for segment, _, group in new:
            segment.require_never_failed(group)
        named = {name: group for _, name, group in new}
        members = resolve_groups(named, named)
        exchange = Exchange(members, self.timeout)
        begun = False
        try:
            device = new[0][0].tensor.device
            require_left(device)
            exchange.round("joining", b"")
            begun = True
            with counting("communicators", device):  # a first window takes more bytes of each
                for segment, name, _ in new:
                    segment.backend.rendezvous(segment, members[name], exchange)
            exchange.round("joined", b"")
            for segment, _, _ in new:
                segment.backend.settle()
            exchange.finish()
        except BaseException as error:
            exchange.fail(error)
            for segment, name, group in new:  # some rank has not met them
                segment.forget(name, group if begun else None)
            raise
        self.rendezvous += len(new)
        return len(new)

    @own_work
    def release(self) -> None:
        """Release all segments. Idempotent. An arena that is dropped releases them, too.

        Tensors that still view a segment keep its memory alive, but symmplan's ops refuse them.

        Collective: no.
        """
        if self.released:
            return
        self.released = True
        self._drop.detach()
        if self.races is not None:
            self.races.end()
        note_released(self.number, self.memory, self.segments.values())
        for segment in reversed(self.segments.values()):
            segment.release()
        if self.parent is not None:
            self.parent.give_back(self.user)

    @own_work
    def give_back(self, tenant: str | None = None, *, together: bool = False) -> None:
        """End a tenant's use. Idempotent.

        All work of this rank in the tenant's bytes must be done. The next tenant meets the peers
        before it uses them.

        Args:
            tenant: Its name, for people; by default the one for which the arena was made. The arena
                is released with its last tenant.
            together: Whether all ranks do so, and take back then what is registered: it is not kept
                for a later plan if that gives its memory back.

        Collective: no.
        """
        who = self.user if tenant is None else tenant
        if who in self.tenants:
            self.tenants.remove(who)
        if self.tenants or self.released:
            return
        segments = self.segments.values()
        spoilt = any(self._leased.values()) or any(
            s.held() or s.health.reason is not None or s.unmet for s in segments
        )
        frees = self.frees_together if together else self.frees
        if not segments or frees or spoilt or not self.numbered:
            self.release()
        else:
            PROCESS.cache[self.number] = self


@own_work
def realize(
    plan: Plan,
    *,
    memory: str = "auto",
    device: torch.device | str = "cpu",
    groups: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    temporary: bool = False,
    debug: bool = False,
    user: str = "",
) -> Arena:
    """Agree on ``plan`` over all its groups, then allocate and rendezvous its segments.

    Each segment is rendezvoused once with each of its groups, in the plan's order. If any rank
    fails, every rank of its groups gets an error and nothing stays allocated. A plan without
    segments is agreed on and needs no backend.

    Args:
        plan: What to realize.
        memory: Name of a memory backend, see `symmplan.memory.BACKENDS`.
        device: Where the segments lie.
        groups: ``{name in the plan: process group}`` for names that torch does not know. Groups
            that this rank's plan does not use take part in the agreement all the same.
        timeout: Seconds that each wait for the peers may take, here and in later barriers.
        temporary: The segments will be released before the process ends, and only collectives of
            process groups will use them: no peer views, no ``torch.ops.symm_mem``. NCCL's memory is
            freed then; otherwise it is kept. Equal on all ranks.
        debug: Look for races on shared memory: see `RaceError`. Equal on all ranks.
        user: The name that `symmplan.segments` shows.

    Raises:
        AgreementError: The ranks' plans differ; raised on every rank of the group.
        OptionError: ``plan`` is no plan.
        BackendError: The backend does not fit device, groups or machine.
        OutOfSharedMemoryError: A segment does not fit into the machine's memory.
        PeerTimeoutError: Ranks did not come within the timeout.
        PeerLostError: A rank ended.
        MissingSeamError: This torch lacks a name that agreements need.

    Collective: yes, over every group of the plan and of ``groups``.
    """
    import torch

    from symmplan.planner.order import rendezvous_order

    if not isinstance(plan, Plan):
        raise OptionError(
            f"plan is {plan!r}",
            expected="a symmplan.Plan",
            got=type(plan).__name__,
            fix="pass the result of symmplan.plan(problem)",
        )
    require("segments")
    device = torch.device(device)
    used = [group for spec in plan.segments for group in spec.groups]
    members = resolve_groups([*used, *(groups or ())], groups)
    exchange = Exchange(members, timeout)
    health = Health()
    segments: dict[str, Segment] = {}
    races = None
    try:
        backend = None
        if plan.segments:
            backend = resolve_backend(memory, device, members, temporary=temporary)
        memory = "local" if backend is None else backend.name
        if debug and isinstance(backend, ShmBackend) and has_process_groups():
            races = backend.races = RaceDetector(*world())
        compare_notes(plan, exchange, memory=memory)
        with counting("rendezvous", device):
            for spec in plan.segments:
                assert backend is not None
                met = [members[group] for group in spec.groups]
                segments[spec.name] = Segment(
                    spec,
                    backend,
                    # Not named: errors hold this frame.
                    *backend.allocate(spec, device, met, health),
                    timeout=timeout,
                    health=health,
                )
            exchange.round("allocated", b"")
            for name, group in rendezvous_order(plan):
                segment = segments[name]
                segment.backend.rendezvous(segment, members[group], exchange)
        number = PROCESS.number_arena()
        said = exchange.round("ready", b"%d" % number)
        if backend is not None:
            backend.settle()
        exchange.finish()
    except BaseException as error:
        exchange.fail(error)
        if races is not None:
            races.end()
        for segment in segments.values():
            segment.release()
        raise
    if races is not None:
        races.follow(plan.placements)
        races.begin()
    alike = all(text == b"%d" % number for texts in said.values() for text in texts)
    return Arena(
        plan,
        memory,
        segments,
        timeout=timeout,
        user=user,
        races=races,
        number=number if alike else None,
    )
