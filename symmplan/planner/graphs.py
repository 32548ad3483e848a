"""What happens before what, and which buffers may not share bytes, as networkx's graphs.

This file says what the two *are*. The planner computes them with vector clocks, which take less
time (`symmplan.planner.order`, `symmplan.planner.items`) and share no code with this file.
`symmplan.planner.verify` follows paths in the graphs.
"""

from __future__ import annotations

from functools import reduce
from itertools import combinations, product
from operator import and_
from typing import TYPE_CHECKING

import networkx as nx

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from symmplan.model import Operation, Problem

__all__ = ["Paths", "conflict_graph_of", "graph_of"]

#: Pairs of operations between which paths are looked for at a time.
PAIRS = 4096


def graph_of(operations: Iterable[Operation], edges: Iterable[tuple[str, str]]) -> nx.DiGraph[str]:
    """Happens-before: see `Problem.graph`."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    last: dict[str, str] = {}
    for operation in operations:
        graph.add_node(operation.name, operation=operation)
        before = last.get(operation.stream)
        if before is not None:
            graph.add_edge(before, operation.name, kind="stream")
        last[operation.stream] = operation.name
    for first, second in edges:
        if not graph.has_edge(first, second):
            graph.add_edge(first, second, kind="edge")
    return graph


def conflict_graph_of(problem: Problem) -> nx.Graph[str]:
    """Which buffers may not share bytes: see `Plan.conflict_graph`."""
    graph: nx.Graph[str] = nx.Graph()
    graph.add_nodes_from((b.name, {"buffer": b}) for b in problem.buffers)
    together: nx.Graph[str] = nx.Graph(problem.together)
    together.add_nodes_from(graph)
    pools = [tuple(names) for names in nx.connected_components(together)]
    paths = Paths(problem.graph())
    count = len(paths.operations)
    before = [mask for _, mask in paths.reached(range(count), range(count))]
    touched: dict[str, set[int]] = {name: set() for name in graph}
    for access in problem.accesses:
        touched[access.buffer].add(paths.number[access.operation])
    pooled = [sorted(set().union(*(touched[name] for name in names))) for names in pools]
    # As bits: the operations that touch a pool, and those that precede all of these.
    own = [sum(1 << op for op in ops) for ops in pooled]
    ahead = [reduce(and_, (before[op] for op in ops)) for ops in pooled]
    persistent = {b.name for b in problem.buffers if b.persistent}
    bound = [not persistent.isdisjoint(names) for names in pools]
    for a, b in combinations(range(len(pools)), 2):
        ordered = own[a] & ahead[b] == own[a] or own[b] & ahead[a] == own[b]
        if not ordered or bound[a] or bound[b]:
            graph.add_edges_from(product(pools[a], pools[b]))
    return graph


class Paths:
    """Paths in a graph of happens-before.

    Attributes:
        operations: In a linear extension.
        number: Place of each in the extension, by name.
    """

    def __init__(self, graph: nx.DiGraph[str]) -> None:
        names = list(nx.topological_sort(graph))
        self.operations: list[Operation] = [graph.nodes[name]["operation"] for name in names]
        self.number = number = {name: k for k, name in enumerate(names)}
        self._before = [[number[p] for p in graph.pred[name]] for name in names]
        #: Calls that meet, by the operation where each ends.
        self._meetings: dict[int, list[int]] = {}
        ended_at = {begun: k for k, op in enumerate(self.operations) for begun in op.ends}
        last = list(range(len(names)))
        for k, op in enumerate(self.operations):
            end = ended_at.get(op.name, k)
            if op.synchronizes or op.handshake or op.release:
                self._meetings.setdefault(end, []).append(number[op.name])
            last[k] = max(end, *(number[n] for n in graph.succ[op.name]), k)
        #: By the last operation that paths lead to directly from each.
        self._last_of: dict[int, list[int]] = {}
        for k, end in enumerate(last):
            self._last_of.setdefault(end, []).append(k)

    def exist(self, pairs: Sequence[tuple[int, int]], groups: Sequence[str] = ()) -> list[bool]:
        """Per pair of operations, whether a path leads from the first to the second.

        Args:
            pairs: Numbers of operations.
            groups: A path goes from one rank to another through a call that meets: from its start
                on the one to its end on the other. It has to pass a call of each of these groups,
                in this order. Without groups it stays on its rank.
        """
        found = [False] * len(pairs)
        order = sorted(range(len(pairs)), key=pairs.__getitem__)
        for at in range(0, len(order), PAIRS):
            some = order[at : at + PAIRS]
            bits = {first: k for k, first in enumerate(dict.fromkeys(pairs[p][0] for p in some))}
            wanted: dict[int, list[int]] = {}
            for p in some:
                wanted.setdefault(pairs[p][1], []).append(p)
            # A path passes only operations between its ends in the extension.
            within = range(pairs[some[0]][0], max(wanted) + 1)
            for op, mask in self.reached(bits, within, groups):
                for p in wanted.get(op, ()):
                    found[p] = bool(mask >> bits[pairs[p][0]] & 1)
        return found

    def reached(
        self, sources: Iterable[int], within: range, groups: Sequence[str] = ()
    ) -> Iterator[tuple[int, int]]:
        """From which sources a path leads to each operation of a range; bit k for the k-th."""
        bits = {op: 1 << k for k, op in enumerate(sources)}
        # How far paths have come when an operation starts and when it is over: those that stay on
        # their rank, those that have passed the first group, and so on.
        starts: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for op in within:
            start = [0] * (len(groups) + 1)
            for p in self._before[op]:
                for k, mask in enumerate(ends.get(p, ())):
                    start[k] |= mask
            starts[op] = start
            yield op, start[-1]
            end = start.copy()
            end[0] |= bits.get(op, 0)
            for call in self._meetings.get(op, ()):
                for k, group in enumerate(groups):
                    if self.operations[call].group == group and call in starts:
                        end[k + 1] |= starts[call][k]
            ends[op] = end
            for done in self._last_of.get(op, ()):
                starts.pop(done, None)
                ends.pop(done, None)
