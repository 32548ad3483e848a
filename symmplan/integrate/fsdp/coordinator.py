"""The interface through which a parameter group reaches the object that serves its whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from symmplan.capture.fsdp_recording import Key
    from symmplan.integrate.fsdp.layout import Layout
    from symmplan.integrate.fsdp.memory import Memory
    from symmplan.integrate.fsdp.occupancy import Occupancy, Occupant
    from symmplan.integrate.fsdp.slots import Counts
    from symmplan.runtime.observe import Expected
    from symmplan.runtime.options import Options

__all__ = ["Coordinator"]


class Coordinator(Protocol):
    """Records what the groups of a model do, and makes the plan that they follow.

    Attributes:
        options: How `symmplan.fsdp.apply` was asked to work.
        memory: What the plan lies in.
        counts: What was served how.
        occupancy: Which modules have bytes for their parameters.
    """

    options: Options
    memory: Memory
    counts: Counts
    occupancy: Occupancy

    def can_lie(self, site: str, layout: Layout | str) -> None:
        """How a module's parameters would lie in a placement; or why they cannot."""

    def arrive(self, key: Key, device: torch.device) -> None:
        """The program comes to a collective. Collective: at the end of the first step yes."""

    def gathering(self, module: Occupant, key: Key) -> None:
        """A module's parameters are gathered where they live."""

    def unsharding(self, site: str) -> AbstractContextManager[None]:
        """FSDP2 waits inside for a gather, and copies it into parameters of its own."""

    def put_off(self, key: Key, module: Occupant) -> None:
        """A module's parameters were wanted before there was room for them."""

    def released(self, site: str, *, after_forward: bool) -> None:
        """A module is done with its parameters. Collective: yes, if others wait for its bytes."""

    def left(self, site: str, why: str) -> None:
        """A module's gathers are flat from now on."""

    def expected(self, key: Key) -> Expected | None:
        """How a collective is to run; None where nobody looks, or there is no plan for it."""
