"""Kernels of torch's symmetric memory over CUDA's mappings, on the doubles of a device.

Those that add up all-reduces in a plan, and those that a program calls itself.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from doubles import on_devices, state
from ranks import pool_of
from test_on_devices import _on_hosts, _same, _turns, _without_races

import symmplan
from symmplan.device import device_of
from symmplan.memory import realize
from symmplan.place.algorithms import Lowerings
from symmplan.registry import spec_for

pytestmark = pytest.mark.ranks

F = torch.ops._c10d_functional
CPU = torch.device("cpu")

pair = pool_of(2, timeout=100.0)
four = pool_of(4, setup=_on_hosts, timeout=100.0)


def _sums(x, group):
    """All-reduces that torch's kernel adds up, and others, each with the bytes of others before."""
    total = F.wait_tensor(F.all_reduce(x.sin(), "sum", group))
    mean = F.wait_tensor(F.all_reduce(total * 2, "avg", group))
    most = F.wait_tensor(F.all_reduce(total.to(torch.float16), "max", group))
    gathered = F.wait_tensor(F.all_gather_into_tensor(mean, 2, group))
    odd = F.wait_tensor(F.all_reduce(x[0, :3].bfloat16(), "sum", group))
    even = F.wait_tensor(F.all_reduce(x[0, :2].bfloat16() + mean[0, 0].bfloat16(), "sum", group))
    many = F.all_reduce_coalesced([gathered.cos(), gathered + 1], "sum", group)
    turned, flat = x.t() * 3, total.tan()
    if not torch.compiler.is_compiling():  # AOTAutograd knows no ops that return what they write
        F.wait_tensor(F.all_reduce_(turned, "sum", group))
        F.wait_tensor(F.all_reduce_(flat, "sum", group))
    return most, odd, even, turned, flat, *(F.wait_tensor(each) * 2 for each in many)


def _many_sums(rank, world, how, inner="eager"):
    torch._dynamo.reset()
    plain = torch.compile(_sums, backend=inner, fullgraph=True) if how == "graph" else _sums
    group, turns = _turns(rank, by=plain)
    torch._dynamo.reset()
    before, wrong = len(state().kernels), []
    given = {"memory": "cuda", "choose": "placed", "timeout": 30.0}
    if how == "graph":
        backend = symmplan.backend(inner=inner, **given)
        compiled = torch.compile(_sums, backend=backend, fullgraph=True)
        wrong = [i for i, (x, want) in enumerate(turns) if not _same(compiled(x, group), want)]
        plan = backend.plans[0]
        backend.release()
    else:
        with symmplan.eager(**given) as session:
            for i, (x, want) in enumerate(turns):
                if not _same(_sums(x, group), want):
                    wrong.append(i)
                session.step()
            plan = session.plan
    kernels = sum("two_shot" in name for name in state().kernels[before:])
    others = {u.reason for u in plan.unplanned if "adds up" in u.reason}
    return wrong, kernels, len(others), [s.signal_pad for s in plan.segments], state().refused


@pytest.mark.parametrize("how", ["graph", "session"])
def test_all_reduces_that_a_kernel_adds_up(pair, how):
    races = how == "session"  # which no compiled graph can look for
    first, second = pair.run(_without_races if races else on_devices, _many_sums, how)
    assert first == second
    wrong, kernels, others, pads, refused = first
    assert (wrong, refused) == ([], [])
    assert kernels >= 4 * 4
    assert others == 1
    assert any(pads)


@pytest.mark.further
def test_all_reduces_of_inductor_s_graphs(pair):
    first, second = pair.run(on_devices, _many_sums, "graph", "inductor")
    assert first == second
    wrong, kernels, _, _, refused = first
    assert (wrong, refused) == ([], [])
    assert kernels == 2 * 5  # Inductor's coalesced ones return what they write, in a list


@pytest.mark.parametrize("op", [F.all_reduce.default, F.all_reduce_.default])
def test_a_small_sum_is_no_meeting(op):
    """A rank reads its own bytes at once, and has the peers' words before they have its result."""
    run = Lowerings("cuda").as_run(spec_for(op), "group")
    assert (run.handshake, run.release, run.synchronizes) == (False, False, True)
    assert all(r.enters and r.releases for r in run.requirements)


def _small_sum(x, group):
    return F.wait_tensor(F.all_reduce(x.sin(), "sum", group)) * 2


def _gathered_sum(x, group):
    return F.wait_tensor(F.all_gather_into_tensor(_small_sum(x, group), 2, group))


def _automatic(rank, world, allocator, windows):
    """The memory of graphs of one backend, and what was wrong in them."""
    import torch.distributed as dist

    if allocator:
        state().memory.set_backend(allocator)
    if not windows:  # a torch that cannot register them: NCCL's memory is torch's allocator
        with mock.patch("symmplan.memory.backends.windows.has_windows", return_value=False):
            return _automatic(rank, world, allocator, windows=True)
    torch._dynamo.reset()
    group, found, wrong = dist.group.WORLD.group_name, [], []
    backend = symmplan.backend(inner="eager", choose="placed", timeout=30.0)
    large = torch.randn(1 << 22, generator=torch.Generator().manual_seed(rank))
    for program, x in ((_small_sum, large[:512]), (_gathered_sum, large[:64]), (_small_sum, large)):
        compiled = torch.compile(program, backend=backend, fullgraph=True, dynamic=False)
        want = program(x, group)
        if not all(torch.equal(compiled(x, group), want) for _ in range(3)):
            wrong.append(x.numel())
        found.append(sorted({arena.memory for arena in backend._pool.arenas}))
    backend.release()
    return wrong, found


@pytest.mark.long
@pytest.mark.parametrize(
    ("allocator", "windows", "found"),
    [
        ("", True, [["cuda"], ["cuda", "nccl"], ["cuda", "nccl"]]),
        ("NCCL", True, [["nccl"], ["nccl"], ["nccl"]]),
        ("", False, [["nccl"], ["nccl"], ["nccl"]]),
    ],
)
def test_small_sums_alone_have_mappings_by_default(pair, allocator, windows, found):
    assert pair.run(on_devices, _automatic, allocator, windows) == [([], found)] * 2


def _asked_for(rank, world, first, second):
    """The memory and algorithms of a graph of sums and one of gathers, of two backends."""
    import torch.distributed as dist

    torch._dynamo.reset()
    group, found = dist.group.WORLD.group_name, []
    x = torch.randn(1 << 12, generator=torch.Generator().manual_seed(rank))
    for program, given in ((_small_sum, first), (_gathered_sum, second)):
        backend = symmplan.backend(inner="eager", timeout=30.0, **given)
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        assert torch.equal(compiled(x, group), program(x, group))
        arenas = [arena.memory for arena in backend._pool.arenas]
        ran = backend.check(lambda run=compiled: run(x, group)).calls
        found.append((arenas, [call.planned.algorithm for call in ran]))
        backend.release()
    return found


@pytest.mark.parametrize(
    ("first", "second", "memory"),
    [
        ({"choose": "copy engine"}, {"choose": "copy engine"}, "nccl"),
        ({"choose": "placed"}, {"choose": "copy engine"}, "cuda"),
        ({"choose": "placed", "collectives": "process group"}, {"choose": "placed"}, "nccl"),
    ],
)
def test_graphs_of_sums_cost_others_no_copy_engines(pair, first, second, memory):
    gathers = "copy engine" if second["choose"] == "copy engine" else "symmetric"
    for found in pair.run(on_devices, _asked_for, first, second):
        assert found == [([memory], ["symmetric"]), (["nccl"], ["symmetric", gathers])]


class _SummedBoth(torch.autograd.Function):
    """Sums in forward and in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _small_sum(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return _small_sum(gradient, ctx.group), None


def _trained(rank, world):
    """The memory of a graph of sums that has a backward."""
    import torch.distributed as dist

    torch._dynamo.reset()
    group, weight = dist.group.WORLD.group_name, torch.nn.Parameter(torch.ones(64))
    backend = symmplan.backend(inner="eager", choose="placed", timeout=30.0)
    compiled = torch.compile(_SummedBoth.apply, backend=backend, fullgraph=True)
    compiled(weight * rank, group).sum().backward()
    found = [arena.memory for arena in backend._pool.arenas]
    backend.release()
    return found


def test_graphs_with_a_backward_keep_nccls_memory(pair):
    assert pair.run(on_devices, _trained) == [["nccl"]] * 2


def _within(rank, world):
    """The memory of a graph of sums over some of the job's ranks."""
    import torch.distributed as dist

    torch._dynamo.reset()
    group = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"].get_group()
    backend = symmplan.backend(inner="eager", choose="placed", timeout=30.0)
    compiled = torch.compile(_small_sum, backend=backend, fullgraph=True)
    compiled(torch.ones(64), group.group_name)
    found = [arena.memory for arena in backend._pool.arenas]
    backend.release()
    return found


@pytest.mark.further
def test_sums_over_some_ranks_leave_torchs_allocator_to_others(four):
    assert four.run(on_devices, _within) == [["nccl"]] * 4


def _elsewhere(rank, world, how):
    """All-reduces that start on one stream and are waited for on another."""
    import torch.distributed as dist

    group, there, wrong = dist.group.WORLD.group_name, device_of(CPU), []
    main, side = there.current_stream(), there.new_stream()
    with symmplan.eager(memory="cuda", choose="placed", timeout=30.0) as session:
        for step in range(5):
            total, work = torch.full((64,), 3.0 * (rank + step)), None
            if how == "functional":
                total = F.all_reduce(total, "sum", group)
            else:
                work = dist.all_reduce(total, async_op=True)
            with there.on_stream(side):
                total = F.wait_tensor(total) if work is None else total
                if work is not None:
                    (work if how == "wait" else work.get_future()).wait()
                found = total - 1
            main.wait_stream(side)
            side.synchronize()
            wanted = sum(3.0 * (r + step) for r in range(world)) - 1
            wrong += [] if found.tolist() == [wanted] * 64 else [(step, found[0].item(), wanted)]
            del total, work, found
            session.step()
        served = session.stats.served
    return wrong, served, sum("two_shot" in name for name in state().kernels)


@pytest.mark.parametrize("how", ["functional", "wait", "future"])
def test_another_stream_may_wait_for_the_kernel(pair, how):
    for wrong, served, kernels in pair.run(_without_races, _elsewhere, how):
        assert not wrong
        assert served == kernels == 4


@pytest.mark.further
def test_over_two_hosts_there_is_no_kernel_and_another_stream_may_wait(four):
    for wrong, served, kernels in four.run(on_devices, _elsewhere, "functional"):
        assert not wrong
        assert (served, kernels) == (4, 0)


def _meetings(rank, world):
    """The channels of the signal pad on which a kernel and a segment's barrier meet."""
    import torch.distributed as dist

    group = dist.group.WORLD.group_name
    problem = symmplan.Problem.from_intervals([("x", 0, 1, 64)])
    with realize(symmplan.plan(problem), memory="cuda", device=CPU, timeout=30.0) as arena:
        x = arena.tensor("x", torch.float32).fill_(1.0)
        torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group)
        (segment,) = arena.segments.values()
        segment.barrier()
        ((*_, handle),) = state().memory.handles
        return x.tolist(), sorted(handle().met)


def test_barriers_have_a_channel_that_no_kernel_has(pair):
    for sums, (first, last) in pair.run(on_devices, _meetings):
        assert set(sums) == {2.0}
        assert first == 0  # a block of the kernel
        assert last == 2048 // 4 // 2 - 1


class _Summed(torch.autograd.Function):
    """The sum over ranks of what a backward sums again."""

    @staticmethod
    def forward(ctx, x, group):
        y = (x * 2).sin()
        ctx.save_for_backward(y)
        ctx.group = group
        return torch.ops.symm_mem.one_shot_all_reduce(y, "sum", group)

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * torch.ops.symm_mem.one_shot_all_reduce(y, "sum", ctx.group), None


class _Kernels(torch.nn.Module):
    """Torch's kernels on parameters, and on what a forward leaves in placements."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.ours = torch.nn.ParameterList(torch.randn(4, 8) for _ in range(2))

    def forward(self, x, group):
        for weight in self.ours:
            total = torch.ops.symm_mem.one_shot_all_reduce(weight.detach(), "sum", group)
            x = _Summed.apply(x * weight, group) + total
        kept = F.wait_tensor(F.all_gather_into_tensor(x.detach(), 2, group))
        whole = F.wait_tensor(F.all_gather_into_tensor(x.detach() * 2, 2, group))
        total = torch.ops.symm_mem.one_shot_all_reduce(whole, "sum", group)  # as a gather left it
        return x.pow(2).sum() + total.sum() + kept.sin().sum()


def _plainly(tensor, reduce_op, group):
    return F.wait_tensor(F.all_reduce(tensor, reduce_op, group))


def _torchs_kernels(rank, world, how):
    """Steps with kernels of torch's on tensors that outlive a graph or a call: what is wrong."""
    import torch.distributed as dist

    torch._dynamo.reset()
    group, model = dist.group.WORLD.group_name, _Kernels(rank)
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def step(run, x):
        loss = run(x, group)
        loss.backward()
        found = [loss.detach().clone(), *(w.grad.clone() for w in model.ours)]
        model.zero_grad()
        return found

    with mock.patch.object(torch.ops.symm_mem, "one_shot_all_reduce", _plainly):
        want = [step(model, x) for x in inputs]
    given = {"memory": "cuda", "choose": "placed", "timeout": 30.0}
    wrong = []
    if how != "session":
        backend = symmplan.backend(inner=how, bind=True, **given)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        wrong = [i for i, x in enumerate(inputs) if not _close(step(compiled, x), want[i])]
        placed = backend.stats.placed
        backend.release()
    else:
        with symmplan.eager(**given) as session:
            for i, x in enumerate(inputs):
                if not _close(step(model, x), want[i]):
                    wrong.append(i)
                session.step()
            placed = session.stats.placed
    return wrong, placed, state().refused


def _close(got, want):
    return all(map(torch.allclose, got, want))


@pytest.mark.long
@pytest.mark.parametrize("how", ["eager", "inductor", "session"])
def test_torchs_kernels_find_what_outlives_a_graph(pair, how):
    for wrong, placed, refused in pair.run(on_devices, _torchs_kernels, how):
        assert (wrong, refused) == ([], [])
        assert placed
