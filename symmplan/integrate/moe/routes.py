"""How many rows every rank sends to every other, which all ranks know alike.

[Note: assumed routes]
    In a simulated world tensors have no values. A program that passes numbers is taken at its word,
    and all its peers to send what it sends. For a tensor without values the worst case is assumed
    for which memory is planned: each rank gets ``max_tokens`` rows. A combine brings back as many
    rows as were dispatched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve, field, frozen

from symmplan.coordination.own import own_work
from symmplan.coordination.world import current
from symmplan.errors import RunError
from symmplan.memory.calls import note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.coordination.groups import Group
    from symmplan.memory.segment import Rendezvous

__all__ = ["Routes", "assumed_routes", "exchange_routes", "routes_of"]

#: What a rank whose own numbers are wrong says.
_WRONG = -1
#: What ranks that meet to tell their counts say that they do.
_NOTE = note("barrier_", "routes")


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
        """Rows that this rank receives from each rank; they lie one behind the other, in order."""
        return [row[self.rank] for row in self.table]

    @property
    def most(self) -> int:
        """The largest number of rows that any rank receives."""
        return max(map(sum, zip(*self.table, strict=True)))

    @property
    def back(self) -> Routes:
        """The routes of the opposite direction: each rank sends back the rows that it received."""
        return Routes(tuple(zip(*self.table, strict=True)), self.rank)

    def takes(self, given: int) -> bool:
        """Whether this rank may send so many rows."""
        return given == sum(self.sent)

    def arrive(self, given: int) -> int:  # noqa: ARG002
        """How many rows come if ``given`` go."""
        return sum(self.received)

    def begins(self, receiver: int) -> int:
        """Where this rank's rows begin among those that ``receiver`` gets."""
        return sum(row[receiver] for row in self.table[: self.rank])


@frozen
class _Assumed(Routes):
    """See [Note: assumed routes].

    Attributes:
        dispatched: How many rows were, once they have been.
        out: Whether these are the routes of a dispatch.
    """

    dispatched: list[int] = field(factory=list, eq=False)
    out: bool = True

    @property
    def back(self) -> Routes:
        """The way back."""
        return evolve(self, out=not self.out)

    def takes(self, given: int) -> bool:  # noqa: ARG002
        """Nobody knows."""
        return True

    def arrive(self, given: int) -> int:
        """How many rows come if ``given`` go."""
        if not self.out:
            return self.dispatched[-1]
        self.dispatched[:] = [given]
        return sum(self.received)


def assumed_routes(counts: torch.Tensor | Sequence[int], group: Group, rows: int) -> Routes:
    """What all ranks send in a simulated world; see [Note: assumed routes].

    Args:
        counts: As for `exchange_routes`.
        group: The group.
        rows: How many each rank gets where that is not known.

    Collective: no.
    """
    size = group.size
    try:
        numbers = counts.tolist() if isinstance(counts, torch.Tensor) else list(counts)
    except Exception as error:
        world = current()
        if world is None or not world.reads_values(error):
            raise
    else:
        mine = numbers if len(numbers) == size else [-1]
        return routes_of([mine] * size, counts, group)
    each = [rows // size + (rank < rows % size) for rank in range(size)]
    return _Assumed(tuple((n,) * size for n in each), group.rank)


@own_work
def exchange_routes(
    counts: torch.Tensor | Sequence[int],
    group: Group,
    device: torch.device,
    meeting: Rendezvous | None,
) -> Routes:
    """Tell all ranks how many rows this one sends to each.

    Args:
        counts: Those numbers.
        group: The ranks.
        device: Where the group's collectives run.
        meeting: Where the ranks can tell each other numbers at no more than a barrier; else None.

    Raises:
        RunError: A rank's counts are none; raised on every rank.

    Collective: yes, over ``group``.
    """
    given = torch.as_tensor(counts, device=device)
    whole = not (given.is_floating_point() or given.is_complex())
    if not whole or tuple(given.shape) != (group.size,):
        given = torch.full((group.size,), _WRONG, device=device)
    if meeting is None:
        gather = torch.ops._c10d_functional.all_gather_into_tensor
        said = gather(given.to(torch.int64).contiguous(), group.size, group.torch_name)
        said = torch.ops._c10d_functional.wait_tensor(said)
        table = said.view(group.size, group.size).tolist()
    else:
        meeting.enter(_NOTE, given.tolist())
        table = [words[: group.size] for words in meeting.free_words()]
    return routes_of(table, counts, group)


def routes_of(
    table: Sequence[Sequence[int]], counts: torch.Tensor | Sequence[int], group: Group
) -> Routes:
    """The routes of what all ranks said.

    Args:
        table: What each said.
        counts: What this one was given to say.
        group: The ranks.

    Raises:
        RunError: A rank's counts are none.
    """
    wrong = next((rank for rank, row in enumerate(table) if min(row) < 0), None)
    if wrong is not None:
        raise RunError(
            f"the counts of rank {wrong} do not say how many rows go where",
            expected=f"a whole number for each of {group.size} ranks, none negative",
            got=f"{counts!r}" if wrong == group.rank else f"what rank {wrong} says",
            fix="pass how many rows go to each rank of the group",
            **group.here,
            ranks=(wrong,),
        )
    return Routes(tuple(map(tuple, table)), group.rank)
