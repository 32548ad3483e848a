"""One process: ordinary memory, and every peer is the process itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from symmplan.errors import OutOfSharedMemoryError
from symmplan.memory.segment import Health, Rendezvous, Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.memory.exchange import Exchange
    from symmplan.memory.groups import Group
    from symmplan.model import SegmentSpec

__all__ = ["LocalBackend"]


class LocalBackend:
    """Groups of one rank, on any device."""

    name = "local"
    frees = True

    def allocate(
        self,
        spec: SegmentSpec,
        device: torch.device,
        *,
        groups: Sequence[Group],
        timeout: float,
        health: Health,
    ) -> Segment:
        """A plain tensor."""
        del groups
        try:
            tensor = torch.empty(spec.nbytes, dtype=torch.uint8, device=device)
        except (MemoryError, RuntimeError) as error:
            raise OutOfSharedMemoryError(
                f"no memory for segment {spec.name!r} on {device}: {str(error).splitlines()[0]}",
                expected=f"{spec.nbytes} bytes",
                fix="make the plan smaller",
                segment=spec.name,
                nbytes=spec.nbytes,
            ) from error
        return Segment(spec, self.name, tensor, timeout=timeout, health=health)

    def rendezvous(self, segment: Segment, group: Group, exchange: Exchange) -> None:  # noqa: ARG002
        """The group is this process.

        Collective: no.
        """
        segment.add_rendezvous(Rendezvous(group, (segment.tensor,)))

    def settle(self) -> None:
        """Nothing was needed."""
