"""A rank that is given a smaller batch compiles alone: right results, or one error on all ranks."""

from __future__ import annotations

import pytest
import torch
from ranks import pool_of

pytestmark = pytest.mark.ranks

F = torch.ops._c10d_functional
#: The store of the first process group.
_STORE: list = []


def _setup(rank, size):
    """Imports take longer than all the rest. Whatever is measured, symmetric memory is chosen."""
    from symmplan.choose import trials

    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    trials.fastest = lambda *_, **__: "symmetric"


three = pool_of(3, setup=_setup, timeout=120.0)


pair = pool_of(2, setup=_setup, timeout=120.0)


class _Gathered(torch.autograd.Function):
    """A parameter's shards are gathered; the gradient's sum is scattered."""

    @staticmethod
    def forward(ctx, shard, group):
        ctx.group = group
        return F.wait_tensor(F.all_gather_into_tensor(shard * 1, 2, group))

    @staticmethod
    def backward(ctx, grad):
        part = F.reduce_scatter_tensor(grad.contiguous(), "sum", 2, ctx.group)
        return F.wait_tensor(part), None


def _loss(x, shard, group):
    """The batch is no part of any collective."""
    whole = _Gathered.apply(shard, group)
    return ((x @ whole).relu() @ whole.t()).sin().sum()


def _uneven(rank, size, inner, dynamic, choose):
    """Training steps in which rank 1 now and then has fewer rows, and in the end both have."""
    import torch.distributed as dist

    import symmplan
    from symmplan.choose import trials

    torch._dynamo.reset()
    trials.forget()
    backend = symmplan.backend(inner=inner, timeout=60.0, choose=choose)
    compiled = torch.compile(_loss, backend=backend, dynamic=dynamic)
    torch.manual_seed(rank)
    group = dist.group.WORLD.group_name
    shard = torch.randn(4, 8, requires_grad=True)
    seen = []
    try:
        for rows in (6, 3 if rank else 6, 6, 1 if rank else 6, 5, 6):
            x = torch.randn(rows, 8)
            found, expected = (f(x, shard, group) for f in (compiled, _loss))
            torch.testing.assert_close(found, expected)
            gradients = (torch.autograd.grad(v, shard) for v in (found, expected))
            torch.testing.assert_close(*gradients)
            seen.append(backend.stats.graphs)
        return seen, backend.stats.rendezvous, backend.stats.placed > 0
    finally:
        dist.barrier()
        backend.release()


@pytest.mark.further
@pytest.mark.parametrize(
    ("inner", "dynamic", "choose"),
    [
        ("eager", False, "placed"),
        ("eager", None, "placed"),
        ("eager", False, "measure"),
        ("inductor", False, "placed"),
        ("inductor", None, "placed"),
    ],
)
def test_a_smaller_batch_on_one_rank_is_right_and_nobody_is_waited_for(
    pair, inner, dynamic, choose
):
    (first, *rest), (second, *others) = pair.run(_uneven, inner, dynamic, choose)
    assert rest == others == [1, True]
    assert first[:2] == [1, 1]
    assert second[:2] == [1, 2], "rank 1 compiled alone"


def _over_two(x, shard, group, other):
    """Two groups of one graph, and the batch is no part of any collective."""
    whole = F.wait_tensor(F.all_gather_into_tensor(shard * 1, 2, group))
    total = F.wait_tensor(F.all_reduce(shard * 2, "sum", other))
    return ((x @ whole).relu() @ total.t()).sum()


def _uneven_over_two(rank, size, choose):
    """Rank 1 alone compiles for fewer rows, over groups in which all was measured before."""
    import torch.distributed as dist

    import symmplan
    from symmplan.choose import trials

    torch._dynamo.reset()
    trials.forget()
    backend = symmplan.backend(inner="eager", timeout=20.0, choose=choose)
    compiled = torch.compile(_over_two, backend=backend, dynamic=False)
    groups = dist.group.WORLD.group_name, dist.new_group().group_name
    shard = torch.full((4, 8), rank + 1.0)
    seen = []
    try:
        for rows in (6, 3 if rank else 6, 6, 1 if rank else 6):
            x = torch.ones(rows, 8)
            expected = _over_two(x, shard, *groups)
            torch.testing.assert_close(compiled(x, shard, *groups), expected)
            seen.append(backend.stats.graphs)
        return seen, backend.stats.placed > 0
    finally:
        dist.barrier()
        backend.release()


@pytest.mark.parametrize("choose", ["placed", "measure"])
def test_over_two_groups_too_nobody_is_waited_for(pair, choose):
    (first, placed), (second, also) = pair.run(_uneven_over_two, choose)
    assert placed
    assert also
    assert first == [1, 1, 1, 1]
    assert second == [1, 2, 2, 3], "rank 1 compiled alone"


class _Layer(torch.nn.Module):
    """Peers read its parameter where it lies."""

    def __init__(self, group):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.group = group

    def forward(self, x):
        part = F.wait_tensor(F.reduce_scatter_tensor(self.weight, "sum", 2, self.group))
        return x @ part.t()


def _kept(rank, size):
    """The same with a parameter that lives in symmetric memory."""
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=60.0, bind=True)
    group = dist.group.WORLD.group_name
    model = _Layer(group)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    try:
        with torch.no_grad():
            for rows in (6, 3 if rank else 6, 6, 5, 5):
                x = torch.randn(rows, 8)
                torch.testing.assert_close(compiled(x), model(x))
        return backend.stats.kept, backend.stats.missed
    finally:
        dist.barrier()
        backend.release()


def test_kept_inputs_of_a_graph_that_one_rank_compiled_alone_stay_where_they_are(pair):
    first, second = pair.run(_kept)
    assert first == second == (1, 0)


def _gather(x, w, group, size):
    return F.wait_tensor(F.all_gather_into_tensor((x @ w).relu(), size, group)).sin()


def _alone(rank, size, dynamic, choose, bind, before):
    """Rank 1 has a declared tensor of another size; afterwards all start anew."""
    import torch.distributed as dist

    import symmplan

    group = dist.group.WORLD.group_name

    def steps(backend, rows):
        torch._dynamo.reset()
        compiled = torch.compile(_gather, backend=backend, dynamic=dynamic)
        w = torch.nn.Parameter(torch.randn(8, 8)) if bind else torch.randn(8, 8)
        for count in rows:
            x = torch.randn(count, 8)
            found = compiled(x, w, group, size)
        torch.testing.assert_close(found, _gather(x, w, group, size))

    make = {"inner": "eager", "timeout": 300.0, "choose": choose, "bind": bind}
    failing = symmplan.backend(**make)
    with pytest.raises(Exception, match="is planning a new graph") as caught:
        steps(failing, [4] * before + [8 if rank == 1 else 4])
    error = getattr(caught.value, "inner_exception", caught.value)
    new = symmplan.backend(**make)
    steps(new, [4, 6])
    dist.barrier()
    failing.release()
    new.release()
    return type(error).__name__, error.what, error.ranks, error.planning, error.running, error.fix


@pytest.mark.long
@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize(
    ("dynamic", "choose", "bind"),
    [(False, "placed", False), (None, "placed", True), (False, "measure", False)],
)
def test_a_new_plan_on_one_rank_alone_fails_on_all_at_once(three, dynamic, choose, bind, before):
    for rank, found in enumerate(three.run(_alone, dynamic, choose, bind, before)):
        kind, what, ranks, planning, running, fix = found
        assert kind == "AgreementError"
        assert ranks == (planning, running)
        assert planning == 1
        assert running == rank or rank == 1
        assert what == f"rank 1 is planning a new graph, rank {running} is running an old one"
        assert "drop or pad the last batch" in fix


def _elsewhere(rank, size):
    """Rank 0 waits in torch's own collective inside an old graph; who plans sees it all the same.

    On boards of their own, as on devices.
    """
    import torch.distributed as dist

    import symmplan
    from symmplan.memory.meeting.control import Meeting

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=300.0)
    group = dist.group.WORLD.group_name
    told = Meeting.told

    def told_by_counters(self):
        return told(self) if self.group.name == group and self._peers[0].numel() < 1024 else []

    Meeting.told = told_by_counters
    try:

        def model(x):
            y = F.wait_tensor(F.all_reduce_coalesced([x.sum()], "sum", group)[0])
            return _gather(x, torch.eye(64), group, size), y

        compiled = torch.compile(model, backend=backend, dynamic=False)
        compiled(torch.ones(16, 64))
        counters = next(iter(backend._pool.progress._counts.values())).made
        assert counters is not None
        if rank == 0:
            backend._pool.progress.run([dist.group.WORLD])
            while not dist.distributed_c10d._get_default_store().check(["said"]):
                pass
            with pytest.raises(symmplan.errors.AgreementError) as caught:
                compiled(torch.ones(16, 64))
        else:
            with pytest.raises(symmplan.errors.AgreementError) as caught:
                compiled(torch.ones(32, 64))
            dist.distributed_c10d._get_default_store().set("said", "")
        return caught.value.what
    finally:
        Meeting.told = told
        dist.barrier()
        backend.release()


@pytest.mark.long
def test_who_plans_sees_who_waits_elsewhere(pair):
    for what in pair.run(_elsewhere):
        assert what == "rank 1 is planning a new graph, rank 0 is running an old one"


def _in_ordinary_memory(rank, size, first):
    """Rank 1 plans alone where all was measured to be faster in ordinary memory."""
    import torch.distributed as dist

    import symmplan
    from symmplan.choose import trials

    torch._dynamo.reset()
    trials.forget()
    fastest, trials.fastest = trials.fastest, lambda *_, **__: "ordinary"
    backend = symmplan.backend(inner="eager", timeout=300.0, choose="measure")
    group = dist.group.WORLD.group_name
    compiled = torch.compile(_gather, backend=backend, dynamic=False)
    x, w = torch.randn(4, 8), torch.eye(8)
    try:
        for _ in range(2):
            torch.testing.assert_close(compiled(x, w, group, size), _gather(x, w, group, size))
        assert backend.stats.placed == 0
        (counts,) = backend._pool.progress._counts.values()
        if rank == 0:
            if first == "runs":  # and waits where nothing of symmplan's can look around
                compiled(x, w, group, size)
                return None
            while counts.epoch_counters[0].most_told(1) == counts.planned:
                pass
        elif first == "runs":
            while counts.epoch_counters[0].told()[0][-1] == counts.runs:
                pass
        with pytest.raises(Exception, match="is planning a new graph") as caught:
            compiled(torch.cat([x, x]) if rank else x, w, group, size)
        if first == "runs":
            _gather(x, w, group, size)  # what rank 0 waits for
        error = getattr(caught.value, "inner_exception", caught.value)
        assert isinstance(error, symmplan.errors.AgreementError)
        return error.what
    finally:
        trials.fastest = fastest
        dist.barrier()
        backend.release()
        _meet()


def _meet():
    """An exchange of all ranks: none of them is ahead of the others."""
    import symmplan
    from symmplan.memory import realize

    problem = symmplan.Problem.from_intervals([("x", 0, 1, 64)])
    realize(symmplan.plan(problem), memory="shm", timeout=20.0).release()


@pytest.mark.parametrize("first", ["plans", "runs"])
def test_who_plans_is_seen_where_nothing_is_placed(pair, first):
    runner, planner = pair.run(_in_ordinary_memory, first)
    assert planner == "rank 1 is planning a new graph, rank 0 is running an old one"
    assert runner == (planner if first == "plans" else None)


def _again(ranks, rank, name):
    """Other ranks make up the default process group, which has the same name."""
    import torch.distributed as dist

    if dist.is_initialized():
        _STORE.append(dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
    if rank in ranks:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(name, _STORE[0]),
            rank=ranks.index(rank),
            world_size=len(ranks),
        )


def _renamed(rank, size, choose, bind):
    """Ranks 0 and 1 compile and run, then 1 and 2: what is known of the first pair is void."""
    import torch.distributed as dist

    import symmplan
    from symmplan.choose import trials

    torch._dynamo.reset()
    trials.forget()
    backend = symmplan.backend(inner="eager", timeout=20.0, choose=choose, bind=bind)
    found, model = [], None
    try:
        for name, ranks in (("one", [0, 1]), ("two", [1, 2]), ("three", [0, 2])):
            _again(ranks, rank, f"{name} {choose} {bind}")
            if rank not in ranks:
                continue
            if choose == "measure":  # all of them compile, and so measure, or nobody
                torch._dynamo.reset()
            model = _Layer(dist.group.WORLD.group_name) if model is None else model
            compiled = torch.compile(model, backend=backend, dynamic=False)
            with torch.no_grad():
                for _ in range(2):
                    x = torch.randn(4, 8)
                    torch.testing.assert_close(compiled(x), model(x))
            found.append((model.group, backend.stats.graphs))
            dist.barrier()
        return found
    finally:
        backend.release()
        _again([0, 1, 2], rank, f"end {choose} {bind}")


_CHOICES = [("placed", False), ("placed", True), ("measure", False)]


@pytest.mark.long
@pytest.mark.parametrize(("choose", "bind"), _CHOICES)
def test_another_group_of_the_same_name_is_another(three, choose, bind):
    found = three.run(_renamed, choose, bind)
    assert {name for pairs in found for name, _ in pairs} == {"0"}
    if choose == "placed":
        assert [[graphs for _, graphs in pairs] for pairs in found] == [[1, 1]] * 3


def _without_board(rank, size, kind, stage):
    """Where one rank cannot have the memory in which ranks see each other; what both have then."""
    import torch.distributed as dist
    from budget_programs import failing

    from symmplan.coordination.groups import resolve_groups
    from symmplan.integrate.compile import progress

    name = dist.group.WORLD.group_name
    group = resolve_groups([name])[name]
    _meet()  # who is on which host
    with failing(stage, kind, here=rank == 1):
        made = progress._make(group, 20.0)
    total = torch.ones(1)
    dist.all_reduce(total)  # nobody is ahead, or gone
    again = progress._make(group, 20.0)
    again.release()
    return made is None, total.item()


@pytest.mark.parametrize("kind", ["MemoryError", "OSError", "RuntimeError", "BackendError"])
@pytest.mark.parametrize("stage", ["allocate", "rendezvous"])
def test_no_rank_sees_peers_where_one_has_no_memory_for_it(pair, kind, stage):
    assert pair.run(_without_board, kind, stage) == [(True, 2.0)] * 2
