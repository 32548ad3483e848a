"""What this build of torch has, and what its devices can do; a part of `symmplan._compat`."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import torch

__all__ = [
    "blocked_devices",
    "cpp_compiler",
    "device_uuid",
    "has_joint_lowering",
    "has_multicast",
    "has_nvshmem",
    "nccl_version",
]

#: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED.
_MULTICAST = 132


def cpp_compiler() -> str:
    """The C++ compiler that Inductor will call; raises whatever Inductor would."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return str(get_cpp_compiler())


def has_joint_lowering() -> bool:
    """Whether a backward can be compiled right after its forward."""
    try:
        import torch._functorch.config as functorch
    except ImportError:
        return False
    return hasattr(functorch, "force_non_lazy_backward_lowering")


def has_nvshmem() -> bool:
    """Whether torch's symmetric memory can use NVSHMEM.

    Raises:
        ImportError: There is no symmetric memory at all.
    """
    import torch.distributed._symmetric_memory as symm_mem

    with contextlib.suppress(Exception):  # an old or odd build: then it is not available
        return bool(symm_mem.is_nvshmem_available())
    return False


def nccl_version() -> tuple[int, ...]:
    """NCCL's version; empty where this build has none."""
    try:
        import torch.cuda.nccl

        version: Any = torch.cuda.nccl.version()
    except Exception:  # noqa: BLE001 - CPU builds lack the symbol and say so in several ways
        return ()
    return tuple(version) if isinstance(version, tuple) else ()


def has_multicast(device: torch.device) -> bool:
    """Whether a CUDA device takes part in NVLink multicast.

    Asked of the driver, as torch does: torch's own question would settle which allocator its
    symmetric memory has, before NCCL's can be chosen.

    Source: cuDeviceGetAttribute in CUDA's driver API, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED.
    """
    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0") not in ("", "0"):
        return False
    torch.cuda.init()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    number, found = ctypes.c_int(0), ctypes.c_int(0)
    failed = driver.cuDeviceGet(ctypes.byref(number), _index(device))
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(found), _MULTICAST, number)
    return not failed and bool(found.value)


def device_uuid(device: torch.device) -> str:
    """Names a CUDA device among all; empty where torch does not say."""
    found = getattr(torch.cuda.get_device_properties(_index(device)), "uuid", "")
    return str(found)


def blocked_devices(device: torch.device) -> list[str]:
    """The CUDA devices that this process sees, and whose memory ``device`` cannot address."""
    mine, others = _index(device), range(torch.cuda.device_count())
    blocked = (i for i in others if i != mine and not torch.cuda.can_device_access_peer(mine, i))
    return [device_uuid(torch.device("cuda", i)) for i in blocked]


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
