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

__all__ = ["LocalBackend"]


class LocalBackend:
    """Groups of one rank, on any device; in a simulated world of any size, without bytes.

    Args:
        world: The world that is simulated; None if there is none.
    """

    frees = frees_together = True

    def __init__(self, world: World | None = None) -> None:
        self.name = "local" if world is None else world.memory
        self._world = world

    def allocate(
        self,
        spec: SegmentSpec,
        device: torch.device,
        groups: Sequence[Group],  # noqa: ARG002
        health: Health,  # noqa: ARG002
    ) -> Allocation:
        """A plain tensor, or a fake one."""
        try:
            with torch.inference_mode(mode=False):  # it outlives the program's mode
                tensor = torch.empty(spec.nbytes, dtype=torch.uint8, device=device)
        except (MemoryError, RuntimeError) as error:
            raise OutOfSharedMemoryError(
                f"no memory for segment {spec.name!r} on {device}: {str(error).splitlines()[0]}",
                expected=f"{spec.nbytes} bytes",
                fix="make the plan smaller",
                segment=spec.name,
                nbytes=spec.nbytes,
            ) from error
        if self._world is not None:
            self._world.is_segment(tensor)
        return tensor, None

    def rendezvous(self, segment: Segment, group: Group, exchange: Exchange) -> None:  # noqa: ARG002
        """All ranks are this process; a world hears of the segment the first time.

        Collective: no.
        """
        if self._world is not None and not segment.rendezvous:
            self._world.segments.append(segment)
        segment.add_rendezvous(Rendezvous(group, (segment.tensor,) * group.size))

    def settle(self) -> None:
        """Nothing was needed."""
