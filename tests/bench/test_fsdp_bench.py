"""`symmplan bench fsdp`: it runs, compares, and says what is wrong."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import threading

import pytest
import torch

from symmplan.bench import fsdp as bench_fsdp
from symmplan.bench.parts import fsdp_tables, pooled
from symmplan.bench.parts.fsdp_ranks import difference, worst
from symmplan.bench.parts.fsdp_sides import HostClock, batch_of
from symmplan.bench.parts.llama import Llama, parts
from symmplan.bench.parts.pooled import PooledAllGather, install
from symmplan.bench.parts.profile import beside, gathers_of, summed
from symmplan.bench.parts.timing import in_turns
from symmplan.cli.shell import parser_of
from symmplan.errors import CommandError, UsageError
from symmplan.runtime.observe import DeviceEvent, kind_of


def options(*words):
    return parser_of("symmplan bench fsdp", bench_fsdp).parse_args(words)


def event(name, begin, end, launched=None):
    return DeviceEvent(name, begin, end, launched)


# Whole runs.


@pytest.mark.further
@pytest.mark.ranks
def test_a_small_benchmark_runs_and_compares():
    args = options("--layers", "2", "--dim", "16", "--steps", "2", "--tokens", "4")
    result = json.loads(json.dumps(bench_fsdp.run(args)))
    assert result["ok"]
    (run,) = result["runs"]
    assert set(run["sides"]) == {"plain", "kept", "symmplan", "unsharded"}
    for name, side in run["sides"].items():
        low, high = side["step_quartiles_ms"]
        assert 0 < low <= side["step_ms"] <= high
        assert side["issue_ms"] <= side["wall_ms"]
        assert side["profile"] is None
        assert (side["host_us"] is None) == (name == "unsharded")
    planned = run["sides"]["symmplan"]
    # Two layers gather twice and reduce once; the root has nothing of its own.
    assert planned["collectives"] == 2 * 3
    assert run["sides"]["kept"]["collectives"] == 2 * 2
    assert planned["difference"] == run["sides"]["kept"]["difference"] == 0.0
    assert planned["losses_equal"]
    assert planned["loss"] == run["sides"]["plain"]["loss"]
    stats = result["stats"]
    # The first of ten steps is recorded.
    assert stats["served"] + stats["plain"] == 9 * 2 * 3
    assert stats["copies"] == 0
    assert result["memory"]["symmplan"] == {"symmetric": stats["segment_bytes"]}
    assert "no symmetric memory" in result["skipped"]["pooled"]
    assert run["collectives_speedup"] > 0
    text = bench_fsdp.render(result)
    assert "the same bits" in text
    assert "speedup" in text
    assert "pooled: left out" in text
    assert max(len(line) for line in text.splitlines() if line.startswith(" ")) <= 80


@pytest.mark.further
@pytest.mark.ranks
def test_a_small_llama_runs_at_several_lengths():
    words = ("--model", "llama", "--layers", "2", "--dim", "32", "--steps", "1")
    result = bench_fsdp.run(options(*words, "--sequence", "8", "4", "--sides", "plain", "symmplan"))
    assert result["ok"]
    assert [run["tokens"] for run in result["runs"]] == [8, 4]
    assert result["dtype"] == result["reduce"] == "bfloat16"
    for run in result["runs"]:
        assert set(run["sides"]) == {"plain", "symmplan"}
        # Two layers, and the root's last norm, which is gathered once.
        assert run["sides"]["symmplan"]["collectives"] == 2 * 3 + 2
        assert run["sides"]["symmplan"]["difference"] == 0.0
        assert run["sides"]["symmplan"]["losses_equal"]
    assert result["stats"]["reordered"] == 0


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--ranks", "1"), "needs peers"),
        (("--model", "llama", "--dim", "20"), "share the width"),
        (["--room", "16"], "--room needs a GPU"),
        (["--vocabulary", "16"], "only a Llama has a vocabulary"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_starts(words, match):
    with pytest.raises(CommandError, match=match):
        bench_fsdp.run(options(*words))


def test_sides_that_do_not_exist_are_wrong_usage():
    with pytest.raises(UsageError, match="invalid choice: 'plan'"):
        options("--sides", "plan")


@pytest.mark.ranks
def test_a_benchmark_that_takes_too_long_says_so():
    with pytest.raises(CommandError, match="did not finish"):
        bench_fsdp.run(options("--timeout", "0.2"))


# What a result says.


def ranked(steps, difference=0.0, **more):
    """What a rank tells of one run: seconds of each side's steps."""
    sides = {
        name: {
            "times": {key: list(seconds) for key in ("step", "wall", "issue", "host")},
            "losses": [1.0],
            "collectives": 4,
            **({"difference": difference, "losses_equal": True} if name == "symmplan" else {}),
            **more,
        }
        for name, seconds in steps.items()
    }
    return {"tokens": 8, "sides": sides}


def told(device="cpu", **reduce):
    return {"device": device, "dtype": "float32", "reduce": "float32", **reduce}


def test_a_step_takes_as_long_as_its_slowest_rank():
    first = ranked({"plain": [1.0, 5.0, 3.0], "symmplan": [1.0, 1.0, 1.0]})
    second = ranked({"plain": [2.0, 1.0, 1.0], "symmplan": [2.0, 1.0, 1.0]})
    run = bench_fsdp._compared([first, second], told())
    plain = run["sides"]["plain"]
    assert plain["step_ms"] == 3000.0  # of 2, 5, 3
    assert plain["step_quartiles_ms"] == [2500.0, 4000.0]
    assert plain["collectives_ms"] == 3000.0
    assert plain["host_us"] == 3e6 / 4
    assert run["step_speedup"] == 3.0
    assert run["paired_speedup"] == 3.0  # of 2/2, 5/1, 3/1


def test_on_devices_the_host_does_not_wait_for_collectives():
    steps = {"plain": [1.0], "symmplan": [1.0]}
    run = bench_fsdp._compared([ranked(steps), ranked(steps)], told("cuda"))
    assert run["sides"]["plain"]["collectives_ms"] is None
    assert run["collectives_speedup"] is None
    assert run["sides"]["plain"]["host_us"] == 250_000.0


@pytest.mark.parametrize(
    ("apart", "ok"), [(0.0, True), (1e-7, True), (1e-3, False), (math.nan, False)]
)
def test_gradients_that_are_not_those_of_plain_fsdp_are_a_failed_check(apart, ok):
    steps = {"plain": [1.0], "symmplan": [1.0]}
    run = bench_fsdp._compared([ranked(steps), ranked(steps, apart)], told())
    assert bench_fsdp._right(run, told()) is ok


def test_bfloat16_reductions_may_round_differently():
    steps = {"plain": [1.0], "symmplan": [1.0]}
    run = bench_fsdp._compared([ranked(steps, 4e-3)], told())
    assert not bench_fsdp._right(run, told())
    assert not bench_fsdp._right(run, told(dtype="bfloat16"))
    assert bench_fsdp._right(run, told(dtype="bfloat16", reduce="bfloat16"))
    assert not bench_fsdp._right(run, told("cuda"))
    assert bench_fsdp._right(run, told("cuda", dtype="bfloat16"))


def test_a_rendered_profile_has_a_column_for_each_side():
    found = summed([event("nvjet_hsh", 0, 2_000_000), event("ncclDevKernel_X(a)", 0, 1_000_000)])
    found["forward"] = {"gathers": 3, "beside": 2}
    run = bench_fsdp._compared([ranked({"plain": [1.0], "symmplan": [1.0]}, profile=found)], told())
    lines = fsdp_tables._profile_lines(run, "tokens")
    assert lines[1].split() == ["plain", "symmplan"]
    assert ["GEMM", "2.00", "2.00"] in [line.split() for line in lines]
    assert "plain: 2 of 3 gathers in forward ran beside computation; 1 ncclDevKernel_X" in lines


# How it measures.


def test_every_side_is_first_in_turn():
    names = ["a", "b", "c"]
    orders = in_turns(names, 7)
    assert all(sorted(order) == names for order in orders)
    assert [order[0] for order in orders] == ["a", "b", "c", "a", "b", "c", "a"]


class Group:
    """Like FSDP2's parameter group: one method calls another, one raises."""

    def __init__(self):
        self.calls = []

    def unshard(self):
        self.calls.append("unshard")

    def wait_for_unshard(self):
        self.calls.append("wait")
        self.unshard()

    def post_backward(self):
        raise ValueError("broken")


def test_the_clock_counts_nested_calls_once_and_leaves_no_trace(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    group, own = Group(), Group()
    own.unshard = mine = lambda: own.calls.append("mine")
    clock = HostClock([group, own])
    with clock.running():
        group.wait_for_unshard()
        thread = threading.Thread(target=own.unshard)  # backward is another thread's
        thread.start()
        thread.join()
        with pytest.raises(ValueError, match="broken"):
            group.post_backward()
    assert group.calls == ["wait", "unshard"]
    assert own.calls == ["mine"]
    assert clock.read() == 3  # each of three calls began and ended a tick apart
    assert clock.read() == 0
    assert vars(group) == {"calls": group.calls}
    assert own.unshard is mine
    group.unshard()
    assert clock.read() == 0


def test_the_clock_does_not_undo_what_others_changed_meanwhile():
    group = Group()
    with HostClock([group]).running():
        group.unshard = changed = lambda: None
    assert group.unshard is changed


def test_a_difference_is_a_part_of_the_whole():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([0.0])
    assert difference([a, b], [a.clone(), b.clone()]) == 0.0
    assert difference([a, b], [a, torch.tensor([1.0])]) == pytest.approx(0.2)
    assert math.isnan(difference([a], [torch.tensor([3.0, math.nan])]))
    assert difference([], []) == 0.0
    assert worst([0.1, 0.2]) == 0.2
    assert math.isnan(worst([0.1, math.nan, 0.2]))
    with pytest.raises(ValueError, match="shorter"):
        difference([a, b], [a])


def test_batches_differ_between_ranks_and_steps_only():
    said = {"model": "llama", "dim": 16, "dtype": "bfloat16", "device": "cpu"}
    first = batch_of(said, 0, 0, 4)
    assert first.shape == (1, 4, 16)
    assert first.dtype == torch.bfloat16
    assert first.requires_grad
    assert torch.equal(first, batch_of(said, 0, 0, 4))
    assert not torch.equal(first, batch_of(said, 1, 0, 4))
    assert not torch.equal(first, batch_of(said, 0, 1, 4))
    assert not batch_of({**said, "model": "mlp"}, 0, 0, 4).requires_grad


# Models.


def test_llama_has_the_shapes_of_llama_3():
    with torch.device("meta"):
        model = Llama(2, 4096)
    assert len(parts(model)) == 2
    shapes = sorted(tuple(p.shape) for p in parts(model)[0].parameters())
    assert shapes == sorted(
        [
            (4096,),
            (4096,),
            (4096, 4096),
            (1024, 4096),
            (1024, 4096),
            (4096, 4096),
            (14336, 4096),
            (14336, 4096),
            (4096, 14336),
        ]
    )


def test_llama_is_causal_and_knows_places():
    torch.manual_seed(0)
    model = Llama(2, 32)
    x = torch.randn(1, 6, 32)
    changed = x.clone()
    changed[0, 4] += 1
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 5], after[:, 5])
    # One layer that knew no places would see the same set of tokens twice.
    model = Llama(1, 32)
    moved = torch.stack([x[0, 0], x[0, 1], x[0, 0], x[0, 0]])[None]
    swapped = torch.stack([x[0, 0], x[0, 0], x[0, 1], x[0, 0]])[None]
    assert not torch.allclose(model(moved)[0, 3], model(swapped)[0, 3], atol=1e-5)


# Torch's pool.


class FakeGroup:
    group_name = "ranks"


@contextlib.contextmanager
def entered(log, pool):
    log.append(("from", pool))
    yield


def test_a_pooled_gather_rendezvouses_at_every_call(monkeypatch):
    log, ran = [], []
    monkeypatch.setattr(torch.cuda, "use_mem_pool", functools.partial(entered, log))
    monkeypatch.setattr(pooled.symm_mem, "pool", lambda device: f"pool of {device}")
    monkeypatch.setattr(
        pooled.symm_mem, "rendezvous", lambda tensor, group: log.append((tensor.data_ptr(), group))
    )
    gather = PooledAllGather(lambda **kwargs: ran.append(kwargs) or "work")
    group = FakeGroup()
    for _ in range(2):
        output = gather.allocate((8,), dtype=torch.bfloat16, device=torch.device("cpu"))
        assert (output.shape, output.dtype) == ((8,), torch.bfloat16)
        assert gather(output, output[:4], group, async_op=True) == "work"
        assert log[-2:] == [("from", "pool of cpu"), (output.data_ptr(), "ranks")]
    assert [r["async_op"] for r in ran] == [True, True]
    assert ran[1]["output_tensor"] is output


def test_torch_own_pool_is_used_where_it_has_one():
    class Module:
        def __init__(self):
            self.asked = []

        def set_symm_mem_for_comm(self, backend):
            self.asked.append(backend)

    modules = [Module(), Module()]
    assert install(modules) == "set_symm_mem_for_comm"
    assert [m.asked for m in modules] == [["NCCL"], ["NCCL"]]


# Profiles.


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "NCCL kernels"),
        ("ncclSymkDevKernel_AllGather_ST(ncclSymkDevWorkArgs4K)", "symmetric kernels"),
        ("Memcpy PtoP (Device -> Device)", "copy engines"),
        ("Memcpy DtoD (Device -> Device)", "local copies"),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<cutlass::bfloat16_t>>",
            "attention",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "GEMM"),
        ("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel", "copies out"),
        ("void at::native::chunk_cat_cuda_kernel<float, float>", "gradient copies in"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>>", "shard copies in"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp>", "sums"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_kernels_have_a_kind(name, kind):
    assert kind_of(name) == kind


def test_times_are_summed_by_kind():
    ring = "ncclDevKernel_ReduceScatter_RING_LL(args<4096ul>)"
    found = summed(
        [
            event("nvjet_a", 1_000_000, 3_000_000),
            event("nvjet_b", 2_000_000, 5_500_000),
            event(ring, 0, 1_000_000),
            event(ring, 6_000_000, 7_000_000),
            event("Memcpy PtoP (Device -> Device)", 3_000_000, 4_000_000),
        ]
    )
    assert found == {
        "span_ms": 7.0,
        "ms": {"GEMM": 5.5, "NCCL kernels": 2.0, "copy engines": 1.0},
        "counts": {"GEMM": 2, "NCCL kernels": 2, "copy engines": 1},
        "collectives": {"Memcpy PtoP": 1, "ncclDevKernel_ReduceScatter_RING_LL": 2},
    }
    assert summed([])["span_ms"] == 0.0


PEER = "Memcpy PtoP (Device -> Device)"


def test_copies_belong_to_the_gather_that_launched_them():
    calls = [(100, 200), (0, 50)]
    events = [
        event(PEER, 1_000, 2_000, 10),
        event(PEER, 2_001, 3_000, 110),  # nearly touches, but another call launched it
        event(PEER, 1_500, 4_000, 20),
        event("nvjet", 0, 9_000, 60),
        event("ncclDevKernel_ReduceScatter_RING(a)", 0, 9_000, 120),
    ]
    assert gathers_of(events, calls) == [(1_000, 4_000), (2_001, 3_000)]


def test_copies_that_nobody_knows_are_told_apart_by_gaps():
    events = [
        event(PEER, 0, 100_000),
        event(PEER, 50_000, 150_000),
        event(PEER, 160_000, 200_000),
        event(PEER, 500_000, 600_000, launched=7),  # outside of every call
        event("ncclSymkDevKernel_AllGather_ST(a)", 900_000, 950_000),
    ]
    expected = [(0, 200_000), (500_000, 600_000), (900_000, 950_000)]
    assert gathers_of(events) == expected
    assert gathers_of(events, [(10, 20)]) == expected
    inside = event(PEER, 700_000, 710_000, launched=4)
    assert gathers_of([*events, inside], [(2, 5)]) == sorted([*expected, (700_000, 710_000)])


def test_only_computation_hides_a_gather():
    gathers = [(0, 100), (200, 300), (400, 500), (600, 700)]
    events = [
        event("nvjet", 100, 200),  # touches both, runs beside none
        event("void at::native::split_with_sizes_copy_out", 0, 1_000),
        event("ncclDevKernel_AllGather_RING(a)", 0, 1_000),
        event("flash_fwd", 450, 650),
    ]
    assert beside(events, gathers) == 2
