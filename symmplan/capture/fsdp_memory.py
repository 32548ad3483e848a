"""How much ordinary memory a recorded step of FSDP2 needs besides what its plan replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from symmplan.capture.fsdp_recording import Recording

__all__ = ["needed"]


def needed(recording: Recording, unsharded: Mapping[str, int]) -> int:
    """The most bytes of tensors that a step had at once, FSDP2's own buffers left out.

    Between two moments at which somebody looked, tensors had as much as at either, or as many as
    never before if that number has grown. All that the plan replaces was there meanwhile that was
    there at both.

    Args:
        recording: The step; its ``moments`` say what was allocated.
        unsharded: ``{site: bytes}`` of unsharded parameters that FSDP2 has in tensors of its own,
            at the latest from when a gather's flat buffer is dropped.

    Returns:
        0 if nobody looked.
    """
    live: dict[tuple[int, str], int] = {}
    released: set[int] = set()
    need = most = done = 0
    for number, (count, allocated, peak) in enumerate(recording.moments):
        before = sum(live.values())
        for what, index in recording.events[done:count]:
            if what == "tenant":
                continue
            call = recording.collectives[index]
            if what == "begin":
                live[index, "flat"] = call.nbytes
            elif what == "drop":
                live.pop((index, "flat"), None)
                if call.key.kind == "all_gather" and index not in released:
                    live[index, "parameters"] = unsharded.get(call.key.site, 0)
            elif what == "release":
                live.pop((index, "parameters"), None)
                released.add(index)
        done, after = count, sum(live.values())
        grown = number > 0 and peak > most
        most = max(most, peak)
        need = max(need, (peak if grown else allocated) - min(before, after), allocated - after)
    return need
