"""Choose the memory backend of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

from attrs import frozen

from symmplan.coordination.world import current
from symmplan.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from symmplan.coordination.exchange import Exchange
    from symmplan.coordination.groups import Group
    from symmplan.memory.health import Health
    from symmplan.memory.segment import Allocation, Segment
    from symmplan.model import SegmentSpec

__all__ = ["BACKENDS", "REACHES", "Backend", "Kind", "Reach", "check_device", "resolve_backend"]

#: What memory spans: a process, a host, hosts that NVLink joins, all that a network joins.
Reach: TypeAlias = Literal["process", "host", "nvlink", "network"]
REACHES: tuple[Reach, ...] = get_args(Reach)


@frozen
class Kind:
    """Features of a memory backend, for all code that depends on the backend.

    Attributes:
        text: A description, for people.
        devices: Whether its memory is a device's.
        collectives: Whether it runs collectives by itself, see `symmplan.memory.ops`.
        races: Whether races in it can be found, see `symmplan.memory.races`.
        engines: Whether copy engines can run collectives in it, see `symmplan.runtime.engines`.
        whole_words: Whether it gathers only parts that are a whole number of words rightly.
        levels: Whether it serves groups on several hosts in two levels.
        pools: Whether segments may be parts of one, see `symmplan.memory.pool`.
        reach: The farthest apart that the ranks of a group may be; see
            [Note: who can be served] in `symmplan.memory.topology`.
        nccl: The oldest version of NCCL that it needs; empty if it needs none.
    """

    text: str
    devices: bool = False
    collectives: bool = False
    races: bool = False
    engines: bool = False
    whole_words: bool = False
    levels: bool = False
    pools: bool = False
    reach: Reach = "host"
    nccl: tuple[int, ...] = ()


#: Name -> what it is and can do.
BACKENDS: Mapping[str, Kind] = {
    "auto": Kind("local, shm, nccl or cuda, by device and group"),
    "local": Kind("one process; ordinary memory", pools=True, reach="process"),
    "shm": Kind(
        "CPU ranks of one host; POSIX shared memory",
        collectives=True,
        races=True,
        levels=True,
        pools=True,
    ),
    "nccl": Kind(
        "torch symmetric memory through NCCL windows",
        devices=True,
        engines=True,
        whole_words=True,
        pools=True,
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

    Attributes:
        name: A name in `BACKENDS`.
        frees: Whether a release gives the memory back, on each rank by itself.
    """

    name: str
    frees: bool

    def allocate(
        self,
        spec: SegmentSpec,
        device: torch.device,
        groups: Sequence[Group],
        health: Health,
        part: torch.Tensor | None = None,
    ) -> Allocation:
        """This rank's bytes of a segment, and a function that frees them.

        ``health`` is the arena's; ``part`` are the bytes if the segment is a part of another one.
        """

    def rendezvous(self, segment: Segment, group: Group, exchange: Exchange) -> None:
        """Associate ``segment`` with ``group`` and add the result to it.

        Collective: yes.
        """

    def settle(self) -> None:
        """All ranks hold all segments: drop what only the rendezvous needed."""


def resolve_backend(
    memory: str, device: torch.device, groups: Mapping[str, Group], *, temporary: bool = False
) -> Backend:
    """The backend called ``memory``, if it fits.

    Args:
        memory: A name in `BACKENDS`.
        device: Where the segments shall lie.
        groups: The groups that will meet in them.
        temporary: As for `symmplan.memory.realize`.

    Raises:
        BackendError: There is no such backend, or it does not fit device, groups or machine.

    Collective: no.
    """
    if memory not in BACKENDS:
        raise BackendError(
            f"there is no memory backend {memory!r}",
            expected=f"one of {', '.join(BACKENDS)}",
            got=repr(memory),
            fix='pass memory="auto"',
            memory=memory,
        )
    from symmplan.memory.local import LocalBackend

    world = current()
    if world is not None:
        return LocalBackend(world)
    alone = all(group.size == 1 for group in groups.values())
    if memory == "auto":
        memory = _automatic(device, groups, alone=alone)
    if memory == "local":
        if not alone:
            large = next(group for group in groups.values() if group.size > 1)
            raise _misfit(
                memory,
                f"group {large.name!r} has {large.size} ranks",
                expected="groups of one rank",
                fix='pass memory="shm" for CPU ranks of one host',
            )
        return LocalBackend()
    check_device(memory, device)
    if memory == "shm":
        from symmplan.memory.shm import ShmBackend

        return ShmBackend()
    from symmplan.memory.torch_symm import TorchSymmBackend

    if temporary and memory == "nccl":
        from symmplan.memory.torch_symm import NcclPoolBackend, has_windows

        if has_windows(groups):
            return NcclPoolBackend(memory, device, groups)
    return TorchSymmBackend(memory, device, groups)


def check_device(memory: str, device: torch.device) -> None:
    """Refuse a memory backend that serves no tensors on ``device``, whatever its group.

    Raises:
        BackendError: It serves none.
    """
    if memory == "shm" and device.type != "cpu":
        raise _misfit(
            memory,
            f"device {device} is not the CPU",
            expected="cpu",
            fix='pass memory="nccl" or memory="cuda" for CUDA devices',
        )
    if BACKENDS[memory].devices and device.type != "cuda":
        raise _misfit(
            memory,
            f"device {device} is not a CUDA device",
            expected="cuda",
            fix='pass memory="shm" for CPU ranks of one host, or memory="auto"',
        )


def _automatic(device: torch.device, groups: Mapping[str, Group], *, alone: bool) -> str:
    if device.type == "cpu":
        return "local" if alone else "shm"
    if device.type == "cuda":
        if alone and all(group.process_group is None for group in groups.values()):
            return "local"
        from symmplan.memory.torch_symm import serves_nccl

        return "nccl" if serves_nccl(groups) else "cuda"
    raise _misfit(
        "auto",
        f"no backend serves device {device}",
        expected="cpu or cuda",
        fix="move the model to a CPU or CUDA device",
    )


def _misfit(memory: str, what: str, *, expected: str, fix: str) -> BackendError:
    return BackendError(f"memory={memory!r}: {what}", expected=expected, fix=fix, memory=memory)
