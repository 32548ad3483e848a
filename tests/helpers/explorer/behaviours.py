"""How calls access memory: which rank touches whose bytes, and for whom it waits.

[Note: parts]
    A call consists of parts. They run at any time and in any order between the call's start and its
    end on their rank, except that a part may wait for others. So the model relies on no order in
    which some implementation happens to work.

[Note: doors]
    Four rules order accesses of different ranks. With a *handshake* every part waits until all
    ranks of the group have started. If a call *enters*, a part waits until those peers have started
    whose bytes it touches. If a call *releases*, a rank's end waits for the parts that touch its
    bytes. With a *release* the end waits for all parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field, frozen

from explorer.machine import Cell, Flag, Post, Read, Step, Thread, Wait, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from explorer.calls import TinyCall

__all__ = ["BEHAVIOURS", "Behaviour", "CallParts"]


@frozen
class Behaviour:
    """How calls of one kind behave: what adds their parts, their doors, known transports."""

    run: Callable[[CallParts], None]
    enters: bool = False
    releases: bool = False
    transports: tuple[str, ...] = ("wire",)


@define(eq=False)
class CallParts:
    """The parts of one call by the ranks of one group. See [Note: parts]."""

    call: TinyCall
    iteration: int
    ranks: tuple[int, ...]
    cells: Mapping[str, tuple[Hashable, ...]]
    behaviour: Behaviour
    threads: list[Thread] = field(init=False, factory=list)
    _ends: dict[int, list[Flag]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._ends = {rank: [] for rank in self.ranks}

    @property
    def in_place(self) -> bool:
        """Whether it writes what it reads."""
        return self.call.reads == self.call.writes

    @property
    def givers(self) -> tuple[int, ...]:
        """The ranks whose input a collective takes."""
        root = self.ranks[self.call.root % len(self.ranks)]
        return (root,) if self.call.kind == "broadcast" else self.ranks

    def start(self, rank: int) -> Flag:
        """Said when a rank starts the call."""
        return ("start", self.call.name, self.iteration, rank)

    def end(self, mains: list[list[Step]]) -> None:
        """Let ranks wait for the end of the call."""
        for rank, flags in self._ends.items():
            mains[rank].append(Wait(tuple(flags)))

    def own(self, buffers: Sequence[str], rank: int) -> list[Cell]:
        """The cells of some buffers on a rank."""
        return [(rank, cell) for name in buffers for cell in self.cells[name]]

    def part(
        self,
        rank: int,
        name: str,
        steps: Sequence[Step],
        *,
        after: Sequence[Flag] = (),
        early: bool = False,
        late: bool = False,
    ) -> Flag:
        """Add a part that a rank runs; what is said when it is done.

        It begins when ``after`` was said. An ``early`` one waits for no handshake; no release waits
        for a ``late`` one, which waits for the release.
        """
        touched = sorted({s.cell[0] for s in steps if isinstance(s, Read | Write)} - {rank})
        waits = [self.start(rank)]
        if self.call.handshake and not early:
            waits = [self.start(r) for r in self.ranks]
        elif self.behaviour.enters:
            waits += [self.start(r) for r in touched]
        if late:
            waits += self._ends[rank]
        done = ("done", self.call.name, self.iteration, rank, name)
        body = (Wait(tuple(waits)), Wait(tuple(after), takes=True), *steps, Post(done))
        self.threads.append(Thread(rank, self.call.name, self.iteration, name, body))
        owed = {rank}
        if self.call.release and not late:
            owed.update(self.ranks)
        elif self.behaviour.releases:
            owed.update(touched)
        for r in owed:
            self._ends[r].append(done)
        return done

    def label(self, *more: Hashable) -> Hashable:
        """What results of the call are called."""
        return (self.call.label or (self.call.name, self.iteration), *more)

    def write(self, cells: Sequence[Cell], *, half: bool = False) -> list[Step]:
        """Write cells with what the part knows, each with a value of its own."""
        kind = "half done" if half else "made"
        named = self.call.label is not None and not half
        ranks = [None if named else rank for rank, _ in cells]
        return [
            Write(cell, self.label(kind, rank, i))
            for i, (cell, rank) in enumerate(zip(cells, ranks, strict=True))
        ]

    def mine(self, ranks: Sequence[int]) -> dict[int, Flag]:
        """Add for each of some ranks a part that reads its own inputs, at once."""
        return {
            rank: self.part(rank, "own input", self.read(rank), early=self.call.early)
            for rank in ranks
        }

    def read(self, rank: int) -> list[Step]:
        """Read the inputs of a rank."""
        return [Read(cell) for cell in self.own(self.call.reads, rank)]


def _local(parts: CallParts) -> None:
    """An ordinary op: what torch runs on a stream or a CPU thread."""
    for rank in parts.ranks:
        written = parts.write(parts.own(parts.call.writes, rank))
        parts.part(rank, "run", [*parts.read(rank), *written])


def _copy(parts: CallParts) -> None:
    """``aten::copy_``: each cell as it is. What symmplan adds to programs is this."""
    for rank in parts.ranks:
        targets = parts.own(parts.call.writes, rank)
        copied = [Write(cell, of=(i,)) for i, cell in enumerate(targets)]
        parts.part(rank, "run", [*parts.read(rank), *copied])


def _read(parts: CallParts) -> None:
    """Reads peers' bytes where they lie and writes a result of this rank's own."""
    for rank, flags in _read_peers(parts).items():
        parts.part(rank, "result", parts.write(parts.own(parts.call.writes, rank)), after=flags)


def _read_peers(parts: CallParts) -> dict[int, list[Flag]]:
    return {
        rank: [parts.part(rank, f"read of {peer}", parts.read(peer)) for peer in parts.ranks]
        for rank in parts.ranks
    }


def _read_all(parts: CallParts) -> dict[int, Flag]:
    read = _read_peers(parts)
    return {rank: parts.part(rank, "joined", [], after=flags) for rank, flags in read.items()}


def _write_next(parts: CallParts, sources: Mapping[int, Flag]) -> None:
    """All of a result into the bytes of the next rank."""
    for rank, peer in zip(parts.ranks, (*parts.ranks[1:], parts.ranks[0]), strict=True):
        steps = parts.write(parts.own(parts.call.writes, peer))
        parts.part(rank, f"write to {peer}", steps, after=[sources[rank]])


def _write_peers(parts: CallParts, sources: Mapping[int, Flag]) -> None:
    """A result into peers' bytes, as README's how-to for declaring an op does.

    A result with a cell for each rank gets one from each; else its first cell comes from the rank
    before and the others from the rank itself.
    """
    size = len(parts.ranks)
    for i, rank in enumerate(parts.ranks):
        for shift in range(size):
            peer = parts.ranks[(i + shift) % size]
            cells = parts.own(parts.call.writes, peer)
            if len(cells) >= size:
                chosen = [cells[i], *(cells[size:] if not shift else ())]
            else:
                chosen = [*(cells[:1] if shift == 1 % size else ())]
                chosen += cells[1:] if not shift else []
            if chosen:
                steps = parts.write(chosen)
                parts.part(rank, f"write to {peer}", steps, after=[sources[rank]])


def _slots(cells: list[Cell], count: int) -> list[list[Cell]]:
    """A part of the cells for each rank of a group."""
    size = len(cells) // count
    assert size * count == len(cells), "a buffer has as many cells for each rank"
    return [cells[i * size : (i + 1) * size] for i in range(count)]


#: A cell that a collective writes, and what it is made of.
_Sum = tuple[Cell, list[Cell]]


def _each(targets: Iterable[Cell], sources: Iterable[Cell]) -> Iterator[_Sum]:
    return ((to, [cell]) for to, cell in zip(targets, sources, strict=True))


def _all_gather(parts: CallParts) -> Iterator[_Sum]:
    """``all_gather_into_tensor``: everybody gets everybody's input."""
    for rank in parts.ranks:
        slots = _slots(parts.own(parts.call.writes, rank), len(parts.ranks))
        for peer, slot in zip(parts.ranks, slots, strict=True):
            yield from _each(slot, parts.own(parts.call.reads, peer))


def _all_to_all(parts: CallParts) -> Iterator[_Sum]:
    """``all_to_all_single``; between ranks that have nothing for each other, nothing moves."""
    size = len(parts.ranks)
    for i, rank in enumerate(parts.ranks):
        slots = _slots(parts.own(parts.call.writes, rank), size)
        for j, (peer, slot) in enumerate(zip(parts.ranks, slots, strict=True)):
            # Where a peer sends nothing, the rank's own part is as much larger.
            giver = rank if (j, i) in parts.call.empty else peer
            yield from _each(slot, _slots(parts.own(parts.call.reads, giver), size)[i])


def _broadcast(parts: CallParts) -> Iterator[_Sum]:
    """``broadcast_``: the root's bytes into everybody's."""
    (root,) = parts.givers
    for rank in parts.ranks:
        if rank != root or not parts.in_place:
            targets = parts.own(parts.call.writes, rank)
            yield from _each(targets, parts.own(parts.call.reads, root))


def _all_reduce(parts: CallParts) -> Iterator[_Sum]:
    """``all_reduce``, in place or not: each cell is the sum of all ranks'."""
    for rank in parts.ranks:
        for i, cell in enumerate(parts.own(parts.call.writes, rank)):
            yield cell, [parts.own(parts.call.reads, r)[i] for r in parts.ranks]


def _reduce_scatter(parts: CallParts) -> Iterator[_Sum]:
    """``reduce_scatter_tensor``: each rank gets its part of the sum."""
    size = len(parts.ranks)
    for i, rank in enumerate(parts.ranks):
        slots = [_slots(parts.own(parts.call.reads, r), size)[i] for r in parts.ranks]
        for k, to in enumerate(parts.own(parts.call.writes, rank)):
            yield to, [slot[k] for slot in slots]


def _summed(parts: CallParts, sums: Iterable[_Sum], known: Sequence[Cell]) -> list[Step]:
    """Write what each cell is made of, by a part that knows what was in some cells, in order.

    What is made of one value is that value.
    """
    index = {cell: i for i, cell in reversed([*enumerate(known)])}
    return [
        Write(to, parts.label("sum") if len(cells) > 1 else None, tuple(index[c] for c in cells))
        for to, cells in sums
    ]


def _by_wire(parts: CallParts, sums: list[_Sum]) -> None:
    """Bytes go through sockets or scratch buffers, as Gloo's and NCCL's ring and tree kernels do.

    A rank reads its own input at once and writes its own result: half done first, once its own
    input was read, and whole when it has what it needs of its peers. Who only sends is through when
    it has sent.
    """
    mine = parts.mine(parts.givers)
    for rank in parts.ranks:
        targets = [(to, cells) for to, cells in sums if to[0] == rank]
        if not targets:
            continue
        own = [mine[rank]] if rank in mine else []
        peers = sorted({r for _, cells in targets for r, _ in cells} - {rank})
        known = [*([rank] if own else []), *peers]
        cells = [to for to, _ in targets]
        steps = [
            *parts.write(cells, half=True),
            Wait(tuple(mine[r] for r in peers), takes=True),
            *_summed(parts, targets, [c for r in known for c in parts.own(parts.call.reads, r)]),
        ]
        parts.part(rank, "result", steps, after=own)


def _by_push(parts: CallParts, sums: list[_Sum]) -> None:
    """Copy engines and symmetric kernels that write results where they belong, into peers, too.

    A sum is made by one rank for all: the cells of one place are read everywhere and written
    everywhere by one rank, so this works in place, too (a two-shot all-reduce).
    """
    if all(len(cells) == 1 for _, cells in sums):
        mine = parts.mine(parts.givers)
        for place, (to, cells) in enumerate(sums):
            rank, _ = cells[0]
            steps = _summed(parts, [(to, cells)], parts.own(parts.call.reads, rank))
            parts.part(rank, f"push {place}", steps, after=[mine[rank]])
        return
    together: dict[tuple[Cell, ...], list[Cell]] = {}
    for to, cells in sums:
        together.setdefault(tuple(cells), []).append(to)
    for i, (places, targets) in enumerate(together.items()):
        rank = parts.ranks[i % len(parts.ranks)]
        read: list[Step] = [Read(cell) for cell in places]
        written = _summed(parts, [(to, [*places]) for to in targets], places)
        parts.part(rank, f"sum {i}", [*read, *written])


def _by_pull(parts: CallParts, sums: list[_Sum]) -> None:
    """Copy engines and symmetric kernels that read inputs where they lie."""
    for place, (to, cells) in enumerate(sums):
        steps: list[Step] = [Read(cell) for cell in cells]
        parts.part(to[0], f"pull {place}", [*steps, *_summed(parts, [(to, cells)], cells)])


def _by_copy(parts: CallParts, sums: list[_Sum]) -> None:
    """Read inputs where they lie into a tensor of one's own, then copy that where it belongs.

    In place, nobody may copy before all have read.
    """
    pulled: dict[int, list[tuple[Cell, list[Cell], Flag]]] = {}
    for place, (to, cells) in enumerate(sums):
        read = parts.part(to[0], f"pull {place}", [Read(cell) for cell in cells])
        pulled.setdefault(to[0], []).append((to, cells, read))
    late = parts.call.late
    every = [flag for reads in pulled.values() for _, _, flag in reads]
    every = every if parts.in_place and not late else []
    for rank, reads in pulled.items():
        for i, (to, cells, flag) in enumerate(reads):
            steps = _summed(parts, [(to, cells)], cells)
            parts.part(rank, f"copy {i}", steps, after=[flag, *every], late=late)


_TRANSPORTS = {"wire": _by_wire, "push": _by_push, "pull": _by_pull, "copy": _by_copy}


def _collective(sums: Callable[[CallParts], Iterator[_Sum]], *transports: str) -> Behaviour:
    def run(parts: CallParts) -> None:
        _TRANSPORTS[parts.call.transport](parts, list(sums(parts)))

    return Behaviour(run, enters=True, releases=True, transports=transports)


#: What calls of each kind do. The doors of one-sided ops are the calls' own, declared where the op
#: is; those of process groups are what c10d's works promise: a peer's bytes are touched once it has
#: entered the collective, and a rank's work is done when its bytes are free for it to change
#: (torch's ``ProcessGroup.hpp``, NCCL's user guide on symmetric windows). symmplan's collectives on
#: shared memory are the same with handshake and release, which ``symmplan.memory.meeting.calls``
#: waits for.
BEHAVIOURS: Mapping[str, Behaviour] = {
    "local": Behaviour(_local),
    "copy": Behaviour(_copy),
    "push": Behaviour(lambda parts: _write_peers(parts, parts.mine(parts.ranks))),
    "push_next": Behaviour(lambda parts: _write_next(parts, parts.mine(parts.ranks))),
    "read": Behaviour(_read),
    "read_write": Behaviour(lambda parts: _write_peers(parts, _read_all(parts))),
    "read_write_next": Behaviour(lambda parts: _write_next(parts, _read_all(parts))),
    "all_gather": _collective(_all_gather, "wire", "push", "pull"),
    "all_to_all": _collective(_all_to_all, "wire", "push", "pull"),
    "broadcast": _collective(_broadcast, "wire", "push", "pull"),
    "all_reduce": _collective(_all_reduce, "wire", "push", "pull", "copy"),
    "reduce_scatter": _collective(_reduce_scatter, "wire", "pull", "copy"),
}
