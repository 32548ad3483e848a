"""The compile backend on two real ranks: results, reuse of bytes, statistics, errors."""

from __future__ import annotations

import pytest
import torch
from custom_ops import GROUPS, meet
from hypothesis import HealthCheck, example, given, settings
from programs import Program, make_inputs, programs, run
from ranks import pool_of

from examples import examples

pytestmark = pytest.mark.ranks


pool = pool_of(2, setup=meet, timeout=120.0)


def _poison(backend):
    for arena in backend._pool.arenas:
        for segment in arena.segments.values():
            segment.tensor.fill_(255)


def _compare(rank, world_size, program: Program, inner: str, repeat: int):
    """Run the program plainly and compiled; return what differs, and the statistics."""
    import symmplan

    torch._dynamo.reset()
    inputs = make_inputs(program, rank)
    expected = run(program, GROUPS, *(x.clone() for x in inputs))
    backend = symmplan.backend(inner=inner, timeout=30.0, debug=inner == "eager" or "poison")
    compiled = torch.compile(
        lambda *tensors: run(program, GROUPS, *tensors), backend=backend, fullgraph=True
    )
    try:
        for turn in range(repeat):
            got = compiled(*(x.clone() for x in inputs))
            for i, (a, b) in enumerate(zip(got, expected, strict=True)):
                torch.testing.assert_close(
                    a, b, rtol=1e-4, atol=1e-5, msg=lambda m, i=i, t=turn: f"{t}.{i}: {m}"
                )
            torch.distributed.barrier()  # nobody reads any more
            _poison(backend)
            torch.distributed.barrier()
        for plan in backend.plans:
            plan.verify()
        stats = backend.stats
        return {
            "fingerprints": [p.fingerprint for p in backend.plans],
            "rendezvous": stats.rendezvous,
            "expected_rendezvous": sum(len(s.groups) for p in backend.plans for s in p.segments),
            "placed": stats.placed,
            "parts": (stats.staged, stats.bound),
        }
    finally:
        backend.release()


def _check(pool, program, inner, repeat=3):
    first, second = pool.run(_compare, program, inner, repeat)
    assert first == second
    assert first["rendezvous"] == first["expected_rendezvous"]
    assert first["placed"] == sum(first["parts"])


@examples(24, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs())
# An op's own all-gather reads what peers still read.
@example(
    program=Program(
        (2,),
        (*[("relu", 0)] * 3, ("peers", 1, 0), ("sum", 1, 0), ("relu", 0)),
        (4, 5),
    )
)
def test_random_programs_op_by_op(pool, program):
    _check(pool, program, "eager")


@pytest.mark.further
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(program=programs(max_steps=16))
# What one group gathered is written for another, and then the first wants it again.
@example(program=Program((2,), (("gather", 0, 1), ("bump", 1, 0), ("scatter", 1, 1)), (1, 2)))
def test_random_programs_through_inductor(pool, program):
    _check(pool, program, "inductor", repeat=2)


# -- training ---------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_gather_into_tensor(x, 2, group))

    @staticmethod
    def backward(ctx, grad):
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(
            ops.reduce_scatter_tensor(grad.contiguous(), "sum", 2, ctx.group)
        ), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", 2, group))

    @staticmethod
    def backward(ctx, grad):
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_gather_into_tensor(grad.contiguous(), 2, ctx.group)), None


class _Blocks(torch.nn.Module):
    """Sequence-parallel MLP blocks: gather, two products, scatter, a residual."""

    def __init__(self, layers: int, width: int, group: str) -> None:
        super().__init__()
        self.group = group
        self.up = torch.nn.ModuleList(torch.nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = torch.nn.ModuleList(torch.nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            hidden = torch.nn.functional.gelu(up(_Gather.apply(x, self.group)))
            x = x + _Scatter.apply(down(hidden), self.group)
        return x.square().mean()


def _train(model, x, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if step == 1:  # two forwards before their backwards
            first, second = model(x), model(x * 2)
            loss = first + second
        else:
            loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def _training(rank, world_size, inner):
    import symmplan

    torch._dynamo.reset()
    results = []
    backend = symmplan.backend(inner=inner, timeout=30.0)
    for compiled in (False, True):
        torch.manual_seed(rank)
        model = _Blocks(3, 32, GROUPS[0])
        x = torch.randn(16, 32)
        run_it = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
        results.append(_train(run_it, x, 4))
    (plain, plain_params), (ours, our_params) = results
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=0)
    for a, b in zip(our_params, plain_params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    (plan,) = backend.plans
    plan.verify()
    stats = backend.stats
    backend.release()
    return plan.fingerprint, stats, plan.peak_bytes, plan.lower_bound_bytes


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_forward_and_backward_share_one_segment(pool, inner):
    first, second = pool.run(_training, inner)
    assert first == second
    _, stats, peak, bound = first
    assert stats.rendezvous == 1
    assert peak == bound
    assert stats.segment_bytes < stats.unshared_bytes
    assert stats.placed == 2 * 3 * 2 - 1  # the first gather needs no gradient


def _after_release(rank, world_size):
    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=30.0)
    program = Program((4,), (("gather", 0, 0), ("sin", 1)), (2,))
    compiled = torch.compile(lambda *t: run(program, GROUPS, *t), backend=backend)
    inputs = make_inputs(program, rank)
    compiled(*inputs)
    backend.release()
    backend.release()  # once more does no harm
    try:
        compiled(*inputs)
    except symmplan.errors.ReleasedError as error:
        return str(error)
    return "no error"


def test_use_after_release_raises(pool):
    for text in pool.run(_after_release):
        assert "released" in text


def _mismatch(rank, world_size):
    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=30.0)
    rows = 4 if rank == 0 else 8
    program = Program((rows,), (("gather", 0, 0), ("sin", 1)), (2,))
    compiled = torch.compile(lambda *t: run(program, GROUPS, *t), backend=backend)
    try:
        compiled(*make_inputs(program, rank))
    finally:
        backend.release()


def test_ranks_that_compile_other_programs_all_get_an_error(pool):
    for outcome in pool.outcomes(_mismatch):
        assert outcome.error is not None
        assert outcome.error.kind == "AgreementError", outcome.error.text
        assert "all_gather_into_tensor" in outcome.error.text


def test_the_backend_is_installed_under_its_name():
    from torch._dynamo.backends.registry import lookup_backend

    from symmplan.integrate.compile.backend import symmplan as installed

    assert lookup_backend("symmplan") is installed


def test_a_model_without_declared_ops_compiles_as_usual():
    import symmplan

    backend = symmplan.backend(inner="eager")
    compiled = torch.compile(torch.nn.Linear(4, 4), backend=backend)
    assert compiled(torch.ones(2, 4)).shape == (2, 4)
    assert backend.stats.placed == 0
    assert backend.plans == ()


@pytest.mark.parametrize("bad", [{"inner": "xla"}, {"memory": "disk"}])
def test_unknown_names_are_refused_at_once(bad):
    import symmplan

    with pytest.raises(symmplan.errors.BackendError, match="unknown") as caught:
        symmplan.backend(**bad)
    assert caught.value.fix


def _wrong_memory(rank, world_size):
    import symmplan

    torch._dynamo.reset()
    program = Program((4,), (("gather", 0, 0), ("sin", 1)), (2,))
    backend = symmplan.backend(inner="eager", memory="nccl", timeout=30.0)
    torch.compile(lambda *t: run(program, GROUPS, *t), backend=backend)(*make_inputs(program, rank))


def test_memory_that_does_not_fit_the_device_is_refused(pool):
    for outcome in pool.outcomes(_wrong_memory):
        assert outcome.error is not None
        assert "memory='nccl': device cpu is not a CUDA device" in outcome.error.text
        assert 'fix: pass memory="shm"' in outcome.error.text


@pytest.mark.parametrize("given", [{"options": {"memory": "shm"}}, {"mode": "fastest"}])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_what_torch_compile_passes_on_is_checked(given, inner):
    import symmplan

    module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    with pytest.raises(symmplan.errors.BackendError) as caught:
        symmplan.backend(inner=inner)(module, [torch.ones(1, 2)], **given)
    assert caught.value.fix


@pytest.mark.further
def test_modes_of_inductor_are_passed_on():

    compiled = torch.compile(
        torch.nn.Linear(4, 4), backend="symmplan", mode="max-autotune-no-cudagraphs"
    )
    assert compiled(torch.ones(2, 4)).shape == (2, 4)


# -- tensor parallelism ---------------------------------------------------------------------------


class _Mlp(torch.nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def _parallel(mesh, *, sequence: bool):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = torch.nn.Sequential(_Mlp(), _Mlp())
    shard = {"input_layouts": Shard(0)} if sequence else {}
    whole = {"output_layouts": Shard(0)} if sequence else {}
    styles = {}
    for i in range(2):
        styles[f"{i}.up"] = ColwiseParallel(**shard)
        styles[f"{i}.down"] = RowwiseParallel(**whole)
        if sequence:
            styles[f"{i}.norm"] = SequenceParallel(sequence_dim=0)
    return parallelize_module(model, mesh, styles)


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _tensor_parallel(rank, world_size, inner, sequence):
    from torch.distributed.tensor import init_device_mesh

    import symmplan

    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (world_size,))
    backend = symmplan.backend(inner=inner, timeout=30.0)
    results = []
    for compiled in (False, True):
        model = _parallel(mesh, sequence=sequence)
        run_it = torch.compile(model, backend=backend) if compiled else model
        torch.manual_seed(5)
        x = torch.randn(8, 64)
        x = x.chunk(world_size)[rank].contiguous() if sequence else x
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            _local(run_it(x).square().mean()).backward()
            optimizer.step()
        results.append([_local(p.detach()).clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    stats = backend.stats
    (plan,) = backend.plans
    backend.release()
    return stats, plan.fingerprint


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_tensor_parallel_with_dtensor(pool, inner, sequence):
    first, second = pool.run(_tensor_parallel, inner, sequence)
    assert first == second
    stats, _ = first
    assert stats.rendezvous == 1
    assert stats.placed >= 4
    assert stats.segment_bytes == stats.lower_bound_bytes < stats.unshared_bytes
