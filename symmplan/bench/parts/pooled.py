"""FSDP2's own symmetric memory, for a comparison; also for a torch that lacks it.

Every buffer comes from torch's pool for symmetric memory, which gives whole blocks and never splits
them, and every call rendezvouses; a block that the group has not met is registered then, in the
middle of the step. Only all-gathers use it, as in FSDP2 unless reductions are plain sums: symmetric
reduce-scatters are slower without multicast, and their outputs, the sharded gradients, would stay
in the pool until ``zero_grad``.

Source: SymmMemAllocMixin and SymmMemAllGather in torch/distributed/fsdp/_fully_shard/
_fsdp_collectives.py (torch 2.13).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmplan.torch_private import c10d, fsdp2, symm_mem

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PooledAllGather", "SymmetricPool", "install"]


class SymmetricPool:
    """Torch's pool of symmetric memory for a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in a block of its own."""
        with torch.cuda.use_mem_pool(symm_mem.pool(self._device)):
            return torch.empty(tuple(size), dtype=dtype, device=self._device)

    def rendezvous(self, tensor: torch.Tensor, group: str) -> None:
        """Register the tensor's block with a group, if that was not done yet.

        Collective: yes.
        """
        symm_mem.rendezvous(tensor, group)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, in use or not."""
        blocks = symm_mem.pool(self._device).snapshot()
        return sum(int(block["total_size"]) for block in blocks)


class PooledAllGather:
    """An FSDP2 all-gather whose output comes from a pool.

    Args:
        pool: Torch's symmetric one.
        plain: FSDP2's own all-gather.
    """

    def __init__(self, pool: Any, plain: Any) -> None:
        self._pool = pool
        self._plain = plain

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """From the pool, on its device."""
        del device
        tensor: torch.Tensor = self._pool.empty(size, dtype)
        return tensor

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Rendezvous, then gather.

        Collective: yes.
        """
        self._pool.rendezvous(output_tensor, c10d.group_name(group))
        return self._plain(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
        )


def install(modules: Sequence[Any], pool: Any) -> str:
    """Let FSDP modules gather in torch's pool, by FSDP2's own method where it has one.

    Args:
        modules: Before their first step.
        pool: For a torch that lacks the method.

    Returns:
        How: ``"set_symm_mem_for_comm"`` or ``"pool"``.

    Collective: with FSDP2's own method, over the modules' groups.
    """
    methods = [getattr(module, "set_symm_mem_for_comm", None) for module in modules]
    if all(methods):
        for method in methods:
            method("NCCL")  # type: ignore[misc]
        return "set_symm_mem_for_comm"
    for module in modules:
        for group in fsdp2.param_groups(module):
            gather, _ = fsdp2.comms(group)
            module.set_custom_all_gather(PooledAllGather(pool, gather))
    return "pool"
