"""A tensor in a segment with the same tensor of its peers, for authors of one-sided ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from symmplan.errors import BackendError, RunError
from symmplan.memory.segment import located, used_after_release

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from symmplan.memory.segment import Rendezvous, Segment
    from symmplan.model import Placement, Plan

__all__ = ["PlacedTensor", "handle", "placement_of", "view_of"]


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
        """This tensor (type, shape, strides, offset) in the memory of ``rank``.

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


def placement_of(plan: Plan, name: str) -> Placement:
    """The placement of a buffer; a RunError if it has none."""
    placement = plan.placements.get(name)
    if placement is None:
        raise RunError(
            f"the plan places no buffer {name!r}",
            expected=f"one of {sorted(plan.placements)}",
            got=repr(name),
            fix="ask for a buffer of arena.plan.placements",
            buffer=name,
        )
    return placement


def view_of(
    segment: torch.Tensor,
    placement: Placement,
    name: str,
    dtype: torch.dtype | None,
    shape: Sequence[int] | None,
) -> torch.Tensor:
    """The bytes of a placement as a tensor.

    Args:
        segment: The bytes of the placement's segment.
        placement: Where the bytes are.
        name: Name of the buffer, for messages.
        dtype: Element type; uint8 if None.
        shape: Shape in elements; one dimension over the whole placement if None.

    Raises:
        RunError: The placement is too small for that shape, or ``dtype`` is no type.
    """
    import torch

    flat = segment[placement.offset : placement.end]
    wanted = torch.uint8 if dtype is None else dtype
    if not isinstance(wanted, torch.dtype):
        raise RunError(
            f"buffer {name!r} was asked for in the type {wanted!r}",
            expected="a torch.dtype",
            got=repr(wanted),
            fix="pass a dtype, such as torch.float32",
            buffer=name,
        )
    count = placement.nbytes // wanted.itemsize
    if shape is not None:
        count = 1
        for extent in shape:
            count *= extent
    nbytes = count * wanted.itemsize
    if nbytes > placement.nbytes or placement.offset % wanted.itemsize:
        raise RunError(
            f"buffer {name!r} in segment {placement.segment!r} at bytes "
            f"[{placement.offset}, {placement.end}) does not fit {wanted} "
            f"{'' if shape is None else tuple(shape)}",
            expected=f"at most {placement.nbytes} bytes, offset a multiple of {wanted.itemsize}",
            got=f"{nbytes} bytes",
            fix="ask for fewer elements, or plan a larger buffer with a larger align",
            buffer=name,
            segment=placement.segment,
        )
    view = flat[:nbytes].view(wanted)
    return view if shape is None else view.view(tuple(shape))
