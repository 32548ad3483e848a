"""Tell the ranks of a group that one of them failed, outside of any exchange between them."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING

from attrs import evolve

from symmplan import _compat as compat
from symmplan.memory.relay import error_as_data, error_from_data

if TYPE_CHECKING:
    from symmplan.errors import SymmplanError
    from symmplan.memory.groups import Group
    from symmplan.memory.sessions import SessionKeys

__all__ = ["Alarm"]

_POLL = 0.02


class Alarm:
    """One error, the first, for all ranks of a session, until its keys are renewed.

    Args:
        keys: Of the session.

    Collective: no; what one rank rings, all ranks hear.
    """

    def __init__(self, keys: SessionKeys) -> None:
        self._group = keys.group
        self._key = f"{keys.prefix}/alarm" if keys.group.size > 1 else ""

    @property
    def group(self) -> Group:
        """The group, with this alarm's connection to its store."""
        return self._group

    def key(self, what: str) -> str:
        """A key in the group's store that is the same on all ranks, and this alarm's own."""
        return f"{self._key}/{what}"

    def ring(self, error: BaseException) -> None:
        """Tell the others of ``error``, unless somebody was first. Never raises."""
        if not self._key or self._group.forked:
            return
        try:
            if self._group.store.add(f"{self._key}/rung", 1) == 1:
                self._group.store.set(self._key, json.dumps(error_as_data(error, self._group.rank)))
        except Exception:  # noqa: BLE001 (the store may be what failed)
            return

    def listener(self) -> Alarm:
        """The same alarm for another thread, over a connection of its own where stores have one.

        A store in a file has none, and lets others in while one of them waits.
        """
        other = Alarm.__new__(Alarm)
        other._group, other._key = self._group, self._key
        if self._key and compat.has_connection(self._group.store):
            with contextlib.suppress(Exception):  # not every kind of store can
                other._group = evolve(self._group, store=self._group.store.clone())
        return other

    def heard(self, patience: float = 0.0) -> SymmplanError | None:
        """What a peer failed with; None if nobody rang within ``patience`` seconds."""
        if not self._key or self._group.forked:
            return None
        deadline = time.monotonic() + patience
        try:
            while not self._group.store.check([self._key]):
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_POLL)
            return error_from_data(bytes(self._group.store.get(self._key)), self._group)
        except Exception:  # noqa: BLE001 (the store may be what failed)
            return None
