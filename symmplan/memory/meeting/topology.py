"""What a process group is: its hosts, and whose memory its ranks can reach.

[Note: who can be served]
    Symmetric memory is memory that every rank of a group addresses. Processes of one host share the
    host's; devices of one host reach each other over NVLink or PCIe, where they have peer access;
    devices of several hosts do so if NVLink joins the hosts to one domain. Ranks that are farther
    apart are served by NVSHMEM, or in two levels: see [Note: two levels] in
    `symmplan.memory.meeting.counterparts`. The collectives of all other groups run in torch's own
    way.

    So before anything is planned for a group, its ranks exchange these facts, and all come to the
    same result: together with the options of a program, otherwise in `survey`. A host is what NCCL
    takes for one: ``NCCL_HOSTID`` if that is set, otherwise the host's name and boot ID.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from symmplan.coordination.all_gather import all_gather_json
from symmplan.coordination.groups import host
from symmplan.coordination.world import current
from symmplan.device import device_of
from symmplan.memory.backends import BACKENDS, REACHES
from symmplan.process import PROCESS
from symmplan.torch_private import c10d, nccl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from symmplan.memory.backends import Reach

__all__ = [
    "Topology",
    "facts_of",
    "known",
    "learn",
    "served",
    "simulated",
    "survey",
    "topology_of",
]


@frozen(kw_only=True)
class Topology:
    """What a process group is. Equal on all its ranks.

    Attributes:
        ranks: How many ranks it has.
        hosts: On how many hosts they are, as NCCL counts them.
        per_host: How many of them are on each host; 0 if not equally many.
        device: Kind of device of its tensors, ``"cpu"`` or ``"cuda"``.
        nvlink: Whether one NVLink domain holds the devices of all its hosts; False for one host.
        peer_access: Whether devices of one host address each other's memory.
        multicast: Whether all its devices take part in NVLink multicast.
        copy_engines: Whether NCCL can be asked to let copy engines run collectives.
        nccl: Version of its oldest NCCL; empty without.

    Examples:
        >>> apart = Topology(ranks=16, hosts=2, device="cuda", nccl=(2, 28, 9))
        >>> apart.reach
        'network'
        >>> apart.why_not("nccl")
        "its ranks are on 2 hosts without NVLink between them, farther than memory='nccl' reaches"
    """

    ranks: int
    hosts: int = 1
    per_host: int = field()
    device: str = "cpu"
    nvlink: bool = False
    peer_access: bool = True
    multicast: bool = False
    copy_engines: bool = False
    nccl: tuple[int, ...] = ()

    @per_host.default
    def _equally_many(self) -> int:
        return 0 if self.ranks % self.hosts else self.ranks // self.hosts

    @property
    def reach(self) -> Reach:
        """How far a backend's memory must reach to serve the group."""
        if self.ranks == 1:
            return "process"
        if not self.peer_access:
            return "network"
        if self.hosts == 1:
            return "host"
        return "nvlink" if self.nvlink else "network"

    @property
    def text(self) -> str:
        """What it is, for people."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        if self.hosts == 1:
            return f"{ranks} on one host"
        joined = "with NVLink" if self.nvlink else "without NVLink"
        return f"{ranks} on {self.hosts} hosts {joined} between them"

    def why_not(self, memory: str) -> str:
        """Why a memory backend cannot serve it; empty if it can.

        Args:
            memory: Name of the backend, not ``"auto"``.
        """
        kind = BACKENDS[memory]
        if self.nccl and self.nccl < kind.nccl:
            have, want = (".".join(map(str, v)) for v in (self.nccl, kind.nccl))
            return f"memory={memory!r} needs NCCL {want}, and this is {have}"
        if REACHES.index(self.reach) <= REACHES.index(kind.reach):
            return ""
        if self.hosts == 1:
            return f"its devices have no peer access to each other, which memory={memory!r} needs"
        joined = "with NVLink" if self.nvlink else "without NVLink"
        return (
            f"its ranks are on {self.hosts} hosts {joined} between them, "
            f"farther than memory={memory!r} reaches"
        )

    def two_levels(self, memory: str) -> bool:
        """Whether a memory backend serves it within each host, and a network between them.

        Args:
            memory: Name of the backend, not ``"auto"``.
        """
        return not self._why_not_two_levels(memory)

    def why_ordinary(self, memory: str) -> str:
        """Why a memory backend serves it in one level as little as in two; empty if it does.

        Args:
            memory: Name of the backend, not ``"auto"``.
        """
        apart = self.why_not(memory)
        levels = self._why_not_two_levels(memory)
        return f"{apart}; {levels}" if apart and levels else ""

    def _why_not_two_levels(self, memory: str) -> str:
        if self.hosts == 1 or not self.why_not(memory):
            return "one level serves it"
        if not BACKENDS[memory].levels:
            other = BACKENDS[memory].devices and self.two_levels("cuda")
            served = "; memory='cuda' serves it in two levels" if other else ""
            return f"memory={memory!r} has no two levels{served}"
        if not self.peer_access:
            return "two levels need devices of one host to reach each other"
        if self.per_host == 0:
            return "two levels need equally many ranks on each host"
        if self.per_host == 1:
            return "two levels need several ranks on each host"
        return ""


def survey(groups: Mapping[str, Any], device: torch.device, timeout: float) -> dict[str, Topology]:
    """What some groups are. Asked once in a process for each group and kind of device.

    Args:
        groups: ``{name: process group}``, or None for a group of this process alone.
        device: Where this rank's tensors lie.
        timeout: Seconds that ranks wait for each other.

    Raises:
        PeerTimeoutError: A rank did not come within the timeout.

    Collective: yes, over the groups that were not asked before. A simulated world is not asked.
    """
    if current() is not None:
        return {n: simulated(g, device.type) for n, g in groups.items()}
    alone = {n for n, g in groups.items() if g is None or g.size() == 1}
    asked = {n: g for n, g in groups.items() if n not in alone}
    new = {n: g for n, g in asked.items() if device.type not in PROCESS.topologies.get(g, {})}
    if new:
        mine = facts_of(device)
        learn(all_gather_json("topology", dict.fromkeys(new, mine), new, timeout), new, device)
    here = Topology(ranks=1, device=device.type)
    found = PROCESS.topologies
    return {n: here if n in alone else found[g][device.type] for n, g in groups.items()}


def learn(
    said: Mapping[str, Sequence[Mapping[str, Any]]], groups: Mapping[str, Any], device: torch.device
) -> None:
    """Remember what some groups are, from what their ranks said.

    Args:
        said: ``{name of a group: what each rank said}``, see `facts_of`.
        groups: ``{name: process group}``.
        device: Where this rank's tensors lie.
    """
    for name, facts in said.items():
        PROCESS.topologies.setdefault(groups[name], {}).setdefault(device.type, topology_of(facts))


def simulated(group: Any, device: str = "cpu") -> Topology:
    """The topology of a process group of the simulated world.

    Args:
        group: The group, None for one of this process alone.
        device: Kind of device of its tensors.
    """
    world = current()
    assert world is not None
    if group is None or world.ranks_per_host is None:
        return Topology(ranks=1 if group is None else group.size(), device=device)
    domain = world.ranks_per_domain
    return topology_of(
        [
            {
                "host": rank // world.ranks_per_host,
                "device": device,
                "fabric": "" if domain is None else str(rank // domain),
            }
            for rank in c10d.ranks_of(group)
        ]
    )


def known(groups: Mapping[str, Any], device: torch.device) -> dict[str, Topology]:
    """The topologies of those groups whose ranks were asked before; in a simulated world, of all.

    Collective: no.
    """
    if current() is not None:
        return {name: simulated(group, device.type) for name, group in groups.items()}
    found = {}
    for name, group in groups.items():
        of = None if group is None else PROCESS.topologies.get(group, {}).get(device.type)
        if of is not None:
            found[name] = of
    return found


def served(
    groups: Mapping[str, Any], memory: str, device: torch.device, timeout: float
) -> tuple[frozenset[str], dict[str, str]]:
    """The groups whose collectives run in two levels, and ``{name: why}`` of those in none.

    Collective: as `survey`.
    """
    found = survey(groups, device, timeout)
    levels = frozenset(name for name, of in found.items() if of.two_levels(memory))
    return levels, {name: why for name, of in found.items() if (why := of.why_ordinary(memory))}


def facts_of(device: torch.device) -> dict[str, Any]:
    """The facts of this rank, as plain data."""
    facts: dict[str, Any] = {"host": host(), "device": device.type}
    there = device_of(device)
    if not there.is_accelerator:
        return facts
    from symmplan.memory.meeting.fabric import fabric_of

    uuid = there.uuid()
    return {
        **facts,
        "uuid": uuid,
        "blocked": there.blocked(),
        "fabric": fabric_of(uuid),
        "multicast": there.has_multicast(),
        "copy_engines": nccl.has_copy_engine_policy(),
        "nccl": list(nccl.version()),
    }


def topology_of(said: Sequence[Mapping[str, Any]]) -> Topology:
    """What ranks are together.

    Args:
        said: What each of them said, see `facts_of`.
    """
    hosts = Counter(facts["host"] for facts in said)
    per_host = {*hosts.values()}
    fabrics = {facts.get("fabric", "") for facts in said}
    devices = {(facts["host"], facts.get("uuid", "")) for facts in said}
    blocked = {(facts["host"], other) for facts in said for other in facts.get("blocked", ())}
    return Topology(
        ranks=len(said),
        hosts=len(hosts),
        per_host=per_host.pop() if len(per_host) == 1 else 0,
        device=said[0]["device"],
        nvlink=len(hosts) > 1 and len(fabrics) == 1 and fabrics != {""},
        peer_access=not blocked & devices,
        multicast=all(facts.get("multicast") is True for facts in said),
        copy_engines=all(facts.get("copy_engines") is True for facts in said),
        nccl=min(tuple(facts.get("nccl", ())) for facts in said),
    )
