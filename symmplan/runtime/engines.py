"""Communicators whose collectives copy engines run instead of kernels.

[Note: own communicators]
    NCCL's copy engines take no multiprocessor from the program's own kernels. A communicator's CTA
    policy says whether NCCL uses them, and the program's own communicator serves other collectives,
    too. So a group gets two more communicators: one for all-gathers, one for the all-to-alls of
    reduce-scatters, because collectives of one communicator run one after the other. They are made
    once per process and set of ranks, for all models, and live until the process groups are
    destroyed.

    Only the ranks of a group take part, so torch names the new group by its ranks and by how many
    groups a rank is in. If that number differs within a group, its ranks would wait for each other
    under different names. Such a group gets no communicators of its own.

Source: ncclConfig_t.CTAPolicy in nccl.h; torch/distributed/distributed_c10d.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from attrs import frozen

from symmplan.coordination.all_gather import all_gather_json
from symmplan.errors import BackendError
from symmplan.memory import BACKENDS
from symmplan.process import PROCESS
from symmplan.torch_private import c10d, nccl

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from symmplan.memory.arena import Arena


@frozen(eq=False)
class Engines:
    """A group's communicators for copy engines.

    Attributes:
        gather: For all-gathers.
        exchange: For all-to-alls.
    """

    gather: Any
    exchange: Any

    def name(self, kind: Literal["gather", "exchange"]) -> str:
        """Name of one of them."""
        return c10d.group_name(self.gather if kind == "gather" else self.exchange)

    @property
    def groups(self) -> dict[str, Any]:
        """``{name: process group}`` of both."""
        return {c10d.group_name(g): g for g in (self.gather, self.exchange)}


def engines_of(groups: Mapping[str, Any], memory: str, timeout: float) -> dict[str, Engines]:
    """For each group its communicators for copy engines; empty where there are none.

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
        name: "made" if _made(ranks[name]) is not None else c10d.known_groups() for name in groups
    }
    told = all_gather_json("engines", mine, groups, timeout)
    made = {}
    for name, group in groups.items():
        if any(said != mine[name] for said in told[name]):
            continue
        found = _made(ranks[name])
        if found is None:
            found = PROCESS.engines_made[ranks[name]] = Engines(
                *(nccl.copy_engine_group(group, f"symmplan_{w}") for w in ("gather", "exchange"))
            )
        made[name] = PROCESS.engines[group] = found
    return made


def known(group: Any) -> Engines | None:
    """The communicators that `engines_of` found for a process group, if they still live."""
    found: Engines | None = PROCESS.engines.get(group)
    if found is not None and _made(tuple(dist.get_process_group_ranks(group))) is not found:
        del PROCESS.engines[group]
        return None
    return found


def known_of(groups: Mapping[str, Any]) -> dict[str, Engines]:
    """Of each group its `known` communicators; none of what has none."""
    return {name: found for name, group in groups.items() if (found := known(group)) is not None}


def asked(group: Any) -> bool:
    """Whether all ranks of a process group were asked for copy engines, and have what was found."""
    known(group)
    return group in PROCESS.engines


def register(arena: Arena, engines: Mapping[str, Engines]) -> int:
    """Register segments with the communicators for copy engines.

    Args:
        arena: The segments.
        engines: ``{name of a group: its communicators}``.

    Returns:
        How many rendezvous were made; 0 if there were all of them already.

    Collective: yes, over those groups, if any was missing.
    """
    if not BACKENDS[arena.memory].engines:  # no other memory is known to a communicator
        return 0
    return arena.join(
        {
            name: {
                n: g
                for group in s.rendezvous  # as they met: names sort differently over a mesh
                if group in engines
                for n, g in engines[group].groups.items()
            }
            for name, s in arena.segments.items()
        }
    )


def register_known(arena: Arena) -> int:
    """`register` segments with the `known` communicators of all groups that they met."""
    met = {n: m for s in arena.segments.values() for n, m in s.rendezvous.items()}
    return register(arena, known_of({n: m.group.process_group for n, m in met.items()}))


def require(groups: Iterable[str], engines: Mapping[str, Engines], memory: str) -> None:
    """Refuse ``choose="copy engine"`` for a group without copy engines.

    Raises:
        BackendError: A group has no copy engines. Shared memory has no kernels to avoid.
    """
    without = [name for name in groups if name not in engines]
    if BACKENDS[memory].devices and without:
        raise BackendError(
            f"choose='copy engine': memory={memory!r} has no copy engines for group {without[0]!r}",
            expected="memory='nccl' with NCCL 2.28 or newer, and ranks that have created "
            "the same process groups",
            fix="use choose='measure'",
            group=without[0],
            memory=memory,
        )


def _made(ranks: tuple[int, ...]) -> Engines | None:
    """Those that were made for some ranks and were not destroyed since."""
    found: Engines | None = PROCESS.engines_made.get(ranks)
    if found is None:
        return None
    try:
        for group in (found.gather, found.exchange):
            dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        del PROCESS.engines_made[ranks]
        return None
    return found
