"""How devices meet in a segment of torch's symmetric memory.

See [Note: torch's allocators] in `symmplan.memory.backends.torch_symm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmplan.coordination.own import own_work
from symmplan.errors import BackendError
from symmplan.memory.segment import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.coordination.groups import Group

__all__ = ["TorchRendezvous", "first_line"]

#: Bytes of a channel of the signal pad for each rank.
_CHANNEL = 4


class TorchRendezvous(Rendezvous):
    """Torch's handle of a segment in a group; the segment begins at byte ``begin`` of it.

    Args:
        group: The group.
        own: This rank's bytes.
        handle: Torch's, among the ranks of this host; None if it is not torch's symmetric memory.
        timeout: Seconds that a barrier of the handle may take.
        begin: Where the bytes begin in the allocation.
        by_collective: Whether a barrier is a one-element all-reduce: some allocators have handles
            without a barrier that orders peers' accesses.
        near: The ranks of this host, if the group is on several.

    Attributes:
        handle: What torch's own ops take; the same.
    """

    def __init__(
        self,
        group: Group,
        own: torch.Tensor,
        handle: Any,
        *,
        timeout: float,
        begin: int = 0,
        by_collective: bool = False,
        near: Sequence[int] = (),
    ) -> None:
        super().__init__(group, (), near)
        self._begin = begin
        self.handle = handle
        self._own: torch.Tensor | None = own
        self._timeout = timeout
        # Each block of a kernel has a channel, from the first on; the last is ours.
        channels = getattr(handle, "signal_pad_size", 0) // (_CHANNEL * group.size)
        self._channel = max(0, channels - 1)
        self._token: torch.Tensor | None = None
        if by_collective:
            self._token = torch.zeros(1, dtype=torch.int32, device=own.device)

    @property
    def near_peers(self) -> tuple[torch.Tensor, ...]:
        """Each rank's bytes, as addressed from this device.

        Raises:
            BackendError: This device cannot address a peer's memory (another host, no peer
                access, or an NCCL that is too old to hand out pointers).
        """
        own = self._own
        if not self._peers and own is not None:
            if self.handle is None:
                raise BackendError(
                    "temporary segments have no peer views",
                    fix="use collectives on the segment, or realize the plan without temporary=",
                    **self.group.here,
                )
            try:
                self._peers = tuple(
                    own
                    if place == self.place
                    else self.handle.get_buffer(place, (own.numel(),), torch.uint8, self._begin)
                    for place in range(len(self.near))
                )
            except (RuntimeError, IndexError) as error:
                raise BackendError(
                    f"this device cannot address the peers' memory: {first_line(error)}",
                    fix="use collectives on the segment instead of peer views, or a newer NCCL",
                    **self.group.here,
                ) from error
        return self._peers

    @own_work
    def barrier(self, timeout: float | None = None) -> None:
        """A barrier in the order of the current stream; the host does not wait.

        NCCL's own timeout (the process group's) applies to an all-reduce, not ``timeout``.
        """
        if self._token is not None:
            dist.all_reduce(self._token, group=self.group.process_group)
            return
        seconds = self._timeout if timeout is None else timeout
        self.handle.barrier(channel=self._channel, timeout_ms=int(seconds * 1000))

    def enter(self, call: bytes, free: Sequence[int] = (), site: str = "") -> None:
        """A barrier. Nothing is compared: that would need the host."""
        del call, site
        if free:
            raise BackendError(
                "this op exchanges sizes between hosts, which only memory='shm' can",
                fix="use torch.distributed's collective on the placement",
                **self.group.here,
            )
        self.barrier()

    def release(self) -> None:
        """Let go of the handle and of the peers' memory."""
        super().release()
        self.handle = None
        self._own = None


def first_line(error: BaseException) -> str:
    """An error's message, or what it is if it has none, in one line."""
    return (str(error) or repr(error)).splitlines()[0]
