"""What Inductor may do around a plan: options that move collectives, its code cache, copies."""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch
from crossing_checks import autograd_cache_wanted
from ranks import RankPool, pool_of

pytestmark = pytest.mark.ranks

F = torch.ops._c10d_functional
_ATEN = "aten_distributed_optimizations."


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group, size):
        ctx.group, ctx.size = group, size
        return F.wait_tensor(F.all_gather_into_tensor(part, size, group))

    @staticmethod
    def backward(ctx, grad):
        started = F.reduce_scatter_tensor(grad.contiguous(), "sum", ctx.size, ctx.group)
        return F.wait_tensor(started), None, None


def _loss(parts, x, group, size):
    """Four layers whose weights are gathered from their parts."""
    for part in parts:
        x = torch.nn.functional.gelu(x @ _Gather.apply(part * 0.5, group, size))
    return x.square().mean()


def _inputs(rank, size):
    torch.manual_seed(rank)
    parts = [torch.randn(32 // size, 32).requires_grad_() for _ in range(4)]
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(9))
    return parts, x


pair = pool_of(2, timeout=200.0)

#: Memory of one process: collectives stay asynchronous there.
single = pool_of(1, timeout=200.0)


# -- options that move and merge collectives ------------------------------------------------------


def _millisecond(*_node, **_size):
    """What overlap scheduling takes an op to last; it would ask a GPU."""
    return 1.0


def _without_gpu():
    """The same of the memory's speed."""
    for name in ("torch.utils._runtime_estimation", "torch._inductor.utils"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            for asked in ("get_gpu_dram_gbps", "get_device_dram_gbps", "get_device_tflops"):
                if hasattr(module, asked):
                    setattr(module, asked, lambda *_, **__: 100.0)
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    RuntimeEstimator._roofline_estimate = staticmethod(lambda function, *_: (function, 1.0))


_OPTIONS = {
    "nothing": {},
    "greedy reordering": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
    },
    "iterative reordering": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [
            "reorder_communication_preserving_peak_memory",
            "sink_waits_iterative",
        ],
    },
    "bucketing": {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all"},
    "overlap scheduling": {
        f"{_ATEN}enable_overlap_scheduling": True,
        f"{_ATEN}collective_bucketing": True,
        f"{_ATEN}insert_overlap_deps": True,
        f"{_ATEN}custom_runtime_estimation": _millisecond,
        f"{_ATEN}pre_bucketing_fsdp_collectives": False,
    },
}


def _with_option(rank, size, option):
    import torch.distributed as dist
    from torch._inductor import config

    import symmplan

    known = config.get_config_copy()
    wanted = {k: v for k, v in _OPTIONS[option].items() if k in known}
    if _OPTIONS[option] and not wanted:
        return None
    _without_gpu()
    torch._dynamo.reset()
    group = dist.group.WORLD.group_name
    parts, x = _inputs(rank, size)
    expected = _loss(parts, x, group, size)
    expected.backward()
    gradients = [p.grad.clone() for p in parts]
    ran = []
    if "reorder_for_compute_comm_overlap_passes" in wanted:
        wanted["reorder_for_compute_comm_overlap_passes"] = [
            *wanted["reorder_for_compute_comm_overlap_passes"],
            lambda nodes: ran.append(len(nodes)) or nodes,
        ]
    backend = symmplan.backend(timeout=60.0, debug="poison")
    try:
        with config.patch(force_disable_caches=True, **wanted):
            compiled = torch.compile(_loss, backend=backend, fullgraph=True)
            for _ in range(2):
                for part in parts:
                    part.grad = None
                loss = compiled(parts, x, group, size)
                loss.backward()
                torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
                for part, gradient in zip(parts, gradients, strict=True):
                    torch.testing.assert_close(part.grad, gradient, rtol=1e-4, atol=1e-5)
        return {
            "stats": backend.stats,
            "reordered": len(ran),
            "reasons": sorted({u.reason for p in backend.plans for u in p.unplanned}),
        }
    finally:
        dist.barrier()
        backend.release()


@pytest.mark.parametrize("ranks", ["single", pytest.param("pair", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "option",
    [
        pytest.param("greedy reordering", marks=pytest.mark.slow),
        pytest.param("iterative reordering", marks=pytest.mark.slow),
        pytest.param("bucketing", marks=pytest.mark.slow),
        pytest.param("overlap scheduling", marks=pytest.mark.slow),
    ],
)
@pytest.mark.further
def test_options_of_inductor_leave_results_and_placements_alone(request, ranks, option):
    first, *others = request.getfixturevalue(ranks).run(_with_option, option)
    if first is None:
        pytest.skip("this torch has no such option")
    assert all(other == first for other in others)
    stats = first["stats"]
    # Shared memory wants one side of a collective only.
    assert [r for r in first["reasons"] if "may lie anywhere" not in r] == []
    assert stats.segment_bytes == stats.lower_bound_bytes
    assert (first["reordered"] > 0) == ("reordering" in option)
    declared = stats.placed + stats.unplanned
    if "reordering" in option:
        assert declared == 16
    else:  # the gathers have become one, or the reduce-scatters have
        assert 4 <= declared < 16


# -- code caches ----------------------------------------------------------------------------------


def _program(x, w, group, size):
    gathered = F.wait_tensor(F.all_gather_into_tensor(x.relu(), size, group))
    part = F.wait_tensor(F.reduce_scatter_tensor(gathered @ w, "sum", size, group))
    return part.sin() + F.wait_tensor(F.all_reduce(part * 2, "sum", group))


def _padded(plan_problem):
    """A planner that begins every segment with bytes of its own: other offsets, nothing else."""
    from attrs import evolve

    from symmplan.model import Access, Buffer

    def plan(problem, **options):
        first, last = problem.operations[0].name, problem.operations[-1].name
        pad = Buffer("pad", 1 << 16, problem.buffers[0].group)
        return plan_problem(
            evolve(
                problem,
                buffers=(pad, *problem.buffers),
                accesses=(
                    *problem.accesses,
                    *(Access(name, "pad", write=True) for name in (first, last)),
                ),
            ),
            **options,
        )

    return plan


#: Algorithms to compile one and the same program, each of which has code of its own.
_ALGORITHMS = ("placed", "poisoned", "moved", "left out")


def _cached(rank, size, directory):
    """``{algorithm: (hits, misses)}`` of Inductor's code cache, results being right."""
    import os
    from pathlib import Path

    import torch.distributed as dist
    from torch._dynamo.utils import counters
    from torch._inductor import config

    import symmplan
    from symmplan.choose import trials
    from symmplan.runtime import prepare

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(directory) / str(rank))
    autograd_cache_wanted()
    group = dist.group.WORLD.group_name
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    w = torch.randn(8, 8, generator=torch.Generator().manual_seed(9))
    expected = _program(x, w, group, size)
    found = {}
    planner, fastest = prepare.plan_problem, trials.fastest
    for algorithm in _ALGORITHMS:
        torch._dynamo.reset()
        counters.clear()
        trials.forget()
        choose = "measure" if algorithm == "left out" else "placed"
        trials.fastest = lambda *_, **__: "ordinary"  # whatever is measured
        prepare.plan_problem = _padded(planner) if algorithm == "moved" else planner
        backend = symmplan.backend(
            timeout=60.0, choose=choose, debug=algorithm == "poisoned" and "poison"
        )
        try:
            with config.patch(fx_graph_cache=True, fx_graph_remote_cache=False):
                compiled = torch.compile(_program, backend=backend, fullgraph=True)
                for _ in range(2):
                    got = compiled(x, w, group, size)
                    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            count = counters["inductor"]
            found[algorithm] = (count["fxgraph_cache_hit"], count["fxgraph_cache_miss"])
            assert counters["aot_autograd"]["autograd_cache_hit"] == 0, algorithm
            assert (backend.stats.placed == 0) == (algorithm == "left out")
        finally:
            prepare.plan_problem, trials.fastest = planner, fastest
            dist.barrier()
            backend.release()
    return found


@pytest.mark.slow
def test_the_plan_is_part_of_what_the_code_cache_goes_by(tmp_path):
    runs = []
    for _ in range(2):  # two processes per rank, one after the other
        with RankPool(2, timeout=200.0) as ranks:
            first, second = ranks.run(_cached, str(tmp_path))
        assert first == second
        runs.append(first)
    assert runs == [dict.fromkeys(_ALGORITHMS, (0, 1)), dict.fromkeys(_ALGORITHMS, (1, 0))]


# -- copies ---------------------------------------------------------------------------------------


def _chain(_parts, x, group, size):
    """Products, loops and collectives feed each other; nothing that is gathered leaves."""
    hidden = (x @ x.t()).relu()
    gathered = F.wait_tensor(F.all_gather_into_tensor(hidden, size, group))
    square = (gathered @ gathered.t()).sin()
    part = F.wait_tensor(F.reduce_scatter_tensor(square @ square, "sum", size, group))
    total = F.wait_tensor(F.all_reduce(part.cos(), "sum", group))
    return total.sum() + part.square().sum()


def _kernels(rank, size, function):
    """``{side: kernels that Inductor generated}``, and the tensors that symmplan copies."""
    import torch.distributed as dist
    from torch._inductor import config, metrics

    import symmplan

    group = dist.group.WORLD.group_name
    parts, x = _inputs(rank, size)
    backend = symmplan.backend(timeout=60.0)
    found = {}
    try:
        with config.patch(force_disable_caches=True):
            for side, given in (("plain", "inductor"), ("symmplan", backend)):
                torch._dynamo.reset()
                metrics.reset()
                compiled = torch.compile(function, backend=given, fullgraph=True)
                result = compiled(parts, x, group, size)
                if result.requires_grad:
                    result.backward()
                found[side] = metrics.generated_kernel_count
        return found, backend.staged(), backend.stats
    finally:
        dist.barrier()
        backend.release()


@pytest.mark.parametrize("ranks", ["single", pytest.param("pair", marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", [_chain, _loss])
@pytest.mark.further
def test_no_copies_are_added_but_those_that_are_stated(request, ranks, function):
    kernels, staged, stats = request.getfixturevalue(ranks).run(_kernels, function)[0]
    # Each copy that cannot be fused is a kernel of its own.
    assert kernels["symmplan"] - kernels["plain"] <= len(staged)
    assert all(reason for *_, reason in staged)
    assert stats.bound >= 3
    if function is _chain:
        assert not staged


# -- inference with other options of Inductor -----------------------------------------------------


class _Split(torch.nn.Module):
    """A product that is summed over the ranks, and one with a gathered weight."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.part = torch.nn.Parameter(torch.randn(4, 8))
        self.register_buffer("scale", torch.randn(8))

    def forward(self, x, group):
        x = F.wait_tensor(F.all_reduce(self.first(x), "sum", group))
        # Torch's own freezing hangs where a weight alone is gathered.
        weight = F.wait_tensor(F.all_gather_into_tensor(self.part * x[0], 2, group))
        return F.wait_tensor(F.all_reduce(x @ weight.t() * self.scale, "sum", group)) + x


_INFERENCE = {
    "freezing": {"freezing": True},
    "freezing for good": {"freezing": True, "freezing_discard_parameters": True},
    "max_autotune": {"max_autotune": True, "coordinate_descent_tuning": True},
    "reduce-overhead": {"triton.cudagraphs": True},
}


def _inference(rank, size, option, bind):
    import torch.distributed as dist
    from torch._inductor import config

    import symmplan

    torch._dynamo.reset()
    torch.manual_seed(rank)
    model, group = _Split().eval(), dist.group.WORLD.group_name
    backend = symmplan.backend(memory="shm", timeout=60.0, bind=bind)
    inputs = [torch.randn(4, 8) for _ in range(3)]
    with torch.no_grad():
        wanted = [model(x, group) for x in inputs]
        with config.patch(_INFERENCE[option]):
            compiled = torch.compile(model, backend=backend, fullgraph=True)
            for x, want in zip(inputs, wanted, strict=True):
                torch.testing.assert_close(compiled(x, group), want)
    placed = backend.stats.placed
    backend.release()
    return placed


@pytest.mark.parametrize("bind", [False, True], ids=["copied", "pinned"])
@pytest.mark.parametrize("option", _INFERENCE)
@pytest.mark.further
def test_inference_with_other_options_of_inductor(pair, option, bind):
    first, second = pair.run(_inference, option, bind)
    assert first == second > 0
