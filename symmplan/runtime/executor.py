"""Runs what integrations plan in this process, or nowhere if the world is simulated.

[Note: who runs]
    An integration records, plans and decides when its collectives run, and asks its `Executor` to
    run them. The executor of a simulated world runs nothing in placements. Buffers are fake
    tensors, each with a storage of its own whose end is noticed like that of a lease. Collectives
    run as torch runs them, or not at all; the executor notes them, and the plan says later how they
    would have run. A simulation needs only what a program asks for, and when the program drops it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from symmplan.coordination.world import Planner, SimulatedCall, at_end, current
from symmplan.memory.leased import lease_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from symmplan.coordination.world import World
    from symmplan.model import AlgorithmName, Plan


class Executor:
    """Runs collectives on the bytes that a plan gives them.

    Attributes:
        serves: Whether anything runs in placements. If not, segments stay until the world ends:
            others may make theirs only then.
    """

    serves = True

    def call(
        self,
        known_by: Any,  # noqa: ARG002
        op: str,  # noqa: ARG002
        nbytes: int,  # noqa: ARG002
        group: str,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Context in which a collective runs that the plan knows by ``known_by``."""
        return contextlib.nullcontext()

    def buffer(self, known_by: Any, tensor: torch.Tensor) -> None:
        """Note that ``tensor`` lies in a placement if the plan says so of ``known_by``."""

    def hold(
        self, known_by: Any, gradients: Sequence[torch.Tensor], itemsize: int, buffer: torch.Tensor
    ) -> None:
        """If the plan says so a collective keeps gradients as long as its buffer."""

    def lease_out(
        self, base: torch.Tensor, on_drop: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A tensor on the bytes of ``base`` that reports its end, and what to keep until then."""
        return lease_out(base, on_drop), base

    def leased(self, kept: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor | None:
        """The lease of ``buffer`` that a collective uses; None if it was not leased."""
        return kept if kept.data_ptr() == buffer.data_ptr() else None


class _Nothing(Executor):
    """Runs nothing. See [Note: who runs]."""

    serves = False

    def __init__(self, world: World, planner: Planner) -> None:
        self._world = world
        self._planner = planner
        world.join(planner)

    @contextlib.contextmanager
    def call(self, known_by: Any, op: str, nbytes: int, group: str) -> Iterator[None]:
        self._world.calls.append((self._planner, known_by, SimulatedCall(op, nbytes, group)))
        self._world.quiet = True
        try:
            yield
        finally:
            self._world.quiet = False

    def buffer(self, known_by: Any, tensor: torch.Tensor) -> None:
        self._world.buffer(self._planner, known_by, tensor)

    def hold(
        self, known_by: Any, gradients: Sequence[torch.Tensor], itemsize: int, buffer: torch.Tensor
    ) -> None:
        kept = self._world.hold(gradients, itemsize, buffer)
        self._world.held.append((self._planner, known_by, kept))

    def lease_out(
        self, base: torch.Tensor, on_drop: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at_end(base, on_drop)
        return base.view(-1), torch.empty(0, dtype=base.dtype, device=base.device)

    def leased(
        self,
        kept: torch.Tensor,  # noqa: ARG002
        buffer: torch.Tensor,
    ) -> torch.Tensor | None:
        return buffer


def executor(
    plans: Callable[[], Sequence[Plan | None]],
    end: Callable[[], None],
    algorithm: Callable[[Any], AlgorithmName] = lambda _: "ordinary",
) -> Executor:
    """The executor of an integration in this process.

    Args:
        plans: Returns its plans. A recording without a plan is planned now.
        end: Frees what it holds.
        algorithm: The algorithm of a call that it knows.
    """
    world = current()
    return Executor() if world is None else _Nothing(world, Planner(plans, end, algorithm))
