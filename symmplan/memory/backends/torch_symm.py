"""CUDA devices: torch's symmetric memory, through its NCCL, CUDA or NVSHMEM allocator.

Sources: torch/distributed/_symmetric_memory/__init__.py and
torch/csrc/distributed/c10d/{ProcessGroupNCCL.cpp,symm_mem/{SymmetricMemory.cpp,
NCCLSymmetricMemory.cu}}.

[Note: torch's allocators]
    - One allocator serves a process. It can be chosen until it is first used. CUDA is the default,
      and cannot be chosen by name in torch 2.11.
    - NCCL registers windows with an existing communicator, so each group runs a small collective
      first, except those for copy engines, which are connected when they are made. NCCL's handle
      has no barrier; a one-element all-reduce, in the order of the stream, serves as one. Torch
      2.11 frees an allocation without deregistering its window, and NCCL then treats later memory
      at this address as symmetric. So NCCL segments are kept until the process ends, and groups
      within a host get other ones: see [Note: windows] in `symmplan.memory.backends.windows`.
    - NVSHMEM allocates collectively: all ranks, in the same order. After the barrier of its handles
      a rank still read older bytes of a peer (two H200, torch 2.11), so it meets as NCCL does.
    - One rendezvous registers the whole allocation, and views are found by address. So placements
      need no rendezvous.
    - NCCL 2.28's symmetric all-gather of small tensors writes wrong bytes if a rank's part does
      not begin at a multiple of 4 bytes, as with an odd number of 16-bit floats (two H200, 2.28.9;
      its other kernels are correct). Such gathers stay in ordinary memory. See `is_whole_words`.
    - Everything runs in the order of the current stream, and the host does not wait. A release
      waits for the device, but not for the peers. So release only when all ranks have reached the
      end of the program, and before the process group is destroyed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.fx.experimental.symbolic_shapes import statically_known_true

from symmplan.device import device_of
from symmplan.errors import BackendError, OutOfSharedMemoryError
from symmplan.memory.device_memory import require_left
from symmplan.memory.meeting.device_hosts import DeviceHostsMeeting, device_counterparts
from symmplan.memory.meeting.torch_rendezvous import TorchRendezvous, first_line
from symmplan.memory.meeting.workspace import kernels_run, workspace_nbytes, workspace_of
from symmplan.process import PROCESS
from symmplan.torch_private import c10d, nccl, symm_mem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from symmplan.coordination.exchange import Exchange
    from symmplan.coordination.groups import Group
    from symmplan.memory.health import Health
    from symmplan.memory.meeting.workspace import Workspace
    from symmplan.memory.segment import Allocation, Segment
    from symmplan.model import SegmentSpec

__all__ = [
    "SPLIT_WORDS",
    "TorchSymmBackend",
    "have_nccl",
    "is_whole_words",
    "serves_cuda",
    "serves_nccl",
]

_WORD = 4

#: Why an all-gather is not placed; see `is_whole_words`.
SPLIT_WORDS = f"its parts are not whole words of {_WORD} bytes, which NCCL's symmetric kernel needs"


def serves_nccl(groups: Mapping[str, Group]) -> bool:
    """Whether all groups have an NCCL communicator and torch can allocate through NCCL.

    Where it can and may still choose, this makes NCCL torch's choice.
    """
    if not have_nccl(groups):
        return False
    try:
        symm_mem.set_backend("NCCL")
    except (RuntimeError, ImportError):
        return False
    return True


def serves_cuda(device: torch.device) -> bool:
    """Whether torch's allocator is CUDA's. That is its default, and not every torch returns to it.

    See [Note: torch's allocators].
    """
    try:
        return symm_mem.backend_of(device) == "CUDA"
    except (RuntimeError, ImportError):
        return False


def have_nccl(groups: Mapping[str, Group]) -> bool:
    """Whether all groups have an NCCL communicator."""
    return all(
        g.process_group is not None and nccl.serves(g.process_group) for g in groups.values()
    )


def is_whole_words(nbytes: int | torch.SymInt) -> bool:
    """Whether NCCL may gather parts of so many bytes in symmetric memory.

    See [Note: torch's allocators]. False also where a size is dynamic and may be odd.
    """
    return statically_known_true(nbytes % _WORD == 0)


class TorchSymmBackend:
    """``torch.distributed._symmetric_memory``.

    Args:
        memory: ``"nccl"``, ``"cuda"`` or ``"nvshmem"``.
        device: A CUDA device; the current one if it has no index.
        groups: Every group that will meet in it.

    Raises:
        BackendError: Torch has no such allocator, uses another one already, or a group has no
            NCCL communicator.
    """

    def __init__(self, memory: str, device: torch.device, groups: Mapping[str, Group]) -> None:
        self.name = memory
        # See [Note: torch's allocators].
        self.frees = self.frees_together = memory == "cuda"
        for group in groups.values():
            self._require_served(group)
        _select(memory, device)

    def allocate(
        self,
        spec: SegmentSpec,
        device: torch.device,
        groups: Sequence[Group],  # noqa: ARG002
        health: Health,  # noqa: ARG002
    ) -> Allocation:
        """An allocation of its own. Collective: with NVSHMEM yes, else no."""
        there = device_of(device)
        device = there.device
        try:
            with there.current():
                tensor, free = self._at_last(spec.nbytes, device)
                try:
                    require_left(device)
                except RuntimeError:
                    free()
                    raise
        except RuntimeError as error:
            left, total = there.free_bytes()
            raise OutOfSharedMemoryError(
                f"no symmetric memory for segment {spec.name!r} on {device}: {first_line(error)}",
                expected=f"{spec.nbytes} bytes",
                got=f"{left} of {total} bytes free",
                fix="make the plan smaller (capacity=), or free device memory first",
                segment=spec.name,
                nbytes=spec.nbytes,
                free_bytes=left,
            ) from error

        def release() -> None:
            there.synchronize()
            free()

        return tensor, release

    def rendezvous(self, segment: Segment, group: Group, exchange: Exchange) -> None:
        """Register the segment with the group.

        Collective: yes.
        """
        self._require_served(group)
        tensor = segment.tensor
        phase = f"segment {segment.spec.name!r} counterparts"
        there = device_of(tensor.device)
        with there.current():
            given = exchange, phase, self.name
            hosts = device_counterparts(group, tensor.device, *given)
        try:
            with there.current():
                _warm_up(group, tensor.device)
                if hosts is not None:
                    handle = symm_mem.rendezvous(segment.allocation, c10d.group_name(hosts.here))
                    met = DeviceHostsMeeting(group, tensor, handle, hosts, segment.begin)
                    segment.add_rendezvous(met)
                    return
                handle = self._registered(segment, group, exchange)
        except RuntimeError as error:
            raise BackendError(
                f"memory={self.name!r}: segment {segment.spec.name!r} of {segment.nbytes} bytes "
                f"cannot be registered with group {group.name!r}: {first_line(error)}",
                fix="check that the devices of the group reach each other (NVLink or PCIe peer "
                "access on one host), or use another memory=",
                **group.here,
                segment=segment.spec.name,
            ) from error
        by_collective = self.name == "nccl" or (
            self.name == "nvshmem" and nccl.serves(group.process_group)
        )
        made = TorchRendezvous(
            group,
            tensor,
            handle,
            timeout=segment.timeout,
            begin=segment.begin,
            by_collective=by_collective,
        )
        if self.name == "cuda" and segment.spec.signal_pad and group.size > 1:
            made.workspace = self._workspace(segment, group, exchange)
        segment.add_rendezvous(made)

    def settle(self) -> None:
        """Nothing was needed."""

    def _workspace(self, segment: Segment, group: Group, exchange: Exchange) -> Workspace | None:
        """Where kernels exchange words beside a segment's signal pad. Collective.

        None where some rank has no kernels, or no room.
        """
        device, timeout = segment.tensor.device, segment.timeout
        nbytes, tensor = workspace_nbytes(group.size, segment.nbytes), None
        with device_of(device).current():
            if kernels_run(group, device, timeout):
                with contextlib.suppress(RuntimeError):
                    tensor, _ = self._at_last(nbytes, device)
            phase, mine = f"segment {segment.spec.name!r} workspace", b"%d" % (tensor is not None)
            said = exchange.round(phase, mine, groups=[group.name])[group.name]
            if tensor is None or b"0" in said:
                return None
            handle = symm_mem.rendezvous(tensor, group.torch_name)
            return workspace_of(TorchRendezvous(group, tensor, handle, timeout=timeout), timeout)

    def _at_last(
        self, nbytes: int, device: torch.device
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Allocate, if need be after torch's caching allocator has returned what it keeps."""
        try:
            return self._allocated(nbytes, device)
        except RuntimeError:
            if self.name == "nvshmem":  # all ranks allocate equally often
                raise
            device_of(device).empty_cache()
        return self._allocated(nbytes, device)

    def _allocated(
        self,
        nbytes: int,
        device: torch.device,
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Memory, and what frees it beyond dropping it."""
        return symm_mem.empty(nbytes, device), lambda: None

    def _registered(
        self,
        segment: Segment,
        group: Group,
        exchange: Exchange,  # noqa: ARG002 (others need it)
    ) -> Any:
        """What hands out the peers' memory, None if nothing does. Collective."""
        # See [Note: torch's allocators].
        tensor = segment.allocation
        if self.name == "nccl" and not any(tensor is kept for kept in PROCESS.kept):
            PROCESS.kept.append(tensor)
        return symm_mem.rendezvous(tensor, group.torch_name)

    def _require_served(self, group: Group) -> None:
        """Refuse a group that cannot meet in this memory."""
        memory = self.name
        if group.process_group is None:
            raise BackendError(
                f"memory={memory!r} needs torch.distributed, which is not initialized",
                fix="call torch.distributed.init_process_group first, or use memory='local'",
                group=group.name,
                memory=memory,
            )
        if memory == "nccl" and not nccl.serves(group.process_group):
            raise BackendError(
                f"memory='nccl': group {group.name!r} has no NCCL communicator",
                expected="a process group with the backend nccl for CUDA",
                fix="create the group with nccl, or use memory='cuda'",
                group=group.name,
                memory=memory,
            )


def _warm_up(group: Group, device: torch.device) -> None:
    """Make sure that a communicator exists. See [Note: torch's allocators]."""
    for engines in PROCESS.engines_made.values():
        if engines is group.process_group:  # connected when it was made
            return
    if nccl.serves(group.process_group):  # each time: what one rank remembers, peers may not
        dist.all_reduce(torch.zeros(1, device=device), group=group.process_group)
        device_of(device).synchronize()


def _select(memory: str, device: torch.device) -> None:
    """Make ``memory`` torch's allocator, if it is not already."""
    wanted = memory.upper()
    current = None
    try:
        current = symm_mem.backend_of(device)
        if current == wanted:
            return
        symm_mem.set_backend(wanted)
    except (RuntimeError, ImportError) as error:
        raise BackendError(
            f"memory={memory!r}: torch cannot use its {wanted} allocator: {first_line(error)}",
            expected=f"{wanted}, chosen before any other symmetric memory was used",
            got=f"{current}",
            fix="use one kind of symmetric memory in a process, or a torch built with this one",
            memory=memory,
        ) from error
