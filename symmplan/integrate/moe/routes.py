"""How many rows every rank sends to every other, which all ranks know alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import field, frozen

from symmplan.errors import RunError
from symmplan.memory.own import own_work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.memory.groups import Group

__all__ = ["Routes", "exchange_routes"]

#: What a rank whose own numbers are wrong says.
_WRONG = -1


@frozen
class Routes:
    """Who sends how many rows to whom, in one dispatch and in the combine behind it.

    Attributes:
        table: ``table[s][r]``: how many rows rank ``s`` sends to rank ``r`` of the group.
        rank: This rank.
    """

    table: tuple[tuple[int, ...], ...]
    rank: int = field(eq=False)

    @property
    def sent(self) -> list[int]:
        """Rows that this rank sends to each rank."""
        return list(self.table[self.rank])

    @property
    def received(self) -> list[int]:
        """Rows that it gets from each rank; they lie one behind the other, in this order."""
        return [row[self.rank] for row in self.table]

    @property
    def most(self) -> int:
        """The most rows that any rank gets."""
        return max(map(sum, zip(*self.table, strict=True)))

    @property
    def back(self) -> Routes:
        """The way back."""
        return Routes(tuple(zip(*self.table, strict=True)), self.rank)

    def begins(self, receiver: int) -> int:
        """Where this rank's rows begin among those that ``receiver`` gets."""
        return sum(row[receiver] for row in self.table[: self.rank])


@own_work
def exchange_routes(
    counts: torch.Tensor | Sequence[int], group: Group, device: torch.device
) -> Routes:
    """Tell all ranks how many rows this one sends to each.

    Raises:
        RunError: A rank's counts are none; raised on every rank.

    Collective: yes, over ``group``.
    """
    given = torch.as_tensor(counts, device=device)
    whole = not (given.is_floating_point() or given.is_complex())
    if not whole or tuple(given.shape) != (group.size,):
        given = torch.full((group.size,), _WRONG, device=device)
    given = given.to(torch.int64)

    gather = torch.ops._c10d_functional.all_gather_into_tensor
    said = gather(given.contiguous(), group.size, group.torch_name)
    said = torch.ops._c10d_functional.wait_tensor(said)
    table = tuple(map(tuple, said.view(group.size, group.size).tolist()))
    wrong = next((rank for rank, row in enumerate(table) if min(row) < 0), None)
    if wrong is not None:
        raise RunError(
            f"the counts of rank {wrong} are no numbers of rows",
            expected=f"{group.size} whole numbers, one for each rank, not negative",
            got=f"{counts!r}" if wrong == group.rank else f"what rank {wrong} says",
            fix="pass how many rows go to each rank of the group",
            **group.here,
            ranks=(wrong,),
        )
    return Routes(table, group.rank)
