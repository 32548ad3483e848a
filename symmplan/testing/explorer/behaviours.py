"""What calls do to memory: which rank touches whose bytes, and for whom it waits before and after.

[Note: parts]
    A call is cut into parts that run at any time, in any order, between its start and its end on
    the rank that runs them, but for what a part itself waits for. So nothing is promised by an
    order in which some implementation happens to do things.

[Note: doors]
    Few habits keep accesses of different ranks apart. With a *handshake* every part waits until all
    ranks of the group have started. A behaviour that *enters* lets a part wait until those peers
    have started whose bytes it touches. One that *releases* lets a rank's end wait for the parts
    that touch its bytes; with a *release* it waits for all parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field, frozen

from symmplan.testing.explorer.machine import Cell, Flag, Post, Read, Step, Thread, Wait, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from symmplan.testing.explorer.program import TinyCall

__all__ = ["BEHAVIOURS", "Behaviour", "Parts"]


@frozen
class Behaviour:
    """How calls of one kind behave.

    Attributes:
        run: Adds the parts of a call.
        enters: See [Note: doors].
        releases: See [Note: doors].
        transports: Those it knows.
    """

    run: Callable[[Parts], None]
    enters: bool = False
    releases: bool = False
    transports: tuple[str, ...] = ("wire",)


@define(eq=False)
class Parts:
    """The parts of one call by the ranks of one group. See [Note: parts].

    Attributes:
        call: The call.
        iteration: Which run of the program.
        ranks: The ranks of the group.
        cells: ``{buffer: its cells}``
        behaviour: The habits.
        threads: The parts so far.
    """

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
        """Add a part.

        Args:
            rank: Who runs it.
            name: What it is, for people.
            steps: What it does.
            after: What it waits for before.
            early: It waits for no handshake.
            late: No release waits for it, but it waits for the release.

        Returns:
            What is said when it is done.
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

    def mine(self, rank: int) -> Flag:
        """Add a part that reads the rank's own inputs, at once."""
        steps = [Read(cell) for cell in self.own(self.call.reads, rank)]
        return self.part(rank, "own input", steps, early=self.call.early)


def _local(parts: Parts) -> None:
    """An ordinary op: what torch runs on a stream or a CPU thread."""
    for rank in parts.ranks:
        reads = [Read(cell) for cell in parts.own(parts.call.reads, rank)]
        parts.part(rank, "run", [*reads, *parts.write(parts.own(parts.call.writes, rank))])


def _copy(parts: Parts) -> None:
    """``aten::copy_``: each cell as it is. What symmplan adds to programs is this."""
    for rank in parts.ranks:
        sources = parts.own(parts.call.reads, rank)
        steps: list[Step] = [Read(cell) for cell in sources]
        targets = parts.own(parts.call.writes, rank)
        steps += [Write(cell, of=(i,)) for i, cell in enumerate(targets)]
        parts.part(rank, "run", steps)


def _push(parts: Parts) -> None:
    """Writes a result into peers' bytes, as README's how-to for declaring an op does.

    A result with a cell for each rank gets one from each; else its first cell comes from the rank
    before and the others from the rank itself.
    """
    mine = {rank: parts.mine(rank) for rank in parts.ranks}
    _write_peers(parts, mine)


def _push_next(parts: Parts) -> None:
    """Writes all of a result into the bytes of the next rank."""
    mine = {rank: parts.mine(rank) for rank in parts.ranks}
    _write_next(parts, mine)


def _write_next(parts: Parts, sources: Mapping[int, Flag]) -> None:
    for rank, peer in zip(parts.ranks, (*parts.ranks[1:], parts.ranks[0]), strict=True):
        steps = parts.write(parts.own(parts.call.writes, peer))
        parts.part(rank, f"write to {peer}", steps, after=[sources[rank]])


def _write_peers(parts: Parts, sources: Mapping[int, Flag]) -> None:
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


def _read(parts: Parts) -> None:
    """Reads peers' bytes where they lie and writes a result of this rank's own."""
    for rank, flags in _read_peers(parts).items():
        parts.part(rank, "result", parts.write(parts.own(parts.call.writes, rank)), after=flags)


def _read_peers(parts: Parts) -> dict[int, list[Flag]]:
    return {
        rank: [
            parts.part(
                rank, f"read of {peer}", [Read(c) for c in parts.own(parts.call.reads, peer)]
            )
            for peer in parts.ranks
        ]
        for rank in parts.ranks
    }


def _read_write(parts: Parts) -> None:
    """Reads peers' bytes, then writes a result into peers' bytes."""
    _write_peers(parts, _read_all(parts))


def _read_write_next(parts: Parts) -> None:
    """Reads peers' bytes, then writes all of a result into the bytes of the next rank."""
    _write_next(parts, _read_all(parts))


def _read_all(parts: Parts) -> dict[int, Flag]:
    read = _read_peers(parts)
    return {rank: parts.part(rank, "joined", [], after=flags) for rank, flags in read.items()}


def _slots(cells: list[Cell], count: int) -> list[list[Cell]]:
    """A part of the cells for each rank of a group."""
    size = len(cells) // count
    assert size * count == len(cells), "a buffer has as many cells for each rank"
    return [cells[i * size : (i + 1) * size] for i in range(count)]


#: For each cell that a collective writes: what it is made of.
_Sums = list[tuple[Cell, list[Cell]]]


def _all_gather(parts: Parts) -> None:
    """``all_gather_into_tensor``: everybody gets everybody's input."""
    found: _Sums = []
    for rank in parts.ranks:
        slots = _slots(parts.own(parts.call.writes, rank), len(parts.ranks))
        for peer, slot in zip(parts.ranks, slots, strict=True):
            sources = parts.own(parts.call.reads, peer)
            found += [(to, [cell]) for to, cell in zip(slot, sources, strict=True)]
    _move(parts, found)


def _all_to_all(parts: Parts) -> None:
    """``all_to_all_single``; between ranks that have nothing for each other, nothing moves."""
    found: _Sums = []
    size = len(parts.ranks)
    for i, rank in enumerate(parts.ranks):
        slots = _slots(parts.own(parts.call.writes, rank), size)
        for j, (peer, slot) in enumerate(zip(parts.ranks, slots, strict=True)):
            # Where a peer sends nothing, the rank's own part is as much larger.
            giver, given = (rank, i) if (j, i) in parts.call.empty else (peer, i)
            sources = _slots(parts.own(parts.call.reads, giver), size)[given]
            found += [(to, [cell]) for to, cell in zip(slot, sources, strict=True)]
    _move(parts, found)


def _broadcast(parts: Parts) -> None:
    """``broadcast_``: the root's bytes into everybody's."""
    root = parts.ranks[parts.call.root % len(parts.ranks)]
    sources = parts.own(parts.call.reads, root)
    found: _Sums = []
    for rank in parts.ranks:
        if rank == root and parts.in_place:
            continue
        targets = parts.own(parts.call.writes, rank)
        found += [(to, [cell]) for to, cell in zip(targets, sources, strict=True)]
    _move(parts, found, givers=(root,))


def _all_reduce(parts: Parts) -> None:
    """``all_reduce``, in place or not: each cell is the sum of all ranks'."""
    found: _Sums = []
    for rank in parts.ranks:
        for i, cell in enumerate(parts.own(parts.call.writes, rank)):
            found.append((cell, [parts.own(parts.call.reads, r)[i] for r in parts.ranks]))
    _move(parts, found)


def _reduce_scatter(parts: Parts) -> None:
    """``reduce_scatter_tensor``: each rank gets its part of the sum."""
    found: _Sums = []
    size = len(parts.ranks)
    for i, rank in enumerate(parts.ranks):
        slots = [_slots(parts.own(parts.call.reads, r), size)[i] for r in parts.ranks]
        targets = parts.own(parts.call.writes, rank)
        found += [(to, [s[k] for s in slots]) for k, to in enumerate(targets)]
    _move(parts, found)


def _move(parts: Parts, sums: _Sums, givers: Sequence[int] | None = None) -> None:
    transport = parts.call.transport
    move = {"wire": _by_wire, "push": _by_push, "pull": _by_pull, "copy": _by_copy}[transport]
    move(parts, sums, parts.ranks if givers is None else givers)


def _summed(parts: Parts, sums: _Sums, known: Sequence[Cell]) -> list[Step]:
    """Write what each cell is made of, by a part that knows what was in some cells, in order.

    What is made of one value is that value.
    """
    index = {cell: i for i, cell in reversed([*enumerate(known)])}
    return [
        Write(to, parts.label("sum") if len(cells) > 1 else None, tuple(index[c] for c in cells))
        for to, cells in sums
    ]


def _by_wire(parts: Parts, sums: _Sums, givers: Sequence[int]) -> None:
    """Bytes go through sockets or scratch buffers, as Gloo's and NCCL's ring and tree kernels do.

    A rank reads its own input at once and writes its own result: half done first, once its own
    input was read, and whole when it has what it needs of its peers. Who only sends is through when
    it has sent.
    """
    mine = {rank: parts.mine(rank) for rank in givers}
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


def _by_push(parts: Parts, sums: _Sums, givers: Sequence[int]) -> None:
    """Copy engines and symmetric kernels that write results where they belong, into peers, too.

    A sum is made by one rank for all: the cells of one place are read everywhere and written
    everywhere by one rank, so this works in place, too (a two-shot all-reduce).
    """
    if all(len(cells) == 1 for _, cells in sums):
        mine = {rank: parts.mine(rank) for rank in givers}
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


def _by_pull(parts: Parts, sums: _Sums, givers: Sequence[int]) -> None:
    """Copy engines and symmetric kernels that read inputs where they lie."""
    del givers
    for place, (to, cells) in enumerate(sums):
        steps: list[Step] = [Read(cell) for cell in cells]
        parts.part(to[0], f"pull {place}", [*steps, *_summed(parts, [(to, cells)], cells)])


def _by_copy(parts: Parts, sums: _Sums, givers: Sequence[int]) -> None:
    """Read inputs where they lie into a tensor of one's own, then copy that where it belongs.

    In place, nobody may copy before all have read.
    """
    del givers
    pulled: dict[int, list[tuple[Cell, list[Cell], Flag]]] = {}
    for place, (to, cells) in enumerate(sums):
        read = parts.part(to[0], f"pull {place}", [Read(cell) for cell in cells])
        pulled.setdefault(to[0], []).append((to, cells, read))
    late = parts.call.late
    every = [flag for reads in pulled.values() for _, _, flag in reads]
    if late or not parts.in_place:
        every = []
    for rank, reads in pulled.items():
        for i, (to, cells, flag) in enumerate(reads):
            steps = _summed(parts, [(to, cells)], cells)
            parts.part(rank, f"copy {i}", steps, after=[flag, *every], late=late)


#: What calls of each kind do. The doors of one-sided ops are the calls' own, declared where the op
#: is; those of process groups are what c10d's works promise: a peer's bytes are touched once it has
#: entered the collective, and a rank's work is done when its bytes are free for it to change
#: (torch's ``ProcessGroup.hpp``, NCCL's user guide on symmetric windows). symmplan's collectives on
#: shared memory are the same with handshake and release, which ``symmplan.memory.calls`` waits for.
BEHAVIOURS: Mapping[str, Behaviour] = {
    "local": Behaviour(_local),
    "copy": Behaviour(_copy),
    "push": Behaviour(_push),
    "read": Behaviour(_read),
    "read_write": Behaviour(_read_write),
    "push_next": Behaviour(_push_next),
    "read_write_next": Behaviour(_read_write_next),
    "all_gather": Behaviour(_all_gather, True, True, ("wire", "push", "pull")),
    "all_to_all": Behaviour(_all_to_all, True, True, ("wire", "push", "pull")),
    "broadcast": Behaviour(_broadcast, True, True, ("wire", "push", "pull")),
    "all_reduce": Behaviour(_all_reduce, True, True, ("wire", "push", "pull", "copy")),
    "reduce_scatter": Behaviour(_reduce_scatter, True, True, ("wire", "pull", "copy")),
}
