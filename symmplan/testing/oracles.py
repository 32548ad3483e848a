"""Oracles: short, slow, obvious. For problems small enough to try everything."""

from __future__ import annotations

from itertools import combinations, permutations, product
from typing import TYPE_CHECKING

import networkx as nx

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from symmplan.model import Problem

__all__ = [
    "conflicts",
    "happens_before",
    "heaviest_set",
    "linear_extensions",
    "lowest_peak",
]


def linear_extensions(problem: Problem) -> Iterator[tuple[str, ...]]:
    """All orders in which the operations may run; feasible for about eight operations.

    Args:
        problem: Its `Problem.graph` is used.
    """
    return map(tuple, nx.all_topological_sorts(problem.graph()))


def happens_before(problem: Problem) -> set[tuple[str, str]]:
    """Pairs (earlier, later) of operations that are in this order in every linear extension.

    Args:
        problem: Its `Problem.graph` is used.
    """
    return set(nx.transitive_closure_dag(problem.graph()).edges)


def conflicts(problem: Problem) -> set[frozenset[str]]:
    """Pairs of buffers that may not share a byte.

    Buffers that must share their offset count as one: their accesses are pooled, and they do not
    conflict with each other.

    Args:
        problem: At most some hundred operations and buffers.
    """
    before = happens_before(problem)
    pools = _pools(problem)
    ops = {names: {a.operation for a in problem.accesses if a.buffer in names} for names in pools}
    persistent = {b.name for b in problem.buffers if b.persistent}
    found: set[frozenset[str]] = set()
    for x, y in combinations(pools, 2):
        ordered = all(p in before for p in product(ops[x], ops[y])) or all(
            p in before for p in product(ops[y], ops[x])
        )
        if not ordered or persistent & (x | y):
            found.update(frozenset(p) for p in product(x, y))
    return found


def _pools(problem: Problem) -> list[frozenset[str]]:
    graph = nx.Graph(problem.together)
    graph.add_nodes_from(b.name for b in problem.buffers)
    return [frozenset(pool) for pool in nx.connected_components(graph)]


def heaviest_set(sizes: Mapping[str, int], clashes: set[frozenset[str]]) -> int:
    """Largest sum of sizes of buffers that conflict pairwise.

    Args:
        sizes: Bytes by name; about a hundred buffers.
        clashes: Conflicting pairs.
    """
    graph = nx.Graph(tuple(p) for p in clashes)
    for name, nbytes in sizes.items():
        graph.add_node(name, nbytes=nbytes)
    return int(nx.max_weight_clique(graph, "nbytes")[1])


def lowest_peak(
    sizes: Mapping[str, int], clashes: set[frozenset[str]], aligns: Mapping[str, int] | None = None
) -> int:
    """The lowest peak there is, by trying all orders; about seven buffers.

    In some best packing nothing can be lowered, so placing its buffers by ascending offset, each
    on top of what it conflicts with, makes it again.

    Args:
        sizes: Bytes by name.
        clashes: Conflicting pairs.
        aligns: Alignments by name; 1 where left out.
    """
    best = sum(sizes.values()) + sum((aligns or {}).values())
    for order in permutations(sorted(sizes)):
        ends: dict[str, int] = {}
        for name in order:
            floor = max((e for m, e in ends.items() if frozenset((name, m)) in clashes), default=0)
            align = (aligns or {}).get(name, 1)
            ends[name] = -(-floor // align) * align + sizes[name]
            if ends[name] >= best:
                break
        else:
            best = max(ends.values())
    return best
