"""Eager sessions in a simulated world: recorded and planned; later iterations run on nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve

from symmplan.integrate.eager.session import Session
from symmplan.memory.spares import give_back

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from symmplan.coordination.world import World
    from symmplan.integrate.eager.recording import IterationRecording
    from symmplan.memory import Arena
    from symmplan.model import AlgorithmName, Plan
    from symmplan.runtime.options import Options

__all__ = ["SimulatedSession"]


class SimulatedSession(Session):
    """An eager program, as `Session`.

    Args:
        group: As for `Session`.
        device: As for `Session`.
        options: As for `Session`.
        world: In which it runs.
    """

    def __init__(self, group: Any, device: torch.device, options: Options, world: World) -> None:
        super().__init__(group, device, options)
        self._held: list[Arena] = []
        world.join(self)

    def replan(self) -> None:
        """Forget the plan; the next iteration is recorded and planned afresh."""
        give_back(self._held)
        super().replan()

    def step(self) -> None:
        """End an iteration; the first one is planned here. Collective: no."""
        if self._recording is not None:
            super().step()
            return
        self._usable()
        self._counts["iterations"] += 1

    def _freeze(self, recording: IterationRecording) -> None:
        """Plan. What comes later is not served, and so not compared with what was recorded."""
        self._recording = None
        frozen = recording.freeze()
        self._counts["rendezvous"] += frozen.rendezvous
        self._counts["recorded"] += sum(e.call.kind == "op" for e in frozen.events)
        self._held.append(frozen.arena)
        self._frozen = evolve(frozen, events=[], tail=[])
        self._state = "frozen"

    def _memory(
        self,
        kind: Literal["empty", "out"],
        make: Callable[..., torch.Tensor],
        args: Any,
        kwargs: Any,
    ) -> torch.Tensor:
        if self._frozen is not None:
            return make(*args, **kwargs)
        return super()._memory(kind, make, args, kwargs)

    def _let_go(self) -> None:
        self._forget()  # the segment stays: others may make theirs only at the end

    def _simulated_plans_(self) -> tuple[Plan, ...]:
        """The plan, if an iteration came to its end."""
        return () if self.plan is None else (self.plan,)

    def _simulated_algorithm_(self, call: Any) -> AlgorithmName:  # noqa: ARG002
        """It tells of no calls."""
        return "ordinary"

    def _simulated_end_(self) -> None:
        """Give the segment back; a session that was not left ends."""
        self.release()
        give_back(self._held)
