"""Communicators whose collectives copy engines run instead of kernels.

[Note: own communicators]
    NCCL's copy engines take no multiprocessor from the program's own kernels. Whether NCCL uses
    them is a property of a communicator (its CTA policy), and the program's own one may serve
    anything. So a group gets two more: one for all-gathers, one for the all-to-alls of
    reduce-scatters, because collectives of one communicator run one after the other. They are made
    once per process and set of ranks, and live until the process group is destroyed.

Source: ncclConfig_t.CTAPolicy in nccl.h.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from attrs import frozen

from symmplan import _compat as compat

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Engines", "engines_of"]


@frozen(eq=False)
class Engines:
    """A group's communicators for copy engines.

    Attributes:
        gather: For all-gathers.
        exchange: For all-to-alls.
    """

    gather: Any
    exchange: Any

    @property
    def groups(self) -> dict[str, Any]:
        """``{name: process group}`` of both."""
        return {compat.group_name(g): g for g in (self.gather, self.exchange)}


#: By the ranks, and the process group of the world, which may be destroyed and made again.
_MADE: dict[tuple[int, tuple[int, ...]], Engines] = {}


def engines_of(groups: Mapping[str, Any], memory: str, timeout: float) -> dict[str, Engines]:
    """For each group its communicators for copy engines; empty where there are none.

    Args:
        groups: ``{name: process group}``, in the same order on all ranks of each.
        memory: Name of the memory backend; only ``"nccl"`` has them.
        timeout: Seconds after which their collectives fail.

    Collective: yes, over those groups, when one of them is new.
    """
    if memory != "nccl" or not compat.has_copy_engine_policy():
        return {}
    made = {}
    world = id(dist.distributed_c10d._get_default_group())
    for name, group in groups.items():
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) < 2:
            continue
        found = _MADE.get((world, ranks))
        if found is None:
            found = Engines(*(_new(ranks, what, timeout) for what in ("gather", "exchange")))
            _MADE[world, ranks] = found
        made[name] = found
    return made


def _new(ranks: tuple[int, ...], what: str, timeout: float) -> Any:
    return dist.new_group(
        list(ranks),
        timeout=dt.timedelta(seconds=timeout),
        backend="nccl",
        pg_options=compat.copy_engine_options(),
        use_local_synchronization=True,
        group_desc=f"symmplan_{what}",
    )
