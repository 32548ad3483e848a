"""Gathers that begin before FSDP2 asks for them; see [Note: gathered ahead] in `fsdp_live`.

[Note: asked for next]
    Such a gather counts only if it is what FSDP2 asks for next, and if its module's shards are what
    they were. Else its bytes are given back and it runs when it is wanted. Both are a matter of the
    program, which all ranks run, so they start and forget the same gathers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from symmplan.integrate.fsdp.changes import State
    from symmplan.integrate.fsdp.direct import Direct
    from symmplan.integrate.fsdp.schedule import Schedule

__all__ = ["Ahead"]


class Ahead:
    """The one gather of a model that has begun before FSDP2 asked for it."""

    def __init__(self) -> None:
        self._begun: tuple[Direct, State] | None = None

    def used(self, site: str, schedule: Schedule | None, directs: list[Direct]) -> None:
        """A module begins to use its parameters: the next one's may be gathered.

        Collective: if the plan says so.
        """
        spot = None if schedule is None or self._begun is not None else schedule.ahead_of(site)
        if spot is None:
            return
        direct = next((d for d in directs if d.site == spot.call.key.site), None)
        state = None if direct is None else direct.gather_ahead()
        if direct is not None and state is not None:
            self._begun = direct, state

    def asked(self, direct: Direct, *, needed: bool) -> None:
        """FSDP2 asks for a module's parameters.

        Args:
            direct: Which.
            needed: Whether nobody has begun to gather them, and they are not there.
        """
        if self._begun is None or (self._begun[0] is not direct and not needed):
            return
        (begun, state), self._begun = self._begun, None
        if begun is not direct or begun.state() != state:
            begun.forget()
