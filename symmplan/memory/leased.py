"""Bytes of a segment as a storage of their own, so that the end of their use is noticed.

[Note: leased bytes]
    A program does not report that it is done with a tensor; it drops the last reference. Views of a
    segment share the segment's storage, so the end of that storage says nothing about one view. So
    bytes are leased as a storage of their own (through numpy's array interface, or CUDA's). Its
    owner's ``__del__`` runs when the last tensor on it is gone, in any thread.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from symmplan.coordination.world import at_end, current

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

__all__ = ["lease_again", "lease_out"]


class _Owner:
    """Owns a storage on somebody else's bytes; see [Note: leased bytes]."""

    def __init__(
        self, tensor: torch.Tensor, nbytes: int, on_drop: Callable[[], None], kept: list[Any]
    ) -> None:
        self._kept = kept
        self._on_drop = on_drop
        interface = {
            "data": (tensor.data_ptr(), False),
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }
        if tensor.is_cpu:
            self.__array_interface__ = interface
        else:
            self.__cuda_array_interface__ = interface

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then half of torch is gone, and nobody reuses the bytes
            self._on_drop()


def lease_out(
    tensor: torch.Tensor,
    on_drop: Callable[[], None] = lambda: None,
    kept: list[Any] | None = None,
) -> torch.Tensor:
    """A tensor on the bytes of another, with a storage of its own that reports its end.

    Args:
        tensor: Contiguous.
        on_drop: Called once, when nothing refers to the result's storage any more, in whatever
            thread that is. Must not raise.
        kept: What is kept alive as long as the result, and may change; the tensor if it is None.

    Returns:
        A tensor of the same type, shape and address.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        on_drop()
        return tensor
    if (world := current()) is not None:
        made = torch.empty_like(tensor)  # of no bytes, as the segment itself
        world.buffer(None, None, made)
        at_end(made, on_drop)
        return made
    owner: Any = _Owner(tensor, nbytes, on_drop, [tensor] if kept is None else kept)
    if tensor.is_cpu:
        import numpy as np

        flat = torch.from_numpy(np.asarray(owner))
    else:
        flat = torch.as_tensor(owner, device=tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape)


def lease_again(
    tensor: torch.Tensor,
    leased: MutableMapping[str, torch.UntypedStorage],
    name: str,
    on_drop: Callable[[], None],
) -> torch.Tensor:
    """A tensor as of `lease_out`; all of one name share a storage while some tensor has it.

    Args:
        tensor: One-dimensional uint8.
        leased: The storages, held weakly.
        name: Of the bytes.
        on_drop: As of `lease_out`, for a storage that is made now.
    """
    storage = leased.get(name)
    with torch.inference_mode(mode=False):
        if storage is not None:
            return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
        made = lease_out(tensor, on_drop)
    leased[name] = made.untyped_storage()
    return made
