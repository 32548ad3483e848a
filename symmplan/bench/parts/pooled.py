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

__all__ = ["PooledAllGather", "install", "pool_bytes"]


def pool_bytes(device: torch.device) -> int:
    """Bytes of all blocks of torch's pool, in use or not."""
    return sum(int(block["total_size"]) for block in symm_mem.pool(device).snapshot())


class PooledAllGather:
    """An FSDP2 all-gather whose output comes from torch's symmetric pool.

    Args:
        plain: FSDP2's own all-gather.
    """

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor in a block of its own."""
        with torch.cuda.use_mem_pool(symm_mem.pool(device)):
            return torch.empty(tuple(size), dtype=dtype, device=device)

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
        symm_mem.rendezvous(output_tensor, c10d.group_name(group))
        return self._plain(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
        )


def install(modules: Sequence[Any]) -> str:
    """Let FSDP modules gather in torch's pool, by FSDP2's own method where it has one.

    Args:
        modules: Before their first step.

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
            module.set_custom_all_gather(PooledAllGather(gather))
    return "pool"
