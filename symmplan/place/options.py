"""How a program is asked to be placed: the options that all integrations have, checked alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import field, frozen

from symmplan.errors import BackendError
from symmplan.memory import BACKENDS, DEFAULT_TIMEOUT
from symmplan.place.choice import CHOOSE
from symmplan.planner.budget import bytes_of
from symmplan.planner.plan import check_effort

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from symmplan.place.choice import Choose
    from symmplan.place.ways import Collectives

__all__ = ["Options", "known"]


@frozen(kw_only=True)
class Options:
    """How a program is to be placed.

    Attributes:
        memory: Name of the memory backend, or ``"auto"``.
        choose: How the ways of collectives are chosen. ``"measure"``: each kind and size of
            collective is timed in every way there is, and what is not clearly faster in symmetric
            memory is left out of the plan. ``"placed"``, the same as ``"symmetric"``: all that can
            be is in symmetric memory. ``"ordinary"``: no collective is, only ops that need it.
            ``"copy engine"``: collectives that have it run without kernels where the memory backend
            has copy engines, the others in symmetric memory. ``"push"``: FSDP2's reduce-scatters
            are pushes of gradients into peers' memory, its gathers run by copy engines where there
            are any; all else is in symmetric memory. ``"auto"``: measured on devices,
            placed elsewhere, as shared memory between processes is always faster.
        capacity: Bytes that all segments of a plan may take together on any rank, as a number or
            as text such as ``"40GiB"``; the least of what the ranks were given counts. None for
            what is free, less a tenth, and for no limit in compiled graphs. What does not fit
            gives way; see [Note: who gives way] in `symmplan.planner.budget`.
        effort: How hard the planner tries, ``"fast"`` or ``"optimal"``.
        timeout: Seconds that ranks wait for each other before they raise.
        debug: Whether dead placements are overwritten, so that a late reader shows; True also to
            look for races, ``"poison"`` for the former alone.
        collectives: Whose collectives run; see `symmplan.place.ways.Lowerings`.

    Raises:
        BackendError: A backend, a way to choose or to debug, or collectives that do not exist.
        PlanningError: An effort that does not exist, or a capacity that is no number of bytes.
    """

    memory: str = "auto"
    choose: Choose = "auto"
    capacity: int | None = field(default=None, converter=bytes_of)
    effort: Literal["fast", "optimal"] = "fast"
    timeout: float = DEFAULT_TIMEOUT
    debug: bool | Literal["poison"] = False
    collectives: Collectives = "auto"

    def __attrs_post_init__(self) -> None:
        known("memory backend", self.memory, tuple(BACKENDS))
        known("way to choose", self.choose, CHOOSE)
        known("way to debug", self.debug, (True, False, "poison"))
        known("collectives", self.collectives, ("auto", "process group"))
        check_effort(self.effort)

    def chosen(self, device: torch.device) -> Choose:
        """``"measure"``, or the way that is meant for all collectives that have it."""
        choose: Choose = self.choose
        if choose == "auto":
            choose = "symmetric" if device.type == "cpu" else "measure"
        return "symmetric" if choose == "placed" else choose


def known(what: str, given: object, names: Sequence[object]) -> None:
    """Refuse what is none of ``names``; the first is what is advised.

    Raises:
        BackendError: It is none of them.
    """
    if given not in names:
        raise BackendError(
            f"unknown {what} {given!r}",
            expected=", ".join(map(repr, names)),
            got=repr(given),
            fix=f"use {names[0]!r}",
        )
