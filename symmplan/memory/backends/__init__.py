"""The memory backends, and what each of them can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

from attrs import frozen

from symmplan.device import kind_of
from symmplan.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from symmplan.coordination.exchange import Exchange
    from symmplan.coordination.groups import Group
    from symmplan.memory.health import Health
    from symmplan.memory.segment import Allocation, Segment
    from symmplan.model import SegmentSpec

__all__ = ["BACKENDS", "REACHES", "Backend", "Kind", "MemoryName", "Reach", "check_device"]
__all__ += ["misfit"]

#: The names of memory backends, see `BACKENDS`.
MemoryName: TypeAlias = Literal["auto", "local", "shm", "nccl", "cuda", "nvshmem"]

#: What memory spans: a process, a host, hosts that NVLink joins, all that a network joins.
Reach: TypeAlias = Literal["process", "host", "nvlink", "network"]
REACHES: tuple[Reach, ...] = get_args(Reach)


@frozen
class Kind:
    """Features of a memory backend, for all code that depends on the backend.

    Attributes:
        text: A description, for people.
        devices: Whether its memory is a device's.
        collectives: Whether it runs collectives by itself, see `symmplan.memory.ops.one_sided`.
        races: Whether races in it can be found, see `symmplan.memory.races`.
        engines: Whether copy engines can run collectives in it, see `symmplan.place.engines`.
        whole_words: Whether it gathers only parts that are a whole number of words rightly.
        levels: Whether it serves groups on several hosts in two levels.
        reach: The farthest apart that the ranks of a group may be; see
            [Note: who can be served] in `symmplan.memory.meeting.topology`.
        nccl: The oldest version of NCCL that it needs; empty if it needs none.
    """

    text: str
    devices: bool = False
    collectives: bool = False
    races: bool = False
    engines: bool = False
    whole_words: bool = False
    levels: bool = False
    reach: Reach = "host"
    nccl: tuple[int, ...] = ()


#: Name -> what it is and can do.
BACKENDS: Mapping[str, Kind] = {
    "auto": Kind("local, shm, nccl or cuda, by device and group"),
    "local": Kind("one process; ordinary memory", reach="process"),
    "shm": Kind(
        "CPU ranks of one host; POSIX shared memory",
        collectives=True,
        races=True,
        levels=True,
    ),
    "nccl": Kind(
        "torch symmetric memory through NCCL windows",
        devices=True,
        engines=True,
        whole_words=True,
        reach="nvlink",
        nccl=(2, 27),
    ),
    "cuda": Kind(
        "torch symmetric memory through CUDA peer mappings",
        devices=True,
        levels=True,
        reach="nvlink",
    ),
    "nvshmem": Kind("torch symmetric memory through NVSHMEM", devices=True, reach="network"),
}


class Backend(Protocol):
    """Allocates segments and registers them with groups.

    `realize` calls `allocate` once for each segment and then `rendezvous` once for each of its
    groups, in the same order on every rank. A method that
    raises has released what it allocated; `realize` releases what a method returned.

    A segment keeps the backend that allocated it, which is asked again if it meets another group.

    Attributes:
        name: A name in `BACKENDS`.
        frees: Whether a release gives the memory back, on each rank by itself.
        frees_together: Whether all ranks together can give it back, once it is released.
    """

    name: str
    frees: bool
    frees_together: bool

    def allocate(
        self,
        spec: SegmentSpec,
        device: torch.device,
        groups: Sequence[Group],
        health: Health,
    ) -> Allocation:
        """This rank's bytes of a segment, and a function that frees them.

        ``health`` is the arena's.
        """

    def rendezvous(self, segment: Segment, group: Group, exchange: Exchange) -> None:
        """Associate ``segment`` with ``group`` and add the result to it.

        Collective: yes.
        """

    def settle(self) -> None:
        """All ranks hold all segments: drop what only the rendezvous needed."""


def check_device(memory: str, device: torch.device) -> None:
    """Refuse a memory backend that serves no tensors on ``device``, whatever its group.

    Raises:
        BackendError: It serves none.
    """
    accelerator = kind_of(device).is_accelerator
    if memory == "shm" and (accelerator or device.type != "cpu"):
        raise misfit(
            memory,
            f"device {device} is not the CPU",
            expected="cpu",
            fix='pass memory="nccl" or memory="cuda" for CUDA devices',
        )
    if BACKENDS[memory].devices and not accelerator:
        raise misfit(
            memory,
            f"device {device} is not a CUDA device",
            expected="cuda",
            fix='pass memory="shm" for CPU ranks of one host, or memory="auto"',
        )


def misfit(memory: str, what: str, *, expected: str, fix: str) -> BackendError:
    """The error about a memory backend that does not fit."""
    return BackendError(f"memory={memory!r}: {what}", expected=expected, fix=fix, memory=memory)
