"""How many bytes of symmetric memory this rank may take."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symmplan.coordination.all_gather import all_gather_json
from symmplan.coordination.world import current
from symmplan.memory import shm_file
from symmplan.memory.backends import BACKENDS
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["agreed_room", "free_bytes"]

#: What is left alone of the bytes that are free: one part in so many.
_MARGIN = 10
#: And at least so many bytes of a device: communicators and kernels take some when they come.
_OWN = 256 << 20


def free_bytes(memory: str, device: torch.device) -> int:
    """Bytes that are free for this rank's segments.

    On devices what their driver has free, in shared memory this rank's part of what the host has.

    Args:
        memory: Name of the memory backend.
        device: Where the segments will lie.

    Collective: no.
    """
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
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


def agreed_room(
    given: int | None,
    held: int,
    groups: Mapping[str, Any],
    *,
    memory: str,
    device: torch.device,
    timeout: float,
    besides: int = 0,
) -> int:
    """Bytes that a plan may take: what was given, else what is free less a margin.

    Args:
        given: Bytes, or None for what is free.
        held: Bytes that the plan may take besides, as they are held for it already.
        groups: ``{name: process group}``.
        memory: Name of the memory backend.
        device: Where the segments will lie.
        timeout: Seconds that ranks wait for each other.
        besides: Bytes that other plans of the same budget hold already.

    Returns:
        The least of what the ranks have, also of those that meet through others. What this machine
        has free is nothing to a simulated world: without ``given`` that has room for all.

    Collective: yes, over those groups.
    """
    if current() is not None:
        return sys.maxsize if given is None else given
    mine = given
    if mine is None:
        free = free_bytes(memory, device)
        margin = max(free // _MARGIN, _OWN if device.type == "cuda" else 0)
        mine = besides + max(held, free - margin, 0)
    for _ in range(3):  # as `symmplan.coordination.all_gather.throughout`
        said = all_gather_json("capacity", dict.fromkeys(groups, mine), groups, timeout)
        mine = min((mine, *(x for of in said.values() for x in of if type(x) is int)))
    return mine
