"""The files behind shared memory, in one process: private, nameless, the right ones or refused."""

# Test code: plainness first.
# ruff: noqa: PTH108, PTH208, PTH211

from __future__ import annotations

import os
import socket

import pytest
from test_shm_faults import SHM, nothing_named_left

from symmplan.errors import BackendError, OutOfSharedMemoryError
from symmplan.memory.backends import shm_file

__all__ = ["nothing_named_left"]


@pytest.fixture
def file():
    fd, made = shm_file.create(8192)
    yield made
    os.close(fd)


def other(made, **changes):
    import attrs

    return attrs.evolve(made, **changes)


def test_open_peer_takes_the_right_file(file):
    fd = shm_file.open_peer(file)
    os.pwrite(fd, b"x", 8191)
    assert os.pread(file.fd, 1, 8191) == b"x"
    os.close(fd)


@pytest.mark.parametrize("key", ["inode", "device", "nbytes"])
def test_open_peer_refuses_another_file(file, key):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BackendError, match="not the peer's shared memory"):
        shm_file.open_peer(other(file, **{key: getattr(file, key) + 1}))
    assert len(os.listdir("/proc/self/fd")) == before


def test_open_peer_refuses_what_others_may_read(file):
    os.fchmod(file.fd, 0o644)
    with pytest.raises(BackendError, match="mode differs") as caught:
        shm_file.open_peer(file)
    assert caught.value.expected == "0o600"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_open_peer_refuses_another_users_file(file):
    os.fchown(file.fd, 65534, -1)
    with pytest.raises(BackendError, match="user differs"):
        shm_file.open_peer(file)


def test_open_peer_refuses_what_is_no_file(file):
    left, right = socket.socketpair()
    read, write = os.pipe()
    for fd in (left.fileno(), read):
        with pytest.raises((BackendError, OSError)):
            shm_file.open_peer(other(file, fd=fd))
    for fd in (read, write):
        os.close(fd)
    left.close()
    right.close()


def test_open_peer_does_not_follow_links(file):
    name = shm_file.unguessable_name()
    os.symlink(f"/proc/self/fd/{file.fd}", f"{SHM}/{name}")
    try:
        with pytest.raises(OSError, match="symbolic links"):
            shm_file.open_peer(other(file, name=name))
    finally:
        os.unlink(f"{SHM}/{name}")


@pytest.mark.parametrize("name", ["../etc/passwd", "symmplan-", "symmplan-" + "g" * 32, "x"])
def test_peers_cannot_make_up_names(file, name):
    with pytest.raises(ValueError, match="name"):
        other(file, name=name)


def test_a_taken_name_is_an_error(file):
    name = shm_file.unguessable_name()
    shm_file.publish(file.fd, name)
    try:
        with pytest.raises(BackendError, match="cannot be named"):
            shm_file.publish(file.fd, name)
    finally:
        shm_file.remove(name)


def test_no_room_is_an_error_and_leaves_nothing(monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OutOfSharedMemoryError) as caught:
        shm_file.create(1 << 46)
    assert caught.value.nbytes == 1 << 46
    assert caught.value.free_bytes > 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_file_systems_without_nameless_files(monkeypatch):
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    fd, made = shm_file.create(4096)
    monkeypatch.undo()
    info = os.fstat(fd)
    assert (info.st_size, info.st_nlink, info.st_mode & 0o777) == (4096, 0, 0o600)
    peer = shm_file.open_peer(made)
    os.close(peer)
    os.close(fd)


def test_a_machine_without_shared_memory(monkeypatch):
    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(shm_file, "DIRECTORY", "/proc")
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(BackendError, match="cannot create shared memory"):
        shm_file.create(4096)
