"""Leases: who holds which bytes of a segment until when, and who used them last.

[Note: one ledger]
    Each segment has one list of its leases, so that all its users see the same leases. A run of a
    compiled graph leases bytes while it runs, a saved tensor until its backward has run, a pinned
    input permanently, FSDP2's parameters from each gather to the next reshard, and a tensor of an
    eager session as long as the program holds it.

    If a new user needs leased bytes, the holder must *step aside*: a saved tensor gets a copy, and
    FSDP2's parameters get ordinary memory. If the holder cannot move, its bytes are *set aside*:
    they are copied elsewhere while the new user runs, and then back. If the program could see this
    (an eager session's tensors are where the session's calls write), it is an error.

    All of this concerns one rank: it delays, copies or raises, and changes no collective, no offset
    and no order between ranks. Which bytes a user may lease at all is decided by a plan on which
    all ranks agreed.

[Note: who may reuse the bytes]
    On the CPU all accesses have happened when a lease ends. On a device the work is only queued. So
    an event is recorded at the moment after which nothing touches the bytes, and the next user of
    any of these bytes waits for the event on the stream on which it fills them:

    - after a collective, on the stream that ran it (or the collective's own work object),
    - for an all-gather's output, when it is dropped, on the stream on which it was asked for.
      FSDP2 drops it after it has made that stream wait for the copy-out; the caching allocator
      relies on the same, and waiting on the compute stream's end instead would cost overlap.

    A reduce-scatter's input is not touched after its collective.

    In a CUDA graph only the events of the same capture count, see [Note: captured steps] in
    `symmplan.memory.streams`.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen

from symmplan.device import device_of
from symmplan.memory.streams import Mark, mark, synchronize, wait_for
from symmplan.torch_private.dispatch import storage_use_count
from symmplan.torch_private.storages import Addresses

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping


@define(eq=False, kw_only=True)
class Lease:
    """Who holds some bytes, and what must have happened before somebody else may use them.

    Attributes:
        stream: The stream on which they are filled, None on the CPU.
        live: Whether it was not dropped yet.
        owner: The object that can be asked to leave, held weakly; None if there is none.
        name: What it is of, for people.
    """

    stream: Any = None
    live: bool = True
    owner: Any = None
    name: str = ""
    _at_drop: bool = field(init=False, default=True)
    _marks: list[Mark] = field(init=False, factory=list)

    @property
    def held(self) -> bool:
        """Whether it is not over."""
        return self.live

    def step_aside(self) -> bool:
        """Let somebody else have the bytes, on this rank alone; whether that can be."""
        return self.owner is not None and bool(self.owner.step_aside())

    def issued(self, work: Any, *, done: bool) -> None:
        """The collective was issued on the current stream.

        Args:
            work: What an asynchronous collective returned, or None.
            done: Nothing touches the bytes after the collective.
        """
        if self.stream is None:
            return
        if work is None:
            work = device_of(self.stream.device).current_stream().record_event()
        self.after(work)
        self._at_drop = not done

    def after(self, event: Any) -> None:
        """The bytes are used until ``event``, of the current stream or one that follows it.

        Args:
            event: Or the work of a collective.
        """
        self._marks.append(mark(event, device_of(self.stream.device)))

    def drop(self) -> None:
        """It is over."""
        if self.stream is not None and self._at_drop:
            device = device_of(self.stream.device)
            self._marks.append(mark(self.stream.record_event(), device, self.stream))
        self.live = False

    def wait(self) -> None:
        """Let the current stream wait for all that happened to the bytes."""
        if self._marks:
            wait_for(self._marks)


@define(eq=False)
class StorageLease(Lease):
    """Bytes that are leased as a storage, as long as anybody has a tensor on it.

    Attributes:
        tensor: The whole storage, as its maker shapes it.
        kept: What lives as long as the storage: the bytes.
        storage: Address of its storage's description, by which a tensor on it is known.
        uses: How many users the storage has when only the lease's own objects hold it.
    """

    tensor: torch.Tensor
    kept: list[Any] = field(factory=list, kw_only=True)
    storage: int = field(init=False)
    uses: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.storage = self.tensor.untyped_storage()._cdata
        self.own()

    def own(self) -> None:
        """Who uses it now is its owner."""
        self.uses = storage_use_count(self.storage)

    @property
    def held(self) -> bool:
        """Whether anybody but the owner has a tensor on it."""
        return storage_use_count(self.storage) > self.uses

    def copy_aside(self) -> None:
        """Let all tensors on the storage be in a copy, for good, on this rank alone."""
        with torch.inference_mode(mode=False), torch.no_grad():
            bytes_ = torch.empty(0, dtype=torch.uint8, device=self.tensor.device)
            copy = bytes_.set_(self.tensor.untyped_storage()).clone()
        Addresses([self.tensor], [0], "").give(copy.data_ptr())
        self.kept[:] = [copy]


@frozen
class Ledger:
    """Who holds which bytes of a segment, and who used them last. See [Note: one ledger].

    Args:
        pieces: ``(begin, end, lease)`` in order, no two with a byte in common, as
            `symmplan.memory.segment.Segment.leases` keeps them: its ledgers are equal.
    """

    _pieces: list[tuple[int, int, Lease]] = field(eq=id)

    def holders(self, begin: int, end: int) -> list[Lease]:
        """The leases of any of the bytes ``[begin, end)`` that are held, each once.

        It costs least where one lease had these bytes before, and no others; so does `take`.
        """
        at = self._exactly(begin, end)
        if at is not None:
            lease = self._pieces[at][2]
            return [lease] if lease.held else []
        first, last = self._within(begin, end)
        found = [piece[2] for piece in self._pieces[first:last] if piece[2].held]
        return found if len(found) < 2 else list(dict.fromkeys(found))

    def give_room(
        self, begin: int, end: int, but: Collection[Lease] = ()
    ) -> tuple[list[Lease], list[Lease]]:
        """Let whoever can leave ``[begin, end)``, on this rank; returns who left, and who stays.

        Those of ``but`` may stay, and are not asked.
        """
        left: list[Lease] = []
        stay: list[Lease] = []
        for lease in self.holders(begin, end):
            if lease not in but:
                (left if lease.step_aside() else stay).append(lease)
        return left, stay

    def take(self, begin: int, end: int, lease: Lease) -> None:
        """Give ``[begin, end)`` to ``lease``, after all who had any of these bytes."""
        at = self._exactly(begin, end)
        if at is not None:
            self._pieces[at][2].wait()
            self._pieces[at] = (begin, end, lease)
            return
        first, last = self._within(begin, end)
        before = self._pieces[first:last]
        for old in dict.fromkeys(piece[2] for piece in before):
            old.wait()
        # What the new lease does not cover still belongs to the old ones.
        left = [(b, begin, t) for b, _, t in before[:1] if b < begin]
        right = [(end, e, t) for _, e, t in before[-1:] if end < e]
        self._pieces[first:last] = [*left, (begin, end, lease), *right]

    def clear(self, begin: int, end: int) -> list[tuple[int, int, Lease]]:
        """Let nobody have ``[begin, end)``, behind all who had; returns what is held all the same.

        That is as `take` would give it back: from where to where, and to whom.
        """
        first, last = self._within(begin, end)
        held = [(max(b, begin), min(e, end), x) for b, e, x in self._pieces[first:last] if x.held]
        self.take(begin, end, Lease(live=False))
        return held

    def claim(self, begin: int, end: int, lease: Lease | None) -> list[Lease]:
        """Take the bytes, unless somebody holds any: then who that is.

        It costs least where one lease had these bytes before, and no others.

        Args:
            begin: The first byte.
            end: Behind the last one.
            lease: None to see only who holds them.
        """
        at = None if lease is None else self._exactly(begin, end)
        if lease is not None and at is not None:
            mine = self._pieces[at][2]
            if mine.held:
                return [mine]
            if mine is not lease:
                mine.wait()
                self._pieces[at] = (begin, end, lease)
            return []
        held = self.holders(begin, end)
        if lease is not None and not held:
            self.take(begin, end, lease)
        return held

    def _exactly(self, begin: int, end: int) -> int | None:
        """Where the piece is that has these bytes and no others; None if there is none."""
        pieces: list[Any] = self._pieces
        at = bisect_left(pieces, (begin,))
        if at < len(pieces) and pieces[at][0] == begin and pieces[at][1] == end:
            return at
        return None

    def _within(self, begin: int, end: int) -> tuple[int, int]:
        """The pieces with any of the bytes ``[begin, end)``: from which, up to which."""
        pieces: list[Any] = self._pieces  # each is behind the tuple of its begin alone
        first = bisect_left(pieces, (begin,))
        if first and pieces[first - 1][1] > begin:
            first -= 1
        return first, bisect_left(pieces, (end,), first)


def in_use(segments: Iterable[Any]) -> bool:
    """Whether anybody holds any bytes of these segments, or of these parts of segments."""
    return any(Ledger(s.leases).holders(s.begin, s.begin + s.nbytes) for s in segments)


@define(eq=False)
class Run:
    """A lease for the time of a run, in bytes where others may be. See [Note: one ledger].

    Attributes:
        lease: What the run has of them.
        left: Who left them for it.
    """

    lease: Lease
    left: list[Lease] = field(init=False, factory=list)
    _aside: ExitStack = field(init=False, factory=ExitStack)

    def hold(
        self,
        segments: Mapping[str, Any],
        spans: Iterable[tuple[str, int, int]],
        args: list[Any],
        but: Collection[Lease] = (),
    ) -> int:
        """Take the bytes; who cannot leave them has them again when it is `over`.

        Args:
            segments: ``{name: segment}``.
            spans: Names of segments, and which of their bytes.
            args: Of the run; those that lie in bytes of others are replaced.
            but: Leases that do not mind.

        Returns:
            In how many spans somebody stays.
        """
        stays = 0
        for name, begin, end in spans:
            segment = segments[name]
            ledger, at = Ledger(segment.leases), (segment.begin + begin, segment.begin + end)
            left, stay = ledger.give_room(*at, but)
            self.left += left
            if stay:
                stays += 1
                there = segment.tensor[begin:end]
                self._aside.enter_context(set_aside(there))
                for i in _overlapping(args, there):
                    args[i] = args[i].clone()
            else:
                ledger.take(*at, self.lease)
        return stays

    def over(self) -> None:
        """The run has ended, on the current stream."""
        self.lease.issued(None, done=True)
        self.lease.drop()
        self._aside.close()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is to be put back: in the host's memory where the tensor's device is full."""
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:
        return torch.empty_like(tensor, device="cpu").copy_(tensor)


@contextmanager
def set_aside(bytes_: torch.Tensor) -> Iterator[None]:
    """Whoever has these bytes does not see what is done to them inside."""
    synchronize(bytes_.device)
    kept = copied(bytes_)
    synchronize(bytes_.device)
    try:
        yield
    finally:
        bytes_.copy_(kept)
        synchronize(bytes_.device)


def _overlapping(args: Iterable[Any], there: torch.Tensor) -> list[int]:
    """Which of some inputs are tensors with any of these bytes."""
    begin, end, found = there.data_ptr(), there.data_ptr() + there.numel(), []
    for i, x in enumerate(args):
        if isinstance(x, torch.Tensor) and x.numel():
            storage = x.untyped_storage()
            first = storage.data_ptr()
            if first < end and begin < first + storage.nbytes():
                found.append(i)
    return found
