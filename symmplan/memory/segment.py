"""A segment: one symmetric allocation, this rank's bytes of it, and the peers' bytes.

[Note: live segments]
    Ops get plain tensors; whether one is symmetric is decided by where its bytes lie. All live
    segments of the process are kept in two tuples sorted by address, replaced as a whole, so that
    `locate` needs no lock: one bisection, about a microsecond. A segment stays live until its
    release, even if nobody refers to it any more: a compiled graph may hold only views.

[Note: parts]
    A segment may be a part of another one, its *parent*: see `symmplan.runtime.tenants`. Other
    programs use its bytes while its own program does not run, so an address does not tell whose
    tensor it is. It has the parent's meetings, health and leases, and `locate` does not find it.

[Note: forked processes]
    A process that is forked from a rank inherits the rank's objects and memory, including memory
    that the rank shares with its peers. Anything that it did with these, even at its end, would
    count as done by the rank: a release would end the arena, and a barrier would count as the
    rank's. So a forked process only drops segments. It writes, frees and tells nothing, and a
    meeting with peers is an error there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from symmplan.coordination.groups import Group, group_key, listed
from symmplan.coordination.world import address_of
from symmplan.errors import BackendError, NotSymmetricError, ReleasedError, RunError
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from symmplan.memory.health import Health
    from symmplan.model import SegmentSpec

    #: What a memory backend gives: bytes, and what gives them back beyond dropping them.
    Allocation: TypeAlias = tuple[torch.Tensor, Callable[[], None] | None]

__all__ = ["Rendezvous", "Segment", "locate", "located", "meetings", "used_after_release"]


class Rendezvous:
    """The one-time association of a segment with a group. This class serves a group of one rank.

    Attributes:
        memory: Name of the memory backend.
        group: The group.
        near: The ranks on this rank's host, in the order of the group.
        place: The index of this rank in ``near``.
        counterparts: Connections with the other hosts, if the group is on several hosts; None
            otherwise.
        workspace: Where kernels of all ranks exchange words, a
            `symmplan.memory.meeting.workspace.Workspace`; None if there is none.
        calls: What makes the calls that ran on it, see `symmplan.memory.ops.library`.
    """

    memory = "local"
    counterparts: Any = None
    workspace: Any = None

    def __init__(
        self, group: Group, peers: tuple[torch.Tensor, ...], near: Sequence[int] = ()
    ) -> None:
        self.group = group
        self.near = tuple(near or range(group.size))
        self.place = self.near.index(group.rank)
        self.calls: dict[Any, Callable[..., Any]] = {}
        self._peers = peers
        self._given: list[int] = []

    def __repr__(self) -> str:
        return f"<Rendezvous with group {self.group.name!r} of {self.group.size} ranks>"

    @property
    def peers(self) -> tuple[torch.Tensor, ...]:
        """Each rank's bytes of the segment, also this one's, as one-dimensional uint8.

        Raises:
            BackendError: This process cannot address a peer's memory.
        """
        if self.counterparts is not None:
            raise BackendError(
                f"memory={self.memory!r}: its ranks are on several hosts; none reaches the "
                "bytes of all others",
                expected="a group within one host",
                got=f"rank {listed(self.near)} on this host",
                fix="use groups within one host for ops that read or write their peers' memory",
                **self.group.here,
            )
        return self.near_peers

    @property
    def near_peers(self) -> tuple[torch.Tensor, ...]:
        """The bytes of each rank of this host, if the group is on several; else of all ranks."""
        return self._peers

    @property
    def levels(self) -> Any:
        """Itself if the group is on several hosts, else None."""
        return None if self.counterparts is None else self

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every rank of the group is here.

        Raises:
            PeerTimeoutError: Ranks did not arrive; ``missing`` names them.
            PeerLostError: A rank's process ended.

        Collective: yes.
        """

    def enter(self, call: bytes, free: Sequence[int] = (), site: str = "") -> None:  # noqa: ARG002
        """Like `barrier`, and compare ``call`` with what the peers say that they run.

        ``site`` names the module that calls, for the error.
        """
        self._given = list(free)

    def refuse(self, call: bytes) -> None:
        """Make the peers' `enter` fail, because this rank's call is wrong. Does not wait."""

    def free_words(self) -> list[list[int]]:
        """The words that every rank passed as ``free`` in the last `enter`."""
        return [self._given]

    def leave(self) -> None:
        """The barrier that ends what `enter` began."""
        self.barrier()

    def tell(self, progress: Sequence[int]) -> None:
        """Say how far this rank's program is, in four numbers, where peers see it at no cost."""

    def told(self) -> list[tuple[int, ...]]:
        """The numbers that each rank told last. Each is at least as new as those after it.

        Empty if ranks cannot tell here; zeros for a rank on another host.
        """
        return []

    def most_told(self, which: int) -> int:  # noqa: ARG002 (there are none)
        """The largest that any rank said last of one of the numbers; 0 where `told` is empty."""
        return 0

    def watch(self, look: Callable[[], None]) -> None:
        """Call ``look`` now and then while a barrier waits; what it raises ends the wait."""

    def unwatch(self, look: Callable[[], None]) -> None:
        """Undo one `watch` of ``look``; no error if there was none."""

    def release(self) -> None:
        """Let go of the peers' memory."""
        self._peers, self.workspace = (), None
        self.calls.clear()

    def forked(self) -> None:
        """Called in a forked child, which takes no part in what the rank does with its peers."""


class Segment:
    """One symmetric allocation.

    Attributes:
        spec: What was asked for.
        backend: The `symmplan.memory.backends.Backend` that allocated it, of a part its parent.
        timeout: Seconds that a barrier may take unless it says otherwise.
        health: Shared by the segments of an arena.
        address: Where this rank's bytes begin; 0 in a simulation.
        nbytes: Its size.
        parent: The segment whose bytes it has a part of; None if all are its own.
        begin: Where it begins there, in bytes.
        rendezvous: ``{group name: Rendezvous}``, under the plan's and under torch's name.
        leases: ``(begin, end, lease)`` in bytes of the parent; see `symmplan.runtime.leases`.
        unmet: Process groups with which some rank could not register it, or its parent. Ranks that
            could would not do it again with those that try again.
    """

    def __init__(
        self,
        spec: SegmentSpec,
        backend: Any,
        tensor: torch.Tensor,
        on_release: Callable[[], None] | None,
        *,
        timeout: float,
        health: Health,
        parent: Segment | None = None,
        begin: int = 0,
    ) -> None:
        self.spec = spec
        self.backend = backend
        self.timeout = timeout
        self.health = health
        self.address: int = address_of(tensor)
        self.nbytes: int = spec.nbytes
        self.parent = parent
        self.begin = begin
        self.rendezvous: dict[str, Rendezvous] = {}
        if parent is not None:
            mine = {id(parent.rendezvous[group]) for group in spec.groups}
            self.rendezvous = {n: r for n, r in parent.rendezvous.items() if id(r) in mine}
        self.leases: list[Any] = [] if parent is None else parent.leases
        self.unmet: WeakSet[Any] = WeakSet() if parent is None else parent.unmet
        self._tensor: torch.Tensor | None = tensor
        self._on_release = on_release
        self._inherited = False
        if parent is None:
            PROCESS.segments.add(self)

    def __repr__(self) -> str:
        state = "" if self._tensor is not None else ", released"
        return f"<Segment {self.spec.name} {self.backend.name} {self.nbytes} bytes{state}>"

    @property
    def released(self) -> bool:
        """Whether `release` ran."""
        return self._tensor is None

    @property
    def allocation(self) -> torch.Tensor:
        """The bytes that were allocated, of which it may have but a part."""
        return self.tensor if self.parent is None else self.parent.tensor

    @property
    def tensor(self) -> torch.Tensor:
        """This rank's bytes as one-dimensional uint8; its storage is exactly the segment.

        Raises:
            ReleasedError: The segment was released.
        """
        if self._tensor is None:
            raise used_after_release(self)
        return self._tensor

    def add_rendezvous(self, rendezvous: Rendezvous) -> None:
        """Remember that the segment met a group."""
        self.rendezvous[rendezvous.group.name] = rendezvous
        self.rendezvous[rendezvous.group.torch_name] = rendezvous

    def forget(self, group: str, unmet: Any | None = None) -> None:
        """Undo `add_rendezvous` for a group; no error if there was none.

        Args:
            group: Its name.
            unmet: The process group, if some rank has failed to register the segment with it.
        """
        if unmet is not None:
            self.unmet.add(unmet)
        gone = self.rendezvous.get(group)
        if gone is not None:
            gone.calls.clear()
        self.rendezvous = {n: met for n, met in self.rendezvous.items() if met is not gone}

    def require_never_failed(self, group: Any) -> None:
        """Refuse a process group with which a registration has failed; see `unmet`."""
        if group in self.unmet:
            raise BackendError(
                f"segment {self.spec.name!r} could not be registered with a group before",
                fix="release the arena, and realize the plan again",
                segment=self.spec.name,
            )

    def meeting(self, group: str | Any | None = None) -> Rendezvous:
        """The rendezvous with ``group``, a name (the plan's or torch's) or torch's group.

        If it is None, the only one.

        Raises:
            ReleasedError: The segment was released.
            RunError: The segment was not rendezvoused with that group, or a barrier failed before.
        """
        if self._tensor is None:
            raise used_after_release(self)
        if self._inherited:
            for met in self.rendezvous.values():
                met.group.require_own()
        if self.health.reason is not None:
            raise RunError(
                f"segment {self.spec.name!r} is unusable since a call failed on this arena: "
                f"{self.health.reason}",
                fix="release the arena and realize the plan again once all ranks are well",
                segment=self.spec.name,
            )
        if group is None:
            found = self._meetings()
            if len(found) == 1:
                return found[0]
        elif (key := group if isinstance(group, str) else group_key(group)) in self.rendezvous:
            return self.rendezvous[key]
        wanted = None if group is None else group_key(group)
        raise RunError(
            f"segment {self.spec.name!r} is not rendezvoused with group {wanted!r}",
            expected=f"one of {sorted(self.rendezvous)}",
            got=repr(wanted),
            fix="name a group of this segment",
            segment=self.spec.name,
        )

    def _meetings(self) -> list[Rendezvous]:
        return list(dict.fromkeys(self.rendezvous.values()))  # each stands under two names

    def held(self) -> list[tuple[int, int]]:
        """Which bytes are leased, of it or of its parts: from where to where."""
        return [(begin, end) for begin, end, lease in self.leases if lease.held]

    def peers(self, group: str | Any | None = None) -> tuple[torch.Tensor, ...]:
        """Each rank's bytes of the segment, in the order of the group's ranks; see `meeting`."""
        return self.meeting(group).peers

    def barrier(self, group: str | Any | None = None, timeout: float | None = None) -> None:
        """Wait until every rank of ``group`` is here; what they wrote before is then visible.

        ``timeout`` is in seconds, the arena's by default. See `Rendezvous.barrier` and `meeting`.

        Collective: yes.
        """
        self.meeting(group).barrier(timeout)

    def release(self) -> None:
        """Give the memory back. Idempotent. Tensors that still view it keep it alive, no more.

        Collective: no. Peers that still use the segment keep their own view of it.
        """
        if self._tensor is None:
            return
        if self.parent is not None:
            self._tensor = None
            self.rendezvous.clear()
            return
        PROCESS.segments.remove(self)
        self.leases.clear()
        if self._inherited:
            PROCESS.kept.append((self._tensor, dict(self.rendezvous)))
            self._tensor = None
            self.rendezvous.clear()
            return
        on_release = self._on_release  # what it holds must live until the tensor is gone
        if on_release is not None:  # first: it may have to wait for work on the memory
            on_release()
            self._on_release = None
        self._tensor = None
        for rendezvous in self._meetings():
            rendezvous.release()
        self.rendezvous.clear()

    def forked(self) -> None:
        """Let go of what belongs to the rank from which this process was forked."""
        # See [Note: forked processes].
        if self.rendezvous and all(r.group.size == 1 for r in self.rendezvous.values()):
            return  # nobody else has it
        self._inherited = True
        self._on_release = None
        self.health.on_break.clear()
        for rendezvous in self.rendezvous.values():
            rendezvous.forked()


def meetings() -> list[Rendezvous]:
    """What live segments of this process, and parts of them, have met. Collective: no."""
    arenas = [arena for arena in list(PROCESS.arenas.values()) if not arena.released]
    parts = (segment for arena in arenas for segment in arena.segments.values())
    segments = dict.fromkeys((*PROCESS.segments, *parts))
    return [met for segment in segments for met in segment.rendezvous.values()]


def locate(tensor: torch.Tensor) -> tuple[Segment, int] | None:
    """The live segment that holds the first byte of ``tensor``, and that byte's offset in it."""
    address = tensor.data_ptr()
    if not address:  # an empty tensor has no address of its own
        address = tensor.untyped_storage().data_ptr()
        address += int(tensor.storage_offset()) * tensor.element_size()
    return PROCESS.segments.find(address)


def in_segment(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same bytes with the storage of its segment; itself if it lies in none."""
    found = locate(tensor)
    if found is None:
        return tensor
    own = found[0].tensor
    begin = (own.storage_offset() + found[1]) // tensor.element_size()
    given = own.untyped_storage(), begin, tensor.shape, tensor.stride()
    return tensor.new_empty(0).set_(*given)


def located(
    tensor: torch.Tensor, name: str, *, fix: str, by: str = "", **fields: Any
) -> tuple[Segment, int]:
    """The live segment of a tensor and its offset; errors call it ``name``, with ``by`` before.

    Raises:
        NotSymmetricError: It lies in no live segment, or is no tensor.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise NotSymmetricError(
            f"{by}{name} is a {type(tensor).__name__}",
            expected="a tensor in symmetric memory",
            got=repr(tensor),
            fix="pass the tensor",
            **fields,
        )
    found = locate(tensor)
    if found is None:
        raise NotSymmetricError(
            f"{by}{name} of shape {tuple(tensor.shape)} lies in no live segment",
            expected=f"{name} in symmetric memory",
            got=f"ordinary memory at {tensor.data_ptr():#x}",
            fix=fix,
            **fields,
        )
    return found


def used_after_release(segment: Segment) -> ReleasedError:
    """The error of a segment whose memory is given back."""
    return ReleasedError(
        f"segment {segment.spec.name!r} of {segment.nbytes} bytes was used after its release",
        expected="an arena, handle or backend that still has its segments",
        got="one whose memory is given back",
        fix="keep the arena until nothing uses its tensors, or realize the plan again",
        segment=segment.spec.name,
    )
