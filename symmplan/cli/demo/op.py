"""The demo's own op: declared with `symmplan.symm_args`, it reads its peers' memory by itself.

The same op runs in a model that is not compiled with symmplan: its argument lies in ordinary memory
then, and it falls back on a collective of torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

import symmplan

__all__ = ["peer_max"]


# handshake: nobody reads a peer before the barrier below, so before every rank has written its x.
# It has no barrier behind the reads (release is left out): the plan sees to it that nobody writes
# over x before all ranks have read it, for which the entry of a later collective is enough.
@symmplan.symm_args("x", group="group_name", align=64, handshake=True)
@torch.library.custom_op("symmplan_demo::peer_max", mutates_args=())
def peer_max(x: Tensor, group_name: str) -> Tensor:
    """The elementwise maximum of ``x`` over the ranks of a group.

    Collective: yes.
    """
    try:
        placed = symmplan.handle(x, group_name)
    except symmplan.errors.RunError:  # not placed: this is the model without symmplan
        top = torch.ops._c10d_functional.all_reduce(x, "max", group_name)
        return torch.ops._c10d_functional.wait_tensor(top)  # type: ignore[no-any-return]
    placed.barrier()
    top = placed.peer(0).clone()
    for rank in range(1, placed.world_size):
        torch.maximum(top, placed.peer(rank), out=top)
    return top


@peer_max.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    del group_name
    return torch.empty_like(x, memory_format=torch.contiguous_format)
