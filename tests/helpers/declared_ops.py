"""Ops whose declarations are not all true; for `test_declaration`."""

from __future__ import annotations

import torch

import symmplan


def _rows(placed):
    return [placed.peer(r) for r in range(placed.world_size)]


@symmplan.symm_args("x", group="group_name", handshake=True, release=True)
@torch.library.custom_op("symmplan_declared::no_release", mutates_args=())
def no_release(x: torch.Tensor, group_name: str) -> torch.Tensor:
    placed = symmplan.placed.handle(x, group_name)
    placed.barrier()
    return torch.stack(_rows(placed)).amax(0)


@symmplan.symm_args("x", group="group_name", handshake=True, release=True)
@torch.library.custom_op("symmplan_declared::no_handshake", mutates_args=())
def no_handshake(x: torch.Tensor, group_name: str) -> torch.Tensor:
    placed = symmplan.placed.handle(x, group_name)
    result = torch.stack(_rows(placed)).amax(0)
    placed.barrier()
    return result


@symmplan.symm_args("x", group="group_name", handshake=True)
@torch.library.custom_op("symmplan_declared::own_too_early", mutates_args=())
def own_too_early(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Touches its own bytes before it waits; nobody else's."""
    result = x.clone()
    placed = symmplan.placed.handle(x, group_name)
    placed.barrier()
    return torch.maximum(result, placed.peer((placed.rank + 1) % placed.world_size))


@symmplan.symm_args("x", group="group_name", handshake=True, release=True)
@torch.library.custom_op("symmplan_declared::writes_input", mutates_args=())
def writes_input(x: torch.Tensor, group_name: str) -> torch.Tensor:
    placed = symmplan.placed.handle(x, group_name)
    placed.barrier()
    result = torch.stack(_rows(placed)).amax(0)
    placed.barrier()
    x.zero_()
    placed.barrier()
    return result


@symmplan.symm_args("x", group="group_name", handshake=True, release=True)
@torch.library.custom_op("symmplan_declared::reaches_further", mutates_args=())
def reaches_further(x: torch.Tensor, y: torch.Tensor, group_name: str) -> torch.Tensor:
    """Reads the peers' ``y``, which is not declared."""
    placed = symmplan.placed.handle(y, group_name)
    placed.barrier()
    result = x + torch.stack(_rows(placed)).amax(0)
    placed.barrier()
    return result


@symmplan.symm_args("x", group="group_name", handshake=True, release=True)
@torch.library.custom_op("symmplan_declared::raises", mutates_args=())
def raises(x: torch.Tensor, group_name: str) -> torch.Tensor:
    placed = symmplan.placed.handle(x, group_name)
    if placed.rank == 1:
        raise ValueError("this rank has had enough")
    placed.barrier()
    return x.clone()


@symmplan.symm_args("x", group="group_name", handshake=True, release=True)
@torch.library.custom_op("symmplan_declared::waits_alone", mutates_args=())
def waits_alone(x: torch.Tensor, group_name: str) -> torch.Tensor:
    placed = symmplan.placed.handle(x, group_name)
    placed.barrier()
    if placed.rank == 0:
        placed.barrier()
    return x.clone()


@torch.library.custom_op("symmplan_declared::undeclared", mutates_args=())
def undeclared(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.clone()
