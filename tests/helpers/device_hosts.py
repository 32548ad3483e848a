"""Devices of several hosts, on CPU ranks: gloo stands for NCCL, mapped files for CUDA mappings."""

from __future__ import annotations

import torch

from symmplan.memory.meeting.topology import Topology

#: Bytes of a rank's segment.
NBYTES = 4096


class _Handle:
    """What torch gives for an allocation: each peer's bytes."""

    def __init__(self, folder, near, nbytes):
        self._near, self._folder, self._nbytes = near, folder, nbytes

    def get_buffer(self, place, shape, dtype, begin):
        return _bytes_of(self._folder, self._near[place], self._nbytes)


def _bytes_of(folder, rank, nbytes):
    return torch.from_file(f"{folder}/{rank}", shared=True, size=nbytes, dtype=torch.uint8)


def files_of(folder, ranks, nbytes=NBYTES):
    """Make the files, before the ranks map them."""
    for rank in range(ranks):
        (folder / str(rank)).write_bytes(bytes(nbytes))
    return str(folder)


def counterparts_over_gloo(group, hosts=2):
    """What a group makes of its hosts, over gloo; twice, as two segments would."""
    import torch.distributed as dist

    from symmplan.coordination.agreement import agree
    from symmplan.coordination.exchange import Exchange
    from symmplan.memory.meeting import device_hosts
    from symmplan.model import Problem
    from symmplan.planner import plan
    from symmplan.process import PROCESS
    from symmplan.torch_private import nccl

    nccl.serves = lambda _: True
    nccl.subgroup = lambda _, ranks, *__: dist.new_group(
        list(ranks), backend="gloo", use_local_synchronization=True
    )
    pg = group.process_group
    topology = Topology(ranks=group.size, hosts=hosts, device="cuda")
    PROCESS.topologies.setdefault(pg, {})["cuda"] = topology
    agree(plan(Problem.from_intervals([("x", 0, 1, 8)])), {"default": pg})  # says who is where
    made = []
    for phase in ("first", "second"):
        with Exchange({group.name: group}, 20.0) as exchange:
            given = group, torch.device("cpu"), exchange, phase
            made.append(device_hosts.device_counterparts(*given, "cuda"))
            assert device_hosts.device_counterparts(*given, "nccl") is None
    assert made[0] is made[1]
    return made[0]


def segment_on_hosts(group, folder, hosts=2, nbytes=NBYTES):
    """This rank's bytes, which its host reaches and the others do not."""
    import torch.distributed as dist

    from symmplan.memory.backends.local import LocalBackend
    from symmplan.memory.health import Health
    from symmplan.memory.meeting.device_hosts import DeviceHostsMeeting
    from symmplan.memory.segment import Segment
    from symmplan.model import SegmentSpec

    counterparts = counterparts_over_gloo(group, hosts)
    own = _bytes_of(folder, group.rank, nbytes)
    dist.barrier()
    spec = SegmentSpec("s0", nbytes=nbytes, groups=("default",), lower_bound_bytes=nbytes)
    segment = Segment(spec, LocalBackend(), own, None, timeout=20.0, health=Health())
    handle = _Handle(folder, counterparts.near, nbytes)
    segment.add_rendezvous(DeviceHostsMeeting(group, own, handle, counterparts))
    return segment, own
