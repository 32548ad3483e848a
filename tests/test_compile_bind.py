"""``bind=True``: parameters, buffers and static inputs that live in symmetric memory."""

from __future__ import annotations

import copy
import io
import itertools
import time

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from programs import Program, make_inputs, programs, run
from ranks import RankPool, pool_of

pytestmark = pytest.mark.ranks

F = torch.ops._c10d_functional
T = torch.ops.symmplan_test


def _setup(rank, size):
    import custom_ops

    custom_ops.load()


pool = pool_of(2, _setup, timeout=120.0)


def _group():
    import torch.distributed as dist

    return dist.group.WORLD.group_name


class _Model(torch.nn.Module):
    """Parameters that peers read, that are all-reduced, that are neither; a buffer that changes."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.read = torch.nn.Parameter(torch.randn(8, 8))
        self.summed = torch.nn.Parameter(torch.randn(8, 8))
        self.plain = torch.nn.Parameter(torch.randn(8, 8))
        self.register_buffer("count", torch.full((8, 8), 1.0 + rank))

    def forward(self, x):
        with torch.no_grad():
            self.count += 1
        read = T.peer_mean(self.read.detach(), _group())
        summed = _Reduce.apply(self.summed)
        total = F.wait_tensor(F.all_reduce(self.count, "sum", _group()))
        return (x @ read @ summed @ self.plain).square().mean() + total.mean() * (
            self.summed.mean() + self.read.mean()
        )


class _Other(_Model):
    """The same; compiled anew, because it is of another class."""


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return F.wait_tensor(F.all_reduce(x, "sum", _group()))

    @staticmethod
    def backward(ctx, grad):
        return F.wait_tensor(F.all_reduce(grad.contiguous(), "sum", _group()))


def _address(model):
    return {n: t.data_ptr() for n, t in model.state_dict(keep_vars=True).items()}


def _placed(model):
    from symmplan.memory import locate

    return {n for n, t in model.state_dict(keep_vars=True).items() if locate(t) is not None}


def _step(run_it, optimizer, x):
    optimizer.zero_grad()
    loss = run_it(x)
    loss.backward()
    optimizer.step()
    return loss.item()


def _trained(rank, size, inner):
    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner=inner, timeout=30.0, bind=True)
    found = []
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    for compiled in (False, True):
        model = _Model(rank)
        objects = {n: id(p) for n, p in model.named_parameters()}
        hooked = []
        model.summed.register_hook(lambda g, h=hooked: h.append(g.shape))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        run_it = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
        losses = [_step(run_it, optimizer, x) for _ in range(4)]
        assert objects == {n: id(p) for n, p in model.named_parameters()}
        found.append((losses, [t.detach().clone() for t in model.state_dict().values()]))
    (plain, expected), (ours, got) = found
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=0)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    stats, placed, staged = backend.stats, _placed(model), backend.staged()
    before = _address(model)
    backend.release()
    assert _placed(model) == set()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), got, strict=True))
    assert {n for n, a in _address(model).items() if a != before[n]} == placed
    _step(model, optimizer, x)  # in ordinary memory, as before
    return stats, placed, staged


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_training_with_parameters_in_symmetric_memory(pool, inner):
    first, second = pool.run(_trained, inner)
    assert first == second
    stats, placed, staged = first
    print(stats, staged)
    assert {"read", "summed"} <= placed
    assert "plain" not in placed
    assert stats.kept == len(placed)
    assert stats.missed == 0
    assert not any("outside" in row[3] for row in staged)


def _trained_on_copies(rank, size, inner):
    """Parameters that cannot stay in their placements: what backward needs is still right."""
    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner=inner, timeout=30.0, bind=True)
    found = []
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    for compiled in (False, True):
        model = _Model(rank)
        run_it = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
        losses = []
        kept = []
        for step in range(4):
            if step in (1, 2):  # the old parameters are still looked at
                kept.append(model.state_dict())
                model.load_state_dict({k: v * 0.5 for k, v in kept[-1].items()}, assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)  # so that it does not diverge
            # Two forward passes before their backward passes.
            optimizer.zero_grad()
            loss = run_it(x) + run_it(2 * x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append((losses, [t.detach().clone() for t in model.state_dict().values()], kept))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    copies = backend.stats.missed
    backend.release()
    return copies


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_training_with_parameters_that_cannot_stay(pool, inner):
    first, second = pool.run(_trained_on_copies, inner)
    assert first == second >= 8


# -- random programs and what may happen to their parameters between runs ------------------------


class _Holder(torch.nn.Module):
    """A random program whose inputs are parameters and buffers."""

    def __init__(self, program, groups, tensors):
        super().__init__()
        self.program, self.groups = program, groups
        for i, tensor in enumerate(tensors):
            if i % 2:
                self.register_buffer(f"t{i}", tensor)
            else:
                self.register_parameter(f"t{i}", torch.nn.Parameter(tensor, requires_grad=False))

    def forward(self):
        tensors = [getattr(self, f"t{i}") for i in range(len(self.program.inputs) + 1)]
        return run(self.program, self.groups, *tensors)


_ACTIONS = (
    "nothing",
    "update",
    "data",
    "assign",
    "assign, old one kept",
    "view kept",
    "data kept",
    "flat",
)


def _act(model, actions, turn, kept):
    """Do something to each tensor, the same to a model on ordinary memory."""
    with torch.no_grad():
        for i, action in enumerate(actions):
            tensor = getattr(model, f"t{i}")
            new = torch.full_like(tensor, 0.25 * (turn + 1)) + i
            if action == "update":
                tensor.mul_(0.5).add_(turn)
            elif action in ("data", "data kept"):
                tensor.data = new
                if action != "data":
                    kept.append(new)
            elif action in ("assign", "assign, old one kept"):
                state = model.state_dict()
                if action != "assign":
                    kept.append(state[f"t{i}"])
                model.load_state_dict({**model.state_dict(), f"t{i}": new}, assign=True)
            elif action == "view kept":
                kept.append(tensor.detach()[:1])
            elif action == "flat":  # both are views of one storage now
                flat = torch.cat([new, new])
                kept.append(flat)
                tensor.data = flat[: len(new)]


def _random(rank, size, program, plan_of_actions, inner):
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    groups = [dist.group.WORLD.group_name] * 2
    backend = symmplan.backend(
        inner=inner, timeout=30.0, debug=inner == "eager" or "poison", bind=True
    )
    models = [_Holder(program, groups, make_inputs(program, rank)) for _ in range(2)]
    compiled = torch.compile(models[1], backend=backend, fullgraph=True)
    kept: list[list[torch.Tensor]] = [[], []]
    try:
        for turn, actions in enumerate(plan_of_actions):
            expected = models[0]()
            got = compiled()
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            # One rank does something else than its peers.
            mine = actions if rank == 0 else actions[::-1]
            for model, held in zip(models, kept, strict=True):
                _act(model, mine, turn, held)
            torch.testing.assert_close(kept[1], kept[0])
            now = [dict(m.named_parameters()) | dict(m.named_buffers()) for m in models]
            torch.testing.assert_close(now[1], now[0])
        backend.release()
        torch.testing.assert_close(kept[1], kept[0])
        torch.testing.assert_close(models[1](), models[0]())
        return backend.stats.bound
    finally:
        backend.release()


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(
    program=Program((4, 4), (("reduce", 0, 0), ("peers", 1, 0)), (2, 3)),
    actions=[["data kept"] * 4, ["update"] * 4, ["update"] * 4],
)
@example(
    # No peer touches what is placed: the op writes its result elsewhere, and it is copied in.
    program=Program((2,), (("sum", 0, 0), ("relu", 1), ("relu", 0)), (0, 2)),
    actions=[["nothing"] * 4] * 2,
)
@given(
    program=programs(groups=1, max_steps=6),
    actions=st.lists(
        st.lists(st.sampled_from(_ACTIONS), min_size=4, max_size=4), min_size=2, max_size=4
    ),
)
def test_random_programs_with_parameters_that_change_between_runs(pool, program, actions):
    plan_of_actions = [a[: len(program.inputs) + 1] for a in actions]
    first, second = pool.run(_random, program, plan_of_actions, "eager")
    assert first == second


@pytest.mark.further
def test_parameters_that_change_between_runs_through_inductor(pool):
    program = Program((8, 8, 4), (("peers", 0, 0), ("reduce", 1, 0), ("scatter", 2, 0)), (3, 4, 5))
    actions = [
        (a, b, c, "nothing") for a, b, c in zip(_ACTIONS, _ACTIONS[2:], _ACTIONS[1:], strict=False)
    ]
    first, second = pool.run(_random, program, actions, "inductor")
    assert first == second >= 3


# -- single cases ----------------------------------------------------------------------------


def _late(rank, size, inner):
    """Rank 1 reads its peers' parameters late; rank 0 updates its own as soon as it may."""
    import symmplan

    @symmplan.symm_args("x", group="group_name", handshake=True)
    @torch.library.custom_op("symmplan_bind::late_total", mutates_args=())
    def late_total(x: torch.Tensor, group_name: str) -> torch.Tensor:
        placed = symmplan.handle(x, group_name)
        placed.barrier()
        time.sleep(0.3 * rank)
        return torch.stack([placed.peer(r) for r in range(placed.world_size)]).sum(0)

    @late_total.register_fake
    def _(x, _group_name):
        return torch.empty_like(x)

    torch._dynamo.reset()
    backend = symmplan.backend(inner=inner, timeout=30.0, bind=True)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.full((8,), 1.0 + rank), requires_grad=False)
    compiled = torch.compile(lambda: late_total(model.w, _group()) + 0, backend=backend)
    found = []
    try:
        for _ in range(3):
            found.append(compiled()[0].item())
            with torch.no_grad():
                model.w += 10
        torch.distributed.barrier()
        return found, backend.stats.barriers, backend.stats.kept
    finally:
        backend.release()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_peers_have_read_a_parameter_before_the_program_updates_it(pool, inner):
    for found, barriers, kept in pool.run(_late, inner):
        assert found == [3.0, 23.0, 43.0]
        assert (barriers, kept) == (1, 1)


def _reduced(backend):
    def program(w, x):
        return F.wait_tensor(F.all_reduce(w, "sum", _group())) * x

    return torch.compile(program, backend=backend)


def _shared_by_graphs(rank, size):
    """Graphs of a training and an evaluating model, another shape, a second model, tied weights."""
    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=30.0, bind=True)
    first, second = _Model(rank), _Other(rank + 7)
    second.read = first.read  # tied
    found = []
    try:
        for model in (first, second):
            compiled = torch.compile(model, backend=backend, dynamic=False)
            plain = copy.deepcopy(model)
            for rows in (4, 2, 4):
                x = torch.ones(rows, 8)
                torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-5)
                with torch.no_grad():
                    torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-5)
            stats = backend.stats
            found.append((stats.graphs, stats.kept, stats.rendezvous, stats.missed))
        return found, sum(a.segment_bytes for a in backend._pool.places.arenas)
    finally:
        backend.release()


def test_graphs_share_the_placements_of_their_parameters(pool):
    first, second = pool.run(_shared_by_graphs)
    assert first == second
    ((graphs, kept, _, copies), (_, all_kept, _, all_copies)), nbytes = first
    assert graphs >= 4
    assert (kept, copies, all_copies) == (2, 0, 0)
    assert all_kept == 3  # the second model brings one that the first has not
    assert nbytes == 3 * 256


def _outside(rank, size):
    """What a user does with a parameter that lives in symmetric memory."""
    import symmplan
    from symmplan.memory import locate

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=30.0, bind=True)
    compiled = _reduced(backend)
    layer = torch.nn.Linear(32, 16, bias=False)
    layer.weight.requires_grad_(False)
    layer.weight.fill_(1.0 + rank)
    static = torch.full((16, 32), 2.0)  # a persistent input that is no parameter
    torch._dynamo.mark_static_address(static)

    def whole(x):
        return compiled(layer.weight, x) + compiled(static, x)

    x = torch.ones(1)
    try:
        assert torch.equal(whole(x), torch.full((16, 32), 7.0))
        assert locate(layer.weight) is not None
        assert locate(static) is not None
        saved = io.BytesIO()
        torch.save(layer.state_dict(), saved)
        assert saved.tell() < 3 * layer.weight.nbytes  # not the whole segment
        saved.seek(0)
        loaded = torch.load(saved)["weight"]
        twin = copy.deepcopy(layer)
        for other in (loaded, twin.weight):
            assert torch.equal(other, layer.weight)
            assert locate(other) is None
        layer.weight.zero_()
        assert twin.weight[0, 0] == 1.0 + rank
        layer.weight.fill_(1.0 + rank)
        sent = layer.weight.detach().clone().share_memory_()  # other processes may look at it
        numpy = torch.from_numpy(torch.ones(16, 32).numpy())
        reasons = []
        for data in (sent, numpy):
            layer.weight.data = data
            address = data.data_ptr()
            got = whole(x)
            del data
            assert layer.weight.data_ptr() == address
            reasons += [row for row in backend.staged() if "outside" not in row[3]]
            assert torch.equal(
                got, torch.full((16, 32), 7.0 if address == sent.data_ptr() else 6.0)
            )
        layer.weight.data = layer.weight.data.clone()
        whole(x)
        assert locate(layer.weight) is not None  # it has moved in again
        return reasons, backend.staged(), backend.stats.missed
    finally:
        backend.release()


def test_what_users_do_with_parameters_in_symmetric_memory(pool):
    first, second = pool.run(_outside)
    assert first == second
    reasons, staged, copies = first
    assert len(reasons) == copies == 2
    for _, op, where, reason in reasons:
        assert (op, where) == ("_c10d_functional::all_reduce.default", "input")
        assert "p.data = p.data.clone()" in reason
    assert staged == ()


def _named(rank, size):
    """A replaced parameter that cannot take its place is named, with what to do."""
    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=30.0, bind=True)
    model = _Model(rank)
    compiled = torch.compile(model, backend=backend)
    try:
        with torch.no_grad():
            compiled(torch.ones(2, 8))
            old = model.state_dict()
            model.load_state_dict({k: v + 1 for k, v in old.items()}, assign=True)
            compiled(torch.ones(2, 8))
            named = backend.staged(), backend.stats.missed, backend.stats.kept
            del old
            compiled(torch.ones(2, 8))
        return named, backend.staged(), backend.stats.missed, backend.stats.kept
    finally:
        backend.release()


def test_a_replaced_parameter_is_named_until_it_has_moved_in(pool):
    first, second = pool.run(_named)
    assert first == second
    (rows, copies, _), after, all_copies, kept = first
    rows = [r for r in rows if "its storage leaves the graph" not in r[3]]
    assert len(rows) == copies == all_copies == 2
    assert all("drop those (state dicts, detached views)" in r[3] for r in rows)
    assert not any("replaced" in r[3] for r in after)
    assert kept == 2


def _distributed(rank, size, inner):
    """Parameters that are DTensors: their local parts move."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, init_device_mesh

    import symmplan
    from symmplan.memory import locate

    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (size,))
    backend = symmplan.backend(inner=inner, timeout=30.0, bind=True)
    results = []
    for compiled in (False, True):
        torch.manual_seed(rank)
        part = DTensor.from_local(torch.randn(8, 8), mesh, [Partial()], run_check=False)
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(part)
        del part  # it would share the parameter's storage

        def forward(x, m=model):
            whole = m.w.redistribute(placements=[Replicate()]).to_local()
            return (x @ whole).square().mean()

        run_it = torch.compile(forward, backend=backend) if compiled else forward
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        losses = [_step(run_it, optimizer, torch.ones(2, 8)) for _ in range(3)]
        results.append((losses, model.w.to_local().detach().clone()))
    torch.testing.assert_close(results[1], results[0])
    return backend.stats, locate(model.w.to_local()) is not None, backend.release()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_local_parts_of_distributed_parameters_move(pool, inner):
    first, second = pool.run(_distributed, inner)
    assert first == second
    stats, placed, _ = first
    assert placed
    assert (stats.kept, stats.missed) == (1, 0)


def _regional(rank, size):
    """One compiled graph for several layers: their parameters take turns."""
    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=30.0, bind=True)
    layers = [_Model(rank + i) for i in range(3)]
    plain = copy.deepcopy(layers)
    compiled = [torch.compile(layer, backend=backend) for layer in layers]
    counts = []
    try:
        for _ in range(4):
            for ours, expected in zip(compiled, plain, strict=True):
                with torch.no_grad():
                    x = torch.ones(2, 8)
                    torch.testing.assert_close(ours(x), expected(x), rtol=1e-4, atol=1e-5)
            counts.append(backend.stats.missed)
        return backend.stats.graphs, counts, sorted({r[3] for r in backend.staged()})
    finally:
        backend.release()


def test_parameters_of_several_modules_take_turns_in_one_graph(pool):
    first, second = pool.run(_regional)
    assert first == second
    graphs, counts, reasons = first
    assert graphs == 1
    # Once it is known, each of the two parameters of each layer is copied in, and none moves.
    assert [b - a for a, b in itertools.pairwise(counts[1:])] == [6, 6]
    assert any("several tensors take turns" in r for r in reasons)


def _gathered(rank, size, inner):
    """An all-gather that wants its input in symmetric memory, too, as NCCL's does."""
    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner=inner, memory="local", timeout=30.0, bind=True)
    layer = torch.nn.Linear(16, 16, bias=False)
    x = torch.ones(2, 16)

    def program(x):
        whole = F.wait_tensor(F.all_gather_into_tensor(layer.weight.detach(), size, _group()))
        return x @ whole.t()

    compiled = torch.compile(program, backend=backend)
    try:
        for _ in range(3):
            torch.testing.assert_close(compiled(x), program(x))
            with torch.no_grad():
                layer.weight += 1
        return backend.stats, backend.staged()
    finally:
        backend.release()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_gather_reads_parameters_where_they_lie(inner):
    with RankPool(1, timeout=120.0) as single:
        ((stats, staged),) = single.run(_gathered, inner)
    assert (stats.bound, stats.staged, stats.kept, stats.missed) == (2, 0, 1, 0)
    assert staged == ()
