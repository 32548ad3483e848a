"""The segment cache: segments without leases, kept for the next plan.

[Note: windows that stay]
    Torch 2.11 registers a segment as a window of NCCL's communicator and frees it without taking
    the window back. NCCL finds windows by address. So it would take ordinary memory that is later
    allocated at that address for symmetric, and reach into unrelated memory of peers. NVSHMEM frees
    collectively, but models end on one rank after the other. So such segments are never freed while
    the process lives. When a model or a compile backend releases them they are kept, and the next
    one of the same groups gets them if its plan fits. Memory that is borrowed for a while comes
    from these segments, or from memory that can be freed. Segments whose windows symmplan makes
    itself can be freed where all ranks come to it: when programs sleep, and where larger segments
    have replaced them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from symmplan.coordination.all_gather import all_agree, all_gather_json, leaders
from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.own import own_work
from symmplan.device import kind_of
from symmplan.memory import agree, realize
from symmplan.memory.backends.windows import take_back
from symmplan.memory.streams import synchronize
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch

    from symmplan.memory import Arena
    from symmplan.model import Plan

__all__ = ["borrowed", "cached", "cached_bytes", "fits", "give_back_together", "obtain"]


def fits(plan: Plan, arena: Arena) -> bool:
    """Whether the segments of ``arena`` have room for those of ``plan``, for the same groups."""
    return all(
        spec.name in arena.segments
        and spec.nbytes <= arena.segments[spec.name].nbytes
        and spec.groups == arena.segments[spec.name].spec.groups
        and spec.signal_pad == arena.segments[spec.name].spec.signal_pad
        for spec in plan.segments
    )


def cached_bytes(device: torch.device) -> int:
    """Bytes of the largest arena that is not in use. Collective: no."""
    cached = PROCESS.cache.copy().values()
    return max((a.segment_bytes for a in cached if _device_of(a) == device), default=0)


@own_work
def obtain(
    plan: Plan,
    groups: Mapping[str, Any],
    *,
    memory: str,
    device: torch.device,
    timeout: float,
    user: str,
    temporary: bool = False,
    debug: bool = False,
) -> tuple[Arena, bool]:
    """Memory for ``plan``: a cached arena that all ranks have, or a new one.

    Args:
        plan: What must fit.
        groups: ``{name: process group}`` of who is asked: together all ranks of the program. Other
            groups of the plan are torch's.
        memory: Name of the memory backend.
        device: Where it must lie.
        timeout: Seconds that ranks wait for each other.
        user: As for `symmplan.memory.realize`.
        temporary: As for `symmplan.memory.realize`, if it must be new.
        debug: The same.

    Returns:
        The arena, and whether it is new.

    Raises:
        AgreementError, BackendError, PeerTimeoutError: As `symmplan.memory.realize`.

    Collective: yes, over those groups.
    """
    if kind_of(device).is_accelerator:
        number = cached(plan, groups, memory=memory, device=device, timeout=timeout)
        if number is not None:
            synchronize(device)  # work of who dropped it may still use the bytes
            agree(plan, groups, timeout)
            kept: Arena = PROCESS.cache.pop(number)
            kept.user, kept.tenants[:] = user, [user]
            return kept, False
    arena = realize(
        plan,
        memory=memory,
        device=device,
        groups=groups,
        timeout=timeout,
        temporary=temporary,
        debug=debug,
        user=user,
    )
    return arena, True


@contextlib.contextmanager
def borrowed(
    plan: Plan,
    groups: Mapping[str, Any],
    *,
    memory: str,
    device: torch.device,
    timeout: float,
    meet: Callable[[Arena], object] = lambda _: None,
) -> Iterator[tuple[Arena, dict[str, torch.Tensor]]]:
    """Memory for ``plan`` for a while, in which nothing but collectives may run.

    Args and errors as `obtain`; ``meet`` meets others in it before anything runs. At the end nobody
    may hold the bytes, and all ranks must have ended what reaches into the others.

    Returns:
        The arena, and ``{buffer: its bytes}``.

    Collective: to enter yes, over those groups; to leave no.
    """
    arena, _ = obtain(
        plan,
        groups,
        memory=memory,
        device=device,
        timeout=timeout,
        user="measurement",
        temporary=True,
    )
    try:
        meet(arena)
    except BaseException:
        arena.give_back()
        raise
    there = {
        name: arena.segments[p.segment].tensor[p.offset : p.end]
        for name, p in plan.placements.items()
    }
    try:
        yield arena, there
        synchronize(device)
    except BaseException:
        if kind_of(device).is_accelerator:  # who waits for it may wait for a peer that failed
            PROCESS.kept.append(arena)
        else:
            arena.release()
        raise
    there.clear()
    arena.give_back()


@own_work
def give_back_together(arenas: Iterable[Arena], groups: Mapping[str, Any], timeout: float) -> None:
    """Give segments back to the driver, and what is cached of these groups.

    Memory that cannot be given back while the process lives stays in the cache.

    Args:
        arenas: Those that the caller has, in one order on all ranks, without work on them.
        groups: ``{name: process group}`` of all with which something may be registered.
        timeout: Seconds that ranks wait for each other.

    Collective: yes, over those groups.
    """
    for arena in arenas:
        arena.give_back(together=True)
    members = {*groups.values()}
    for number, arena in PROCESS.cache.copy().items():
        met = {
            r.group.process_group for s in arena.segments.values() for r in s.rendezvous.values()
        }
        if arena.frees_together and met <= members:
            PROCESS.cache.pop(number).release()
    take_back(groups, timeout)


def cached(
    plan: Plan, groups: Mapping[str, Any], *, memory: str, device: torch.device, timeout: float
) -> int | None:
    """Number of the smallest cached arena that `obtain` would give for a plan; None if none.

    Collective: yes, over those groups.
    """
    found = {
        number: arena
        for number, arena in PROCESS.cache.copy().items()
        if _device_of(arena) == device and _serves(arena, plan, memory, groups)
    }
    return _common(found, groups, timeout)


def _common(found: Mapping[int, Arena], groups: Mapping[str, Any], timeout: float) -> int | None:
    """Number of the smallest arena that all ranks have found; None if there is none.

    A model that was dropped ends on each rank at a moment of its own.

    Collective: yes, over those groups.
    """
    mine = sorted(found, key=lambda n: (found[n].segment_bytes, n))
    names = dict.fromkeys(leaders(groups).values())
    said = all_gather_json("cached", dict.fromkeys(names, mine), groups, timeout)
    lists = [numbers for texts in said.values() for numbers in texts]
    first = [n for n in mine if all(isinstance(m, list) and n in m for m in lists)][:1]
    return first[0] if all_agree("cached arena", first, groups, timeout) else None


def _device_of(arena: Arena) -> torch.device:
    return next(iter(arena.segments.values())).tensor.device


def _serves(arena: Arena, plan: Plan, memory: str, groups: Mapping[str, Any]) -> bool:
    if memory not in ("auto", arena.memory) or not fits(plan, arena):
        return False
    # A group may have been destroyed and made again under its old name.
    now = resolve_groups((name for spec in plan.segments for name in spec.groups), groups)
    return all(
        arena.segments[spec.name].rendezvous[name].group.process_group is now[name].process_group
        for spec in plan.segments
        for name in spec.groups
    )
