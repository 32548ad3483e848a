"""The NVLink domain of a device, as NVIDIA's driver reports it.

NVLink may reach across hosts (NVL72 and its like). All devices of one such domain and clique
address each other's memory; NCCL asks the same question in the same way.

Source: ``nvmlDeviceGetGpuFabricInfo`` in nvml.h; ``ncclMnnvlCheck`` in NCCL's ``mnnvl.cc``.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct

__all__ = ["fabric_of"]

_COMPLETED = 3
_NO_DOMAIN = bytes(16)
#: ``nvmlGpuFabricInfo_t``: cluster, status, clique, state.
_INFO = struct.Struct("@16sIIB3x")


def fabric_of(uuid: str) -> str:
    """Names the NVLink domain and clique of a device; empty if it is in none or this is not known.

    Args:
        uuid: The device's, as `symmplan.torch_private.devices.device_uuid` gives it.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        asked = nvml.nvmlDeviceGetGpuFabricInfo
    except (OSError, AttributeError):
        return ""
    if nvml.nvmlInit_v2():
        return ""
    with contextlib.ExitStack() as stack:
        stack.callback(nvml.nvmlShutdown)
        device, info = ctypes.c_void_p(), ctypes.create_string_buffer(_INFO.size)
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)):
            return ""
        if asked(device, ctypes.byref(info)):
            return ""
        cluster, status, clique, state = _INFO.unpack(info.raw)
        if status or state != _COMPLETED or cluster == _NO_DOMAIN:
            return ""
        return f"{cluster.hex()}/{clique}"
