"""How many bytes of symmetric memory this rank may take.

[Note: what the program had]
    On a device a plan may take what the program had without it. That is what the driver has free;
    what torch's allocator has cached beyond what tensors will need, which the plan's own buffers
    are not among; and no more than lets tensors and segments together stay at what the allocator
    had at its most. The cached bytes are no use as long as the allocator keeps them: it gives them
    back once, before segments are obtained, unless replays say that it then needs more of them.

    Where torch's allocator has noted what it did in a recorded step, it is known how much it needs
    of the driver without the buffers that plans replace, see `symmplan.capture.fsdp_reserved`. That
    decides how much a plan may take so that the program has no more than before. Communicators and
    windows count as the plan's, and so does what tensors need more with it, even if fragments had
    room for that in the replay. Smaller plans than `SMALL` are not worth that: what a small
    program has at its most is a few blocks of the driver, and communicators take more than these.

    How much tensors will need is known of a step that was recorded, see
    `symmplan.capture.fsdp_memory`. Elsewhere it is taken to be what they had at most. Where tensors
    come and go, the allocator loses bytes to fragments. So where the device is nearly full it keeps
    one part in `_FRAGMENTS` more than what will come and go; what is there between steps stays.

    On a full device FSDP2's own buffers are the largest of these fragments: steps in which all of
    them are placed retry allocations less often than those of FSDP2 alone, and steps in which some
    are placed more often. Each byte more that a plan takes adds to the retries, which cost more
    than what a faster algorithm gains. So a plan that leaves nothing out and takes as few bytes as
    it can may take the room for fragments, too, if replays say that the program then needs no
    larger device than without it, and retries no more often. Where nothing was noted, it may if
    tensors fit, and has to if the allocator retried more than once in the recorded step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from symmplan.coordination.all_gather import least
from symmplan.coordination.world import current
from symmplan.memory.backends import BACKENDS, shm_file
from symmplan.memory.device_memory import device_memory
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from symmplan.device import DeviceMemory

__all__ = ["LEFT", "SMALL", "Room", "Usage", "agreed_room", "beside_cache", "free_bytes", "room_on"]

#: What is left alone of the bytes that are free: one part in so many.
_MARGIN = 10
#: And at least so many bytes of a device: communicators and kernels take some when they come.
LEFT = 256 << 20
#: A plan of up to so many bytes need not make up for fragments and communicators.
SMALL = 128 << 20
#: What torch's allocator loses to fragments: one part in so many of what comes and goes.
_FRAGMENTS = 16


@frozen
class Room:
    """Bytes that a plan may take; equal on all ranks.

    Attributes:
        nbytes: All of them.
        at_once: Those that it may take before torch's allocator has given back what it has cached.
        whole: Those that a plan may take which leaves out no collective.
        slack: As in `Usage`, of the ranks the least.
        held: Those of segments that are there for the plan, or that nobody uses.
    """

    nbytes: int
    at_once: int = sys.maxsize
    whole: int = sys.maxsize
    slack: tuple[int, ...] = ()
    held: int = 0


@frozen
class Usage:
    """What a program had of this rank's device before anything of it was planned.

    Attributes:
        need: Peak bytes of tensors that it still needs, without those that plans replace.
        most: The most bytes that torch's allocator had of the driver.
        slack: What `symmplan.capture.fsdp_memory.Needed` has besides.
        less: By how many bytes the allocator needs less of the driver without what plans replace;
            None if that is not known.
    """

    need: int
    most: int
    slack: tuple[int, ...] = ()
    less: int | None = None


def free_bytes(memory: str) -> int:
    """Bytes that are free for this rank's segments on the host: this rank's part of them.

    Args:
        memory: Name of the memory backend.

    Collective: no.
    """
    free = _available()
    if BACKENDS[memory].collectives:
        free = min(free, shm_file.free_bytes())
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if ranks.isdigit() and int(ranks):
        return free // int(ranks)
    return free // (c10d.world()[1] if c10d.has_process_groups() else 1)


def _available() -> int:
    """Bytes that the host can give; without bound where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return sys.maxsize
    found = (int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:"))
    return next(found, sys.maxsize)


def beside_cache(there: DeviceMemory) -> int:
    """Bytes that the driver has for segments while torch's allocator keeps its cache."""
    return there.free - max(there.free // _MARGIN, LEFT)


def room_on(there: DeviceMemory, usage: Usage | None, *, below: bool, reserve: int = 0) -> Room:
    """Bytes of a device that a plan may take. See [Note: what the program had].

    Args:
        there: What the device has now.
        usage: What the program had; None where that is not known, and it may need again as much as
            it had at most.
        below: Whether tensors and the plan may not have more than torch's allocator had.
        reserve: Bytes that something else will take before the plan does.
    """
    need = there.most_allocated if usage is None else usage.need
    fragments = max(0, need - there.allocated) // _FRAGMENTS
    unneeded = there.free + there.reserved - max(need, there.allocated)
    free = unneeded - fragments - reserve
    nbytes = free - max(free // _MARGIN, LEFT)
    whole = unneeded - max(reserve, LEFT)
    at_once = beside_cache(there)
    if usage is not None and below:
        most = usage.most - need
        if usage.less is not None:
            most = max(usage.less, min(most, SMALL))
        nbytes, whole = min(nbytes, most), min(whole, most)
        at_once = min(at_once, usage.most - there.reserved)
    room = Room(max(0, nbytes), max(0, at_once), max(0, whole))
    return room if usage is None else evolve(room, slack=usage.slack)


def agreed_room(
    given: int | None,
    held: int,
    groups: Mapping[str, Any],
    *,
    memory: str,
    device: torch.device,
    timeout: float,
    besides: int = 0,
    usage: Usage | None = None,
    below: bool = False,
    reserve: int = 0,
) -> Room:
    """Bytes that a plan may take: what was given, else what is free less a margin.

    Args:
        given: Bytes, or None for what is free.
        held: Bytes that the plan may take besides, as they are held for it already.
        groups: ``{name: process group}``.
        memory: Name of the memory backend.
        device: Where the segments will lie.
        timeout: Seconds that ranks wait for each other.
        besides: Bytes that other plans of the same budget hold already.
        usage: As for `room_on`.
        below: As for `room_on`.
        reserve: As for `room_on`.

    Returns:
        The least of what the ranks have, also of those that meet through others. What this machine
        has free is nothing to a simulated world: on its host there is room for all.

    Collective: yes, over those groups.
    """
    there = device_memory(device)
    if there is not None:
        mine = room_on(there, usage, below=below, reserve=reserve)
    elif current() is not None:
        mine = Room(sys.maxsize - besides)
    else:
        free = free_bytes(memory)
        mine = Room(max(0, free - free // _MARGIN))
    if given is not None:
        mine = evolve(mine, nbytes=given)
    else:
        mine = evolve(mine, nbytes=besides + max(held, mine.nbytes))
    numbers = (mine.nbytes, mine.at_once, mine.whole, held, *mine.slack)
    nbytes, at_once, whole, held, *slack = least("capacity", numbers, groups, timeout)
    return Room(nbytes, at_once, whole, tuple(slack), held)
