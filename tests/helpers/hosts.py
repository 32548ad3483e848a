"""Hosts on one machine: each has a /dev/shm of its own, and the ranks of each take others' for far.

with HostPool((2, 2)) as pool:            # ranks 0 and 1 on one host, 2 and 3 on another
    pool.run(work, 5)                     # else as `ranks.RankPool`

pool = hosts_pool((2, 2))                 # the same as a fixture, skipped where it cannot be had

A host is a mount namespace with a fresh tmpfs, which lives as long as a process that waits in it.
Its ranks enter that before they have threads, and have an ``NCCL_HOSTID`` of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path

from ranks import RankPool

_CLONE_NEWNS = 0x00020000
_SHM_MIB = 256


class Host:
    """A mount namespace with ``mib`` MiB in its /dev/shm.

    Raises:
        OSError: This machine lets nobody have one.
    """

    def __init__(self, mib: int = _SHM_MIB) -> None:
        if shutil.which("unshare") is None:
            raise OSError("there is no unshare")
        inside = f"mount -t tmpfs -o size={mib}m tmpfs /dev/shm && echo ready && exec cat"
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", inside],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if self._process.stdout.readline().strip() != "ready":
            said = self._process.stderr.read().strip()
            self.close()
            raise OSError(f"no mount namespace: {said}")

    @property
    def pid(self) -> int:
        """The process that waits in it."""
        return self._process.pid

    def left(self) -> list[str]:
        """Names of files in its /dev/shm."""
        return sorted(f.name for f in Path(f"/proc/{self.pid}/root/dev/shm").iterdir())

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._process.communicate("", timeout=10)
        self._process.kill()
        self._process.wait()


def _enter(of: list[tuple[int, str]], rank: int) -> None:
    """Be a process of a host: ``of`` has its process and its name for each rank."""
    pid, name = of[rank]
    here = Path.cwd()
    descriptor = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)
    os.chdir(here)
    os.environ["NCCL_HOSTID"] = name


class HostPool(RankPool):
    """Ranks on hosts.

    Args:
        per_host: How many are on each.
        mixed: Rank after rank on another host in turn, instead of all of a host's together.
        mib: MiB of each host's /dev/shm.
        options: Of `RankPool`.
    """

    def __init__(self, per_host, *, mixed=False, mib=None, **options) -> None:
        mib = mib or [_SHM_MIB] * len(per_host)
        self.hosts = []
        try:
            for size in mib:
                self.hosts.append(Host(size))
            turns = [(n, h) for h, count in enumerate(per_host) for n in range(count)]
            self.of = [h for _, h in sorted(turns)] if mixed else [h for _, h in turns]
            where = [(self.hosts[h].pid, f"host {h}") for h in self.of]
            super().__init__(len(where), enter=functools.partial(_enter, where), **options)
        except BaseException:
            self._end_hosts()
            raise

    def close(self) -> None:
        """End the ranks, then the hosts."""
        super().close()
        self._end_hosts()

    def _end_hosts(self) -> None:
        for host in self.hosts:
            host.close()


@functools.cache
def why_no_hosts() -> str:
    """Why this machine has no mount namespaces; empty if it has."""
    try:
        Host().close()
    except OSError as error:
        return str(error)
    return ""


def hosts_pool(*shapes, setup=None, **options):
    """A fixture: a pool for all tests of a module, for several shapes one after the other.

    ``setup(rank, world_size)`` runs on each rank before the tests; ``options`` are of `HostPool`.
    """
    import pytest

    @pytest.fixture(scope="module", params=shapes, ids=str)
    def hosts(request):
        if why_no_hosts():
            pytest.skip(why_no_hosts())
        with HostPool(request.param, **options) as pool:
            if setup is not None:
                pool.run(setup)
            yield pool

    return hosts
