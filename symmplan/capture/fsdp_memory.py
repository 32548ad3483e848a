"""How much ordinary memory a recorded step of FSDP2 needs besides what its plan replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from symmplan.capture.fsdp_recording import Recording

__all__ = ["needed"]


def needed(recording: Recording, unsharded: Mapping[str, int]) -> tuple[int, int]:
    """The peak of tensor bytes in later steps, without and with FSDP2's buffers.

    A buffer that the plan replaces counts between two recorded moments only if it was there at
    both. Tensors that a step leaves for later ones, such as the state of an optimizer, count from
    the beginning of these.

    Args:
        recording: The step; its ``moments`` say what was allocated.
        unsharded: ``{site: bytes}`` of the unsharded parameters that the plan may place.

    Returns:
        Zeros if no moment was recorded.
    """
    if not recording.moments:
        return 0, 0
    live: dict[tuple[int, str], int] = {}
    need = peak = done = earlier = 0
    last = len(recording.moments) - 1
    left = max(0, recording.moments[-1].allocated - recording.moments[0].allocated)
    filled = {at: index for index, at in recording.filled.items()}
    for number, (count, allocated, most, own) in enumerate(recording.moments):
        before = sum(live.values())
        for at, (what, index) in enumerate([*recording.events[done:count], ("", 0)], done):
            if at in filled:
                gather = filled.pop(at)
                site = recording.collectives[gather].key.site
                live[gather, "parameters"] = unsharded.get(site, 0)
            if what in ("", "tenant"):
                continue
            call = recording.collectives[index]
            if what == "begin":
                live[index, "flat"] = call.nbytes
            elif what == "drop":
                live.pop((index, "flat"), None)
            elif what == "release":
                live.pop((index, "parameters"), None)
        done, after = count, sum(live.values())
        more = left if number < last else 0
        peak = max(peak, most + more)
        if not own and most > max(allocated, earlier):
            need = max(need, most - min(before, after) + more)
        need, earlier = max(need, allocated - after + more), allocated
    return need, peak
