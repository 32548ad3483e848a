"""Capture from FX: what is found, what is decided, and whether it is right about lifetimes."""

from __future__ import annotations

import operator

import custom_ops
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given
from programs import Program, make_inputs, programs, run
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import symmplan
from examples import examples
from symmplan.capture import capture_fx
from symmplan.capture.graphs import tensor_leaves
from symmplan.errors import CaptureError
from symmplan.torch_private.c10d import boxed_group, boxed_reduction

F = torch.ops._c10d_functional


@pytest.fixture(scope="module", autouse=True)
def groups():
    """Two groups of a fake world of two ranks: collectives return, whatever they return."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    custom_ops.load()
    second = dist.new_group([0, 1])
    yield [dist.group.WORLD.group_name, second.group_name]
    dist.destroy_process_group()


def trace(function, *args):
    return make_fx(function, tracing_mode="fake")(*args)


def how(captured):
    return {(s.node.name, s.where): (s.how, s.reason) for s in captured.sites}


def test_the_producer_writes_an_argument_and_the_op_its_result(groups):
    def program(x, w):
        gathered = F.wait_tensor(F.all_gather_into_tensor(torch.relu(x), 2, groups[0]))
        return gathered @ w

    captured = capture_fx(trace(program, torch.ones(4, 8), torch.ones(8, 8)))
    assert how(captured) == {
        ("all_gather_into_tensor", "input"): ("bind", ""),
        ("all_gather_into_tensor", "return"): ("bind", ""),
    }
    by_name = {b.name: b for b in captured.problem.buffers}
    assert by_name["relu"].nbytes == 4 * 8 * 4
    assert by_name["all_gather_into_tensor"].nbytes == 8 * 8 * 4
    assert by_name["all_gather_into_tensor"].shape == (8, 8)


def test_an_asynchronous_op_holds_its_buffers_until_its_wait(groups):
    def program(x):
        h = torch.relu(x)
        started = F.all_gather_into_tensor(h, 2, groups[0])
        other = torch.sin(x)  # overlaps
        return F.wait_tensor(started).sum() + other.sum()

    problem = capture_fx(trace(program, torch.ones(4, 8))).problem
    held = {a.operation for a in problem.accesses if a.buffer == "relu"}
    assert held == {"relu", "all_gather_into_tensor", "wait_tensor"}
    by_name = {o.name: o for o in problem.operations}
    start, end = by_name["all_gather_into_tensor"], by_name["wait_tensor"]
    assert (start.group, start.synchronizes) == (groups[0], True)
    assert (start.handshake, start.release) == (False, False)
    assert end.ends == ("all_gather_into_tensor",)
    calls = [a for a in problem.accesses if a.operation == start.name]
    assert all(a.remote and a.enters and a.releases for a in calls)
    assert {a.buffer: a.write for a in problem.accesses if a.operation == end.name} == {
        "relu": False,
        "all_gather_into_tensor": True,
    }


def test_work_that_nobody_waits_for_touches_no_placement(groups):
    def program(x):
        h = torch.relu(x)
        F.all_gather_into_tensor(h, 2, groups[0])  # reads h, nobody knows until when
        again = F.wait_tensor(F.all_gather_into_tensor(h, 2, groups[0])) + 1
        return again, F.all_gather_into_tensor(torch.sin(x), 2, groups[0])

    captured = capture_fx(trace(program, torch.ones(4, 8)))
    decided = how(captured)
    for node in ("all_gather_into_tensor", "all_gather_into_tensor_2"):
        for where in ("input", "return"):
            state, reason = decided[node, where]
            assert state is None
            assert "nobody in the graph waits" in reason
    assert decided["all_gather_into_tensor_1", "input"] == ("stage", "its storage leaves the graph")


@pytest.mark.parametrize(
    "program",
    [
        lambda a: (a, F.wait_tensor(a) + 1),
        lambda a: (a[:2], F.wait_tensor(a) + 1),
        lambda a: (F.wait_tensor(a), F.wait_tensor(a)),
        lambda a: (v := a.view(-1), F.wait_tensor(a), v.sin()),
    ],
)
def test_a_result_that_leaves_by_two_algorithms_is_left_out(groups, program):
    """It can be copied out only where everybody gets the copy."""
    captured = capture_fx(
        trace(lambda x: program(F.all_gather_into_tensor(x.relu(), 2, groups[0])), torch.ones(4, 8))
    )
    state, reason = how(captured)["all_gather_into_tensor", "return"]
    assert state is None
    assert "used other than through one wait" in reason


def test_work_on_a_placement_holds_it_though_the_op_declares_something_else(groups):
    """An op whose own requirement is not met may still read a buffer until its wait."""

    def program(x):
        h = torch.relu(x)
        gathered = F.wait_tensor(F.all_gather_into_tensor(h, 2, groups[0]))
        started = F.all_to_all_single(h, [2, 2], [2, 2], groups[0])
        other = gathered.sin()
        return F.wait_tensor(started) + 1, other + 1

    def skip(spec, _group, _requirement):
        return "not this one" if "all_to_all" in spec.op else None

    problem = capture_fx(trace(program, torch.ones(4, 8)), skip=skip).problem
    held = {a.operation for a in problem.accesses if a.buffer == "relu"}
    assert held >= {"all_to_all_single", "wait_tensor_1"}


def test_a_result_that_the_op_cannot_write_itself_counts_as_staged(groups):
    def program(x):
        return torch.ops.symmplan_test.peer_sum(x, groups[0]) + 1

    captured = capture_fx(trace(program, torch.ones(4, 8)))
    state, reason = how(captured)["peer_sum", "return"]
    assert state == "stage"
    assert "symmplan_test::peer_sum.default has no variant" in reason
    assert not any(o.name.endswith(":out") for o in captured.problem.operations)


def test_what_subgraphs_declare_is_left_out_with_the_reason(groups):
    def program(x):
        def gather(t):
            return F.wait_tensor(F.all_gather_into_tensor(t.sin(), 2, groups[0])) + 1

        return torch.cond(x.sum() > 0, gather, lambda t: torch.cat([t, t]), (x,))

    plan = symmplan.plan(trace(program, torch.ones(4, 8)))
    assert [(u.op, u.where) for u in plan.unplanned] == [
        ("_c10d_functional::all_gather_into_tensor.default", "input"),
        ("_c10d_functional::all_gather_into_tensor.default", "return"),
    ]
    assert all("inside true_graph_0" in u.reason for u in plan.unplanned)


def test_functions_of_torch_distributed_in_a_graph_are_left_out_with_what_to_call_instead(groups):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(dist.get_rank)
    graph.call_function(dist.all_reduce, (x,))
    graph.output(x)
    module = fx.GraphModule(torch.nn.Module(), graph)
    with pytest.warns(UserWarning, match=r"torch\.distributed's functions .* not declared ops"):
        plan = symmplan.plan(module, [torch.ones(4)])
    (left_out,) = plan.unplanned
    assert left_out.op == "torch.distributed.all_reduce"
    assert "call torch.ops._c10d_functional" in left_out.reason
    assert left_out.reason in plan.summary()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own
def test_what_is_functionalized_is_left_out_with_the_reason(groups):
    class Model(torch.nn.Module):
        def forward(self, x):
            h = x.relu()
            torch.ops.symmplan_test.bump(h, groups[0])
            return h + 1

    exported = torch.export.export(Model(), (torch.ones(4, 8),)).run_decompositions()
    (left,) = symmplan.plan(exported).unplanned
    assert (left.op, left.where) == ("symmplan_test::bump.default", "x")
    assert "auto_functionalized" in left.reason


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda x, g: F.wait_tensor(F.all_reduce(x, "sum", g)) + 1, "outside the graph"),
        (lambda x, g: (h := x.relu(), F.wait_tensor(F.all_reduce(h, "sum", g)) + 1), "leaves"),
        (lambda x, g: F.wait_tensor(F.all_reduce(x.relu().t(), "sum", g)) + 1, "not contiguous"),
        (lambda x, g: F.wait_tensor(F.all_reduce(x.relu()[1:], "sum", g)) + 1, "alignment"),
        (
            lambda x, g: F.wait_tensor(F.all_reduce(torch.cumsum(x, 0), "sum", g)) + 1,
            "aten::cumsum cannot write",
        ),
    ],
)
def test_what_cannot_be_bound_is_staged_and_says_why(groups, program, reason):
    captured = capture_fx(trace(lambda x: program(x, groups[0]), torch.ones(4, 8)))
    state, why = how(captured)["all_reduce", "input"]
    assert state == "stage"
    assert reason in why


def test_a_result_that_leaves_the_graph_is_copied_out(groups):
    captured = capture_fx(
        trace(lambda x: F.wait_tensor(F.all_reduce(x.relu(), "sum", groups[0])), torch.ones(2, 8))
    )
    assert how(captured)["all_reduce", "return"] == ("stage", "it leaves the graph")
    last = captured.problem.operations[-1]
    assert last.name == "all_reduce.return:out"


def test_a_storage_cannot_be_symmetric_over_two_groups_at_once(groups):
    def program(x):
        h = x.relu()
        a = F.wait_tensor(F.all_reduce(h, "sum", groups[0]))
        b = F.wait_tensor(F.all_reduce(h, "sum", groups[1]))
        return a + b

    captured = capture_fx(trace(program, torch.ones(2, 8)))
    assert how(captured)["all_reduce", "input"] == ("bind", "")
    assert "over group" in how(captured)["all_reduce_1", "input"][1]


def test_lists_have_a_site_for_each_element(groups):
    def program(x):
        a, b = F.all_gather_into_tensor_coalesced([x.relu(), x.sin()], 2, groups[0])
        return F.wait_tensor(a).sum() + F.wait_tensor(b).sum()

    captured = capture_fx(trace(program, torch.ones(4, 8)))
    assert {where for _, where in how(captured)} == {"inputs.0", "inputs.1", "return.0", "return.1"}


def test_empty_and_symbolic_tensors_are_left_out_with_the_reason(groups):
    plan = symmplan.plan(
        trace(lambda x: F.wait_tensor(F.all_reduce(x.relu(), "sum", groups[0])) + 1, torch.ones(0))
    )
    assert {u.reason for u in plan.unplanned} == {"it has no elements"}
    symbolic = make_fx(
        lambda x: F.wait_tensor(F.all_reduce(x.relu(), "sum", groups[0])) + 1,
        tracing_mode="symbolic",
    )(torch.ones(4, 8))
    plan = symmplan.plan(symbolic)
    assert len(plan.unplanned) == 2
    assert all("symbolic" in u.reason for u in plan.unplanned)
    assert plan.peak_bytes == 0


def test_a_graph_without_shapes_asks_for_example_inputs(groups):
    class Model(torch.nn.Module):
        def forward(self, x):
            gathered = torch.ops._c10d_functional.all_gather_into_tensor(x + 1, 2, groups[0])
            return torch.ops._c10d_functional.wait_tensor(gathered) * 2

    gm = fx.symbolic_trace(Model())
    with pytest.raises(CaptureError, match="has no shape") as caught:
        symmplan.plan(gm)
    assert "example_inputs" in str(caught.value)
    assert caught.value.op == "_c10d_functional::all_gather_into_tensor.default"
    before = [dict(n.meta) for n in gm.graph.nodes]
    plan = symmplan.plan(gm, [torch.ones(4, 8)])
    assert [dict(n.meta) for n in gm.graph.nodes] == before  # the caller's graph is untouched
    assert sorted(b.nbytes for b in plan.problem.buffers) == [4 * 8 * 4, 8 * 8 * 4]
    assert symmplan.plan(gm.graph, [torch.ones(4, 8)]) == plan


def test_example_inputs_that_do_not_fit_are_refused(groups):
    gm = fx.symbolic_trace(lambda x: F.all_reduce(x, "sum", groups[0]) @ x)
    with pytest.raises(CaptureError, match="do not match"):
        symmplan.plan(gm, [])
    with pytest.raises(CaptureError, match="does not run on the example inputs"):
        symmplan.plan(gm, [torch.ones(2, 3)])


@pytest.mark.parametrize("program", [3, "graph", torch.nn.Linear(2, 2), None])
def test_other_programs_are_refused(program):
    with pytest.raises(CaptureError, match="cannot plan a") as caught:
        symmplan.plan(program)
    assert caught.value.got == type(program).__name__


def test_an_exported_program_can_be_planned(groups):
    class Model(torch.nn.Module):
        def forward(self, x):
            return F.wait_tensor(F.all_gather_into_tensor(x.relu(), 2, groups[0])).sum()

    exported = torch.export.export(Model(), (torch.ones(4, 8),))
    assert symmplan.plan(exported).peak_bytes > 0


# -- lifetimes, against what really happens -------------------------------------------------------


class _Watcher(fx.Interpreter):
    """Runs a graph for real and notes which step touches which storage."""

    def __init__(self, module):
        super().__init__(module)
        self.step = 0
        self.touched: dict[int, list[int]] = {}
        self.made: dict[str, int] = {}
        self.keep = []

    def run_node(self, n):
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        value = super().run_node(n)
        self.step += 1
        leaves = [t for _, t in tensor_leaves([*args, *kwargs.values(), value])]
        self.keep += leaves
        for tensor in [] if _is_view(n) else leaves:  # a view touches no byte
            key = tensor.untyped_storage().data_ptr()
            self.touched.setdefault(key, []).append(self.step)
        for path, tensor in tensor_leaves(value):
            name = ".".join([n.name, *map(str, path)])
            self.made.setdefault(name, tensor.untyped_storage().data_ptr())
        if n.op == "output":
            self.step += 10**6
            for tensor in leaves:  # what leaves the graph lives on
                self.touched[tensor.untyped_storage().data_ptr()].append(self.step)
        return value


def _is_view(node):
    views = ("aten::view", "aten::slice", "aten::as_strided")
    name = node.target._schema.name if hasattr(node.target, "_schema") else ""
    return node.target is operator.getitem or name in views


@examples(100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs())
def test_no_two_live_storages_share_a_byte(groups, program: Program):
    """An oracle that knows nothing of schemas: real tensors, real storages, real addresses."""
    inputs = make_inputs(program, 0)
    gm = trace(lambda *tensors: run(program, groups, *tensors), *inputs)
    captured = capture_fx(gm)
    plan = symmplan.plan(gm)
    plan.verify()
    watcher = _Watcher(gm)
    watcher.run(*(x.clone() for x in inputs))
    lives = {}
    for placed in captured.placed_storages:
        name = ".".join([placed.node.name, *map(str, placed.path)])
        steps = watcher.touched[watcher.made[name]]
        lives[placed.buffer] = (min(steps), max(steps))
    names = sorted(lives)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            pa, pb = plan.placements[a], plan.placements[b]
            if pa.segment != pb.segment or pa.end <= pb.offset or pb.end <= pa.offset:
                continue
            first, second = sorted([lives[a], lives[b]])
            assert first[1] < second[0], f"{a} and {b} share bytes while both live"


@examples(60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs())
def test_every_declared_tensor_is_placed_or_explained(groups, program: Program):
    gm = trace(lambda *ts: run(program, groups, *ts), *make_inputs(program, 0))
    captured = capture_fx(gm)
    for site in captured.sites:
        if site.how is None:
            assert site.reason
        else:
            assert site.buffer in {b.name for b in captured.problem.buffers}
            assert (site.how == "stage") == bool(site.reason)
    declared = sum(
        n.op == "call_function"
        and isinstance(n.target, torch._ops.OpOverload)
        and symmplan.requirements(n.target) is not None
        for n in gm.graph.nodes
    )
    assert len({s.node for s in captured.sites}) == declared


class _Reductions(TorchDispatchMode):
    """The names of groups and reductions, which the dispatcher gives in boxes."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append((boxed_group(args[1]), boxed_reduction(args[2])))
        return func(*args, **(kwargs or {}))


def test_plain_reductions_have_names_and_scaled_ones_none(groups):
    kinds = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")
    x, world = torch.ones(4), dist.group.WORLD.group_name
    for kind in kinds:
        plain = getattr(dist.ReduceOp, kind)
        with _Reductions() as seen:
            dist.all_reduce(x, op=plain)
            dist.all_reduce(x, op=dist.ReduceOp(plain))
        assert seen.names == [(world, kind.lower())] * 2
    with _Reductions() as seen:
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(2.0))
    assert seen.names == [(world, None)]
