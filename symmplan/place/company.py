"""Which collectives of a program may run while another group's does.

[Note: company]
    Collectives of one group run one after the other, those of two groups need not: a sharded gather
    and a tensor-parallel sum share links, copy engines and multiprocessors. So each such kind of
    collective is also timed beside the other group's, in the way that this has by then, and what is
    timed is until both are done. It goes round twice, as the other may take another way meanwhile.
    The slowest of all ranks that meet counts, also through other groups, so that a whole mesh takes
    the same ways; where these ranks have no such programs alike, what was measured alone holds.

    Of several neighbours the kind with most bytes counts, as often as it runs for each collective
    of this kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from numpy.typing import NDArray
    from torch import fx

    from symmplan.capture import Captured

__all__ = ["company_of"]


def company_of(
    captured: Captured,
    groups: Mapping[fx.Node, str],
    kinds: Mapping[fx.Node, tuple[Hashable, int]],
) -> dict[fx.Node, tuple[fx.Node, float]]:
    """What may run while each collective does, by the happens-before order of the program.

    Args:
        captured: The program.
        groups: The collectives, and over which group they run.
        kinds: Of each what tells its kind from others, and its bytes.

    Returns:
        ``{collective: (another group's, how many of that kind for each of this)}`` of those that
        have company.
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


def _unordered(captured: Captured, nodes: list[fx.Node]) -> NDArray[np.bool_]:
    """For each two calls whether neither is over before the other begins."""
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
