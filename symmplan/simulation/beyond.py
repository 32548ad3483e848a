"""Bytes of a simulated rank's device beyond segments and tensors, awake and asleep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmplan.memory.beyond import expected_beyond
from symmplan.memory.held_segment import PINNED
from symmplan.memory.meeting.topology import simulated
from symmplan.process import PROCESS
from symmplan.torch_private.c10d import group_by_name

if TYPE_CHECKING:
    from collections.abc import Collection

    from symmplan.coordination.world import SimulatedCall, World
    from symmplan.memory.segment import Segment
    from symmplan.model import AlgorithmName

__all__ = ["expected"]


def expected(
    world: World, kinds: Collection[tuple[SimulatedCall, AlgorithmName]], *, asleep: bool = False
) -> int:
    """Bytes of a device that NCCL takes for the plans; ``asleep``: and what stays of segments."""
    engines = {call.group for call, algorithm in kinds if algorithm == "copy engine"}
    held = [s for s in world.segments if not s.released]
    # Names of one group share a rendezvous.
    groups = [{*{id(r): name for name, r in s.rendezvous.items()}.values()} for s in held]
    if not asleep:
        return expected_beyond(world.memory, groups, engines)
    given = zip(held, groups, strict=True)
    stay = [(s.nbytes, names) for s, names in given if not _sleeps(world, s, names)]
    engines &= {name for _, names in stay for name in names}
    nbytes: int = sum(n for n, _ in stay)
    return nbytes + expected_beyond(world.memory, groups, engines)


def _sleeps(world: World, segment: Segment, groups: Collection[str]) -> bool:
    """Whether a segment is given back while its program sleeps."""
    pinned = [a for a in PROCESS.arenas.values() if a.user == PINNED]
    if world.memory == "nvshmem" or any(segment in a.segments.values() for a in pinned):
        return False
    # Windows of NCCL are of groups within a host; torch has what others reach, and keeps it.
    within = all(simulated(group_by_name(name)).hosts == 1 for name in groups)
    return world.memory != "nccl" or within
