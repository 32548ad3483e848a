"""Small programs of graphs and sessions, for tests of who lies in one segment."""

from __future__ import annotations

import torch
from held import segments_of_plans

WIDTH, ROWS = 32, 8
OPTIONS = {"timeout": 60.0, "memory": "shm", "choose": "placed"}


def gathered(x, group, size=2):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x * 1.0, size, group))


def summed(x, group):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x * 1.0, "sum", group))


def graph_of(x, group):
    return summed(gathered(x, group).sin(), group)[: len(x)] + x


def own(x, group):
    """What a session does in an iteration, besides graphs."""
    mine = gathered(x, group)
    return mine, summed(x.cos() + mine[: len(x)], group)


def users_of():
    """The segments that plans use, without those that only tensors of the program still keep."""
    return [(s.nbytes, sorted(s.users)) for s in segments_of_plans()]


def inputs(turn, rows=ROWS):
    torch.manual_seed(1000 * turn + torch.distributed.get_rank())
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def late(rank, turn):
    import time

    if rank == turn % 2:
        time.sleep(0.02)


def iteration(inputs, turn, group):
    return own(inputs[0], group)


def graphs_of(inputs, turn, group, graphs=(graph_of, graph_of)):
    """Two graphs in turn, in another order each time; clones, as they share bytes with others."""
    found = {i: graphs[i](inputs[1] * (i + 1), group).clone() for i in ((0, 1), (1, 0))[turn % 2]}
    return [found[0], found[1]]


def differ(found, wanted, what):
    return [] if all(map(torch.equal, found, wanted)) else [what]
