"""NCCL: its version, communicators that use copy engines, memory registered as windows."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmplan.torch_private.c10d import new_group
from symmplan.torch_private.peers import tensor_at

if TYPE_CHECKING:
    from collections.abc import Sequence


def version() -> tuple[int, ...]:
    """NCCL's version; empty where this build has none."""
    try:
        import torch.cuda.nccl

        version: Any = torch.cuda.nccl.version()
    except Exception:  # noqa: BLE001 - CPU builds lack the symbol and say so in several ways
        return ()
    return tuple(version) if isinstance(version, tuple) else ()


def serves(group: dist.ProcessGroup) -> bool:
    """Whether CUDA collectives of ``group`` go through NCCL."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # the group has no backend for CUDA
        return False
    return type(backend).__name__ == "ProcessGroupNCCL"


def has_copy_engine_policy() -> bool:
    """Whether a communicator of NCCL can be asked to use copy engines."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    return (
        hasattr(nccl, "NCCL_CTA_POLICY_ZERO")
        and hasattr(getattr(nccl, "NCCLConfig", None), "cta_policy")
        # The library may be older than the one that torch was built with.
        and torch.cuda.nccl.version() >= (2, 28)
    )


def copy_engine_options() -> Any:
    """Options of an NCCL communicator that uses copy engines; see `has_copy_engine_policy`."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    return options


def name_of(what: str, ranks: Sequence[int]) -> str:
    """The name under which torch has a communicator that is made of some ranks for something.

    The next of these ranks has it again: compiled graphs know communicators for copy engines so.
    """
    told = ",".join(map(str, ranks)).encode()
    return f"{what}_{hashlib.sha1(told, usedforsecurity=False).hexdigest()}"


def subgroup(like: Any, ranks: Sequence[int], what: str, number: int) -> Any:
    """An NCCL communicator of some ranks of a group. Collective, over ``ranks``.

    Args:
        like: The group, for its timeout.
        ranks: The global ranks.
        what: For what it is made.
        number: How many of that name were made before, at least; the same on all its ranks.
    """
    options: Any = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined, unused-ignore]
    return _made(like, ranks, options, f"{what}_{number}", number)


def copy_engine_group(like: Any, what: str, number: int) -> Any:
    """An NCCL communicator of the same ranks that uses copy engines, connected. Collective.

    It has one channel, because a communicator takes bytes of the device for each: 484 MiB with
    NCCL's default, 22 MiB with one (two H100, NCCL 2.28.9). Copy engines need none.

    Args:
        like: The group, where `has_copy_engine_policy`.
        what: For what it is made.
        number: As for `subgroup`.
    """
    options = copy_engine_options()
    if hasattr(options.config, "max_ctas"):
        options.config.min_ctas = options.config.max_ctas = 1
    group = _made(like, dist.get_process_group_ranks(like), options, what, number)
    try:
        _connect(group)
    except BaseException:
        end(group)  # the next one has its name
        raise
    return group


def end(group: Any) -> None:
    """End a communicator that was made here, and what it has of the device.

    Nothing runs on it, and no window is registered with it. Collective, over its ranks.
    """
    dist.destroy_process_group(group)


def _connect(group: Any) -> None:
    """Connect a communicator that has run nothing, if possible without a collective.

    Its first collective would take more bytes of the device. Collective, over ``group``.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    connect = getattr(group._get_backend(device), "eager_connect_single_device", None)
    if connect is not None:
        connect(device)
        return
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    torch.cuda.synchronize(device)


def _made(like: Any, ranks: Sequence[int], options: Any, what: str, number: int) -> Any:
    """A communicator of some ranks, with the timeout of another one's."""
    options._timeout = like._get_backend(torch.device("cuda")).options._timeout
    # Where a device is bound, torch would split the world's communicator, for which it needs all
    # ranks of the world.
    world = dist.distributed_c10d._get_default_group()
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        given = name_of(what, ranks), ranks, number, "nccl", options._timeout, what, options
        return new_group(*given)
    finally:
        world.bound_device_id = bound


def registers_windows(group: dist.ProcessGroup) -> bool:
    """Whether memory can be registered as windows of the communicator of ``group``."""
    backend = group._get_backend(torch.device("cuda"))
    return hasattr(backend, "_comm_ptr") and _library() is not None


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that can be registered as windows: uint8, freed with the last tensor on it.

    Torch's caching allocator does not have it.

    Raises:
        RuntimeError: There is too little.
    """
    address = ctypes.c_void_p()
    _checked(_library().ncclMemAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes)))
    return tensor_at(int(address.value or 0), nbytes, device, _free)


def register(tensor: torch.Tensor, group: dist.ProcessGroup) -> int:
    """Register an allocation as a window, on the current device; returns what stands for it.

    The group has run a collective before, or is connected. Collective.

    Source: ncclCommWindowRegister, with NCCL_WIN_COLL_SYMMETRIC.
    """
    window = ctypes.c_void_p()
    where, nbytes = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    register = _library().ncclCommWindowRegister
    _checked(register(_communicator(group), where, nbytes, ctypes.byref(window), 1))
    return int(window.value or 0)


def deregister(window: int, group: dist.ProcessGroup) -> None:
    """Take a window back. In the same order on all ranks, as each of them finds room for more."""
    deregister = _library().ncclCommWindowDeregister
    _checked(deregister(_communicator(group), ctypes.c_void_p(window)))


def _communicator(group: dist.ProcessGroup) -> ctypes.c_void_p:
    backend: Any = group._get_backend(torch.device("cuda"))
    return ctypes.c_void_p(backend._comm_ptr())


def _free(address: int) -> None:
    _library().ncclMemFree(ctypes.c_void_p(address))


@functools.cache
def _library() -> Any:
    """The NCCL that torch has loaded, if it has windows; None where torch contains one."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    return library if hasattr(library, "ncclCommWindowRegister") else None


def _checked(result: int) -> None:
    if result:
        said = _library().ncclGetErrorString
        said.restype = ctypes.c_char_p
        raise RuntimeError(f"NCCL error: {said(result).decode()}")
