"""Collectives in two levels on devices, started on a stream of their own.

They are the ops of `symmplan.memory.ops.one_sided` of these names, in the manner of torch's
functional collectives: a call returns at once, and ``wait_tensor`` of ``out`` ends it. What the
program queues meanwhile runs beside it. Until then nobody may write or free ``out``, or an
``input`` that must be symmetric. Any other ``input`` has been read when the current stream goes on.
"""

# ruff: noqa: A002 (`input` is what torch calls it)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from symmplan.memory.ops.one_sided import all_gather_out, all_reduce_out, reduce_scatter_out
from symmplan.memory.streams import beside
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    import torch

    from symmplan.memory.ops.one_sided import Run

__all__ = ["all_gather_start", "all_reduce_start", "reduce_scatter_start"]


def all_gather_start(
    input: torch.Tensor, group_size: int, group_name: str, *, out: torch.Tensor
) -> Run:
    """Every rank's ``input``, concatenated along dimension 0, into every rank's ``out``."""
    run = all_gather_out(input, group_size, group_name, out=out)
    count, rank = input.numel(), c10d.group_by_name(group_name).rank()
    own = out.view(-1)[rank * count : (rank + 1) * count].view(input.shape)

    def start(tensor: torch.Tensor = input) -> Any:
        if tensor.data_ptr() != own.data_ptr():
            own.copy_(tensor)
        return beside(functools.partial(run, own), out.device, group_name, out)

    return start


def reduce_scatter_start(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: str, *, out: torch.Tensor
) -> Run:
    """This rank's part, along dimension 0, of the reduction of all ranks' inputs."""
    run = reduce_scatter_out(input, reduce_op, group_size, group_name, out=out)

    def start(tensor: torch.Tensor = out) -> Any:
        given = functools.partial(run, tensor)
        return beside(given, out.device, group_name, input, tensor)

    return start


def all_reduce_start(
    input: torch.Tensor, reduce_op: str, group_name: str, *, out: torch.Tensor
) -> Run:
    """The reduction of all ranks' inputs, the same bits on every rank."""
    run = all_reduce_out(input, reduce_op, group_name, out=out)
    return lambda: beside(run, out.device, group_name, input, out)
