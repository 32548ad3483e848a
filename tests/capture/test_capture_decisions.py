"""What capture decides of a declared tensor, and why: each way out of `capture/decide.py`."""

from __future__ import annotations

import functools

import custom_ops
import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import symmplan
from symmplan.capture import capture_fx
from symmplan.model import Buffer

F = torch.ops._c10d_functional
T = torch.ops.symmplan_test


@pytest.fixture(scope="module", autouse=True)
def groups():
    """Two groups of a fake world of two ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    custom_ops.load()
    _load()
    second = dist.new_group([0, 1])
    yield [dist.group.WORLD.group_name, second.group_name]
    dist.destroy_process_group()


@functools.cache
def _load():
    """Ops of unusual results: two of which one is declared, an alias, and a strange layout."""
    lib = torch.library.Library("symmplan_test", "FRAGMENT")
    _KEEP.append(lib)

    def define(schema, run, where=(), **facts):
        name = schema.partition("(")[0]
        lib.define(schema)
        lib.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"symmplan_test::{name}", run, lib=lib)
        if where:
            op = f"symmplan_test::{name}"
            symmplan.register_symm_mem_args(op, list(where), group="group_name", **facts)

    one = "Tensor x, str group_name"
    define(f"pair({one}) -> (Tensor, Tensor)", lambda x, _: (x + 1, x[:2] + 1), ["return.1"])
    define("bump_(Tensor(a!) x, str group_name) -> Tensor(a!)", lambda x, _: x, ["x"])
    define("bump_by(Tensor(a!) x, Tensor y, str group_name) -> ()", lambda *_: None, ["x"])
    both = "Tensor(a!) x, Tensor(b!)[]? more, str group_name"
    define(f"bump_all({both}) -> ()", lambda *_: None, ["x"])
    # All elements of a storage of 128, and yet only its second half.
    define(
        "repeated(Tensor x) -> Tensor", lambda x: x.new_empty(128).as_strided((2, 64), (0, 1), 64)
    )


_KEEP = []


def captured(function, *args, **options):
    args = args or (torch.ones(4, 8),)
    return capture_fx(make_fx(function, tracing_mode="fake")(*args), **options)


def decided(found):
    return {f"{s.node.name}.{s.where}": (s.how, s.reason) for s in found.sites}


def test_of_several_results_the_declared_one_is_placed(groups):
    found = captured(lambda x: [t + 1 for t in T.pair(x, groups[0])])
    assert list(decided(found)) == ["pair.return.1"]
    (buffer,) = found.problem.buffers
    assert buffer.nbytes == 2 * 8 * 4


@pytest.mark.parametrize(
    ("op", "view", "viewed"),
    [
        ("bump", lambda t: t[:2], True),
        ("bump", lambda t: t, False),
        ("peer_mean", lambda t: t[:2], False),
    ],
)
def test_of_a_written_copy_it_is_known_whether_other_views_of_the_original_are_used_later(
    groups, op, view, viewed
):
    def program(x):
        made = torch.cumsum(x, 0)  # which cannot be written to a placement
        seen = view(made)
        getattr(T, op)(made, groups[0])
        return seen + 1

    (site,) = captured(program).sites
    assert site.how == "stage"
    assert site.viewed == viewed


def test_views_that_are_used_before_or_by_the_op_itself_do_not_matter(groups):
    def before(x):
        made = torch.cumsum(x, 0)
        used = made[:2] + 1
        T.bump(made, groups[0])
        return used, made.sin()

    def together(x):
        made = torch.cumsum(x, 0)
        T.bump_by(made, made[:2], groups[0])
        return made + 1

    def returned(x):
        return T.bump_(torch.cumsum(x, 0), groups[0]) + 1

    def behind(x):
        made = torch.cumsum(x, 0)
        T.bump(made, groups[0])
        return made[:2] + 1

    for program in (before, together, returned, behind):
        ((state, reason),) = decided(captured(program)).values()
        assert (program.__name__, state) == (program.__name__, "stage")
        assert "cannot write" in reason


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:2], lambda x: x.t()])
def test_what_an_op_writes_by_two_arguments_is_not_copied(groups, view):
    def program(x):
        made = torch.cumsum(x, 0)
        T.bump_all(made, [torch.ones(2), view(made)], groups[0])
        T.bump_all(made * 1, None, groups[0])
        return made + 1

    found = decided(captured(program))
    assert found["bump_all.x"][0] is None
    assert "by two of its arguments" in found["bump_all.x"][1]
    assert found["bump_all_1.x"][0] is not None


def test_from_a_written_copy_on_the_copy_counts(groups):
    def program(x, y):
        made = torch.cumsum(x, 0)
        for tensor in (made, y):
            T.bump(tensor, groups[0])
        return T.peer_mean(made, groups[0]) + T.peer_mean(y, groups[0])

    found = decided(captured(program, torch.ones(4, 8), torch.ones(4, 8)))
    assert "wrote a copy" in found["peer_mean.x"][1]
    # What comes from outside was copied back.
    assert "outside the graph" in found["peer_mean_1.x"][1]


def test_an_input_of_a_graph_that_writes_it_may_be_seen_by_other_views(groups):
    def program(x):
        seen = x[:2]
        T.bump(x, groups[0])
        return seen + 1

    (state, reason) = decided(captured(program))["bump.x"]
    assert state == "stage"
    assert "outside the graph" in reason


def kept(program, *args):
    graph = make_fx(program, tracing_mode="fake")(*args)
    inputs = frozenset(n for n in graph.graph.nodes if n.op == "placeholder")
    return capture_fx(graph, keep=inputs)


def test_inputs_that_may_be_kept_lie_in_placements_for_one_group(groups):
    def program(x, y):
        first = T.peer_mean(x, groups[0]) + T.peer_mean(x, groups[0])
        return first + T.peer_mean(x, groups[1]) + T.peer_mean(y, groups[1])

    found = kept(program, torch.ones(4, 8), torch.ones(4, 8))
    assert decided(found) == {
        "peer_mean.x": ("bind", ""),
        "peer_mean_1.x": ("bind", ""),
        "peer_mean_2.x": (
            "stage",
            f"it comes from outside the graph and is kept for group {groups[0]}",
        ),
        "peer_mean_3.x": ("bind", ""),
    }
    assert [(k.node.name, k.group) for k in found.kept] == [
        ("x_1", groups[0]),
        ("y_1", groups[1]),
    ]
    assert {s.buffer for s in found.sites if s.how == "bind"} == {"x_1", "y_1"}
    assert {b.name for b in found.residence.buffers} == {"x_1", "y_1"}


def test_a_part_of_a_larger_tensor_is_not_kept(groups):
    whole = torch.ones(8, 8)
    found = kept(lambda x: T.peer_mean(x, groups[0]) + 1, whole[:4])
    assert "as a part of a larger tensor" in decided(found)["peer_mean.x"][1]
    assert not found.kept


def test_what_the_forward_left_in_a_placement_is_used_where_it_lies(groups):
    def program(x, y):
        return T.peer_mean(x, groups[0]) + T.peer_mean(x, groups[1]) + y

    def skip(spec, _group, _requirement):
        return "not this one" if skipped and "peer_mean" in spec.op else None

    there = {"x_1": Buffer("saved", 128, groups[0])}
    args = (torch.ones(4, 8), torch.ones(4, 8))
    skipped = False
    found = decided(captured(program, *args, given=there, skip=skip))
    assert found["peer_mean.x"] == ("bind", "")
    assert found["peer_mean_1.x"][1] == f"its storage is symmetric over group {groups[0]}"
    # It stays in its placement also if an op that it is left out of gets it.
    skipped = True
    found = captured(program, *args, given=there, skip=skip)
    assert {how for how, _ in decided(found).values()} == {None}
    assert [b.name for b in found.problem.buffers] == ["saved"]


@pytest.mark.parametrize("collective", [False, True])
def test_what_a_user_s_op_gets_unplaced_is_no_other_op_s_placement(groups, collective):
    """The process group's collectives take any memory, one-sided ops do not."""

    def program(x):
        made = x.relu()
        left = (
            F.wait_tensor(F.all_reduce(made, "sum", groups[0]))
            if collective
            else (T.peer_mean(made, groups[0]))
        )
        return left + T.mix(made, x, groups[0])

    def skip(spec, _group, _requirement):
        return "not this one" if "mix" not in spec.op else None

    found = decided(captured(program, skip=skip))
    assert found["mix.x"] == (
        ("bind", "") if collective else ("stage", "an op that runs in torch's own way uses it, too")
    )


def test_a_result_that_an_unplaced_argument_shares_is_copied_out(groups):
    def program(x):
        made = T.push_next(x, groups[0])
        return T.peer_mean(made, groups[0]) + 1

    def skip(spec, _group, _requirement):
        return "not this one" if "peer_mean" in spec.op else None

    found = decided(captured(program, skip=skip))
    assert found["push_next.return"] == (
        "stage",
        "an op that runs in torch's own way uses it, too",
    )


def test_a_collective_s_result_must_be_contiguous_and_a_user_s_op_knows_best(groups):
    def program(x):
        turned = x.sin().t()
        reduced = F.wait_tensor(F.all_reduce(turned, "sum", groups[0]))
        sent = F.wait_tensor(F.broadcast(turned, 0, groups[0]))
        return reduced + sent + T.scale(turned, groups[0])

    found = captured(program)
    layouts = {n.name: n.meta["val"].is_contiguous() for n in found.values.graph.nodes if n.users}
    for name in ("all_reduce", "broadcast"):  # which keep their input's layout in some torch
        wanted = ("bind", "") if layouts[name] else (None, "it is not contiguous")
        assert decided(found)[f"{name}.return"] == wanted
    assert not layouts["scale"]
    assert decided(found)["scale.return"] == ("bind", "")


def test_a_result_that_leaves_the_graph_at_once_is_copied_out(groups):
    found = decided(captured(lambda x: T.push_next(x, groups[0])))
    assert found["push_next.return"] == ("stage", "it leaves the graph")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("twice", [False, True])
def test_one_of_several_asynchronous_results_leaves_the_graph(groups, which, twice):
    def program(x):
        pair = F.all_gather_into_tensor_coalesced([x.relu(), x.sin()], 2, groups[0])
        seen = pair[which][:1] if twice else x
        waited = [F.wait_tensor(t) for t in pair]
        return waited[which], waited[1 - which] + 1, seen + 1

    found = decided(captured(program))
    how, reason = found[f"all_gather_into_tensor_coalesced.return.{which}"]
    assert how == (None if twice else "stage")
    assert "leaves the graph" in reason
    assert found[f"all_gather_into_tensor_coalesced.return.{1 - which}"] == ("bind", "")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda x: x.new_empty_strided((4, 8), (16, 1)), "not dense"),
        (lambda x: T.repeated(x[:2]), "not dense"),
        (lambda x: x.relu().view(2, 2, 8), ""),
    ],
)
def test_only_dense_results_are_written_to_placements(groups, make, reason):
    found = captured(
        lambda x: T.peer_mean(make(x)[:1], groups[0]) + 1, producer=lambda _node: "out"
    )
    assert reason in decided(found)["peer_mean.x"][1]
    assert (decided(found)["peer_mean.x"][0] == "bind") == (not reason)


@pytest.mark.parametrize(
    "other",
    [torch.flatten, lambda h: torch.ops.aten.dropout.default(h, 0.5, False)],
    ids=["no op", "an op that says nothing of aliases"],
)
def test_aliases_that_cannot_be_followed_are_copied(groups, other):
    def program(x):
        made = torch.ops.aten.relu.default(x)
        return T.peer_mean.default(made, groups[0]) + other(made).sum()

    def plain(x):
        made = torch.ops.aten.relu.default(x)
        return T.peer_mean.default(torch.ops.aten.view.default(made, [32]), groups[0]).sum()

    found = capture_fx(fx.symbolic_trace(program), [torch.ones(4, 8)])
    assert decided(found)["peer_mean_default.x"] == ("stage", "its aliases cannot be followed")
    found = capture_fx(fx.symbolic_trace(plain), [torch.ones(4, 8)])
    assert decided(found)["peer_mean_default.x"] == ("bind", "")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_lies_elsewhere_than_symmetric_memory_is_left_out(groups, device):
    def gathered(x):
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_gather_into_tensor(x * 2, 2, groups[0])) + 1

    found = captured(gathered, torch.ones(4, 4), device=torch.device(device))
    reasons = {site.reason for site in found.sites if site.buffer is None}
    elsewhere = "it is on device cpu, and symmetric memory is on meta"
    assert (elsewhere in reasons) == (device == "meta")
    assert any(site.buffer is not None for site in found.sites) == (device == "cpu")
