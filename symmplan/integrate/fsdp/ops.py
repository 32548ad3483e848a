"""How FSDP2's collectives run on symmetric bytes: by the rows of `symmplan.place.algorithms`.

A row that names an op of symmplan's runs that op. Otherwise FSDP2 makes the process group's
collective itself. Copy engines run it over communicators of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmplan.coordination.own import own_work
from symmplan.integrate.fsdp.sums import sum_rows
from symmplan.memory import BACKENDS
from symmplan.memory.meeting.calls import in_two_levels
from symmplan.memory.ops.library import IMPLEMENTATIONS
from symmplan.memory.streams import off_default_stream
from symmplan.place.algorithms import Lowerings
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["exchanges", "factor_of", "gathers", "scatters"]


def gathers(
    memory: str,
    plain: Any,
    output: torch.Tensor,
    source: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    async_op: bool,
    site: str = "",
) -> Callable[[], Any]:
    """A function that gathers into the symmetric ``output``.

    Args:
        memory: Name of the memory backend of ``output``.
        plain: FSDP2's own all-gather, which takes any memory.
        output: Symmetric.
        source: This rank's part; may be the right part of ``output``.
        group: Over which it runs.
        async_op: Whether FSDP2 wants a work object; shared memory needs none.
        site: Name of the module, which must be the same on all ranks; shared memory compares it.
    """
    name = c10d.group_name(group)
    run = _one_sided(memory, "all_gather_into_tensor_out", output, name)
    if run is None:

        @own_work
        def act() -> Any:
            with off_default_stream(output.device):
                return plain(
                    output_tensor=output, input_tensor=source, group=group, async_op=async_op
                )

        return act
    return run(source, group.size(), name, out=output, what=site)


def scatters(
    memory: str,
    plain: Any,
    output: torch.Tensor,
    source: torch.Tensor,
    group: dist.ProcessGroup,
    op: Any,
    *,
    async_op: bool,
    site: str = "",
) -> Callable[[], Any] | None:
    """A function that reduces and scatters the symmetric ``source``.

    Args:
        memory: Name of the memory backend of ``source``.
        plain: FSDP2's own reduce-scatter, which takes any memory.
        output: This rank's part of the result, in any memory.
        source: Symmetric.
        group: Over which it runs.
        op: The reduction.
        async_op: As in `gathers`.
        site: As in `gathers`.

    Returns:
        None if the backend has no such reduction.
    """
    name = c10d.group_name(group)
    run = _one_sided(memory, "reduce_scatter_tensor_out", source, name)
    if run is None:
        summed = _summed(plain, output, source, group, op) if BACKENDS[memory].engines else None
        return summed or own_work(
            lambda: plain(
                output_tensor=output, input_tensor=source, group=group, op=op, async_op=async_op
            )
        )
    reduction = _reduction(op)
    if reduction is None:
        return None
    return run(source, reduction, group.size(), name, out=output, what=site)


def _summed(
    plain: Any, output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, op: Any
) -> Callable[[], Any] | None:
    """A sum in place, scaled as it is copied out; None if the reduction is no scaled sum.

    NCCL has symmetric kernels for plain sums alone (until 2.30), and in 2.28 for results that are
    symmetric, too: this rank's part of ``source`` is.
    """
    factor = factor_of(op, group.size())
    if factor is None or not source.dtype.is_floating_point:
        return None
    count = output.numel()
    part = source.view(-1)[group.rank() * count : (group.rank() + 1) * count]
    total = output.view(-1)

    @own_work
    def act() -> None:
        with off_default_stream(source.device):
            plain(
                output_tensor=part,
                input_tensor=source.view(-1),
                group=group,
                op=dist.ReduceOp.SUM,
                async_op=False,
            )
        torch.mul(part, factor, out=total)

    return act


def _one_sided(
    memory: str, collective: str, tensor: torch.Tensor, group: str
) -> Callable[..., Callable[[], None]] | None:
    """What prepares a functional collective as this memory runs it by itself, if it does.

    Args:
        memory: Name of the memory backend.
        collective: The collective.
        tensor: Its symmetric tensor.
        group: Over which it runs.
    """
    op = f"_c10d_functional::{collective}.default"
    row = Lowerings(memory).table.get(op)
    if BACKENDS[memory].devices and in_two_levels(tensor, group):
        row = Lowerings.in_two_levels(op)
    if row is None or not row.one_sided:
        return None
    return IMPLEMENTATIONS[row.target]


def exchanges(
    output: torch.Tensor,
    source: torch.Tensor,
    received: torch.Tensor,
    group: dist.ProcessGroup,
    op: Any,
) -> Callable[[], Any] | None:
    """A function that reduces and scatters ``source`` as an all-to-all and a local sum.

    It takes as long as a push, which needs peers' memory and so cannot be tried before a plan.

    Args:
        output: This rank's part of the result, in any memory.
        source: Symmetric.
        received: Symmetric, as large as ``source``: where the parts of all ranks arrive.
        group: Over which it runs.
        op: The reduction.

    Returns:
        None if the reduction is no sum, average, or sum with a factor.
    """
    factor = factor_of(op, group.size())
    if factor is None:
        return None

    @own_work
    def act() -> None:
        with off_default_stream(source.device):
            c10d.all_to_all(received, source, group)
        sum_rows(received.view(group.size(), -1), output.view(-1), factor)

    return act


def factor_of(op: Any, ranks: int) -> float | None:
    """The factor by which a reduction multiplies a sum; None if it is no such sum."""
    if op == dist.ReduceOp.AVG:
        return 1 / ranks
    return 1.0 if op == dist.ReduceOp.SUM else c10d.premul_factor(op)


def _reduction(op: Any) -> str | None:
    """The name of a reduction that needs no factor of its own."""
    for name in ("SUM", "AVG", "MIN", "MAX"):
        if op == getattr(dist.ReduceOp, name):
            return name.lower()
    return None
