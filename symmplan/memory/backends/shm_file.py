"""Shared memory files: create one that vanishes with its last user, and open a peer's file safely.

[Note: nameless files]
    A named file outlives a crash. So the file has no name: ``O_TMPFILE`` makes it nameless in the
    first place (``memfd_create`` where the file system cannot), peers open it through
    ``/proc/<pid>/fd/<fd>``, and the kernel frees it with the last process that holds it, whenever
    and however that ends. Only where peers may not open each other's descriptors (another pid
    namespace, a hardened /proc) the file gets a name after all, for a moment: an unguessable one,
    announced to all ranks before it exists so that survivors of a crash can remove it, and removed
    as soon as every rank has mapped the file, by whoever gets there first. Only if all ranks end
    within those milliseconds a name is left.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, instance_of, matches_re

from symmplan.errors import BackendError, OutOfSharedMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "DIRECTORY",
    "SharedFile",
    "closing_fd",
    "create",
    "free_bytes",
    "map_file",
    "open_peer",
    "publish",
    "remove",
    "unguessable_name",
]

#: Where POSIX shared memory lives on Linux.
DIRECTORY = "/dev/shm"  # noqa: S108

_MODE = 0o600
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})
_FULL = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG})


@frozen
class SharedFile:
    """What peers must know to open a file, and to know that it is the right one."""

    pid: int = field(validator=[instance_of(int), ge(1)])  # process that holds it open
    fd: int = field(validator=[instance_of(int), ge(0)])  # file descriptor in that process
    device: int = field(validator=instance_of(int))  # device number of its file system
    inode: int = field(validator=instance_of(int))  # inode number
    nbytes: int = field(validator=[instance_of(int), ge(1)])  # size in bytes
    # What a peer says becomes part of a path: no separators.
    #: File name in `DIRECTORY`, empty for a nameless file.
    name: str = field(default="", validator=matches_re(r"(symmplan-[0-9a-f]{32})?"))


def free_bytes() -> int:
    """How much of `DIRECTORY` is free."""
    room = os.statvfs(DIRECTORY)
    return room.f_bavail * room.f_frsize


def unguessable_name() -> str:
    """A name for a file in `DIRECTORY` that others cannot guess, and so cannot take first."""
    return f"symmplan-{secrets.token_hex(16)}"


def create(nbytes: int) -> tuple[int, SharedFile]:
    """Make a nameless file of ``nbytes`` zero bytes, mode 0600, all of them really allocated.

    Returns:
        An open descriptor, and what peers must know.

    Raises:
        OutOfSharedMemoryError: There is no room. Without real allocation the first write to a
            missing page would end the process with SIGBUS.
        BackendError: The machine has no usable shared memory.
    """
    try:
        fd = _open_nameless()
        try:
            os.fchmod(fd, _MODE)  # whatever the umask took away
            os.posix_fallocate(fd, 0, nbytes)
            info = os.fstat(fd)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        if error.errno in _FULL:
            raise _no_room(nbytes) from error
        raise BackendError(
            f"cannot create shared memory in {DIRECTORY}: {error.strerror}",
            fix=f"mount a tmpfs at {DIRECTORY} that this user may write to",
            errno=error.errno,
        ) from error
    return fd, SharedFile(os.getpid(), fd, info.st_dev, info.st_ino, nbytes)


def _open_nameless() -> int:
    try:
        return os.open(DIRECTORY, os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE, _MODE)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        return os.memfd_create("symmplan", os.MFD_CLOEXEC)


def publish(fd: int, name: str) -> None:
    """Give the nameless file ``fd`` a name from `unguessable_name`.

    Raises:
        BackendError: This machine cannot.
    """
    directory = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with closing_fd(directory):
        try:
            # A directory descriptor is what makes os.link follow /proc's link to the file.
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=directory, follow_symlinks=True)
        except OSError as error:
            raise BackendError(
                f"peers may not open this process's shared memory, and it cannot be named in "
                f"{DIRECTORY}: {error.strerror}",
                fix="run the ranks as one user in one pid namespace",
                errno=error.errno,
            ) from error


def remove(name: str) -> None:
    """Remove a name if it is there."""
    with contextlib.suppress(OSError):
        Path(DIRECTORY, name).unlink()


def open_peer(file: SharedFile) -> int:
    """Open a peer's file and check that it is the one that the peer made.

    Returns:
        An open descriptor.

    Raises:
        FileNotFoundError: There is no such process or descriptor or name.
        PermissionError: This process may not open the peer's descriptors.
        BackendError: It is another file than announced, or not private to this user.
    """
    if file.name:
        path, flags = f"{DIRECTORY}/{file.name}", os.O_NOFOLLOW
    else:
        path, flags = f"/proc/{file.pid}/fd/{file.fd}", 0
    # O_NONBLOCK: whatever else lies there (a pipe, a device) must not hold this process up.
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        _check_opened(fd, path, file)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_opened(fd: int, path: str, file: SharedFile) -> None:
    info = os.fstat(fd)
    checks = {
        "kind": ("regular" if stat.S_ISREG(info.st_mode) else "not regular", "regular"),
        "device": (info.st_dev, file.device),
        "inode": (info.st_ino, file.inode),
        "bytes": (info.st_size, file.nbytes),
        "user": (info.st_uid, os.geteuid()),
        "mode": (oct(stat.S_IMODE(info.st_mode)), oct(_MODE)),
    }
    for key, (found, wanted) in checks.items():
        if found != wanted:
            raise BackendError(
                f"{path} is not the peer's shared memory: its {key} differs",
                expected=wanted,
                got=found,
                fix="run the ranks as one user in one mount of /dev/shm",
                path=path,
                key=key,
            )


def map_file(fd: int, nbytes: int) -> mmap.mmap:
    """Map a whole file, shared, with all its pages present: no page fault in the first step."""
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close ``fd`` at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def _no_room(nbytes: int) -> OutOfSharedMemoryError:
    try:
        free = free_bytes()
    except OSError:
        free = 0
    return OutOfSharedMemoryError(
        f"{DIRECTORY} has no room for {nbytes} bytes",
        expected=f"{nbytes} bytes",
        got=f"{free} bytes free",
        fix=f"make {DIRECTORY} larger (mount -o remount,size=..., docker run --shm-size=...), "
        "free memory there, or make the plan smaller",
        nbytes=nbytes,
        free_bytes=free,
    )
