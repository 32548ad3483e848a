"""Collectives of process groups that torch has in no form that writes a given tensor.

As torch's functional collectives they return at once: ``wait_tensor`` of ``out`` ends them. Until
then neither ``input`` nor ``out`` may be written or freed.

Source: torch/csrc/distributed/c10d/Functional.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmplan import _compat as compat
from symmplan.errors import RunError
from symmplan.memory.ops import register_op

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["all_to_all_single_into"]


def all_to_all_single_into(
    input: torch.Tensor,  # noqa: A002 (`input` is what torch calls it)
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    group_name: str,
    *,
    out: torch.Tensor,
) -> None:
    """Equal parts of ``input`` to every rank; those of every rank into ``out``, in their order.

    Args:
        input: Contiguous; its first dimension is cut into parts.
        output_split_sizes: How many rows come from each rank: empty, or all equal.
        input_split_sizes: How many rows go to each: the same.
        group_name: Name of the process group.
        out: Contiguous, of the size of ``input``.

    Raises:
        RunError: Parts are of different sizes.

    Collective: yes; nobody is waited for.
    """
    if len({*output_split_sizes, *input_split_sizes}) > 1 or input.numel() != out.numel():
        raise RunError(
            "an all-to-all into a given tensor has parts of different sizes",
            expected="equal parts",
            got=f"{list(input_split_sizes)} sent, {list(output_split_sizes)} received",
            fix="use torch.ops._c10d_functional.all_to_all_single",
            op="symmplan::all_to_all_single_into",
        )
    register = compat.register_work()
    work = compat.start_all_to_all(out, input, compat.group_by_name(group_name))
    if register is None:
        work.wait()
    else:
        register(out, work)


register_op(
    "all_to_all_single_into(Tensor input, SymInt[] output_split_sizes, "
    "SymInt[] input_split_sizes, str group_name, *, Tensor(a!) out) -> ()",
    all_to_all_single_into,
)
