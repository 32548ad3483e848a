"""What FSDP2's own symmetric memory does, for a torch that lacks it, to compare with.

Every buffer comes from torch's pool for symmetric memory, which gives whole blocks and never
splits them, and every call rendezvouses; a block that the group has not met is registered then, in
the middle of the step. All-gathers only: without multicast symmetric reduce-scatters are slower,
and their outputs, the sharded gradients, would stay in the pool until ``zero_grad``.

Source: SymmMemAllocMixin and SymmMemAllGather in torch/distributed/fsdp/_fully_shard/
_fsdp_collectives.py (torch 2.13).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmplan import _compat

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PooledAllGather"]


class PooledAllGather:
    """An FSDP2 all-gather whose output comes from torch's symmetric pool.

    Args:
        group: Over which it will run; NCCL.
        plain: FSDP2's own all-gather.
    """

    #: ``{address: bytes}`` of all blocks that the pool ever gave.
    blocks: dict[int, int] = {}  # noqa: RUF012 -- one pool per process

    def __init__(self, group: dist.ProcessGroup, plain: Any) -> None:
        self._group = group
        self._plain = plain
        _compat.set_symm_mem_backend("NCCL")
        dist.barrier(group=group)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """From the pool."""
        with torch.cuda.use_mem_pool(_compat.symm_mem_pool(device)):
            tensor = torch.empty(size, dtype=dtype, device=device)
        self.blocks[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
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
        _compat.symm_mem_rendezvous(output_tensor, _compat.group_name(group))
        return self._plain(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
        )
