"""What this machine and this torch offer: the probes behind `symmplan doctor`.

Each probe returns a `Check` and never raises: a feature that cannot be looked at is missing.
Torch's private names are only looked at here, never called with effect.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from symmplan.report.format import size

__all__ = ["Check", "checks", "cxx_compiler", "hardware"]

#: Where POSIX shared memory lives on Linux.
_SHM = Path("/dev/shm")  # noqa: S108
#: Below this, two ranks' segments of an ordinary model do not fit.
_SHM_WANTED = 256 << 20

Status = Literal["ok", "missing", "fix"]


@frozen
class Check:
    """One line of the doctor.

    Attributes:
        name: What was looked at.
        status: ``ok``; ``missing``: not there, and something optional is off; ``fix``: something
            that symmplan's CPU path needs is wrong.
        detail: What was found, or what it turns off.
        fix: One action, where there is one.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


def checks() -> list[Check]:
    """All probes, from the ground up."""
    found = [_python(), _cores(), *_shared_memory(), _compiler()]
    try:
        import torch
    except ImportError as error:
        fix = "python -m pip install 'torch>=2.11'"
        return [*found, Check("torch", "fix", f"cannot be imported: {error}", fix)]
    version = str(torch.__version__)
    recent = tuple(int(p) for p in version.split(".", 2)[:2] if p.isdigit()) >= (2, 11)
    found.append(
        Check("torch", "ok", version)
        if recent
        else Check("torch", "fix", version, "python -m pip install 'torch>=2.11'")
    )
    return [*found, *_distributed(), *_features(), *_symmetric_memory(), _entry_point()]


def hardware() -> dict[str, Any]:
    """What a measurement ran on: processor, cores, system, Python."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        cpu = next(x.split(":", 1)[1].strip() for x in info.splitlines() if "model name" in x)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")


def _cores() -> Check:
    # What the process may use, which in a container is less than what the machine has.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Check("cores", "ok", f"{usable} usable")


def _shared_memory() -> list[Check]:
    where = _SHM
    if not where.is_dir():
        return [Check(str(_SHM), "fix", "does not exist", 'use Linux, or memory="local"')]
    stat = os.statvfs(where)
    total, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    detail = f"{size(free)} free of {size(total)}"
    fix = "mount -o remount,size=4G /dev/shm, or docker run --shm-size=4g"
    found = [
        Check(str(_SHM), "ok", detail)
        if free >= _SHM_WANTED
        else Check(str(_SHM), "fix", f"{detail}: too little for a model's segments", fix)
    ]
    try:
        flags = os.O_TMPFILE | os.O_RDWR | os.O_EXCL
        os.close(os.open(where, flags, 0o600))
        found.append(Check("O_TMPFILE", "ok", "segments need never have a name"))
    except (AttributeError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        found.append(Check("O_TMPFILE", "missing", f"{reason}: segments are named, then unlinked"))
    return found


def cxx_compiler() -> str | None:
    """The C++ compiler that Inductor will call, or None if it finds none."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        return str(get_cpp_compiler())
    except Exception:  # noqa: BLE001 - whatever went wrong, Inductor would meet it too
        return None


def _compiler() -> Check:
    found = cxx_compiler()
    if found is not None:
        return Check("C++ compiler", "ok", f"{found}: Inductor can compile for the CPU")
    return Check(
        "C++ compiler",
        "missing",
        'Inductor cannot compile for the CPU; the demo uses inner="eager"',
        "install g++ (apt-get install g++), or set CXX",
    )


def _distributed() -> list[Check]:
    import torch.distributed as dist

    if not dist.is_available():
        return [Check("torch.distributed", "fix", "not in this build", "install an official wheel")]
    gloo = (
        Check("gloo", "ok", "ranks on the CPU can meet")
        if dist.is_gloo_available()
        else Check("gloo", "fix", "not in this build", "install an official wheel of torch")
    )
    return [gloo, _nccl()]


def _nccl() -> Check:
    try:
        import torch.cuda.nccl

        version = torch.cuda.nccl.version()
    except Exception:  # noqa: BLE001 - CPU builds lack the symbol and say so in several ways
        return Check("NCCL", "missing", 'not in this build: memory="nccl" is off')
    text = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    if isinstance(version, tuple) and version < (2, 27):
        return Check("NCCL", "missing", f"{text}: symmetric memory needs 2.27 or later")
    return Check("NCCL", "ok", text)


def _features() -> list[Check]:
    """Private or recent names of torch that some paths of symmplan use when they are there."""
    import torch

    def check(name: str, present: bool, without: str) -> Check:
        return Check(name, "ok" if present else "missing", "found" if present else without)

    try:
        from torch.distributed.fsdp import FSDPModule

        fsdp = hasattr(FSDPModule, "set_symm_mem_for_comm")
    except ImportError:
        fsdp = False
    try:
        import torch._functorch.config as functorch

        together = hasattr(functorch, "force_non_lazy_backward_lowering")
    except ImportError:
        together = False
    return [
        check(
            "torch.library.Library.register_symm_mem_args",
            hasattr(torch.library.Library, "register_symm_mem_args"),
            "not in this torch (2.13+): there is no upstream registry to adopt",
        ),
        check(
            "FSDPModule.set_symm_mem_for_comm",
            fsdp,
            "not in this torch (2.13+)",
        ),
        check(
            "backward compiled with its forward",
            together,
            "not in this torch: forward and backward get segments of their own",
        ),
    ]


def _symmetric_memory() -> list[Check]:
    """Torch's own symmetric memory; all of it needs GPUs."""
    import torch

    try:
        import torch.distributed._symmetric_memory as symm
    except ImportError as error:
        return [Check("torch symmetric memory", "missing", f"cannot be imported: {error}")]
    if not torch.cuda.is_available():
        return [
            Check(
                "torch symmetric memory",
                "missing",
                'no GPU: memory="nccl", "cuda" and "nvshmem" are off; "shm" and "local" work',
            )
        ]
    found = ["CUDA"]
    try:
        if symm.is_nvshmem_available():
            found.append("NVSHMEM")
    except Exception:  # noqa: BLE001 - an old or odd build: then it is not available
        found = ["CUDA"]
    if _nccl().status == "ok":
        found.append("NCCL")
    gpus = f"{torch.cuda.device_count()} GPUs, {torch.cuda.get_device_name(0)}"
    return [Check("torch symmetric memory", "ok", f"backends {', '.join(found)}; {gpus}")]


def _entry_point() -> Check:
    name = 'torch.compile(backend="symmplan")'
    group = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if any(point.name == "symmplan" for point in group):
        return Check(name, "ok", "the dynamo entry point is installed")
    return Check(
        name,
        "fix",
        "the dynamo entry point is not installed",
        "install the package (python -m pip install .) instead of putting it on PYTHONPATH",
    )
