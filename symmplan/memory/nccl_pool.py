"""NCCL's windows in a pool of torch's caching allocator: symmetric memory that can be freed.

[Note: windows of a pool]
    A process group registers what lies in a ``torch.cuda.MemPool`` as windows, and takes the
    windows back when asked, which torch's own symmetric memory does not (see [Note: torch's
    allocators] in `symmplan.memory.torch_symm`). NCCL runs the same kernels and copy engines there.
    But torch does not know such memory as symmetric: it gives no handles of it, and
    ``torch.ops.symm_mem`` refuses it. So only temporary segments are made this way.

Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, registerMemPool and deregisterMemPool.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from symmplan import _compat
from symmplan.memory.torch_symm import TorchSymmBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from symmplan.memory.groups import Group

__all__ = ["NcclPoolBackend", "has_windows"]

#: ``{address: (pool, process groups that registered it)}`` of what is not yet released.
_POOLS: dict[int, tuple[Any, list[Any]]] = {}


def has_windows(groups: Mapping[str, Group]) -> bool:
    """Whether the communicators of all groups can register a pool's memory as windows."""
    return bool(groups) and all(
        g.process_group is not None
        and _compat.has_nccl_backend(g.process_group)
        and _compat.nccl_window_allocator(g.process_group) is not None
        for g in groups.values()
    )


class NcclPoolBackend(TorchSymmBackend):
    """See [Note: windows of a pool]. Used where `has_windows`."""

    def __init__(self, memory: str, device: torch.device, groups: Mapping[str, Group]) -> None:
        super().__init__(memory, device, groups)
        self.frees = True

    def _allocated(
        self, nbytes: int, device: torch.device, groups: Sequence[Group]
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        pool = torch.cuda.MemPool(_compat.nccl_window_allocator(groups[0].process_group))
        with torch.cuda.use_mem_pool(pool, device=device):
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        address = tensor.data_ptr()
        _POOLS[address] = (pool, [])

        def free() -> None:
            for group in _POOLS.pop(address)[1]:
                # A group that was destroyed has taken its windows along.
                with contextlib.suppress(RuntimeError):
                    _compat.deregister_nccl_pool(pool, group)

        return tensor, free

    def _registered(self, tensor: torch.Tensor, group: Group) -> None:
        pool, registered = _POOLS[tensor.data_ptr()]
        _compat.register_nccl_pool(pool, group.process_group)
        registered.append(group.process_group)
