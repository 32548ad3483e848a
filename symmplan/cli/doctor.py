"""Print what this machine and this torch can do, and what to fix.

Each line says ok, missing (an optional feature is off) or fix (CPU ranks need it). If a line says
fix, the exit code is 1. The last part lists the private names of torch that symmplan uses, what
depends on each of them, and whether this torch has them.

    torchrun --nproc-per-node 2 -m symmplan doctor --group

prints how these processes are connected, and how each collective can run between them.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from attrs import asdict

from symmplan import __version__
from symmplan.cli import group
from symmplan.report.format import size

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "cxx_compiler", "render", "run"]

#: Where POSIX shared memory lives on Linux.
_SHM = Path("/dev/shm")  # noqa: S108
#: Below this, two ranks' segments of an ordinary model do not fit.
_SHM_WANTED = 256 << 20
#: Minor versions of torch with which the tests run, and the newest for which the code is written.
_TESTED, _NEWEST = ((2, 11), (2, 13)), (2, 15)
_WRITTEN_FOR = "2.11 to 2.15"


#: One line of the doctor; see `_check`.
Check: TypeAlias = dict[str, str]


def _check(name: str, status: Literal["ok", "missing", "fix"], detail: str, fix: str = "") -> Check:
    """One line of the doctor.

    Args:
        name: What was looked at.
        status: As in the module's docstring.
        detail: What was found, or what it turns off.
        fix: One action, where there is one.
    """
    return {"name": name, "status": status, "detail": detail, "fix": fix}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``symmplan doctor``."""
    parser.add_argument(
        "--group",
        action="store_true",
        help="check the processes that torchrun started: which of them reach each other's memory, "
        "how each collective can run, and whether a small one of each runs that way",
    )


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Run every probe, from the ground up. None of them raises.

    With ``--group`` those of a group; only rank 0 has a result.

    Raises:
        CommandError: ``--group``, and no launcher started this process.
    """
    if args.group:
        return group.examine()
    python = f"{platform.python_version()} on {platform.platform(terse=True)}"
    # What the process may use, which in a container is less than what the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [_check("python", "ok", python), _check("cores", "ok", f"{cores} usable")]
    found += [*_shared_memory(), _compiler(), *_torch()]
    seams = _seams()
    return {
        "ok": all(check["status"] != "fix" for check in found) and not any(map(_is_fatal, seams)),
        "symmplan": __version__,
        "checks": found,
        "seams": seams,
    }


def render(result: dict[str, Any]) -> str:
    """One line per check, and the fix under it."""
    if "topology" in result:
        return group.render(result)
    lines = [f"symmplan {result['symmplan']}", *_lines(result["checks"])]
    if result["seams"]:
        lines += ["private names of torch, and what depends on them"]
        lines += _lines([_as_check(seam) for seam in result["seams"]])
    return "\n".join(lines)


def _lines(checks: list[Check]) -> list[str]:
    lines = []
    for check in checks:
        lines.append(f"  {check['status']:7}  {check['name']}  {check['detail']}")
        if check["fix"]:
            lines.append(f"           fix: {check['fix']}")
    return lines


def _shared_memory() -> list[Check]:
    if not _SHM.is_dir():
        return [_check(str(_SHM), "fix", "does not exist", 'use Linux, or memory="local"')]
    stat = os.statvfs(_SHM)
    total, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    room = _check(str(_SHM), "ok", f"{size(free)} free of {size(total)}")
    if free < _SHM_WANTED:
        detail = f"{room['detail']}: too little for a model's segments"
        fix = "mount -o remount,size=4G /dev/shm, or docker run --shm-size=4g"
        room = _check(str(_SHM), "fix", detail, fix)
    try:
        os.close(os.open(_SHM, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600))
    except (AttributeError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        detail = f"{reason}: segments are named, then unlinked"
        return [room, _check("O_TMPFILE", "missing", detail)]
    return [room, _check("O_TMPFILE", "ok", "segments need never have a name")]


def cxx_compiler() -> str | None:
    """The C++ compiler that Inductor will call, or None if it finds none."""
    try:
        from symmplan.torch_private.compilers import cpp_compiler

        return cpp_compiler()
    except Exception:  # noqa: BLE001 - whatever went wrong, Inductor would meet it too
        return None


def _compiler() -> Check:
    found = cxx_compiler()
    if found is not None:
        return _check("C++ compiler", "ok", f"{found}: Inductor can compile for the CPU")
    return _check(
        "C++ compiler",
        "missing",
        'Inductor cannot compile for the CPU; the demo uses inner="eager"',
        "install g++ (apt-get install g++), or set CXX",
    )


def _torch() -> list[Check]:
    fix = "python -m pip install 'torch>=2.11'"
    try:
        import torch
    except ImportError as error:
        return [_check("torch", "fix", f"cannot be imported: {error}", fix)]
    return [
        _version(str(torch.__version__), fix),
        *_distributed(),
        *_features(),
        _symmetric_memory(),
        _entry_point(),
    ]


def _version(torch: str, fix: str) -> Check:
    """Whether the tests run with this version of torch, in plain words."""
    minor = tuple(int(p) for p in torch.split(".", 2)[:2] if p.isdigit())
    tested = " and ".join(f"{a}.{b}" for a, b in _TESTED)
    known = f"symmplan is written for torch {_WRITTEN_FOR}, and tested with {tested}"
    if minor in _TESTED:
        return _check("torch", "ok", f"{torch}: symmplan is tested with this version")
    if minor < _TESTED[0]:
        return _check("torch", "fix", f"{torch}: too old; {known}", fix)
    if minor > _NEWEST:
        detail = f"{torch}: newer than symmplan knows; {known}. See the private names below"
        return _check("torch", "ok", detail)
    return _check("torch", "ok", f"{torch}: should work; {known}")


def _distributed() -> list[Check]:
    import torch.distributed as dist

    none, fix = "not in this build", "install an official wheel of torch"
    if not dist.is_available():
        return [_check("torch.distributed", "fix", none, fix)]
    if not dist.is_gloo_available():
        return [_check("gloo", "fix", none, fix), _nccl()]
    return [_check("gloo", "ok", "ranks on the CPU can meet"), _nccl()]


def _nccl() -> Check:
    from symmplan.memory import BACKENDS
    from symmplan.torch_private import nccl

    version = nccl.version()
    if not version:
        return _check("NCCL", "missing", 'not in this build: memory="nccl" is off')
    text = ".".join(map(str, version))
    if version < BACKENDS["nccl"].nccl:
        return _check("NCCL", "missing", f"{text}: symmetric memory needs 2.27 or later")
    return _check("NCCL", "ok", text)


def _features() -> list[Check]:
    """Private or recent names of torch that some paths of symmplan use when they are there."""
    import torch

    def check(name: str, present: bool, without: str) -> Check:
        return _check(name, "ok" if present else "missing", "found" if present else without)

    try:
        from torch.distributed.fsdp import FSDPModule

        fsdp = hasattr(FSDPModule, "set_symm_mem_for_comm")
    except ImportError:
        fsdp = False
    return [
        check(
            "torch.library.Library.register_symm_mem_args",
            hasattr(torch.library.Library, "register_symm_mem_args"),
            "not in this torch (2.13+): there is no upstream registry to adopt",
        ),
        check("FSDPModule.set_symm_mem_for_comm", fsdp, "not in this torch (2.13+)"),
    ]


def _symmetric_memory() -> Check:
    """Torch's own symmetric memory; all of it needs GPUs."""
    import torch

    from symmplan.device import kind_of
    from symmplan.torch_private.symm_mem import has_nvshmem

    name = "torch symmetric memory"
    try:
        nvshmem = has_nvshmem()
    except ImportError as error:
        return _check(name, "missing", f"cannot be imported: {error}")
    gpus = kind_of(torch.device("cuda")).names()
    if not gpus:
        off = 'no GPU: memory="nccl", "cuda" and "nvshmem" are off; "shm" and "local" work'
        return _check(name, "missing", off)
    found = ["CUDA", *(["NVSHMEM"] if nvshmem else [])]
    found += ["NCCL"] if _nccl()["status"] == "ok" else []
    return _check(name, "ok", f"backends {', '.join(found)}; {len(gpus)} GPUs, {gpus[0]}")


def _seams() -> list[dict[str, Any]]:
    """What symmplan takes of torch's private names; nothing where there is no torch."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return []
    from symmplan.torch_private.table import SEAMS

    return [{**asdict(seam), "missing": list(seam.missing())} for seam in SEAMS]


def _is_fatal(seam: dict[str, Any]) -> bool:
    return bool(seam["missing"]) and seam["carries"] == "correctness"


def _as_check(seam: dict[str, Any]) -> Check:
    """The line of a seam."""
    detail, fix = f"{seam['carries']}: {seam['rests']}", ""
    if seam["undone"]:
        detail += f"; replaced, put back {seam['undone']}"
    status: Any = "ok"
    if seam["missing"]:
        detail += f"; not in this torch: {', '.join(seam['missing'])}"
        status = "missing"
    if _is_fatal(seam):
        fix = f"install torch {_WRITTEN_FOR}, or a newer symmplan"
        status = "fix"
    return _check(seam["name"], status, detail, fix)


def _entry_point() -> Check:
    name = 'torch.compile(backend="symmplan")'
    group = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if any(point.name == "symmplan" for point in group):
        return _check(name, "ok", "the dynamo entry point is installed")
    return _check(
        name,
        "fix",
        "the dynamo entry point is not installed",
        "install the package (python -m pip install .) instead of putting it on PYTHONPATH",
    )
