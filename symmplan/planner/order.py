"""Happens-before, which is reachability in `Problem.graph`, as vector clocks over chains.

[Note: runs]
    An operation without edges to other streams has nothing to say about order beyond its place in
    its stream. So each stream is cut only before operations that something waits into and after
    operations that something waits for; the pieces are *runs*. networkx holds the graph of runs,
    a quotient of `Problem.graph`: it validates, sorts and names cycles. A program on one stream is
    a single run. Cutting and clocks are numpy's: with 400,000 operations `Problem.graph` alone
    takes as long to build as all of this, and its closure would be quadratic.

[Note: chains]
    A chain is a totally ordered list of operations. Streams are chains, and where edges let one
    stream continue in another, fewer chains cover all: a total order spread over many streams is
    one chain. The clock of an operation holds, per chain, how many of the chain's operations
    happen before it; they are always the first ones. Memory is runs x chains, never pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
from attrs import frozen

from symmplan.errors import ProblemError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from symmplan.model import Plan, Problem

    Ints = NDArray[np.int64]

__all__ = ["Order", "order_of", "rendezvous_order"]

#: Entries of one clock table (runs x chains); 160 MB as 32-bit integers.
MAX_CLOCK_ENTRIES = 40_000_000


@frozen(eq=False)
class Order:
    """The happens-before order of a problem's operations.

    Operations are numbered by a canonical linear extension, which depends on names, streams and
    edges but not on how the problem was listed.

    Attributes:
        names: Operation names by number.
        index: Number by operation name.
        chain: Chain of each operation.
        pos: Place of each operation in its chain, counted from 1.
        run: Run of each operation.
        before: [runs, chains] how many operations of each chain happen before the run's first.
        after: [runs, chains] place of the first operation of each chain that happens after the
            run's last; one more than the chain's length if there is none.
        members: Per chain, its operations in order.
        links: Pairs (earlier, later) of runs that the edges and streams join, sorted by the later.
    """

    names: tuple[str, ...]
    index: dict[str, int]
    chain: Ints
    pos: Ints
    run: Ints
    before: NDArray[np.int32]
    after: NDArray[np.int32]
    members: tuple[Ints, ...]
    links: Ints

    @property
    def chains(self) -> int:
        """Number of chains; 1 for a total order."""
        return len(self.members)

    def entry(self, ops: Ints) -> NDArray[np.int32]:
        """Per operation and chain, how many of the chain's operations strictly precede it."""
        clock = self.before[self.run[ops]]
        clock[np.arange(len(ops)), self.chain[ops]] = self.pos[ops] - 1
        return clock

    def exit(self, ops: Ints) -> NDArray[np.int32]:
        """Per operation and chain, the place of the first operation strictly after it."""
        clock = self.after[self.run[ops]]
        clock[np.arange(len(ops)), self.chain[ops]] = self.pos[ops] + 1
        return clock

    def precedes(self, first: int, second: int) -> bool:
        """Whether operation number ``first`` strictly happens before number ``second``."""
        c = self.chain[first]
        if c == self.chain[second]:
            return bool(self.pos[first] < self.pos[second])
        return bool(self.before[self.run[second], c] >= self.pos[first])


def order_of(problem: Problem) -> Order:
    """The order of a problem's operations, computed once per problem.

    Raises:
        ProblemError: The order has a cycle (it is named), or is too wide to be kept.
    """
    if problem._order is None:
        object.__setattr__(problem, "_order", _build(problem))
    order: Order = problem._order
    return order


def rendezvous_order(plan: Plan) -> list[tuple[str, str]]:
    """The segments and groups that meet, in an order that is the same on all ranks.

    Names of groups differ over a mesh, and so may their alphabetical order; the order in which
    the program first uses them does not.
    """
    problem = plan.problem
    index = order_of(problem).index
    used = [buffer.group for buffer in sorted(problem.buffers, key=lambda b: b.name)]
    used += [o.group for o in sorted(problem.operations, key=lambda o: index[o.name]) if o.group]
    first = {group: place for place, group in reversed(list(enumerate(used)))}
    last = len(first) + len(used)
    return [
        (spec.name, group)
        for spec in plan.segments
        for group in sorted(spec.groups, key=lambda g: first.get(g, last))
    ]


def _build(problem: Problem) -> Order:
    streams: dict[str, list[str]] = {}
    for op in problem.operations:
        streams.setdefault(op.stream, []).append(op.name)
    names = [name for stream in sorted(streams) for name in streams[stream]]
    count = len(names)
    number = {name: i for i, name in enumerate(names)}
    counts = np.asarray([len(streams[stream]) for stream in sorted(streams)], dtype=np.int64)
    stream_no = np.repeat(np.arange(len(streams)), counts)
    edges = _cross_edges(problem, number, stream_no)
    starts = np.zeros(count + 1, dtype=bool)
    starts[0] = True
    starts[1:count] = stream_no[1:] != stream_no[:-1]
    starts[edges[:, 1]] = True
    starts[edges[:, 0] + 1] = True
    firsts = np.flatnonzero(starts[:count])
    run_of = np.cumsum(starts[:count]) - 1
    lengths = np.diff(np.append(firsts, count))
    links = _run_edges(edges, run_of, stream_no[firsts])
    ranking = _sort_runs(names, firsts, lengths, links)
    # From here on runs are numbered by their place in the canonical linear extension.
    rank = np.empty(len(firsts), dtype=np.int64)
    rank[ranking] = np.arange(len(firsts))
    links = rank[links]
    links = links[np.lexsort((links[:, 0], links[:, 1]))]
    chain_of_run, chains = _cover(links, stream_no[firsts][ranking], len(streams))
    lengths = lengths[ranking]
    if len(firsts) * chains > MAX_CLOCK_ENTRIES:
        raise ProblemError(
            f"{count} operations on {len(streams)} streams need {chains} chains",
            expected=f"at most {MAX_CLOCK_ENTRIES} clock entries (runs x chains)",
            got=len(firsts) * chains,
            fix="put operations that follow each other on one stream",
        )
    place, tail, sizes = _places(chain_of_run, lengths, chains)
    before = _clock(links, chain_of_run, tail, chains)
    # Seen from the end, places are counted down and what comes after comes before.
    back = links[np.lexsort((links[:, 1], links[:, 0]))][::-1, ::-1]
    left = _clock(back, chain_of_run, sizes[chain_of_run] + 1 - place, chains)
    after = (sizes + 1).astype(np.int32) - left
    # Operations follow their runs.
    run = np.repeat(np.arange(len(firsts)), lengths)
    within = np.arange(count) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    old = firsts[ranking][run] + within
    chain = chain_of_run[run]
    ordered = tuple(names[i] for i in old.tolist())
    return Order(
        names=ordered,
        index={name: i for i, name in enumerate(ordered)},
        chain=chain,
        pos=place[run] + within,
        run=run,
        before=before,
        after=after,
        members=tuple(np.flatnonzero(chain == c) for c in range(chains)),
        links=links,
    )


def _cross_edges(problem: Problem, number: dict[str, int], stream: Ints) -> Ints:
    """Distinct edges that the streams' own order does not already imply."""
    if not problem.edges:
        return np.zeros((0, 2), dtype=np.int64)
    pairs = np.asarray([(number[a], number[b]) for a, b in problem.edges], dtype=np.int64)
    implied = (stream[pairs[:, 0]] == stream[pairs[:, 1]]) & (pairs[:, 0] < pairs[:, 1])
    return np.unique(pairs[~implied], axis=0)


def _run_edges(edges: Ints, run_of: Ints, stream: Ints) -> Ints:
    """Edges between runs: those of the problem, and from each run to the next of its stream."""
    follows = np.flatnonzero(stream[1:] == stream[:-1])
    links = np.concatenate([np.stack([follows, follows + 1], axis=1), run_of[edges]])
    return np.unique(links, axis=0)


def _sort_runs(names: list[str], firsts: Ints, lengths: Ints, links: Ints) -> Ints:
    """Topological order of the runs; among those that may come next, the least name comes next."""
    heads = [names[i] for i in firsts.tolist()]
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(heads)))
    graph.add_edges_from(links.tolist())
    try:
        ranking = list(nx.lexicographical_topological_sort(graph, key=heads.__getitem__))
    except nx.NetworkXUnfeasible:
        _raise_cycle(graph, names, firsts, lengths)
    return np.asarray(ranking, dtype=np.int64)


def _raise_cycle(graph: Any, names: list[str], firsts: Ints, lengths: Ints) -> None:
    cycle: list[str] = []
    for run, _ in nx.find_cycle(graph):
        cycle.append(names[firsts[run]])
        if lengths[run] > 1:
            cycle.append(names[firsts[run] + lengths[run] - 1])
    shown = cycle if len(cycle) <= 12 else [*cycle[:6], "...", *cycle[-5:]]
    raise ProblemError(
        "the order has a cycle: " + " -> ".join([*shown, cycle[0]]),
        expected="an order in which no operation precedes itself",
        got=f"a cycle through {len(cycle)} operations",
        fix="remove one of its edges, or put the operations on different streams",
        cycle=tuple(cycle),
    ) from None


def _cover(links: Ints, streams: Ints, stream_count: int) -> tuple[Ints, int]:
    """Assign runs to chains: continue the own stream if possible, else any finished chain."""
    runs = len(streams)
    chain = [-1] * runs
    is_tail = [False] * runs
    bounds = np.searchsorted(links[:, 1], np.arange(runs + 1)).tolist()
    sources = links[:, 0].tolist()
    stream = streams.tolist()
    used = 0
    for r in range(runs):
        found = -1
        for p in sources[bounds[r] : bounds[r + 1]]:
            # Of other streams the latest is taken: it has the least left to be ordered with.
            if is_tail[p]:
                found = p
                if stream[p] == stream[r]:
                    break
        if found < 0:
            chain[r] = used
            used += 1
        else:
            chain[r] = chain[found]
            is_tail[found] = False
        is_tail[r] = True
    if used >= stream_count:
        return streams, stream_count
    return np.asarray(chain, dtype=np.int64), used


def _places(chain: Ints, lengths: Ints, chains: int) -> tuple[Ints, Ints, Ints]:
    """Place of each run's first and last operation in its chain (from 1), and chain lengths."""
    place = np.empty(len(chain), dtype=np.int64)
    sizes = np.zeros(chains, dtype=np.int64)
    for c in range(chains):
        of_chain = np.flatnonzero(chain == c)
        ends = np.cumsum(lengths[of_chain])
        place[of_chain] = ends - lengths[of_chain] + 1
        sizes[c] = ends[-1] if len(ends) else 0
    return place, place + lengths - 1, sizes


def _clock(links: Ints, chain: Ints, place: Ints, chains: int) -> NDArray[np.int32]:
    """Per run and chain, the highest place among runs before it; links are sorted by target."""
    clock = np.zeros((len(chain), chains), dtype=np.int32)
    rows = list(clock)
    own, last = chain.tolist(), place.tolist()
    for p, r in links.tolist():  # so sources are complete
        row = rows[r]
        np.maximum(row, rows[p], out=row)
        c = own[p]
        row[c] = max(row[c], last[p])
    return clock
