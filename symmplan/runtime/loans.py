"""Loans: bytes of a segment that are handed out, and the ledger of who used them last.

[Note: lent bytes]
    Who is handed a tensor does not say that it is done with it; it drops the last reference. Views
    of a segment share the segment's storage, whose end says nothing. So such bytes are lent as a
    storage of their own (through numpy's array interface, or CUDA's): its owner's ``__del__`` runs
    when the last tensor on it is gone, whoever held it, in whatever thread.

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

import sys
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from symmplan.memory.streams import Mark, current_stream, mark, wait_for
from symmplan.torch_private.dispatch import storage_use_count

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Ledger", "Lent", "Loan", "lend"]


class _Owner:
    """Owns a storage on somebody else's bytes; see [Note: lent bytes]."""

    def __init__(self, tensor: torch.Tensor, nbytes: int, on_drop: Callable[[], None]) -> None:
        self._tensor = tensor  # keeps the bytes
        self._on_drop = on_drop
        interface = {
            "data": (tensor.data_ptr(), False),
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }
        if tensor.is_cpu:
            self.__array_interface__ = interface
        else:
            self.__cuda_array_interface__ = interface

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then half of torch is gone, and nobody reuses the bytes
            self._on_drop()


def lend(tensor: torch.Tensor, on_drop: Callable[[], None] = lambda: None) -> torch.Tensor:
    """The same bytes as another storage, which reports its end.

    Args:
        tensor: Contiguous; kept alive as long as the result.
        on_drop: Called once, when nothing refers to the result's storage any more, in whatever
            thread that is. Must not raise.

    Returns:
        A tensor of the same type, shape and address.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        on_drop()
        return tensor
    owner: Any = _Owner(tensor, nbytes, on_drop)
    if tensor.is_cpu:
        import numpy as np

        flat = torch.from_numpy(np.asarray(owner))
    else:
        flat = torch.as_tensor(owner, device=tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape)


@define(eq=False)
class Lent:
    """Lent bytes of which one can tell whether anybody holds them.

    Attributes:
        tensor: The whole storage, as its maker shapes it.
        storage: Address of its storage's description, by which a tensor on it is known.
        uses: How many users the storage has when nobody else holds it.
    """

    tensor: torch.Tensor
    storage: int = field(init=False)
    uses: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.storage = self.tensor.untyped_storage()._cdata
        self.uses = storage_use_count(self.storage)

    @property
    def held(self) -> bool:
        """Whether anybody but the owner has a tensor on it."""
        return storage_use_count(self.storage) > self.uses


@define(eq=False)
class Loan:
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
    _marks: list[Mark] = field(factory=list)

    def ran(self, work: Any, *, done: bool) -> None:
        """The collective was issued on the current stream.

        Args:
            work: What an asynchronous collective returned, or None.
            done: Nothing touches the bytes after the collective.
        """
        if self.stream is None:
            return
        if work is None:
            work = current_stream().record_event()
        self.after(work)
        self._at_drop = not done

    def after(self, event: Any) -> None:
        """The bytes are used until ``event``, of the current stream or one that follows it.

        Args:
            event: Or the work of a collective.
        """
        self._marks.append(mark(event))

    def drop(self) -> None:
        """The buffer was dropped."""
        if self.stream is not None and self._at_drop:
            self._marks.append(mark(self.stream.record_event(), self.stream))
        self.live = False

    def wait(self) -> None:
        """Let the current stream wait for all that happened to the bytes."""
        wait_for(self._marks)


class Ledger:
    """Who used which bytes of a segment last."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, Loan]] = []

    def held(self, begin: int, end: int) -> bool:
        """Whether a live buffer has any of the bytes ``[begin, end)``."""
        return any(t.live and b < end and begin < e for b, e, t in self._pieces)

    def holders(self, begin: int, end: int) -> list[Loan]:
        """The live loans of any of the bytes ``[begin, end)``, each once."""
        found: dict[int, Loan] = {}
        for b, e, t in self._pieces:
            if t.live and b < end and begin < e:
                found[id(t)] = t
        return list(found.values())

    def live(self) -> list[tuple[int, int]]:
        """The ``[begin, end)`` of live buffers."""
        return [(b, e) for b, e, t in self._pieces if t.live]

    def take(self, begin: int, end: int, loan: Loan) -> None:
        """Give ``[begin, end)`` to ``loan``, after all who had any of these bytes."""
        pieces = []
        waited: list[Loan] = []
        for piece in self._pieces:
            b, e, old = piece
            if e <= begin or end <= b:
                pieces.append(piece)
                continue
            if not any(old is w for w in waited):
                waited.append(old)
                old.wait()
            # What the new loan does not cover still belongs to the old one.
            if b < begin:
                pieces.append((b, begin, old))
            if end < e:
                pieces.append((end, e, old))
        pieces.append((begin, end, loan))
        self._pieces = pieces
