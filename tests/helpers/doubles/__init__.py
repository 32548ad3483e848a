"""Doubles of the seams through which symmplan asks a device, for CPU ranks.

    from doubles import on_devices, state

    def program(rank, world): ...              # memory="nccl" and memory="cuda", tensors on "cpu"

    pair.run(on_devices, program)              # on a pool of gloo ranks

The CPU counts as a device with streams, events, captures and a capacity; gloo stands for NCCL, and
files that ranks map for CUDA's mappings. What the real ones refuse, these refuse. Kernels and speed
are what they lack.
"""

from __future__ import annotations

import contextlib
from unittest import mock

from attrs import define

from doubles import streams as streams_
from doubles.capacity import Counted, Device
from doubles.kind import DoubledDevice, put_in_torch
from doubles.network import Network
from doubles.sanitizer import Sanitizer
from doubles.symmetric import SymmetricMemory
from symmplan.process import PROCESS, Process

__all__ = ["State", "installed", "on_devices", "state"]


@define
class State:
    """The doubles of this process.

    Attributes:
        device: Its bytes.
        network: Its communicators.
        memory: Its symmetric memory.
    """

    device: Device
    network: Network
    memory: SymmetricMemory

    @property
    def kernels(self):
        """Names of the kernels and copies that have run, as in a profile."""
        return [name for name, _ in self.network.kernels]

    @property
    def refused(self):
        """What was refused so far, also where the error was caught."""
        return self.network.refused

    @property
    def races(self):
        """What was found, as `doubles.sanitizer` has it."""
        return self.streams.sanitizer.races

    @property
    def streams(self):
        return streams_.streams()


_STATES = []


def state():
    """The doubles that are installed."""
    return _STATES[-1]


@contextlib.contextmanager
def installed(*, total=80 << 30, had=4 << 30, nccl=(2, 28, 9), counted=False, races=False):
    """While inside, symmplan sees a device.

    Args:
        total: Bytes of the device.
        had: Those of them that the program had before, which it does not need any more.
        nccl: NCCL's version.
        counted: Whether the tensors of the program take bytes of it, which excludes compilers.
    """
    from symmplan.choose import clock
    from symmplan.device import replace_kind
    from symmplan.memory import kernels
    from symmplan.torch_private import nccl as nccl_seam
    from symmplan.torch_private import peers, symm_mem

    assert not _STATES, "the doubles are installed already"
    streams_.renew()
    device = Device(total, had)
    network = Network(device, nccl)
    memory = SymmetricMemory(device, network)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_fresh_process())
        for where, double in ((nccl_seam, network), (peers, network), (symm_mem, memory)):
            _replace(stack, where, double)
        replace_kind("cpu", type("Kind", (DoubledDevice,), {"bytes": device}))
        stack.callback(replace_kind, "cpu", None)
        put_in_torch(stack)
        # Speed is not what a double has, so nobody waits for products of a device's size.
        stack.enter_context(mock.patch.object(clock._DeviceClock, "_rows", 32))
        stack.enter_context(mock.patch.object(clock._DeviceClock, "often", 2))
        stack.enter_context(mock.patch.object(clock, "_REPETITIONS", 2))
        # A copy past torch would not wait for what its stream has queued.
        stack.enter_context(mock.patch.object(kernels, "_SMALL", -1))
        for double in (network, memory):
            double.install()
            stack.callback(double.uninstall)
        if counted:
            stack.enter_context(Counted(device))
        if races:
            sanitizer = streams_.streams().sanitizer = Sanitizer(streams_.streams())
            stack.enter_context(sanitizer)
        _STATES.append(State(device, network, memory))
        stack.callback(_STATES.pop)
        yield state()
        streams_.streams().synchronize()


def on_devices(rank, world, program, *args, **options):
    """Run ``program(rank, world, *args)`` on the doubles; ``options`` are those of `installed`."""
    with installed(**options):
        return program(rank, world, *args)


#: What a process knows of its device, and of its groups there.
_OF_DEVICES = ("cache", "windows", "kept", "cuda_memory", "beyond", "topologies", "engines")
_OF_DEVICES += ("engines_made", "device_counterparts", "measured", "side_streams", "devices")
_OF_DEVICES += ("beyond_before",)


@contextlib.contextmanager
def _fresh_process():
    """Nothing is known of a device inside; what is cached then is released at the end."""
    before, new = {name: getattr(PROCESS, name) for name in _OF_DEVICES}, Process()
    for name in _OF_DEVICES:
        setattr(PROCESS, name, getattr(new, name))
    try:
        yield
    finally:
        for arena in (*PROCESS.cache.values(), *PROCESS.kept):
            getattr(arena, "release", lambda: None)()
        for name, value in before.items():
            setattr(PROCESS, name, value)


def _replace(stack, module, double):
    """Put the methods of a double in place of the functions of a module, all of them."""
    for name, function in vars(module).items():
        if name.startswith("_") or getattr(function, "__module__", "") != module.__name__:
            continue
        stack.callback(setattr, module, name, function)
        setattr(module, name, getattr(double, name))
