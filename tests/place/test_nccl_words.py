"""What NCCL cannot gather in symmetric memory stays out of plans.

See `memory/backends/torch_symm.py`.

Decided without a device. What the devices do is in `gpu/test_memory_gpu.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from symmplan.capture import capture_fx
from symmplan.capture.fsdp_recording import Call, Key
from symmplan.integrate.fsdp.cases import case_of, why_not_measured
from symmplan.memory.backends.torch_symm import SPLIT_WORDS, is_whole_words
from symmplan.model import Algorithm
from symmplan.place.algorithms import Lowerings
from symmplan.runtime.measure import choose_algorithms
from symmplan.runtime.options import Options
from symmplan.runtime.prepare import Preparation

F = torch.ops._c10d_functional


def test_parts_are_whole_words_if_nothing_else_is_possible():
    assert is_whole_words(8)
    assert not is_whole_words(6)
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    rows = mode.from_tensor(torch.empty(5, 2)).shape[0]
    assert not isinstance(rows, int)
    assert is_whole_words(rows * 8)
    assert not is_whole_words(rows * 2)


def _gathers(x, y):
    whole = F.wait_tensor(F.all_gather_into_tensor(x.sin(), 2, "group"))
    odd = F.wait_tensor(F.all_gather_into_tensor(y.sin(), 2, "group"))
    both = F.all_gather_into_tensor_coalesced([x.cos(), y.cos()], 2, "group")
    total = F.wait_tensor(F.all_reduce(x.tan(), "sum", "group"))
    return whole.sum() + odd.sum() + total.sum() + sum(F.wait_tensor(b).sum() for b in both)


@pytest.mark.parametrize("memory", ["nccl", "cuda"])
def test_gathers_of_split_words_are_left_out(memory):
    inputs = torch.ones(8, dtype=torch.bfloat16), torch.ones(7, dtype=torch.bfloat16)
    module = make_fx(_gathers, tracing_mode="fake")(*inputs)
    lowerings = Lowerings(memory)
    captured = capture_fx(
        module,
        as_run=lowerings.as_run,
        skip=lowerings.skip,
        producer=lambda node: lowerings.producer(node, lambda _: None),
    )
    left_out = lowerings.partly(captured)
    gathers = [n for n in module.graph.nodes if "all_gather" in str(n.target)]
    if memory == "nccl":
        assert set(left_out) == set(gathers[1:])
        assert set(left_out.values()) == {SPLIT_WORDS}
    else:
        assert not left_out


def _call(kind, numel, dtype="bfloat16"):
    return Call(Key("model", kind, numel, dtype, kind == "reduce_scatter"), numel * 2, "g")


_MANY = 1 << 20


def test_fsdp_gathers_of_split_words_stay_in_ordinary_memory(monkeypatch):
    monkeypatch.setattr("symmplan.torch_private.nccl.has_copy_engine_policy", lambda: False)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")

    def case(numel):
        return case_of(_call("all_gather", numel), "nccl", cuda, 2)

    odd, even = (case(2 * (_MANY + n)) for n in (1, 2))
    preparation = Preparation(Options(choose="placed"), "a test", "a test")
    chosen = choose_algorithms({1: odd, 2: even}, {}, cuda, preparation, memory="nccl")
    assert chosen.algorithms == {1: Algorithm("ordinary", SPLIT_WORDS), 2: Algorithm("symmetric")}
    # What gains nothing is not measured.
    assert why_not_measured(odd, cuda) == SPLIT_WORDS
    assert why_not_measured(even, cuda) == ""
    assert "gain nothing" in why_not_measured(case(8), cuda)
    assert why_not_measured(case_of(_call("all_gather", 6), "shm", cpu, 2), cpu) == ""
    monkeypatch.setattr("symmplan.torch_private.nccl.has_copy_engine_policy", lambda: True)
    assert why_not_measured(odd, cuda) == ""  # copy engines gather them
