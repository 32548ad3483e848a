"""How many modules are unsharded at the same time, and until when.

[Note: released late]
    FSDP2 reshards a module before it unshards the next. If the next one took the bytes over, its
    gather would wait until the module's kernels ended. So in the plan a gather's bytes are in use
    until the next gather was started, unless that had been started ahead of time.

[Note: unsharded modules]
    If the number of unsharded modules is limited, the plan gives released bytes to the next gather
    at once where the limit would be exceeded. A prefetch that finds no room waits until the next
    module is released. A gather that is needed before that, such as a block's inside its root,
    exceeds the limit.

[Note: kept after forward]
    If the limit is larger than the program's own number, the plan keeps the last modules of a
    forward pass unsharded until their backward pass, as many as fit. These are not gathered again.
    This is what ``reshard_after_forward=False`` of `torch.distributed.fsdp.fully_shard` does, and
    symmplan sets it on these modules. Which modules those are follows from the recording alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from symmplan.capture.fsdp_recording import Call, Recording

_Events = list[tuple[str, int]]


def gathers_unsharded(recording: Recording, zero_copy: set[int], live: int | None) -> _Events:
    """The events, in which buffers of ``zero_copy`` drop when their bytes are free to be reused.

    Args:
        recording: What the program did.
        zero_copy: Indices of the all-gathers that fill parameters.
        live: How many of these may be alive together; None: as many as in [Note: released late].
    """
    late = _released_late(recording, zero_copy)
    if live is None or _most(late, zero_copy) <= live:
        return late
    needed: dict[int, int] = {}
    while True:
        events, missing = _at_most(recording, zero_copy, live, needed)
        if missing is None:
            return events
        needed[missing] = needed.get(missing, 0) + 1


def most_alive(
    recordings: Sequence[Recording], zero_copy: Collection[str], live: int | None
) -> int:
    """How many gathers of these modules have bytes at the same time."""
    most = 0
    for recording in recordings:
        inside = placeable(recording, zero_copy)
        most = max(most, _most(gathers_unsharded(recording, inside, live), inside))
    return most


def placeable(recording: Recording, zero_copy: Collection[str]) -> set[int]:
    """Indices of the gathers of these modules that a plan has room for."""
    gathers = {i for i, call in enumerate(recording.collectives) if _gathers(call, zero_copy)}
    return gathers - recording.unplaced


def kept_after_forward(
    recordings: Sequence[Recording], zero_copy: Collection[str], live: int | None
) -> tuple[str, ...]:
    """The modules that stay unsharded until their backward pass. See [Note: kept after forward].

    Args:
        recordings: What the program did.
        zero_copy: Names of the modules whose parameters live in placements.
        live: How many of these may be unsharded at once; None: as many as the program has, and
            then, or where it has no fewer, none stays.
    """
    if live is None or live <= most_alive(recordings, zero_copy, None):
        return ()
    again: dict[str, None] = {}
    for recording in recordings:
        gathered: set[str] = set()
        for what, index in recording.events:
            call = recording.collectives[index] if what == "begin" else None
            if call is not None and _gathers(call, zero_copy):
                if call.key.backward and call.key.site in gathered:
                    again.setdefault(call.key.site)
                gathered.add(call.key.site)
    kept: tuple[str, ...] = ()
    for site in again:  # backward first comes to what forward gathered last
        more = (*kept, site)
        if most_alive([with_kept(r, more) for r in recordings], zero_copy, None) > live:
            break
        kept = more
    return kept


def with_kept(recording: Recording, kept: Collection[str]) -> Recording:
    """The recording as it would be if these modules were not resharded after forward.

    A module that forward gathered stays until a pass that is not forward releases it; what was
    gathered of it meanwhile is not.
    """
    events: _Events = []
    collectives = list(recording.collectives)
    as_if: dict[int, int] = {}  # of what is not gathered: which gather is still there
    there: dict[str, int] = {}
    for what, index in recording.events:
        call = recording.collectives[index] if what != "tenant" else None
        if call is None or call.key.kind != "all_gather" or call.key.site not in kept:
            events.append((what, index))
            continue
        site = call.key.site
        if what == "begin" and site in there and call.group:
            as_if[index] = there[site]
            collectives[index] = evolve(call, group="")
        elif what == "release":
            stays = as_if.get(index, index)
            if index in recording.after_forward:
                there[site] = stays
            else:
                there.pop(site, None)
                events.append(("release", stays))
        elif index not in as_if:
            events.append((what, index))
    return evolve(recording, collectives=collectives, events=events)


def _gathers(call: Call, zero_copy: Collection[str]) -> bool:
    """Whether a call gathers the parameters of one of these modules."""
    return bool(call.group) and call.key.kind == "all_gather" and call.key.site in zero_copy


def _most(events: _Events, zero_copy: set[int]) -> int:
    alive = most = 0
    for what, index in events:
        if index in zero_copy and what in ("begin", "drop"):
            alive += 1 if what == "begin" else -1
            most = max(most, alive)
    return most


def _released_late(recording: Recording, zero_copy: set[int]) -> _Events:
    events: _Events = []
    late: list[int] = []
    live: list[int] = []
    for what, index in tuple(recording.events):
        if what == "tenant" or index not in zero_copy:
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
    recording: Recording, zero_copy: set[int], most: int, needed: Mapping[int, int]
) -> tuple[_Events, int | None]:
    """The events with at most so many gathers alive; or which one was needed without room.

    Args:
        recording: What the program did.
        zero_copy: As in `gathers_unsharded`.
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

    for what, index in tuple(recording.events):
        if what == "tenant" or index not in zero_copy:
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
