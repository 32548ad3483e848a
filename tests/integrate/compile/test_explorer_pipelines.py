"""Pipelined graphs before the explorer and the verifier: every order that their parts allow."""

from __future__ import annotations

import copy

import attrs
import pytest
import torch
from explorer_graphs import ALGORITHMS, F, one_sided, rewritten, world
from graph_explorer import explore_graph
from torch.fx.experimental.proxy_tensor import make_fx

from symmplan.choose.work import flops_beside
from symmplan.errors import VerificationError
from symmplan.integrate.compile import pipelining
from symmplan.torch_private.compilers import fake_mode_of

RANKS = 3


@pytest.fixture(scope="module", autouse=True)
def group():
    with world(RANKS) as names:
        yield names[0]


def _layer(x, w, group):
    """Two products of one gather, of which one is scattered; and all of it once more."""
    whole = F.wait_tensor(F.all_gather_into_tensor(x, RANKS, group))
    part = F.wait_tensor(
        F.reduce_scatter_tensor((whole @ w) + (whole @ w.t()), "sum", RANKS, group)
    )
    again = F.wait_tensor(F.all_gather_into_tensor(part.relu(), RANKS, group))
    return F.wait_tensor(F.reduce_scatter_tensor(again.relu() @ w, "sum", RANKS, group))


def _pipelined(group):
    """The graph in parts, with placements of nothing yet."""
    graph = make_fx(lambda x, w: _layer(x, w, group), tracing_mode="fake")(
        torch.empty(1, 2), torch.empty(2, 2)
    )
    mode = fake_mode_of([n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")])
    found = pipelining.find(graph.graph, [group])
    for one in found:
        pipelining.apply(graph.graph, one, 0, mode)
    graph.recompile()
    return graph, found


def _writes_shard(x, w, group):
    whole = F.wait_tensor(F.all_gather_into_tensor(x, RANKS, group))
    x.add_(1)
    return whole @ w


def _writes_weight(x, w, group):
    whole = F.wait_tensor(F.all_gather_into_tensor(x, RANKS, group))
    total = whole.sum()
    w.add_(1)
    return whole @ w, total


def _writes_left(x, w, group):
    left = x.repeat(RANKS, 1)
    product = left @ w
    left.add_(1)
    return F.wait_tensor(F.reduce_scatter_tensor(product, "sum", RANKS, group)), left


@pytest.mark.parametrize("program", [_writes_shard, _writes_weight, _writes_left])
def test_products_do_not_move_across_a_write(group, program):
    graph = make_fx(lambda x, w: program(x, w, group), tracing_mode="fake")(
        torch.empty(1, 2), torch.empty(2, 2)
    )
    assert pipelining.find(graph.graph, [group]) == []
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Tensor):
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    assert len(pipelining.find(graph.graph, [group])) == 1


def _hidden(x, w, group):
    """As of weights: products run beside the gather, and the scatter is awaited at the end."""
    started = F.all_gather_into_tensor(x, RANKS, group)
    first = w @ w
    whole = F.wait_tensor(started)
    sent = F.reduce_scatter_tensor(w.repeat(RANKS, 1) @ w, "sum", RANKS, group)
    return whole @ first, (first @ w).sum(), F.wait_tensor(sent)


def test_what_products_hide_already_is_left_alone(group):
    graph = make_fx(lambda x, w: _hidden(x, w, group), tracing_mode="fake")(
        torch.empty(1, 2), torch.empty(2, 2)
    )
    assert pipelining.find(graph.graph, [group]) == []


def _explored(group, algorithm, transport, **changes):
    original, _ = _pipelined(group)
    made = rewritten(copy.deepcopy(original), ALGORITHMS[algorithm], **changes)
    verdict = explore_graph(
        made.module,
        original,
        ranks=RANKS,
        groups={group: (tuple(range(RANKS)),)},
        segments=made.segments,
        ops=one_sided(),
        transport=transport,
    )
    return verdict, made


def test_all_of_a_layer_is_found(group):
    _, found = _pipelined(group)
    kinds = [type(one).__name__ for one in found]
    assert kinds == ["Gather", "Scatter", "Scatter"]
    assert len(found[0].products) == len(found[1].products) == 2


def test_products_run_between_the_start_and_the_wait_of_each_collective(group):
    """The last of a rank's shifts is beside its own rows, those before beside more."""
    graph, _ = _pipelined(group)
    targets = (F.all_gather_into_tensor.default, torch.ops.symmplan.shift.default)
    starts = [n for n in graph.graph.nodes if n.target in targets]
    assert [n.target for n in starts] == [targets[0], targets[0], targets[1], targets[1]]
    beside = flops_beside(starts)
    assert beside[starts[0]] == 2 * 2 * 1 * 2 * 2  # two products of one row
    assert not beside[starts[1]]  # its result is no left side
    assert all(beside[n] for n in starts[2:])


@pytest.mark.parametrize("transport", ["wire", "push", "pull"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_pipelined_graphs_are_right_in_every_order(group, algorithm, transport):
    verdict, made = _explored(group, algorithm, transport, poison=True)
    assert verdict.kind == "right", (verdict, made.module.graph, made.plan)
    shifts = [o for o in made.plan.problem.operations if o.op.startswith("symmplan::shift")]
    assert len(shifts) == RANKS - 1  # the other scatter's products are the gather's already


def test_a_part_that_is_said_to_be_over_too_early_is_found(group):
    """A shift that is no longer held until its wait: its bytes are given to others at once."""

    def unheld(problem):
        ends = {o.name for o in problem.operations if o.ends}
        operations = [attrs.evolve(o, ends=()) for o in problem.operations]
        kept = [a for a in problem.accesses if a.operation not in ends]
        return attrs.evolve(problem, operations=operations, accesses=kept)

    verdict, _ = _explored(group, "nccl", "push", told=unheld)
    assert verdict.kind != "right"


def test_the_verifier_refuses_parts_that_share_bytes(group):
    """Two shifts on their way at a time, in one place."""
    made = rewritten(_pipelined(group)[0], ALGORITHMS["nccl"])
    plan = made.plan
    received = sorted(
        {
            a.buffer
            for a in plan.problem.accesses
            if a.write and a.remote and a.operation.startswith("shift")
        }
    )
    first, second = received[:2]
    moved = {**plan.placements, second: attrs.evolve(plan.placements[first])}
    with pytest.raises(VerificationError):
        attrs.evolve(plan, placements=moved).verify()
