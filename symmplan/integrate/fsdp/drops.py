"""How long buffers are held, on the rank that holds them longest.

[Note: the latest drop counts]
    Ranks run the same collectives in the same order, but the last reference to a buffer may go at
    different moments: a thread or a cycle of references may hold it a little longer on one rank.
    The plan must not depend on that, so a buffer counts as live until its latest drop on any rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan.coordination.all_gather import all_gather_json, leaders

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from symmplan.capture.fsdp_recording import Moment, Recording

__all__ = ["merged"]


def merged(
    recordings: Sequence[Recording], groups: Mapping[str, Any], timeout: float
) -> list[Recording]:
    """Recordings with the latest drops of all ranks. See [Note: the latest drop counts].

    Where ranks recorded other collectives, theirs are not looked at: their plans will differ, and
    the comparison of plans says how.

    Collective: yes, over those groups.
    """
    mine = [recording.drops() for recording in recordings]
    names = dict.fromkeys(leaders(groups).values())
    answers = all_gather_json("drops", dict.fromkeys(names, mine), groups, timeout)
    result = mine
    for said in (drops for texts in answers.values() for drops in texts):
        if not _alike(said, mine):
            continue
        result = [
            [None if a is None or b is None else max(a, (*b,)) for a, b in zip(x, y, strict=True)]
            for x, y in zip(result, said, strict=True)
        ]
    return [r.with_drops(drops) for r, drops in zip(recordings, result, strict=True)]


def _alike(said: Any, mine: list[list[Moment | None]]) -> bool:
    return (
        isinstance(said, list)
        and [len(x) if isinstance(x, list) else -1 for x in said] == [len(x) for x in mine]
        and all(d is None or _is_moment(d) for x in said for d in x)
    )


def _is_moment(said: Any) -> bool:
    return isinstance(said, list) and len(said) == 2 and all(type(n) is int for n in said)
