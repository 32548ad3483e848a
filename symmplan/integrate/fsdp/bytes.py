"""Who has which bytes of a segment that are lent to FSDP2. See [Note: lent bytes].

[Note: who may reuse the bytes]
    On the CPU everything has happened by the time the buffer is dropped. On a device the work is
    only queued, so at the moments after which nothing touches the bytes an event is recorded, and
    the next user of any of these bytes waits for it on the stream on which it fills them:

    - after a collective, on the stream that ran it (or the collective's own work object),
    - for an all-gather's output, when it is dropped, on the stream on which it was asked for.
      FSDP2 drops it after it has made that stream wait for the copy-out; the caching allocator
      relies on the same, and waiting on the compute stream's end instead would cost overlap.

    A reduce-scatter's input is not touched after its collective.

    In a CUDA graph only the events of the same capture count, see [Note: captured steps] in
    `symmplan.memory.streams`.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import define, field

from symmplan.memory.streams import capture_of

__all__ = ["Bytes", "Tenant"]


@define(eq=False)
class Tenant:
    """Who has some bytes, and what must have happened before somebody else may.

    Attributes:
        stream: The stream on which they are filled, None on the CPU.
        live: Whether FSDP2 still holds the buffer.
        owner: Whose parameters they are, weakly; None for a buffer.
    """

    stream: Any = None
    live: bool = True
    owner: Any = None
    _at_drop: bool = True
    _marks: list[tuple[int, Any]] = field(factory=list)

    def ran(self, work: Any, *, done: bool) -> None:
        """The collective was issued on the current stream.

        Args:
            work: What an asynchronous collective returned, or None.
            done: Nothing touches the bytes after the collective.
        """
        if self.stream is None:
            return
        if work is None:
            work = torch.cuda.Event()
            work.record()
        self.after(work)
        self._at_drop = not done

    def after(self, event: Any) -> None:
        """The bytes are used until ``event``, of the current stream or one that follows it."""
        self._marks.append((capture_of(), event.wait))

    def drop(self) -> None:
        """The buffer was dropped."""
        if self.stream is not None and self._at_drop:
            event = torch.cuda.Event()
            event.record(self.stream)
            self._marks.append((capture_of(self.stream), event.wait))
        self.live = False

    def wait(self) -> None:
        """Let the current stream wait for all that happened to the bytes."""
        capture = capture_of() if self._marks else 0
        for number, wait in self._marks:
            if number == capture:
                wait()


class Bytes:
    """Who used which bytes of a segment last."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, Tenant]] = []

    def held(self, begin: int, end: int) -> bool:
        """Whether a live buffer has any of the bytes ``[begin, end)``."""
        return any(t.live and b < end and begin < e for b, e, t in self._pieces)

    def holders(self, begin: int, end: int) -> list[Tenant]:
        """The live tenants of any of the bytes ``[begin, end)``, each once."""
        found: dict[int, Tenant] = {}
        for b, e, t in self._pieces:
            if t.live and b < end and begin < e:
                found[id(t)] = t
        return list(found.values())

    def live(self) -> list[tuple[int, int]]:
        """The ``[begin, end)`` of live buffers."""
        return [(b, e) for b, e, t in self._pieces if t.live]

    def take(self, begin: int, end: int, tenant: Tenant) -> None:
        """Give ``[begin, end)`` to ``tenant``, after all who had any of these bytes."""
        pieces = []
        waited: list[Tenant] = []
        for piece in self._pieces:
            b, e, old = piece
            if e <= begin or end <= b:
                pieces.append(piece)
                continue
            if not any(old is w for w in waited):
                waited.append(old)
                old.wait()
            # What the new tenant does not cover still belongs to the old one.
            if b < begin:
                pieces.append((b, begin, old))
            if end < e:
                pieces.append((end, e, old))
        pieces.append((begin, end, tenant))
        self._pieces = pieces
