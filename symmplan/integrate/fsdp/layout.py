"""How the unsharded parameters of an FSDP2 group lie in one placement, if they can."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from symmplan.capture.fsdp_recording import Key
from symmplan.coordination.world import on_device
from symmplan.memory.torch_symm import SPLIT_WORDS, is_whole_words
from symmplan.torch_private import fsdp2, fsdp2_in_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["NO_SEAM", "OTHERS", "Asked", "Gathered", "Layout", "layout_of"]

#: Why a group has no layout where torch has other methods.
NO_SEAM = "this torch's FSDP2 lacks what is replaced"
#: Why it has none where somebody else was first.
OTHERS = "methods of its class were replaced"

#: Alignment in bytes of a parameter in its placement, which is what kernels expect of torch's.
_ALIGN = 512


@frozen(eq=False)
class Gathered:
    """What FSDP2 keeps of a gather that was started and not yet waited for.

    Its attributes are those of FSDP2's own ``AllGatherResult`` that it reads elsewhere.
    """

    all_gather_event: Any = None
    all_gather_work: Any = None


@frozen(eq=False)
class Asked(Gathered):
    """The same of a gather that has to wait for room.

    FSDP2 forgets it where it forgets a gather that nobody waited for.

    Attributes:
        key: Which collective.
        streams: On which streams it is to run.
        shards: The shards as they were when FSDP2 asked.
        copied: What has happened when these are there; None on the CPU.
    """

    key: Key = field(kw_only=True)
    streams: tuple[Any, Any] = field(kw_only=True)
    shards: Sequence[torch.Tensor] = field(kw_only=True)
    copied: Any = field(kw_only=True)


@frozen
class Layout:
    """The parameters of one group, one behind the other.

    A parameter whose first dimension the ranks do not divide has shards of equal size all the same:
    FSDP2 pads the last ones. Gathered one behind the other, the padding comes to lie behind the
    parameter, which is all that a padded placement needs.

    Attributes:
        dtype: Of all of them.
        counts: Elements of this rank's shard of each, padded, equal on all ranks.
        offsets: Where each begins in the placement, in bytes.
        nbytes: Size of the placement.
        ranks: Ranks that hold a shard.
    """

    dtype: torch.dtype
    counts: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int
    ranks: int

    def key(self, site: str, *, backward: bool) -> Key:
        """The gather of this group, as its flat form is recorded."""
        count = sum(self.counts) * self.ranks
        return Key(site, "all_gather", count, str(self.dtype).removeprefix("torch."), backward)


def layout_of(group: Any) -> Layout | str:
    """The layout of a parameter group; or why it has none.

    Args:
        group: FSDP2's, after its lazy initialization.
    """
    parameters = list(group.fsdp_params)
    if not fsdp2.shards(group):  # others have no gathers, and raise if asked for a group
        return "its parameters are not sharded"
    if not parameters or not fsdp2_in_place.has_seam():
        return NO_SEAM
    if fsdp2_in_place.reshards_elsewhere(group):
        return "it reshards to another mesh after forward"
    ranks = fsdp2_in_place.group_of(group).size()
    if ranks < 2:
        return "its group has one rank"
    dtypes = {p.param_dtype or p.orig_dtype for p in parameters}
    if len(dtypes) > 1:
        return "its parameters have several dtypes"
    for p in parameters:
        reason = _reason(p, ranks)
        if reason:
            return reason
    counts = tuple(fsdp2_in_place.shard_of(p).numel() for p in parameters)
    dtype = dtypes.pop()
    if on_device(group.device) and not all(is_whole_words(n * dtype.itemsize) for n in counts):
        return SPLIT_WORDS
    offsets = []
    end = 0
    for count in counts:
        offsets.append(end)
        end += -(-count * ranks * dtype.itemsize // _ALIGN) * _ALIGN
    return Layout(dtype, counts, tuple(offsets), end, ranks)


def _reason(parameter: Any, ranks: int) -> str:
    if fsdp2_in_place.has_own_gather(parameter):
        return "a parameter has its own way to be gathered"
    if parameter.offload_to_cpu:
        return "its shards lie on the CPU"
    if parameter.fsdp_placement.dim != 0:
        return "a parameter is not sharded along its first dimension"
    if getattr(parameter, "is_spmd_types", False):
        return "a parameter has types of its own"
    if getattr(parameter, "keep_unsharded_storage", False):
        return "it keeps its unsharded storage"
    elements = fsdp2_in_place.shard_of(parameter).numel() * ranks
    if elements < max(1, math.prod(fsdp2_in_place.size_of(parameter))):
        return "a parameter has no elements"
    return ""
