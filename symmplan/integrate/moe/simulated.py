"""Dispatch and combine in a simulated world: planned, and run on nothing.

[Note: assumed routes]
    How many rows go where is not known where tensors have no values. A program that passes numbers
    is taken at its word, and all its peers to send what it sends. For a tensor without values the
    worst case is assumed for which memory is planned: each rank gets ``max_tokens`` rows. A combine
    brings back as many rows as were dispatched.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, field, frozen

from symmplan.coordination.own import own_work
from symmplan.coordination.world import SimulatedCall, World
from symmplan.integrate.moe.dispatcher import ExpertParallel
from symmplan.integrate.moe.routes import Routes, routes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.memory import Arena
    from symmplan.model import AlgorithmName, Plan
    from symmplan.runtime.options import Options

__all__ = ["SimulatedExperts"]


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

    def rows(self, given: int) -> int:
        """How many rows come if ``given`` go."""
        if not self.out:
            return self.dispatched[-1]
        self.dispatched[:] = [given]
        return sum(self.received)


class SimulatedExperts(ExpertParallel):
    """Dispatch and combine, as `ExpertParallel`.

    Args:
        group: As for `ExpertParallel`.
        device: As for `ExpertParallel`.
        options: As for `ExpertParallel`.
        max_tokens: As for `ExpertParallel`.
        world: In which they are.
    """

    def __init__(
        self, group: str, device: torch.device, options: Options, max_tokens: int, world: World
    ) -> None:
        super().__init__(group, device, options, max_tokens)
        self._world = world
        self._made: tuple[Plan, ...] = ()
        world.join(self)

    def routes(self, counts: torch.Tensor | Sequence[int]) -> Routes:
        """What all ranks send if they send what this one does; see [Note: assumed routes]."""
        self._usable()
        size = self._group.size
        try:
            numbers = counts.tolist() if isinstance(counts, torch.Tensor) else list(counts)
        except Exception as error:
            if not self._world.reads_values(error):
                raise
        else:
            mine = numbers if len(numbers) == size else [-1]
            return routes_of([mine] * size, counts, self._group)
        each = [self._rows // size + (rank < self._rows % size) for rank in range(size)]
        return _Assumed(tuple((n,) * size for n in each), self._group.rank)

    @own_work
    def exchange(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Nothing moves."""
        self._usable()
        if isinstance(routes, _Assumed):
            count = routes.rows(rows.shape[0])
        else:
            self._check(rows, routes)
            count = sum(routes.received)
        row = math.prod(rows.shape[1:]) * rows.element_size()
        algorithm = self._algorithm(rows, row, routes)
        self._counts["plain" if algorithm == "ordinary" else "served"] += 1
        call = SimulatedCall("all_to_all", max(count, rows.shape[0]) * row, self._group.name)
        self._world.calls.append((self, row, call))
        return rows.new_empty((count, *rows.shape[1:]))

    def _obtained(self, nbytes: int) -> Arena | None:
        arena = super()._obtained(nbytes)
        self._made = () if arena is None else (arena.plan,)
        return arena

    def release(self) -> None:
        """It cannot be used any more. Its segment stays: others may make theirs only at the end."""
        self._released = True

    def _simulated_plans_(self) -> tuple[Plan, ...]:
        """The last plan, if rows were exchanged."""
        return self._made

    def _simulated_algorithm_(self, call: Any) -> AlgorithmName:
        """How rows of so many bytes move."""
        return self._algorithms.get(call, "ordinary")

    def _simulated_end_(self) -> None:
        """Give the segment back."""
        self._let_go()
