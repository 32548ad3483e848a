"""NCCL's memory: allocations that are windows of communicators, and that peers of a host map.

[Note: windows]
    Torch's symmetric memory can be NCCL's, too, but has one allocator in a process. So symmplan
    asks NCCL itself, for a group within a host: it allocates, registers the allocation as a window
    of the communicator of each group, and can take the window back, which torch cannot. Peers map
    the allocation through a file descriptor, as torch's own memory does. Torch's symmetric memory
    remains the program's. But torch does not know these allocations: ``torch.ops.symm_mem``
    refuses them.

    NCCL finds room for windows on each rank by itself, which must be the same room on all. So ranks
    register and take back in the same order. A window is taken back
    when its group registers the next one, or all ranks ask for it, if no rank needs it any more.
    Temporary segments are released in the same order anyway, and give their windows back at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any

from attrs import define, field

from symmplan.coordination.all_gather import all_gather_json
from symmplan.coordination.groups import host
from symmplan.device import device_of
from symmplan.memory.backends.torch_symm import TorchSymmBackend, have_nccl
from symmplan.memory.meeting.topology import known
from symmplan.process import PROCESS
from symmplan.torch_private import nccl, peers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from typing_extensions import Self

    from symmplan.coordination.exchange import Exchange
    from symmplan.coordination.groups import Group
    from symmplan.memory.segment import Segment

__all__ = ["WindowsBackend", "has_windows", "take_back"]


@define(eq=False)
class _Allocation:
    """NCCL's memory of a segment.

    Attributes:
        tensor: Its bytes.
        ended: Whether this rank does not need them any more.
        windows: What NCCL has of it, by process group.
        mapped: The allocation of each rank of some ranks.
    """

    tensor: torch.Tensor
    ended: bool = False
    windows: list[tuple[Any, int]] = field(factory=list)
    mapped: dict[tuple[int, ...], _Mapped] = field(factory=dict)


def has_windows(groups: Mapping[str, Group], device: torch.device, *, temporary: bool) -> bool:
    """Whether groups can be served by windows.

    Args:
        groups: They.
        device: Of this rank's tensors.
        temporary: As for `symmplan.memory.realize`; otherwise each group is within a host.

    Collective: no.
    """
    if not groups or not have_nccl(groups) or not peers.can_map():
        return False
    of = {name: group.process_group for name, group in groups.items()}
    near = temporary or all(topology.hosts == 1 for topology in known(of, device).values())
    return near and all(nccl.registers_windows(group) for group in of.values())


class WindowsBackend(TorchSymmBackend):
    """See [Note: windows]. Used where `has_windows`.

    Args:
        groups: Every group that will meet in it.
        temporary: As for `symmplan.memory.realize`.
    """

    def __init__(self, groups: Mapping[str, Group], *, temporary: bool) -> None:
        self.name = "nccl"
        self.frees, self.frees_together = temporary, True
        self._allocations: dict[int, _Allocation] = {}
        for group in groups.values():
            self._require_served(group)

    def _allocated(
        self, nbytes: int, device: torch.device
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        tensor = nccl.allocate(nbytes, device)
        made = _Allocation(tensor)
        self._allocations[tensor.data_ptr()] = made

        def free() -> None:
            del self._allocations[made.tensor.data_ptr()]
            made.ended = True
            if self.frees:
                for group, window in made.windows:
                    # A group that was destroyed has taken its windows along.
                    with contextlib.suppress(RuntimeError):
                        nccl.deregister(window, group)

        return tensor, free

    def _registered(self, segment: Segment, group: Group, exchange: Exchange) -> _Mapped | None:
        made = self._allocations[segment.allocation.data_ptr()]
        of = group.process_group
        if any(of is which for which, _ in made.windows):  # by another part of it
            return made.mapped.get(group.ranks)
        windows: list[_Allocation | None] = PROCESS.windows.setdefault(of, [])
        ended = _ended(of)
        with _Post(segment.timeout) as post:
            mine = {"ended": ended, "host": host(), "post": post.name}
            phase = f"segment {segment.spec.name!r} windows"
            told = exchange.round(phase, json.dumps(mine).encode(), groups=[group.name])
            said = [json.loads(text) for text in told[group.name]]
            _take_back(of, [one["ended"] for one in said])
            windows.append(None)  # also if it fails: the others count it
            made.windows.append((of, nccl.register(made.tensor, of)))
            if self.frees:
                return None
            windows[-1] = made
            near = len({one["host"] for one in said}) == 1
            if near and group.ranks not in made.mapped:
                names = [one["post"] for one in said]
                made.mapped[group.ranks] = _Mapped(_exchanged(made.tensor, group, post, names))
        return made.mapped.get(group.ranks)


def take_back(groups: Mapping[str, Any], timeout: float) -> None:
    """Take the windows back that no rank of their group needs any more.

    The driver has their bytes then: a peer that still mapped them would keep them.

    Args:
        groups: ``{name: process group}``, also of such as have no windows.
        timeout: Seconds that ranks wait for each other.

    Collective: yes, over those of the groups that have windows.
    """
    asked = {name: group for name, group in groups.items() if group in PROCESS.windows}
    mine = {name: _ended(group) for name, group in asked.items()}
    told = all_gather_json("ended windows", mine, asked, timeout)
    taken = [name for name, said in told.items() if _take_back(asked[name], said)]
    all_gather_json("windows taken back", dict.fromkeys(taken), asked, timeout)


def _ended(group: Any) -> list[int]:
    """Numbers of a group's windows that this rank does not need any more."""
    windows = PROCESS.windows.get(group, ())
    return [n for n, window in enumerate(windows) if window is not None and window.ended]


def _take_back(group: Any, ended: Sequence[Sequence[int]]) -> bool:
    """Take back what each rank of a group says that it does not need; whether that is any."""
    windows = PROCESS.windows.get(group, [])
    numbers = sorted(set.intersection(*map(set, ended)))
    for number in numbers:
        allocation, windows[number] = windows[number], None
        assert allocation is not None
        for which, window in allocation.windows:
            if which is group:
                nccl.deregister(window, group)
    return bool(numbers)


class _Mapped:
    """What hands out the peers' memory, as torch's handles do.

    Args:
        allocations: Of each rank, from where its segment begins.
    """

    def __init__(self, allocations: Sequence[torch.Tensor]) -> None:
        self._allocations = allocations

    def get_buffer(
        self, place: int, shape: tuple[int, ...], dtype: torch.dtype, begin: int
    ) -> torch.Tensor:
        """A rank's bytes, from byte ``begin`` of the allocation on."""
        (nbytes,) = shape
        return self._allocations[place][begin : begin + nbytes].view(dtype)


class _Post:
    """Where the processes of a host send this one a file descriptor each.

    Args:
        timeout: Seconds that it waits for each.

    Attributes:
        name: Its address.
        timeout: The same.
    """

    def __init__(self, timeout: float) -> None:
        self.name = f"symmplan-{os.getpid()}-{secrets.token_hex(8)}"
        self.timeout = timeout
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(timeout)
        self._socket.bind(f"\0{self.name}")  # a name that no file has

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def receive(self) -> tuple[list[int], int]:
        """What the next one says, and its file descriptor."""
        said, files, *_ = socket.recv_fds(self._socket, 256, 1)
        return json.loads(said), files[0]

    @staticmethod
    def send(name: str, what: Sequence[int], file: int) -> None:
        """Send numbers and a file descriptor to the process that has a name."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.connect(f"\0{name}")
            socket.send_fds(out, [json.dumps(what).encode()], [file])


def _exchanged(
    tensor: torch.Tensor, group: Group, post: _Post, names: Sequence[str]
) -> list[torch.Tensor]:
    """The memory of each rank of a group within a host. Collective, over the group.

    Args:
        tensor: This rank's.
        group: The group.
        post: Where its ranks send theirs.
        names: Of all ranks' posts.

    Raises:
        PeerTimeoutError: A rank did not send its own.
        RuntimeError: This device cannot address a peer's memory.
    """
    found = {group.rank: tensor}
    device = device_of(tensor.device).device
    file, nbytes, begin = peers.share(tensor)
    try:
        for rank, name in enumerate(names):
            if rank != group.rank:
                post.send(name, [group.rank, nbytes, begin], file)
    finally:
        os.close(file)
    while len(found) < group.size:
        try:
            (rank, nbytes, begin), file = post.receive()
        except TimeoutError:
            missing = [rank for rank in range(group.size) if rank not in found]
            raise group.timed_out(missing, "to share their memory", post.timeout) from None
        try:
            found[rank] = peers.mapped(file, nbytes, device)[begin:]
        finally:
            os.close(file)
    return [found[rank] for rank in range(group.size)]
