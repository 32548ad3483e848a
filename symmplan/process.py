"""All that symmplan remembers of this process, in one object.

[Note: state of the process]
    What the process holds, or has found out about its groups, cannot belong to a plan or a model:
    two models share it. It is the fields of `PROCESS` and nowhere else; a test may set it back by
    `Process.reset`, and a reader sees here who writes what and who reads it. Types of the layers
    above are not known here: each field names them, and the functions that read it give them.

    In a process that is forked from this one nearly all of it is untrue: the peers, the sessions
    and the communicators are the parent's. So a child finds those fields fresh. What it has
    inherited indeed, memory that is mapped and calls that its thread is in the midst of, stays.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import Counter, deque
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from attrs import define, field, fields

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PROCESS", "LiveSegments", "Process", "ThreadState"]

_INHERITED = {"inherited": True}


class ThreadState(threading.local):
    """What one thread is in the midst of."""

    def __init__(self) -> None:
        #: How deep the thread is in work of symmplan's own: written by `symmplan.coordination.own`,
        #: read on every declared call by whoever watches the program's calls.
        self.own_work = 0
        #: Which ops it is in, the innermost last: written by those who run ops for the race
        #: detector, read where an access is written down.
        self.ops: list[str] = []
        #: The frame below which a line of a compiled graph counts, and that line: likewise.
        self.node: tuple[Any, str] | None = None


class LiveSegments:
    """The live segments of this process, by address.

    See [Note: live segments] in `symmplan.memory.segment`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sorted: tuple[tuple[int, ...], tuple[Any, ...]] = ((), ())

    def __len__(self) -> int:
        return len(self._sorted[0])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sorted[1])

    def add(self, segment: Any) -> None:
        """A segment begins to live."""
        with self._lock:
            self._replace([*self._sorted[1], segment])

    def remove(self, segment: Any) -> None:
        """Its memory is given back."""
        with self._lock:
            self._replace([s for s in self._sorted[1] if s is not segment])

    def find(self, address: int) -> tuple[Any, int] | None:
        """The segment that holds the byte at ``address``, and that byte's offset in it."""
        starts, segments = self._sorted
        index = bisect_right(starts, address) - 1
        if index < 0:
            return None
        offset = address - starts[index]
        segment = segments[index]
        return (segment, offset) if offset < segment.nbytes else None

    def forked(self) -> None:
        """In a forked process: its threads are gone, and with them who held the lock."""
        self._lock = threading.Lock()
        for segment in self._sorted[1]:
            segment.forked()

    def _replace(self, segments: list[Any]) -> None:
        segments.sort(key=lambda s: s.address)
        self._sorted = (tuple(s.address for s in segments), tuple(segments))


@define(eq=False)
class Process:
    """The state of this process. See [Note: state of the process]."""

    # Memory.

    #: Segments by address: written by `Segment`, read by `locate`. A child has them mapped.
    segments: LiveSegments = field(factory=LiveSegments, metadata=_INHERITED)
    #: ``{number: Arena}`` in the order of their making, and how many were made: written by `Arena`,
    #: read by `symmplan.segments`.
    arenas: WeakValueDictionary[int, Any] = field(factory=WeakValueDictionary)
    arenas_made: int = 0
    #: The segment cache: ``{number: Arena}`` of those without leases: written by `Arena`, read and
    #: emptied by `symmplan.memory.cache`.
    cache: dict[int, Any] = field(factory=dict)
    #: ``{process group: its windows in the order of their making, None for those taken back}``:
    #: written and read by `WindowsBackend`. A child may not end them.
    windows: WeakKeyDictionary[Any, list[Any]] = field(
        factory=WeakKeyDictionary, metadata=_INHERITED
    )
    #: What must not be freed while the process lives: written where that is found out, read by
    #: torch's symmetric memory, which adds nothing twice. A child has it, too.
    kept: list[Any] = field(factory=list, metadata=_INHERITED)
    #: What is due for objects that the program has dropped: written where they end, and done by
    #: `end_dropped`.
    dropped: deque[Any] = field(factory=deque)
    #: ``(weak reference to the storage, number of the arena, HeldSegment)`` of released segments
    #: that tensors keep: written by `Arena`, read by `symmplan.segments`.
    left: list[tuple[Any, int, Any]] = field(factory=list)
    #: How many ask torch's allocator for the history that it keeps for symmplan: written by
    #: `symmplan.device`, read there.
    histories: int = 0
    #: Whether ``memory="auto"`` is CUDA's memory on devices; else that is open, or the choice of
    #: torch's allocator: written and read by `resolve_backend`.
    cuda_memory: bool = False
    #: ``{cause: bytes of devices beyond segments}``: written by `counting`, read by `Stats`.
    beyond: dict[str, int] = field(factory=dict)
    #: ``{device: bytes}`` beyond segments and torch's allocator when something was first counted
    #: there: written by `counting`, read by `beyond_segments`.
    beyond_before: dict[Any, int] = field(factory=dict)

    # Process groups, by themselves and not by their names: another may have had that before.

    #: ``{group: the process that is its rank here}``, the first that asked: written and read where
    #: groups are resolved. A child must know that it is not the rank.
    ranks: WeakKeyDictionary[Any, int] = field(factory=WeakKeyDictionary, metadata=_INHERITED)
    #: ``{group: its ranks' ProcessIdentity}``: written and read by `Exchange`.
    members: WeakKeyDictionary[Any, tuple[Any, ...]] = field(factory=WeakKeyDictionary)
    #: ``{group: {kind of device: Topology}}``: written by `learn`, read by `survey` and `known`.
    topologies: WeakKeyDictionary[Any, dict[str, Any]] = field(factory=WeakKeyDictionary)
    #: ``{group: its group for copy engines, or None}``, and ``{ranks: that group}`` as it was made:
    #: written and read by `engines_of`.
    engines: WeakKeyDictionary[Any, Any] = field(factory=WeakKeyDictionary)
    engines_made: dict[tuple[int, ...], Any] = field(factory=dict)
    #: ``{(for what, ranks): how many communicators were made}``: written and read where some are.
    communicators_made: Counter[Any] = field(factory=Counter)
    #: ``{group: its Counterparts}`` of groups on several hosts: written and read by
    #: `connections_of`.
    counterparts: WeakKeyDictionary[Any, Any] = field(factory=WeakKeyDictionary)
    #: ``{group: its DeviceCounterparts}``, the same of devices: written and read by
    #: `device_counterparts`.
    device_counterparts: WeakKeyDictionary[Any, Any] = field(factory=WeakKeyDictionary)
    #: ``{group: {what a Trial is found under: Choice}}``: written and read by `measure`.
    measured: WeakKeyDictionary[Any, dict[Any, Any]] = field(factory=WeakKeyDictionary)
    #: ``{path: Table}`` of choices, each read once, so that all plans are made of the same: written
    #: and read by `read_table`.
    tables: dict[str, Any] = field(factory=dict)
    #: ``{Rendezvous: weak reference to the Progress that speaks there}``, one for good, as peers
    #: may read what another has said there before: written and read by `Progress`.
    speakers: WeakKeyDictionary[Any, Any] = field(factory=WeakKeyDictionary)

    # What runs.

    #: Each FSDP2 `Runtime`, whose ``tenant_ran`` is called: written by it, read when a tenant runs.
    watchers: WeakSet[Any] = field(factory=WeakSet)
    #: Each `SegmentOwner`: written by it, read by sessions that look for a segment that rests.
    resting: WeakSet[Any] = field(factory=WeakSet)
    #: ``{process group: how often such segments were made for it}``, and how many collectives of
    #: such owners have come: written by those.
    segments_made: WeakKeyDictionary[Any, int] = field(factory=WeakKeyDictionary)
    owners_ran: int = 0

    #: ``{torch.device: Device}`` that was asked for: written and read by `device_of`.
    devices: dict[Any, Any] = field(factory=dict)
    #: ``{type of a device: subclass of Device}`` in place of the usual one, which tests write by
    #: `replace_kind`: read by `kind_of`. A child has the same devices.
    device_kinds: dict[str, Any] = field(factory=dict, metadata=_INHERITED)
    #: ``{device: stream}`` of what may not run on the default one: written and read by
    #: `off_default_stream`.
    side_streams: dict[Any, Any] = field(factory=dict)
    #: Of each thread. The one thread of a child goes on where its parent's was.
    thread: ThreadState = field(factory=ThreadState, metadata=_INHERITED)
    #: The eager `Session` that was entered: written by it, read by `symmplan.placed`; and the lock
    #: under which one is entered.
    session: Any = None
    entering: Any = field(factory=threading.Lock)
    #: Its `SessionKeys`: written when it is entered and left, read by every exchange.
    session_keys: Any = None
    #: The simulated `World`: written by `symmplan.simulate`, read by all that asks peers or memory.
    #: A child is in the midst of it.
    world: Any = field(default=None, metadata=_INHERITED)
    #: What a step that is being checked has launched, and why not as planned; None outside a check:
    #: written by `check`, read at every launch.
    launched: Any = None
    #: The dispatch modes that report accesses, the innermost last: written by `Watching`, read
    #: where ops run past the modes. A child is in the midst of them.
    watching: list[Any] = field(factory=list, metadata=_INHERITED)
    #: Each `RaceDetector`, one for an arena; empty unless somebody debugs, which is all that is
    #: asked then: written by those, read at every access.
    detectors: list[Any] = field(factory=list)
    #: ``{(rank, number of ranks): vector clock}``: written and read by `RaceDetector`.
    clocks: dict[tuple[int, int], Any] = field(factory=dict)
    #: Ops that run over groups and are not declared, of which the log has told: written and read by
    #: `tell_undeclared`.
    undeclared: set[Any] = field(factory=set)
    #: How a rank of `symmplan.testing` speaks to who started it: written when it begins, read by
    #: `mark`.
    parent: Any = None

    def number_arena(self) -> int:
        """Number of the next arena. Collective: no."""
        self.arenas_made += 1
        return self.arenas_made - 1

    def reset(self) -> None:
        """Be as when the process began, but for `kept`; for tests that hold nothing of symmplan's.

        Collective: no.
        """
        kept = self.kept
        self._renew([f.name for f in fields(Process)])
        self.kept = kept

    def forked(self) -> None:
        """In a process that was forked from this one: begin anew, but for what it has inherited."""
        fresh = [f.name for f in fields(Process) if not f.metadata.get("inherited")]
        # Nothing of the parent's ends here: its end might be told to peers.
        self.kept.append([getattr(self, name) for name in fresh])
        self._renew(fresh)
        self.segments.forked()

    def _renew(self, names: list[str]) -> None:
        new = Process()
        for name in names:
            setattr(self, name, getattr(new, name))


#: The one of this process.
PROCESS = Process()
os.register_at_fork(after_in_child=PROCESS.forked)
