"""What symmplan remembers of a process: it can be set back, and a forked child has its own."""

from __future__ import annotations

import os
import pickle
import threading

import attrs
import pytest

from symmplan.process import PROCESS, LiveSegments, Process


class Group:
    """Stands for a process group."""


class Segment:
    """Stands for a segment."""

    def __init__(self, address, nbytes=8):
        self.address, self.nbytes = address, nbytes
        self.inherited = 0

    def forked(self):
        self.inherited += 1


def written(process):
    """Write something to each field; what may not be dropped meanwhile."""
    group, marks = Group(), []
    for f in attrs.fields(Process):
        value = getattr(process, f.name)
        if f.name == "segments":
            marks.append(Segment(64))
            value.add(marks[-1])
        elif f.name == "thread":
            value.own_work, value.ops = 1, ["op"]
        elif hasattr(value, "setdefault"):
            marks.append(Group())
            value[0 if f.name == "arenas" else group] = marks[-1]
        elif isinstance(value, list):
            value.append(group)
        else:
            setattr(process, f.name, group)
    return group, marks


def is_fresh(process):
    """Which fields are as in a process that begins."""
    new = Process()
    fresh = set()
    for f in attrs.fields(Process):
        value, other = getattr(process, f.name), getattr(new, f.name)
        if f.name == "thread":
            value, other = vars(value), vars(other)
        if f.name == "segments":
            value, other = len(value), len(other)
        if f.name == "entering":
            value, other = type(value), type(other)
        if value == other:
            fresh.add(f.name)
    return fresh


NAMES = {f.name for f in attrs.fields(Process)}
#: What a child has of its parent, by its nature.
STAY = {
    "device_kinds",
    "segments",
    "thread",
    "kept",
    "windows",
    "ranks",
    "world",
    "watching",
}


def test_a_process_begins_fresh_and_is_written_to():
    process = Process()
    assert is_fresh(process) == NAMES
    held = written(process)
    assert is_fresh(process) == set()
    assert held


def test_reset_sets_back_all_but_what_must_outlive_it():
    process = Process()
    held = written(process)
    process.reset()
    assert is_fresh(process) == NAMES - {"kept"}
    assert process.kept == [held[0]]


def test_a_child_begins_anew_but_for_what_it_has_inherited():
    process = Process()
    _, marks = written(process)
    before = len(process.kept)
    process.forked()
    assert is_fresh(process) == NAMES - STAY
    assert [m.inherited for m in marks if isinstance(m, Segment)] == [1]
    assert len(process.kept) == before + 1, "what was the parent's is not ended in the child"


def test_a_real_child_finds_its_process_fresh():
    group = Group()
    PROCESS.session_keys, PROCESS.topologies[group] = group, {"cpu": None}
    PROCESS.ranks[group] = os.getpid()
    read, write = os.pipe()
    try:
        child = os.fork()
        if not child:
            seen = (PROCESS.session_keys, len(PROCESS.topologies), PROCESS.ranks[group])
            os.write(write, pickle.dumps(seen))
            os._exit(0)
        os.waitpid(child, 0)
        assert pickle.loads(os.read(read, 4096)) == (None, 0, os.getpid())
        assert PROCESS.session_keys is group
        assert group in PROCESS.topologies
    finally:
        os.close(read)
        os.close(write)
        PROCESS.session_keys = None


def test_each_thread_has_a_state_of_its_own():
    process, seen = Process(), []
    process.thread.own_work = 2
    process.thread.ops.append("op")
    other = threading.Thread(
        target=lambda: seen.append((process.thread.own_work, process.thread.ops))
    )
    other.start()
    other.join()
    assert seen == [(0, [])]
    assert (process.thread.own_work, process.thread.ops) == (2, ["op"])


@pytest.mark.parametrize(
    ("address", "expected"),
    [(63, None), (64, (0, 0)), (71, (0, 7)), (72, None), (80, (1, 0)), (88, None)],
)
def test_segments_are_found_by_any_of_their_bytes(address, expected):
    live, segments = LiveSegments(), [Segment(64), Segment(80)]
    for segment in reversed(segments):
        live.add(segment)
    found = live.find(address)
    assert (None if found is None else (segments.index(found[0]), found[1])) == expected
    live.remove(segments[0])
    assert live.find(64) is None
    assert len(live) == 1


def test_a_child_can_lock_what_its_parent_had_locked():
    live = LiveSegments()
    live._lock.acquire()
    live.forked()
    live.add(Segment(64))
    assert len(live) == 1
