"""Tensors that a program makes only for a collective to fill, in placements.

[Note: tensors that move]
    A program makes a tensor by ``torch.empty``, or ``torch.zeros``, and a collective overwrites all
    of it before anybody has used it. If that was so on all ranks in the recorded iteration, the
    program's own tensor becomes one of the placement right before the collective, and nothing is
    copied. In the plan it begins there.

    Other tensors on its storage, and arrays of NumPy, would not see what the collective brings. The
    recorded iteration had none; if a later one has, the tensor gets its own storage back behind the
    collective, with the values. Who has taken an address by ``data_ptr()`` before the collective
    cannot be seen.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from symmplan.capture.apart import storage_key
from symmplan.torch_private.dispatch import has_own_bytes, storage_use_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmplan.integrate.eager.schedule import Event
    from symmplan.runtime.leases import StorageLease

__all__ = ["and_back", "move"]

_HERE = contextlib.nullcontext()


def move(event: Event, lease: StorageLease, tensor: torch.Tensor) -> None:
    """Let a tensor that nobody has used be the placement. See [Note: tensors that move].

    Args:
        event: The call that overwrites it.
        lease: Of the placement.
        tensor: The program's.
    """
    if event.declined:
        return
    alone = storage_use_count(storage_key(tensor)) <= _alone() and has_own_bytes(tensor)
    with _changing(tensor):
        if not (alone and tensor.is_contiguous()):
            event.shared.append((tensor, tensor.detach()))
        _lie_as(tensor, lease.tensor)


def and_back(event: Event, run: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """The call, and then the way back of those that share their storage.

    Args:
        event: The call.
        run: What makes it.
    """

    def made(args: Any, kwargs: Any, keys: Any) -> Any:
        result = run(args, kwargs, keys)
        if event.shared:
            boxed = result[1] if isinstance(result, (list, tuple)) else result
            work = torch.distributed.Work.unbox(boxed)
            if work is not None:  # NCCL has none for what runs on the current stream
                work.wait()
            while event.shared:
                _go_back(*event.shared.pop())
        return result

    return made


def _go_back(tensor: torch.Tensor, own: torch.Tensor) -> None:
    """Let a tensor be on its own storage again, with the values that it has now."""
    with _changing(tensor):
        own.copy_(tensor)
        _lie_as(tensor, own)


def _lie_as(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let a tensor be on the storage of another one, where and as large as that is."""
    tensor.set_(other.untyped_storage(), other.storage_offset(), other.shape, other.stride())


def _changing(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Where torch lets a tensor be changed, also one that was made in inference mode."""
    outside = tensor.is_inference() and not torch.is_inference_mode_enabled()
    return torch.inference_mode() if outside else _HERE


@functools.cache
def _alone() -> int:
    """How many users a storage has with one tensor on it, as they are counted here."""
    tensor = torch.empty(1)
    return storage_use_count(storage_key(tensor))
