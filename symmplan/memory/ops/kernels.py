"""All-reduces by kernels on one host's devices, in place."""

# ruff: noqa: A002 (`input` is what torch calls it)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from symmplan.memory.segment import in_segment, located

if TYPE_CHECKING:
    from symmplan.memory.ops.one_sided import Run

__all__ = ["kernel_all_reduce_"]


def kernel_all_reduce_(input: torch.Tensor, reduce_op: str, group_name: str) -> Run:
    """The sum of all ranks' inputs, the same bits on every rank.

    Small ones go through workspaces, see `symmplan.memory.meeting.workspace`, if all ranks have
    them; others are torch's two-shot kernel's.

    Args:
        input: In a segment, contiguous, whole words of 4 bytes; float32 or bfloat16.
        reduce_op: ``"sum"``.
        group_name: Name of the group.

    Raises:
        NotSymmetricError: ``input`` lies in no segment.
        RunError: The segment has not met that group.
    """
    by = "symmplan::kernel_all_reduce_: "
    segment, _ = located(input, "'input'", by=by, fix="let the plan place it")
    workspace = segment.meeting(group_name).workspace
    if workspace is not None and workspace.takes(input):
        return functools.partial(workspace.all_reduce, input)
    whole = in_segment(input)

    def run() -> None:
        torch.ops.symm_mem.two_shot_all_reduce_(whole, reduce_op, group_name)

    return run
