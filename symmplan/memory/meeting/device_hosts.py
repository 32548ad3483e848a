"""Two levels for device memory: CUDA's mappings within each host, NCCL between hosts.

See [Note: two levels] in `symmplan.memory.meeting.counterparts`. What differs from shared memory:

- Everything runs in the order of the current stream, and the host does not wait.
- The ranks of a host have one communicator, and the counterparts another one. The ranks of a host
  meet in a one-element all-reduce, because torch's allocation has only one signal pad, and a
  gather and a reduction may meet at the same time.
- A lost rank is detected as in any collective of NCCL.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmplan.coordination.all_gather import all_gather_json
from symmplan.coordination.exchange import processes_of
from symmplan.coordination.own import own_work
from symmplan.errors import BackendError
from symmplan.memory.beyond import counting
from symmplan.memory.kernels import as_bytes
from symmplan.memory.meeting.counterparts import counterparts_of, hosts_of
from symmplan.memory.meeting.torch_rendezvous import TorchRendezvous
from symmplan.memory.segment import meetings
from symmplan.process import PROCESS
from symmplan.torch_private import c10d, nccl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from symmplan.coordination.exchange import Exchange
    from symmplan.coordination.groups import Group

__all__ = ["DeviceCounterparts", "DeviceHostsMeeting", "device_counterparts", "end_unused"]


class DeviceCounterparts:
    """A rank's communicators with the ranks of its host, and with its counterparts.

    Args:
        group: The group on several hosts.
        near: The ranks of this one's host, itself among them.
        ranks: The counterparts, itself among them.
        device: This rank's.
        number: How many there were of the group before, at least; the same on all ranks.

    Attributes:
        near: The ranks of this one's host, in the order of the process group ``here``.
        ranks: The counterparts, in the order of the process group that connects them.
        here: The process group of the ranks of this host.

    Collective: yes, over ``group``.
    """

    def __init__(
        self,
        group: Group,
        near: Sequence[int],
        ranks: Sequence[int],
        device: torch.device,
        number: int,
    ) -> None:
        # Torch sorts the ranks of a new group. Counterparts come in the order of their hosts.
        self.near, self.ranks = (
            tuple(sorted(of, key=group.ranks.__getitem__)) for of in (near, ranks)
        )
        members = [[group.ranks[r] for r in of] for of in (self.near, self.ranks)]
        self.here, self._across = (
            nccl.subgroup(group.process_group, of, f"symmplan_{what}", number)
            for of, what in zip(members, ("host", "counterparts"), strict=True)
        )
        for made in (self.here, self._across):  # which connect when they are first used
            dist.all_reduce(torch.zeros(1, device=device), group=made)

    def gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor) -> Any:
        """Start to gather each counterpart's bytes; returns a work. Collective."""
        flat = [as_bytes(x) for x in outputs]
        return c10d.start_all_gather(flat, as_bytes(source), self._across)

    def exchange(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        received: Sequence[int] = (),
        sent: Sequence[int] = (),
    ) -> Any:
        """Start to send a part to each counterpart; see `Counterparts.exchange`. Collective."""
        parts: dict[str, Any] = {"received": received, "sent": sent}
        return c10d.start_all_to_all(as_bytes(output), as_bytes(source), self._across, **parts)

    def end(self) -> None:
        """End them. Collective, over ``group``."""
        for made in (self.here, self._across):
            nccl.end(made)

    def meet(self, token: torch.Tensor) -> None:
        """Meet the counterparts, in the order of the current stream. Collective."""
        dist.all_reduce(token, group=self._across)


class DeviceHostsMeeting(TorchRendezvous):
    """The meeting of a group of devices on several hosts.

    Args:
        group: The group.
        own: This rank's bytes.
        handle: Torch's, of the allocation among the ranks of this host.
        counterparts: Connections.
        begin: Where the bytes begin in the allocation.
    """

    memory = "cuda"

    def __init__(
        self,
        group: Group,
        own: torch.Tensor,
        handle: Any,
        counterparts: DeviceCounterparts,
        begin: int = 0,
    ) -> None:
        given: dict[str, Any] = {"begin": begin, "by_collective": True, "near": counterparts.near}
        super().__init__(group, own, handle, timeout=0.0, **given)
        self.counterparts = counterparts

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each counterpart's host, in the order of the counterparts."""
        return hosts_of(self.group, self.counterparts.ranks)

    @own_work
    def barrier(self, timeout: float | None = None) -> None:
        """A barrier in the order of the current stream; the timeouts of NCCL apply."""
        del timeout
        self.leave()
        self.counterparts.meet(self._token)
        self.leave()

    def enter(self, call: bytes, free: Sequence[int] = (), site: str = "") -> None:
        """See `Rendezvous.enter`: of the ranks of this host alone, and nothing is compared."""
        del call, free, site
        self.leave()

    @own_work
    def leave(self) -> None:
        """See `Rendezvous.leave`. Ranks of other hosts have not touched any bytes."""
        dist.all_reduce(self._token, group=self.counterparts.here)

    @own_work
    def wait(self, work: Any) -> None:
        """Let the current stream wait for what was started with the counterparts."""
        work.wait()


@own_work
def device_counterparts(
    group: Group, device: torch.device, exchange: Exchange, phase: str, memory: str
) -> DeviceCounterparts | None:
    """A rank's communicators if its group runs in two levels: made once for a group.

    Args:
        group: The group, whose ranks were asked what they are to each other; else it has one level.
        device: This rank's.
        exchange: Among all ranks of the group.
        phase: Name of a round of it.
        memory: Name of the memory backend.

    Raises:
        BackendError: The group has no NCCL communicator.

    Collective: yes, over the group.
    """
    known = PROCESS.topologies.get(group.process_group, {}).get("cuda")
    if known is None or not known.two_levels(memory):
        return None
    if not nccl.serves(group.process_group):
        raise BackendError(
            f"group {group.name!r} is on several hosts and has no NCCL communicator",
            fix="create the group with nccl",
            **group.here,
        )
    found: DeviceCounterparts | None = PROCESS.device_counterparts.get(group.process_group)
    of = "hosts", group.ranks
    mine = [found is not None, PROCESS.communicators_made[of]]
    said = exchange.round(phase, json.dumps(mine).encode(), groups=[group.name])[group.name]
    theirs = [json.loads(text) for text in said]
    if found is not None and all(made for made, _ in theirs):
        return found
    number = max(number for _, number in theirs)
    hosts = [process.host for process in processes_of(group.process_group)]
    PROCESS.communicators_made[of] = number + 1
    with counting("communicators", device):
        made = DeviceCounterparts(group, *counterparts_of(hosts, group.rank), device, number)
    PROCESS.device_counterparts[group.process_group] = made
    return made


def end_unused(groups: Mapping[str, Any], timeout: float) -> None:
    """End the communicators of groups on several hosts with which no segment is registered.

    Args:
        groups: ``{name: process group}``, in the same order on all ranks of each. Nothing runs over
            their communicators.
        timeout: Seconds that ranks wait for each other.

    Collective: yes, over those of the groups that have some.
    """
    found = {n: g for n, g in groups.items() if g in PROCESS.device_counterparts}
    met = [id(meeting.counterparts) for meeting in meetings()]
    used = {name: id(PROCESS.device_counterparts[group]) in met for name, group in found.items()}
    told = all_gather_json("communicators in use", used, found, timeout)
    for name, group in found.items():
        if not any(told[name]):
            PROCESS.device_counterparts.pop(group).end()
