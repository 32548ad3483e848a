"""One process: ordinary memory, and every peer is the process itself.

Where the world is simulated, that one process stands for all ranks, and its memory is fake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from symmplan.errors import OutOfSharedMemoryError
from symmplan.memory.segment import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.coordination.exchange import Exchange
    from symmplan.coordination.groups import Group
    from symmplan.coordination.world import World
    from symmplan.memory.health import Health
    from symmplan.memory.segment import Allocation, Segment
    from symmplan.model import SegmentSpec

__all__ = ["LocalBackend", "SimulatedBackend"]


class LocalBackend:
    """Groups of one rank, on any device."""

    name = "local"
    frees = True

    def allocate(
        self,
        spec: SegmentSpec,
        device: torch.device,
        groups: Sequence[Group],  # noqa: ARG002
        health: Health,  # noqa: ARG002
        part: torch.Tensor | None = None,
    ) -> Allocation:
        """A plain tensor."""
        if part is not None:
            return part, None
        try:
            return torch.empty(spec.nbytes, dtype=torch.uint8, device=device), None
        except (MemoryError, RuntimeError) as error:
            raise OutOfSharedMemoryError(
                f"no memory for segment {spec.name!r} on {device}: {str(error).splitlines()[0]}",
                expected=f"{spec.nbytes} bytes",
                fix="make the plan smaller",
                segment=spec.name,
                nbytes=spec.nbytes,
            ) from error

    def rendezvous(self, segment: Segment, group: Group, exchange: Exchange) -> None:  # noqa: ARG002
        """All ranks are this process.

        Collective: no.
        """
        segment.add_rendezvous(Rendezvous(group, (segment.tensor,) * group.size))

    def settle(self) -> None:
        """Nothing was needed."""


class SimulatedBackend(LocalBackend):
    """Segments without bytes, for any device and groups of any size.

    Args:
        world: The world that is simulated.
    """

    def __init__(self, world: World) -> None:
        self.name = world.memory
        self._world = world

    def allocate(
        self,
        spec: SegmentSpec,
        device: torch.device,
        groups: Sequence[Group],
        health: Health,
        part: torch.Tensor | None = None,
    ) -> Allocation:
        """A fake tensor."""
        with torch.inference_mode(mode=False):
            tensor, token = super().allocate(spec, device, groups, health, part)
        self._world.is_segment(tensor)
        return tensor, token

    def rendezvous(self, segment: Segment, group: Group, exchange: Exchange) -> None:
        """The first time, the world hears of the segment.

        Collective: no.
        """
        if not segment.rendezvous:
            self._world.segments.append(segment)
        super().rendezvous(segment, group, exchange)
