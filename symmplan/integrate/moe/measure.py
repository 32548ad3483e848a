"""The algorithm by which rows of one size go: timed once, alike on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve

from symmplan.coordination.all_gather import all_gather_json
from symmplan.runtime.choice import fastest
from symmplan.runtime.clock import clock_of, seconds_of
from symmplan.torch_private.c10d import group_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from symmplan.runtime.choice import Choice

__all__ = ["measured"]

#: As for `symmplan.runtime.clock.seconds_of`.
_ENOUGH = 512 << 20


def measured(
    choice: Choice,
    algorithms: Mapping[str, Callable[[], None]],
    group: Any,
    device: torch.device,
    timeout: float,
) -> Choice:
    """A choice with its times and its algorithm.

    Args:
        choice: All that is known of it before.
        algorithms: ``{algorithm: what moves rows}``, torch's own first.
        group: The process group.
        device: Where the rows lie.
        timeout: Seconds that ranks wait for each other.

    Collective: yes, over ``group``.
    """

    def act(move: Callable[[], None]) -> Callable[[Callable[[], None]], None]:
        def run(beside: Callable[[], None]) -> None:
            move()
            beside()

        return run

    kernels = device.type == "cuda"
    name = group_name(group)
    clock = clock_of(device, timeout)
    with clock.together({name: group}):
        times = seconds_of(
            clock,
            {algorithm: act(move) for algorithm, move in algorithms.items()},
            group,
            choice.nbytes,
            beside=None if kernels else 0.0,  # nobody says how much the experts compute meanwhile
            enough=_ENOUGH,
        )
    said = all_gather_json("times", {name: times}, {name: group}, timeout)[name]
    seconds = {algorithm: max(float(rank[algorithm]) for rank in said) for algorithm in times}
    return evolve(
        choice, seconds=seconds, algorithm=fastest(seconds, kernels=kernels, beside=kernels)
    )
