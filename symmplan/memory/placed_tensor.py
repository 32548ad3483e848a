"""A tensor in a segment with the same tensor of its peers, for authors of one-sided ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from symmplan.errors import BackendError
from symmplan.memory.segment import located, used_after_release

if TYPE_CHECKING:
    import torch

    from symmplan.memory.segment import Rendezvous, Segment

__all__ = ["PlacedTensor", "handle"]


@frozen
class PlacedTensor:
    """A tensor that lies in a segment, and the same tensor on its peers.

    Attributes:
        tensor: The tensor.
        segment: The segment that holds it.
        offset: Offset in bytes of its first element inside the segment.
        rank: This process's rank in the group.
        world_size: How many ranks the group has.
    """

    tensor: torch.Tensor = field(repr=False)
    segment: Segment
    offset: int
    rank: int
    world_size: int
    _rendezvous: Rendezvous = field(repr=False, alias="rendezvous")

    def peer(self, rank: int) -> torch.Tensor:
        """The same tensor (type, shape, strides, offset) in the memory of ``rank``.

        Raises:
            BackendError: There is no such rank, or this process cannot address its memory.
        """
        peers = self._rendezvous.peers
        if self.segment.released:
            raise used_after_release(self.segment)
        if not 0 <= rank < len(peers):
            raise BackendError(
                f"no rank {rank} in group {self._rendezvous.group.name!r}",
                expected=f"0 to {len(peers) - 1}",
                got=rank,
                fix="pass a rank of the group, not of the world",
                group=self._rendezvous.group.name,
                rank=self.rank,
            )
        mine = self.tensor
        step = mine.element_size()
        view = peers[rank][self.offset % step :]
        view = view[: view.numel() // step * step].view(mine.dtype)
        return view.as_strided(
            mine.shape, mine.stride(), view.storage_offset() + self.offset // step
        )

    def barrier(self, timeout: float | None = None) -> None:
        """Wait for every rank of the group. See `Segment.barrier`.

        Collective: yes.
        """
        self.segment.barrier(self._rendezvous.group.name, timeout)


def handle(tensor: torch.Tensor, group: str | Any | None = None) -> PlacedTensor:
    """A placed tensor with its segment, offset and peers, for authors of one-sided ops.

    Args:
        tensor: Any tensor whose bytes lie in a segment of a live arena.
        group: Name of a group or torch's group; needed only if the segment has several.

    Raises:
        NotSymmetricError: It is no tensor, or lies in no live segment.
        SymmplanError: Its segment did not meet that group.
    """
    segment, offset = located(
        tensor,
        "a tensor",
        fix="call the op inside `with symmplan.eager()` or in a model compiled with "
        'backend="symmplan": they place what symmplan.symm_args declares',
    )
    rendezvous = segment.meeting(group)
    return PlacedTensor(
        tensor=tensor,
        segment=segment,
        offset=offset,
        rank=rendezvous.group.rank,
        world_size=rendezvous.group.size,
        rendezvous=rendezvous,
    )
