"""Which process is that, and does it still run?

A process id alone does not name a process: ids are reused, and mean something else in another
container. Together with its start time and its pid namespace it does.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from pathlib import Path

from attrs import asdict, field, frozen
from attrs.validators import instance_of

__all__ = ["ProcessIdentity", "is_gone", "this_process"]

_ENDED = frozenset("ZXx")  # a killed process stays visible as a zombie until its parent reaps it


@frozen
class ProcessIdentity:
    """A process, named so that ranks on the same host can recognise it."""

    pid: int = field(validator=instance_of(int))  # process id, in its own pid namespace
    #: Start time in clock ticks since boot, 0 where it is not known.
    started: int = field(validator=instance_of(int))
    namespace: str = field(validator=instance_of(str))  # the pid namespace
    #: The host's boot, or its name where that is not known.
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
        host=_host(),
        user=os.geteuid(),
    )


def is_gone(process: ProcessIdentity) -> bool:
    """Whether ``process`` certainly ended; False also where this process cannot tell."""
    if process.host != _host() or process.namespace != _namespace() or not process.started:
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


@functools.cache
def _host() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


@functools.cache
def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
