"""How many rows every rank sends to every other, which all ranks know alike.

[Note: padded routes]
    A tensor's shape is known to the host. So either the host waits for the counts of all ranks, and
    tensors have as many rows as there are (`Routes`); or it does not, and they have as many as
    there may be at most (`PaddedRoutes`). Behind the rows that there are, such tensors have zeros.

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
from symmplan.device import device_of, kind_of
from symmplan.errors import RunError
from symmplan.memory.meeting.calls import note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.coordination.groups import Group
    from symmplan.memory.segment import Rendezvous

__all__ = ["PaddedRoutes", "Routes", "assumed_routes", "counts_of", "exchange_routes"]
__all__ += ["routes_of"]

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
        out: Whether these are the routes of a dispatch; else of the combine behind it.
    """

    table: tuple[tuple[int, ...], ...]
    rank: int = field(eq=False)
    out: bool = field(default=True, eq=False)
    #: What `on_device` has given.
    _tables: list[torch.Tensor] = field(factory=list, eq=False, repr=False)

    @property
    def sent(self) -> list[int]:
        """Rows that this rank sends to each rank."""
        return list(self.table[self.rank])

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.table)

    @property
    def sends(self) -> int:
        """How many rows this rank sends."""
        return sum(self.sent)

    @property
    def received(self) -> list[int]:
        """Rows that this rank receives from each rank; the result has them in this order."""
        return [row[self.rank] for row in self.table]

    @property
    def most(self) -> int:
        """The largest number of rows that any rank receives."""
        return max(map(sum, zip(*self.table, strict=True)))

    @property
    def back(self) -> Routes:
        """The routes of the opposite direction: each rank sends back the rows that it received."""
        table = tuple(zip(*self.table, strict=True))
        return Routes(table, self.rank, not self.out, self._tables)

    def takes(self, given: int) -> bool:
        """Whether this rank may send so many rows."""
        return given == self.sends

    def arrive(self, given: int) -> int:  # noqa: ARG002
        """How many rows come if ``given`` go."""
        return sum(self.received)

    def begins(self, receiver: int) -> int:
        """Where this rank's rows begin among those that ``receiver`` gets."""
        return sum(row[receiver] for row in self.table[: self.rank])

    def on_device(self, device: torch.device) -> torch.Tensor:
        """The table as kernels read it; see `PaddedRoutes`."""
        if not self._tables:
            table = self.table if self.out else zip(*self.table, strict=True)
            self._tables.append(torch.tensor([[*row, sum(row)] for row in table], device=device))
        return self._tables[0]


@frozen(eq=False)
class PaddedRoutes:
    """Routes on the device: kernels that move rows need no copy of them on the host.

    Attributes:
        table: ``(ranks, ranks + 1)`` on the device, 64 bits: the number of rows that each rank
            sends to each other, and in the last column the number that it has.
        rank: This rank.
        rows: How many rows this rank has.
        most: How many a rank may get.
        out: Whether these are the routes of a dispatch; else of the combine behind it.
    """

    table: torch.Tensor = field(repr=False)
    rank: int
    rows: int
    most: int
    out: bool = True
    _host: list[Routes] = field(factory=list, repr=False)

    @property
    def sent(self) -> torch.Tensor:
        """Rows that this rank sends to each rank; on the device."""
        return self._steps()[self.rank]

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.table)

    @property
    def sends(self) -> int:
        """How many rows this rank sends, those without a meaning included."""
        return self.rows if self.out else self.most

    @property
    def received(self) -> torch.Tensor:
        """Rows that this rank receives from each rank, in their order; on the device."""
        return self._steps()[:, self.rank]

    @property
    def back(self) -> PaddedRoutes:
        """The routes of the opposite direction."""
        return evolve(self, out=not self.out, host=self._host)

    def takes(self, given: int) -> bool:
        """Whether this rank may send so many rows."""
        return given == self.sends

    def arrive(self, given: int) -> int:  # noqa: ARG002
        """How many rows come if ``given`` go."""
        return self.most if self.out else self.rows

    def on_host(self, group: Group) -> Routes:
        """These routes with counts that the host knows, which waits for them once.

        Args:
            group: The ranks.

        Raises:
            RunError: A CUDA graph is being captured, in which nobody can wait; or a rank's counts
                are none, which all ranks find alike.
        """
        if not self._host:
            if device_of(self.table.device).is_capturing():
                raise RunError(
                    "routes are needed on the host while a CUDA graph is being captured",
                    expected="an algorithm that moves rows by kernels",
                    got="an algorithm that needs to know the routes on the host",
                    fix='pass choose="symmetric", and see the reasons in experts.stats',
                )
            known = routes_of(self.table.tolist(), self.table[self.rank, :-1], group)
            self._host.append(evolve(known, tables=[self.table]))
        return self._host[0] if self.out else self._host[0].back

    def on_device(self, device: torch.device) -> torch.Tensor:  # noqa: ARG002
        """The table as kernels read it."""
        return self.table

    def _steps(self) -> torch.Tensor:
        counts = self.table[:, :-1]
        return counts if self.out else counts.t()


@frozen
class _Assumed(Routes):
    """See [Note: assumed routes].

    Attributes:
        dispatched: How many rows were, once they have been.
    """

    dispatched: list[int] = field(factory=list, eq=False)

    @property
    def back(self) -> Routes:
        """The way back."""
        return evolve(self, out=not self.out)

    def takes(self, given: int) -> bool:  # noqa: ARG002
        """True: whether the rows fit is known only on the device."""
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
        mine = [*numbers, sum(numbers)] if len(numbers) == size else [-1]
        return routes_of([mine] * size, counts, group)
    each = [rows // size + (rank < rows % size) for rank in range(size)]
    return _Assumed(tuple((n,) * size for n in each), group.rank)


@own_work
def exchange_routes(
    counts: torch.Tensor | Sequence[int],
    group: Group,
    device: torch.device,
    meeting: Rendezvous | None,
    rows: int | None = None,
) -> Routes | torch.Tensor:
    """Tell all ranks how many rows this one sends to each.

    Args:
        counts: Those numbers.
        group: The ranks.
        device: Where the group's collectives run.
        meeting: Where the ranks can tell each other numbers at no more than a barrier; else None.
        rows: How many rows this rank has, if the host shall not wait for the counts.

    Returns:
        The routes; or, where ``rows`` are given and no host has heard the others, the table of
        `PaddedRoutes`.

    Raises:
        RunError: A rank's counts are none; raised on every rank.

    Collective: yes, over ``group``.
    """
    given = counts_of(counts, group, device)
    if meeting is not None:
        total = int(given.sum()) if rows is None else rows
        meeting.enter(_NOTE, [*given.tolist(), total])
        words = [each[: group.size + 1] for each in meeting.free_words()]
        return routes_of(words, counts, group)
    if rows is None:
        lines = _gathered(given, group).tolist()
        return routes_of([[*line, sum(line)] for line in lines], counts, group)
    said = _gathered(torch.cat([given, given.new_full((1,), rows)]), group)
    if kind_of(said.device).is_accelerator:
        return said
    return routes_of(said.tolist(), counts, group)


def counts_of(
    counts: torch.Tensor | Sequence[int], group: Group, device: torch.device
) -> torch.Tensor:
    """What a rank says of its counts, 64 bits on ``device``; see `_WRONG`. Collective: no."""
    given = torch.as_tensor(counts, device=device)
    whole = not (given.is_floating_point() or given.is_complex())
    if not whole or tuple(given.shape) != (group.size,):
        return torch.full((group.size,), _WRONG, device=device)
    return given.to(torch.int64).contiguous()


def _gathered(line: torch.Tensor, group: Group) -> torch.Tensor:
    """What all ranks have, one below the other; no host waits. Collective: yes."""
    gather = torch.ops._c10d_functional.all_gather_into_tensor
    said = gather(line, group.size, group.torch_name)
    lines: torch.Tensor = torch.ops._c10d_functional.wait_tensor(said).view(group.size, -1)
    return lines


def routes_of(
    table: Sequence[Sequence[int]], counts: torch.Tensor | Sequence[int], group: Group
) -> Routes:
    """The routes of what all ranks said.

    Args:
        table: What each said: its counts, and how many rows it has.
        counts: What this one was given to say.
        group: The ranks.

    Raises:
        RunError: A rank's counts are none, or more than it has rows.
    """
    wrong = next(
        (rank for rank, row in enumerate(table) if min(row) < 0 or sum(row[:-1]) > row[-1]), None
    )
    if wrong is not None:
        raise RunError(
            f"the counts of rank {wrong} are not valid",
            expected=f"a whole number for each of {group.size} ranks, none negative, no more "
            "together than there are rows",
            got=f"{counts!r}" if wrong == group.rank else f"what rank {wrong} says",
            fix="pass how many rows go to each rank of the group",
            **group.here,
            ranks=(wrong,),
        )
    rows = tuple(tuple(row[:-1]) for row in table)
    return Routes(rows, group.rank)
