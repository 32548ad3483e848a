"""Hosts on one machine: each has a /dev/shm of its own, and the ranks of each take others' for far.

with HostPool((2, 2)) as pool:            # ranks 0 and 1 on one host, 2 and 3 on another
    pool.run(work, 5)                     # else as `ranks.RankPool`

pool = hosts_pool((2, 2))                 # the same as a fixture, skipped where it cannot be had

with Network() as network, HostPool((2, 2), network=network) as pool:
    network.stop(1)                       # nothing passes between that host and the others
    network.go_on(1)

A host is a mount namespace with a fresh tmpfs, which lives as long as a process that waits in it.
Its ranks enter that before they have threads, and have an ``NCCL_HOSTID`` of their own. On a
`Network` it is a network namespace, too, and a cable leads from there to a switch.
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
from typing_extensions import Self

_NAMESPACES = {"mnt": 0x00020000, "net": 0x40000000}
_SHM_MIB = 256


class Namespaces:
    """Some namespaces, which live as long as a process that waits in them.

    Args:
        asked: Of ``unshare``.
        inside: What is done in them first, as a line for a shell.

    Raises:
        OSError: This machine lets nobody have them.
    """

    def __init__(self, asked: list[str], inside: str) -> None:
        if shutil.which("unshare") is None:
            raise OSError("there is no unshare")
        self._process = subprocess.Popen(
            ["unshare", *asked, "sh", "-c", f"{inside} && echo ready && exec cat"],
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
            raise OSError(f"no namespaces: {said}")

    @property
    def pid(self) -> int:
        """The process that waits in it."""
        return self._process.pid

    def close(self) -> None:
        """End them."""
        with contextlib.suppress(OSError):
            self._process.communicate("", timeout=10)
        self._process.kill()
        self._process.wait()


class Host(Namespaces):
    """A mount namespace with ``mib`` MiB in its /dev/shm.

    Args:
        mib: So many.
        alone: Whether it has a network namespace, too.

    Raises:
        OSError: This machine lets nobody have one.
    """

    def __init__(self, mib: int = _SHM_MIB, *, alone: bool = False) -> None:
        asked = ["--mount", "--propagation", "private", *(["--net"] if alone else [])]
        super().__init__(asked, f"mount -t tmpfs -o size={mib}m tmpfs /dev/shm")

    def left(self) -> list[str]:
        """Names of files in its /dev/shm."""
        return sorted(f.name for f in Path(f"/proc/{self.pid}/root/dev/shm").iterdir())


class Network(Namespaces):
    """A switch, in a namespace of its own: hosts are plugged in, and plugged out.

    Raises:
        OSError: This machine lets nobody have one.
    """

    def __init__(self) -> None:
        if shutil.which("ip") is None or shutil.which("nsenter") is None:
            raise OSError("there is no ip, or no nsenter")
        super().__init__(["--net"], "ip link add switch type bridge && ip link set switch up")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def address(number: int) -> str:
        """Where a host is."""
        return f"10.77.0.{number + 1}"

    def join(self, number: int, host: Host) -> None:
        """Lay a cable to a host."""
        self._ip(f"link add port{number} type veth peer name cable netns {host.pid}")
        for what in ("addr add {}/24 dev cable", "link set cable up", "link set lo up"):
            self._ip(what.format(self.address(number)), host.pid)
        self._ip(f"link set port{number} up")
        self.go_on(number)

    def stop(self, number: int) -> None:
        """Plug a host out: what it sends is lost, and it sees nothing of that."""
        self._ip(f"link set port{number} nomaster")

    def go_on(self, number: int) -> None:
        """Plug it in."""
        self._ip(f"link set port{number} master switch")

    def _ip(self, what: str, where: int | None = None) -> None:
        enter = ["nsenter", "--net", f"--target={where or self.pid}", "ip"]
        done = subprocess.run([*enter, *what.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"ip {what}: {done.stderr.strip()}")


def _enter(of: list[tuple[int, str]], kinds: list[str], rank: int) -> None:
    """Be a process of a host: ``of`` has its process and its name for each rank."""
    pid, name = of[rank]
    here = Path.cwd()
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in kinds:
        descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        if libc.setns(descriptor, _NAMESPACES[kind]):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
    os.chdir(here)
    os.environ["NCCL_HOSTID"] = name
    if "net" in kinds:
        os.environ["GLOO_SOCKET_IFNAME"] = "cable"


class HostPool(RankPool):
    """Ranks on hosts.

    Args:
        per_host: How many are on each.
        mixed: Rank after rank on another host in turn, instead of all of a host's together.
        mib: MiB of each host's /dev/shm.
        network: On which the hosts are; None for this machine's own, which all share.
        options: Of `RankPool`.
    """

    def __init__(self, per_host, *, mixed=False, mib=None, network=None, **options) -> None:
        mib = mib or [_SHM_MIB] * len(per_host)
        self.hosts = []
        kinds = ["mnt"]
        if network is not None:
            kinds = ["net", "mnt"]  # of which the second changes what /proc is
            options |= {"rank0_store": True, "store_host": network.address(0)}
        try:
            for number, size in enumerate(mib):
                self.hosts.append(Host(size, alone=network is not None))
                if network is not None:
                    network.join(number, self.hosts[-1])
            turns = [(n, h) for h, count in enumerate(per_host) for n in range(count)]
            self.of = [h for _, h in sorted(turns)] if mixed else [h for _, h in turns]
            where = [(self.hosts[h].pid, f"host {h}") for h in self.of]
            super().__init__(len(where), enter=functools.partial(_enter, where, kinds), **options)
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


@functools.cache
def why_no_network() -> str:
    """Why this machine lets nobody lay cables between hosts; empty if it does."""
    try:
        with Network() as network:
            host = Host(alone=True)
            try:
                network.join(0, host)
            finally:
                host.close()
    except OSError as error:
        return str(error)
    return ""


def needs_hosts():
    """The marks of a module whose tests need hosts."""
    import pytest

    why = why_no_hosts()
    return [
        pytest.mark.ranks,
        pytest.mark.skipif(bool(why), reason=f"no hosts on one machine: {why}"),
    ]


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
