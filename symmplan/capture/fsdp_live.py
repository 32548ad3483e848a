"""How many modules' unsharded parameters have bytes at once, and until when.

[Note: released late]
    FSDP2 reshards a module before it unshards the next. If the next one took the bytes over, its
    gather would wait until the module's kernels ended. So in the plan a gather's bytes are in use
    until the next gather was started, unless that had been started ahead of time.

[Note: live gathers]
    Told how many gathers may be alive, the plan keeps released bytes for longer or for less long:
    the oldest are given to the next gather once there would be more. What is gathered ahead of its
    time and finds no room is gathered when the next module is released. A gather that is needed
    before that, as a block's inside a root's, goes beyond the number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from symmplan.capture.fsdp import Recording

__all__ = ["gathered_ahead", "gathers_live", "most_alive"]

_Events = list[tuple[str, int]]


def gathered_ahead(recording: Recording, direct: set[int]) -> dict[int, int]:
    """Which gathers of ``direct`` begin ahead of their time, and with the use of which other.

    See [Note: gathered ahead].
    """
    found: dict[int, int] = {}
    seen: set[str] = set()
    used: set[int] = set()
    last: int | None = None
    for what, index in tuple(recording.events):
        if what == "use":
            used.add(index)
        if what != "begin" or not recording.collectives[index].group:
            continue
        key = recording.collectives[index].key
        if key.backward or key.kind != "all_gather":
            seen.clear()
            last = None
            continue
        if key.site in seen:
            seen.clear()
        elif last in used and index in direct:
            found[index] = last
        seen.add(key.site)
        last = index
    return found


def _with_ahead(recording: Recording, direct: set[int]) -> _Events:
    """The events, in which gathers begin as early as they will; and none of uses."""
    ahead = gathered_ahead(recording, direct)
    early: dict[int, list[tuple[str, int]]] = {}
    for index, other in ahead.items():
        early.setdefault(other, []).extend([("begin", index), ("run", index)])
    events: _Events = []
    for what, index in tuple(recording.events):
        if what == "use":
            events += early.pop(index, ())
        elif index not in ahead or what not in ("begin", "run"):
            events.append((what, index))
    return events


def gathers_live(recording: Recording, direct: set[int], live: int | None) -> _Events:
    """The events, in which buffers of ``direct`` drop when their bytes are free to be reused.

    Args:
        recording: What the program did.
        direct: Indices of the all-gathers that fill parameters.
        live: How many of these may be alive at once; None: as in [Note: released late].
    """
    if live is None:
        return _released_late(recording, direct)
    needed: dict[int, int] = {}
    while True:
        events, missing = _at_most(recording, direct, live, needed)
        if missing is None:
            return events
        needed[missing] = needed.get(missing, 0) + 1


def most_alive(recordings: Sequence[Recording], direct: set[str], live: int | None) -> int:
    """How many gathers of these modules have bytes at once."""
    most = 0
    for recording in recordings:
        inside = {
            i
            for i, call in enumerate(recording.collectives)
            if call.group and call.key.kind == "all_gather" and call.key.site in direct
        }
        alive = 0
        for what, index in gathers_live(recording, inside, live):
            if index in inside and what in ("begin", "drop"):
                alive += 1 if what == "begin" else -1
                most = max(most, alive)
    return most


def _released_late(recording: Recording, direct: set[int]) -> _Events:
    events: _Events = []
    late: list[int] = []
    live: list[int] = []
    for what, index in _with_ahead(recording, direct):
        if what == "guest" or index not in direct:
            if what != "release":
                events.append((what, index))
            continue
        site = recording.collectives[index].key.site
        if what == "release":
            ahead = live[live.index(index) + 1 :] if index in live else []
            live = [i for i in live if i != index]
            if ahead:
                events.append(("drop", index))
            else:
                late.append(index)
        elif what == "begin":
            own = [i for i in late if recording.collectives[i].key.site == site]
            events += [("drop", i) for i in own]
            late = [i for i in late if i not in own]
            live.append(index)
            events.append((what, index))
        elif what == "run":
            events.append((what, index))
            events += [("drop", i) for i in late]
            late = []
    return events + [("drop", i) for i in late]


def _at_most(
    recording: Recording, direct: set[int], most: int, needed: Mapping[int, int]
) -> tuple[_Events, int | None]:
    """The events with at most so many gathers alive; or which one was needed without room.

    Args:
        recording: What the program did.
        direct: As in `gathers_live`.
        most: How many may be alive.
        needed: Gathers that cannot wait for room: with 1 until a module was released, else at all.
    """
    events: _Events = []
    alive: list[int] = []
    late: list[int] = []
    waiting: list[int] = []
    waited: set[int] = set()

    def begin(index: int, urgency: int) -> bool:
        site = recording.collectives[index].key.site
        for i in [i for i in late if recording.collectives[i].key.site == site]:
            late.remove(i)
            events.append(("drop", i))
        while late and len(alive) + len(late) >= most:
            events.append(("drop", late.pop(0)))
        if len(alive) >= most and needed.get(index, 0) < urgency:
            return False
        alive.append(index)
        events.append(("begin", index))
        return True

    for what, index in _with_ahead(recording, direct):
        if what == "guest" or index not in direct:
            if what != "release":
                events.append((what, index))
        elif what == "begin":
            if (waiting and needed.get(index, 0) < 2) or not begin(index, 2):
                waiting.append(index)
        elif what == "run":
            if index not in waiting and index not in waited:
                events.append((what, index))
        elif what == "release":
            if index in waiting:
                return events, index
            alive.remove(index)
            late.append(index)
            urgency = 1  # of the first; there is no hurry with more
            while waiting and begin(waiting[0], urgency):
                waited.add(waiting[0])
                events.append(("run", waiting.pop(0)))
                urgency = 2
    if waiting:
        return events, waiting[0]
    return events + [("drop", i) for i in late], None
