"""Rows that are not those of the routes are refused, on all ranks where that can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from symmplan.device import device_of
from symmplan.integrate.moe.routes import PaddedRoutes, Routes

if TYPE_CHECKING:
    from symmplan.integrate.moe.slot import RowSlot


def check_types(slot: RowSlot, rows: Any, routes: Any) -> None:
    """Refuse what are no rows, or no routes.

    Raises:
        RunError: They are none.
    """
    if not (isinstance(rows, torch.Tensor) and isinstance(routes, Routes | PaddedRoutes)):
        found = f"rows are a {type(rows).__name__}, and routes a {type(routes).__name__}"
        slot.refuse(
            found,
            expected="a tensor, and what `routes` gave",
            got=found,
            fix="pass the rows, and experts.routes(counts)",
        )


def check_rows(
    experts: Any, slot: RowSlot, rows: torch.Tensor, routes: Routes | PaddedRoutes
) -> None:
    """Refuse rows that were not counted, or lie elsewhere.

    Args:
        experts: The `symmplan.integrate.moe.dispatcher.ExpertParallel` that is to move them.
        slot: Its slot.
        rows: The rows.
        routes: The routes.

    Raises:
        RunError: They are such.
    """
    group, device = slot.group, slot.device
    known = routes.ranks == group.size and rows.dim() > 0
    if known and routes.takes(rows.shape[0]) and rows.device == device:
        return
    joins = known and device_of(device).is_accelerator
    if joins:  # else peers on devices would wait
        experts.exchange(rows.new_zeros((routes.sends, *rows.shape[1:]), device=device), routes)
    slot.refuse(
        f"rows of shape {tuple(rows.shape)} on {rows.device} are not those of the routes",
        expected=f"{routes.sends} rows along dimension 0, on {device}",
        got=f"{rows.shape[0] if rows.dim() else 0} rows on {rows.device}",
        fix="pass the rows that were counted, or count them again",
        alone=joins,
    )
