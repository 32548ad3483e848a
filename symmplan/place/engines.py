"""Communicators whose collectives copy engines run instead of kernels.

[Note: own communicators]
    NCCL's copy engines take no multiprocessor from the program's own kernels. A communicator's CTA
    policy says whether NCCL uses them, and the program's own communicator serves other collectives,
    too. So the ranks of a group get one more communicator. It is made once per process and set of
    ranks, for all models, and lives until the process groups are destroyed, or all programs sleep
    that have segments registered with it. When one of them wakes, another one is made.

    It runs all-gathers and all-to-alls on segments, and nothing else. An ordinary collective would
    make it allocate channels. So ranks meet over the program's own group.

Source: ncclConfig_t.CTAPolicy in nccl.h; torch/distributed/distributed_c10d.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from symmplan.coordination.all_gather import all_gather_json
from symmplan.errors import BackendError
from symmplan.memory import BACKENDS
from symmplan.memory.beyond import counting
from symmplan.memory.segment import meetings
from symmplan.process import PROCESS
from symmplan.torch_private import c10d, nccl

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import torch

    from symmplan.memory.arena import Arena

#: For what communicators are made here.
_WHAT = "symmplan_copy_engines"


def engines_of(groups: Mapping[str, Any], memory: str, timeout: float) -> dict[str, Any]:
    """For each group its communicator for copy engines: a process group of the same ranks.

    Args:
        groups: ``{name: process group}``, in the same order on all ranks of each.
        memory: Name of the memory backend; only ``"nccl"`` has them.
        timeout: Seconds that ranks wait for each other. Later collectives have the timeout of the
            group itself.

    Raises:
        PeerTimeoutError: A rank did not come within the timeout.

    Collective: yes, over those groups.
    """
    PROCESS.engines.update(dict.fromkeys(groups.values()))
    groups = {name: group for name, group in groups.items() if group.size() > 1}
    if not BACKENDS[memory].engines or not groups or not nccl.has_copy_engine_policy():
        return {}
    ranks = {name: tuple(dist.get_process_group_ranks(g)) for name, g in groups.items()}
    mine = {
        name: (_made(of) is not None, PROCESS.communicators_made[_WHAT, of])
        for name, of in ranks.items()
    }
    told = all_gather_json("engines", mine, groups, timeout)
    made = {}
    for name, group in groups.items():
        lives = {alive for alive, _ in told[name]}
        if len(lives) > 1:  # some ranks have destroyed it
            continue
        of = ranks[name]
        found = _made(of)
        if found is None:
            number = max(number for _, number in told[name])
            PROCESS.communicators_made[_WHAT, of] = number + 1
            found = PROCESS.engines_made[of] = nccl.copy_engine_group(group, _WHAT, number)
        made[name] = PROCESS.engines[group] = found
    return made


def again(groups: Mapping[str, Any], memory: str, device: torch.device, timeout: float) -> None:
    """Make communicators again that have ended while their programs slept.

    Args:
        groups: As for `engines_of`: those that had one.
        memory: As for `engines_of`.
        device: Of this rank's tensors.
        timeout: As for `engines_of`.

    Collective: yes, over those of the groups that have none.
    """
    gone = {name: group for name, group in groups.items() if known(group) is None}
    if gone:
        with counting("communicators", device):
            engines_of(gone, memory, timeout)


def having(groups: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Those groups whose communicators have these names, now or when there are any."""
    ranks = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    return {n: groups[n] for n, of in ranks.items() if nccl.name_of(_WHAT, of) in names}


def end_unused(groups: Mapping[str, Any], timeout: float) -> None:
    """End the communicators of groups with which no segment is registered on any rank.

    Args:
        groups: ``{name: process group}``, in the same order on all ranks of each. Nothing runs over
            their communicators.
        timeout: Seconds that ranks wait for each other.

    Collective: yes, over those of the groups that have one.
    """
    names = {engines: name for name, engines in known_of(groups).items()}
    met = {meeting.group.process_group for meeting in meetings()}
    used = {
        name: engines in met or any(w is not None for w in PROCESS.windows.get(engines, ()))
        for engines, name in names.items()
    }
    asked = {name: groups[name] for name in used}
    told = all_gather_json("communicators in use", used, asked, timeout)
    for engines, name in names.items():
        if not any(told[name]):
            del PROCESS.engines_made[tuple(dist.get_process_group_ranks(engines))]
            unask([group for group, found in PROCESS.engines.items() if found is engines])
            nccl.end(engines)


def known(group: Any) -> Any | None:
    """The communicator that `engines_of` found for a process group, if it still lives."""
    found = PROCESS.engines.get(group)
    if found is not None and _made(tuple(dist.get_process_group_ranks(group))) is not found:
        del PROCESS.engines[group]
        return None
    return found


def known_of(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Of each group its `known` communicator; none of what has none."""
    return {name: found for name, group in groups.items() if (found := known(group)) is not None}


def with_known(groups: Mapping[str, Any]) -> dict[str, Any]:
    """The groups, and by their own names the `known` communicators of the same ranks."""
    return {**groups, **{c10d.group_name(found): found for found in known_of(groups).values()}}


def asked(group: Any) -> bool:
    """Whether all ranks of a process group were asked for copy engines, and have what was found."""
    known(group)
    return group in PROCESS.engines


def unask(groups: Iterable[Any]) -> None:
    """Ask for the copy engines of process groups again, next time. On all ranks, or on none."""
    for group in groups:
        PROCESS.engines.pop(group, None)


def register(arena: Arena, engines: Mapping[str, Any]) -> int:
    """Register segments with the communicators for copy engines.

    Args:
        arena: The segments.
        engines: ``{name of a group: its communicator}``.

    Returns:
        How many rendezvous were made; 0 if there were all of them already.

    Collective: yes, over those groups, if any was missing.
    """
    if not BACKENDS[arena.memory].engines:  # no other memory is known to a communicator
        return 0
    return arena.join(
        {
            name: {
                c10d.group_name(engines[group]): engines[group]
                for group in s.rendezvous  # as they met: names sort differently over a mesh
                if group in engines
            }
            for name, s in arena.segments.items()
        }
    )


def register_known(arena: Arena) -> int:
    """`register` segments with the `known` communicators of all groups that they met."""
    met = {n: m for s in arena.segments.values() for n, m in s.rendezvous.items()}
    return register(arena, known_of({n: m.group.process_group for n, m in met.items()}))


def require(groups: Iterable[str], engines: Mapping[str, Any], memory: str) -> None:
    """Refuse ``choose="copy engine"`` for a group without copy engines.

    Raises:
        BackendError: A group has no copy engines. Shared memory has no kernels to avoid.
    """
    without = [name for name in groups if name not in engines]
    if BACKENDS[memory].devices and without:
        raise BackendError(
            f"choose='copy engine': memory={memory!r} has no copy engines for group {without[0]!r}",
            expected="memory='nccl' with NCCL 2.28 or newer",
            fix="use choose='measure'",
            group=without[0],
            memory=memory,
        )


def _made(ranks: tuple[int, ...]) -> Any | None:
    """The communicator that was made for some ranks and was not destroyed since."""
    found = PROCESS.engines_made.get(ranks)
    if found is None:
        return None
    try:
        dist.get_process_group_ranks(found)
    except (KeyError, ValueError, RuntimeError):
        del PROCESS.engines_made[ranks]
        return None
    return found
