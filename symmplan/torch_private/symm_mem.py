"""Torch's own symmetric memory."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def backend_of(device: torch.device) -> str | None:
    """Which allocator torch's symmetric memory uses for ``device``; None if it has none."""
    from torch.distributed import _symmetric_memory as symm_mem

    return symm_mem.get_backend(device)


def set_backend(name: str) -> None:
    """Choose the allocator of torch's symmetric memory for the whole process.

    Raises:
        RuntimeError: This build has no such allocator, or another one is in use.
    """
    from torch.distributed import _symmetric_memory as symm_mem

    symm_mem.set_backend(name)  # type: ignore[arg-type]


def empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """An own allocation of ``nbytes`` bytes of symmetric memory.

    ``_symmetric_memory.empty`` would take it from a caching pool, from which ranks may be served
    different old blocks; this asks the allocator itself.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


def pool(device: torch.device) -> Any:
    """Torch's caching pool of symmetric memory."""
    from torch.distributed import _symmetric_memory as symm_mem

    return symm_mem.get_mem_pool(device)


def rendezvous(tensor: torch.Tensor, group: str) -> Any:
    """Torch's handle for ``tensor`` in ``group``. Collective."""
    from torch.distributed import _symmetric_memory as symm_mem

    return symm_mem.rendezvous(tensor, group)  # type: ignore[arg-type]


def has_nvshmem() -> bool:
    """Whether torch's symmetric memory can use NVSHMEM.

    Raises:
        ImportError: There is no symmetric memory at all.
    """
    import torch.distributed._symmetric_memory as symm_mem

    with contextlib.suppress(Exception):  # an old or odd build: then it is not available
        return bool(symm_mem.is_nvshmem_available())
    return False
