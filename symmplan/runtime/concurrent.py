"""Which collectives of a program may run while another group's does.

[Note: concurrent collectives]
    Collectives of one group run one after the other. Those of two groups may run at the same time:
    a sharded gather and a tensor-parallel sum then share links, copy engines and multiprocessors.
    So each such kind of collective is also timed while the other group's collective runs by its
    current algorithm, until both have ended. There are two rounds, because the other collective may
    get another algorithm in the first one. The slowest of all ranks counts that are connected
    through these groups, so that a whole mesh takes the same algorithms. If these ranks have
    different programs, the times that were measured alone count.

    If several kinds may run beside a collective, the kind with most bytes is taken, as many of them
    as run for each collective of this kind.

    FSDP2's collectives of one kind and size all take one algorithm, so they have one set of
    concurrent collectives, that of all of them together. These are the collectives of other groups
    that were noted in the recorded step (see [Note: listening] in `symmplan.runtime.listening`).
    They run in torch's own way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import fx

    from symmplan.capture import Captured


def concurrent_with(
    captured: Captured,
    groups: Mapping[fx.Node, str],
    kinds: Mapping[fx.Node, tuple[Hashable, int]],
) -> dict[fx.Node, tuple[fx.Node, float]]:
    """The collectives that may run beside each one, by the program's happens-before order.

    Args:
        captured: The program.
        groups: The collectives, and over which group they run.
        kinds: Of each what tells its kind from others, and its bytes.

    Returns:
        ``{collective: (another group's, how many of that kind for each of this)}``, for collectives
        that have any.
    """
    if len({*groups.values()}) < 2:
        return {}
    nodes = list(groups)
    beside = _unordered(captured, nodes)
    names = np.asarray([groups[n] for n in nodes])
    beside &= names[:, None] != names
    # A neighbour that runs beside several of a group is divided among them.
    alike = names[:, None] == names
    share = beside / np.maximum(alike.astype(float) @ beside, 1)
    found = {}
    for i, node in enumerate(nodes):
        times: dict[Hashable, float] = {}
        first: dict[Hashable, int] = {}
        for j in map(int, np.flatnonzero(beside[i])):
            kind = kinds[nodes[j]][0]
            times[kind] = times.get(kind, 0.0) + float(share[i, j])
            first.setdefault(kind, j)
        if times:
            most = max(times, key=lambda k: times[k] * kinds[nodes[first[k]]][1])
            found[node] = nodes[first[most]], times[most]
    return found


def concurrent_heard(
    calls: Sequence[tuple[Hashable, Hashable]], heard: Sequence[tuple[int, Hashable, int]]
) -> dict[Hashable, tuple[Hashable, float]]:
    """The collectives that may run beside each kind of call, by the order of issue.

    Each stream runs its calls one after the other, and the program may be ahead or behind by one
    call. So a call may run from the issue of its predecessor on the stream until the issue of its
    successor: a gather, for example, is issued after the products beside which the device runs it.

    Args:
        calls: The stream and the kind of each, in order.
        heard: Of others' collectives how many calls were issued before, their kind and bytes.

    Returns:
        ``{kind: (others' kind, how many of that for each call of this)}`` of those with concurrent
        collectives.
    """
    streams: dict[Hashable, list[int]] = {}
    for at, (stream, _) in enumerate(calls):
        streams.setdefault(stream, []).append(at)
    times: dict[Hashable, dict[Hashable, float]] = {}
    sizes = {kind: nbytes for _, kind, nbytes in heard}
    for before, kind, _ in heard:
        near: list[int] = []
        for of in streams.values():
            at = bisect_left(of, before)
            near += of[max(0, at - 1) : at + 1]
        for call in near:
            mine = times.setdefault(calls[call][1], {})
            mine[kind] = mine.get(kind, 0.0) + 1 / len(near)
    counts = Counter(kind for _, kind in calls)
    found = {}
    for kind, mine in times.items():
        most = max(mine, key=lambda k: mine[k] * sizes[k])
        found[kind] = most, mine[most] / counts[kind]
    return found


def _unordered(captured: Captured, nodes: list[fx.Node]) -> NDArray[np.bool_]:
    """For each pair of calls, whether neither ends before the other begins."""
    problem = captured.problem
    order = order_of(problem)
    launches = {s.node: name for name, s in captured.steps.items() if s.kind == "launch"}
    over = {call: o.name for o in problem.operations for call in o.ends}
    starts = np.asarray([order.index[launches[n]] for n in nodes])
    ends = np.asarray([order.index[over.get(launches[n], launches[n])] for n in nodes])
    # [i, j]: call j is over before call i begins.
    behind = order.entry(starts)[:, order.chain[ends]] >= order.pos[ends]
    beside: NDArray[np.bool_] = ~(behind | behind.T)
    return beside
