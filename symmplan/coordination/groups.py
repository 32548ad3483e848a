"""Who the ranks are: the process groups that a plan names, and the processes in them.

A process id alone does not name a process: ids are reused, and mean something else in another
container. Together with its start time and its pid namespace it does.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, field, frozen
from attrs.validators import instance_of

from symmplan.errors import BackendError, OptionError, PeerLostError, PeerTimeoutError, RunError
from symmplan.process import PROCESS
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "Group",
    "ProcessIdentity",
    "group_key",
    "host",
    "is_gone",
    "listed",
    "resolve_groups",
    "this_process",
]

_ENDED = frozenset("ZXx")  # a killed process stays visible as a zombie until its parent reaps it


@frozen
class Group:
    """A process group."""

    name: str  # what the plan calls it
    torch_name: str  # what torch calls it; equal to ``name`` unless the plan was made elsewhere
    rank: int = 0  # this process's rank in it
    size: int = 1  # how many ranks it has
    #: Its ranks in the world, in its order; of a process alone its only one.
    ranks: tuple[int, ...] = field(default=(0,), eq=False, repr=False)
    #: The group's key-value store, None for a group of one without torch.distributed.
    store: Any = field(default=None, eq=False, repr=False)
    process_group: Any = field(default=None, eq=False, repr=False)  # Torch's group, None likewise
    #: The process that is this rank. One that is forked from it is not.
    pid: int = field(factory=os.getpid, eq=False, repr=False)

    @property
    def here(self) -> dict[str, Any]:
        """The fields ``group`` and ``rank`` of errors that are found here."""
        return {"group": self.name, "rank": self.rank}

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the rank: what it shares with peers is not ours."""
        return self.size > 1 and self.pid != os.getpid()

    def require_own(self) -> None:
        """See that this process is the rank.

        Raises:
            RunError: It was forked from it.
        """
        if self.forked:
            raise RunError(
                f"process {os.getpid()} was forked from the rank that is in process group "
                f"{self.name!r}, and is not a rank itself",
                expected=f"process {self.pid}",
                got=f"process {os.getpid()}",
                fix="use symmetric memory in the ranks only; start other processes with "
                "multiprocessing's 'spawn' or 'forkserver'",
                **self.here,
            )

    def ended(self, rank: int, pid: int, when: str, **fields: Any) -> PeerLostError:
        """The error about a rank whose process ended."""
        return PeerLostError(
            f"rank {rank} (process {pid}) ended {when}",
            fix="find out why that process ended; its own output says more",
            **self.here,
            lost_rank=rank,
            **fields,
        )

    def timed_out(
        self, missing: Sequence[int], where: str, timeout: float, **fields: Any
    ) -> PeerTimeoutError:
        """The error about ranks that did not come within ``timeout`` seconds."""
        return PeerTimeoutError(
            f"rank {listed(missing)} did not come: rank {self.rank} waited {timeout:g} s {where}",
            expected=f"all {self.size} ranks of the group",
            got=f"{self.size - len(missing)}",
            fix="check that every rank of the group makes the same calls, or increase timeout=",
            **self.here,
            missing=tuple(missing),
            timeout=timeout,
            **fields,
        )


def listed(ranks: Sequence[int]) -> str:
    """Ranks, for people."""
    shown = ", ".join(str(r) for r in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"


def group_key(group: str | Any) -> str:
    """The name of ``group``, which is a name or torch's group.

    Raises:
        OptionError: It is neither.
    """
    if isinstance(group, str):
        return group
    if not hasattr(group, "group_name"):
        raise OptionError(
            f"{group!r} is not a process group",
            expected="a torch.distributed.ProcessGroup, or the name of one",
            got=type(group).__name__,
            fix="pass mesh.get_group() of a device mesh, or the result of "
            "torch.distributed.new_group",
        )
    return c10d.group_name(group)


def resolve_groups(
    names: Iterable[str], groups: Mapping[str, Any] | None = None
) -> dict[str, Group]:
    """Find the process group behind each name.

    Args:
        names: As in the plan: torch's group names, or ``"default"`` for the default group.
        groups: ``{name: process group}`` for names that torch does not know.

    Returns:
        ``{name: Group}`` in the order of ``names``. Without torch.distributed, groups of one.

    Raises:
        BackendError: A name is unknown, or this rank is not in its group.
        RunError: This process was forked from the rank.
    """
    return {name: _resolve(name, groups or {}) for name in dict.fromkeys(names)}


def _resolve(name: str, groups: Mapping[str, Any]) -> Group:
    process_group = groups.get(name)
    if process_group is None:
        if not c10d.has_process_groups():
            return Group(name, name)
        try:
            process_group = c10d.group_by_name(c10d.world_name() if name == "default" else name)
        except LookupError:
            raise BackendError(
                f"the plan names process group {name!r}, which torch does not know",
                expected="the name of a process group of this process",
                got=repr(name),
                fix="create the group first, or pass groups={name: process_group}",
                group=name,
            ) from None
    rank = process_group.rank()
    if rank < 0:
        raise BackendError(
            f"this rank is not in process group {name!r}",
            fix="realize a plan only on the ranks of its groups",
            group=name,
        )
    group = Group(
        name=name,
        torch_name=c10d.group_name(process_group),
        rank=rank,
        size=process_group.size(),
        ranks=tuple(c10d.group_ranks(c10d.group_name(process_group))),
        store=c10d.group_store(process_group),
        process_group=process_group,
        pid=PROCESS.ranks.setdefault(process_group, os.getpid()),
    )
    group.require_own()
    return group


@frozen
class ProcessIdentity:
    """A process, named so that ranks on the same host can recognise it."""

    pid: int = field(validator=instance_of(int))  # process id, in its own pid namespace
    #: Start time in clock ticks since boot, 0 where it is not known.
    started: int = field(validator=instance_of(int))
    namespace: str = field(validator=instance_of(str))  # the pid namespace
    #: Of the host; see `host`.
    host: str = field(validator=instance_of(str))
    user: int = field(validator=instance_of(int))  # effective user id

    @property
    def key(self) -> int:
        """A word of 8 bytes that stands for it, never 0."""
        text = repr(sorted(asdict(self).items())).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1 or 1


def this_process() -> ProcessIdentity:
    """The calling process."""
    pid = os.getpid()
    return ProcessIdentity(
        pid=pid,
        started=_state(pid)[1],
        namespace=_namespace(),
        host=host(),
        user=os.geteuid(),
    )


def is_gone(process: ProcessIdentity) -> bool:
    """Whether ``process`` certainly ended; False also where this process cannot tell."""
    if process.host != host() or process.namespace != _namespace() or not process.started:
        return False
    state, started = _state(process.pid)
    return state in _ENDED or started != process.started


def _state(pid: int) -> tuple[str, int]:
    """State letter and start time of ``pid``; ``("X", 0)`` where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:  # there is none, or it ended while we read
        return "X", 0
    # The second field is the command's name in parentheses and may itself hold any character.
    rest = text[text.rindex(")") + 2 :].split()
    return rest[0], int(rest[19])


def host() -> str:
    """This host, as NCCL tells hosts apart: ``NCCL_HOSTID``, else its name and its boot."""
    return os.environ.get("NCCL_HOSTID") or _boot()


@functools.cache
def _boot() -> str:
    name = socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return name
    return f"{name} {boot}"


@functools.cache
def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
