"""``bind=True``: parameters, buffers and static inputs that live in symmetric memory."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from ranks import RankPool, pool_of

pytestmark = pytest.mark.ranks

F = torch.ops._c10d_functional
T = torch.ops.symmplan_test


def _setup(rank, size):
    import custom_ops

    custom_ops.load()


pool = pool_of(2, setup=_setup, timeout=120.0)


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


@pytest.mark.further
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_training_with_parameters_that_cannot_stay(pool, inner):
    first, second = pool.run(_trained_on_copies, inner)
    assert first == second >= 8


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
        return found, sum(p.arena.segment_bytes for p in backend._pool.pinned)
    finally:
        backend.release()


@pytest.mark.further
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
