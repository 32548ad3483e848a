"""The facade of a device: streams, events, captures, bytes, and what its kind has.

All other code asks a device only through `device_of` and `accelerator`, and through
`symmplan.torch_private` for NCCL and torch's symmetric memory.
"""

from __future__ import annotations

import os

import torch

from symmplan.device.base import Allocation, Device, DeviceMemory, HeldBlock
from symmplan.device.cuda import CudaDevice
from symmplan.process import PROCESS

__all__ = [
    "Allocation",
    "Device",
    "DeviceMemory",
    "HeldBlock",
    "accelerator",
    "device_of",
    "kind_of",
    "replace_kind",
    "runs_triton",
]


def kind_of(device: torch.device) -> type[Device]:
    """The kind of a device, which need not be there; the CPU's for a type that is not known."""
    usual = CudaDevice if device.type == "cuda" else Device
    kind: type[Device] = PROCESS.device_kinds.get(device.type, usual)
    return kind


def device_of(device: torch.device) -> Device:
    """The facade of a device; of the current one of its kind if it has no index."""
    found: Device | None = PROCESS.devices.get(device)
    if found is None:
        found = kind_of(device)(device)
        if found.device != device:  # another one in each thread
            return device_of(found.device)
        PROCESS.devices[device] = found
    return found


def accelerator() -> torch.device | None:
    """This process's accelerator, without an index; None if it has none. Initializes nothing."""
    types = dict.fromkeys((*PROCESS.device_kinds, "cuda"))
    for device in map(torch.device, types):
        kind = kind_of(device)
        if kind.is_accelerator and kind.is_available():
            return device
    return None


def runs_triton(device: torch.device) -> bool:
    """Whether Triton compiles kernels for a device, or interprets them (``TRITON_INTERPRET=1``)."""
    return kind_of(device).has_kernels or os.environ.get("TRITON_INTERPRET") == "1"


def replace_kind(type_: str, kind: type[Device] | None) -> None:
    """Let all devices of a type be of another kind, for tests without a device.

    Args:
        type_: The type, such as ``"cpu"``.
        kind: A subclass of `Device`, made with a ``torch.device``; None for the usual one.
    """
    PROCESS.devices.clear()
    if kind is None:
        PROCESS.device_kinds.pop(type_, None)
    else:
        PROCESS.device_kinds[type_] = kind
