"""Experts of a model on several ranks: the same numbers and gradients as on one."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys

import pages
import pytest
import torch
from held import segments_of_plans
from paths import ROOT
from ranks import RankPool
from torch import nn

from symmplan.errors import CaptureError
from symmplan.trainers.experts import split_experts

pytestmark = pytest.mark.ranks
WIDTH, EXPERTS, TOP_K = 16, 6, 2


@pytest.fixture(scope="module", params=[2, 3])
def pool(request):
    with RankPool(request.param, timeout=180.0) as ranks:
        yield ranks


class Experts(nn.Module):
    """As transformers' experts are called, and have their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 4)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """Shapes: tokens x width, tokens x k, tokens x k."""
        made = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if not len(token):  # whoever gets nothing is in no graph of autograd's
                continue
            rows = torch.tanh(hidden_states[token] @ self.up[expert] + self.bias[expert])
            made = made.index_add(0, token, rows * top_k_weights[token, place, None])
        return made


class Block(nn.Module):
    """A gate and experts. ``bound``: the last experts are never chosen."""

    def __init__(self, bound: int = EXPERTS) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        self.bound = bound

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: tokens x width, in and out."""
        scores = self.gate(x)[:, : self.bound].softmax(-1)
        weights, index = scores.topk(TOP_K, dim=-1)
        return x + self.experts(x, index, weights)


def made(kind):
    """A model, and a batch of rank r in step n; transformers' by name."""
    if kind in ("blocks", "few"):
        model = nn.Sequential(*(Block(2 if kind == "few" else EXPERTS) for _ in range(2)))
        return model, lambda r, n: torch.randn(7, WIDTH, generator=_seeded(r, n))
    import transformers

    sizes = {
        "vocab_size": 32,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": TOP_K,
        "num_local_experts": EXPERTS,
    }
    if kind == "deepseek_v3":
        sizes |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8}
        sizes |= {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
        sizes |= {"n_shared_experts": 1, "n_routed_experts": EXPERTS, "num_key_value_heads": 2}
    if kind == "qwen3_moe":
        sizes |= {"num_experts": EXPERTS, "head_dim": 8}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # gates are made of zeros
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return _Logits(model), lambda r, n: torch.randint(32, (2, 5), generator=_seeded(r, n))


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens."""
        return self.model(tokens, use_cache=False).logits


def _seeded(rank, number):
    return torch.Generator().manual_seed(100 * number + rank)


def compared(rank, world_size, kind, padded):
    """Two steps of a split model and of the whole one, on delayed ranks."""
    import time

    import torch.distributed as dist

    torch.manual_seed(0)
    whole, batch = made(kind)
    split = copy.deepcopy(whole)
    tokens = batch(0, 0).numel() // (WIDTH if batch(0, 0).is_floating_point() else 1)
    most = tokens * TOP_K * world_size
    via = split_experts(split, max_tokens=most, padded=padded, timeout=60.0)
    names = [
        name for name, p in split.named_parameters() if p.shape != whole.get_parameter(name).shape
    ]
    for number in range(2):
        time.sleep(0.003 * ((rank + number) % 2))
        out = split(batch(rank, number))
        expected = whole(batch(rank, number))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        out.square().sum().backward()
        whole.zero_grad()
        sum(whole(batch(r, number)).square().sum() for r in range(world_size)).backward()
        for name, parameter in split.named_parameters():
            wanted = whole.get_parameter(name).grad
            wanted = torch.zeros_like(whole.get_parameter(name)) if wanted is None else wanted
            if name in names:
                count = len(parameter)
                wanted = wanted[rank * count : (rank + 1) * count]
                assert parameter.grad is not None, name  # see [Note: no rows]
            else:
                found = parameter.grad
                parameter.grad = torch.zeros_like(parameter) if found is None else found
                dist.all_reduce(parameter.grad)
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-5)
        split.zero_grad()
    assert len([s for s in segments_of_plans() if s.users]) == 1
    via.release()
    return sorted(names)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["blocks", "few", "mixtral", "deepseek_v3", "qwen3_moe"])
def test_split_experts_give_the_same_numbers(pool, kind, padded):
    if kind not in ("blocks", "few"):
        pytest.importorskip("transformers")
    first, *others = pool.run(compared, kind, padded)
    assert all(other == first for other in others)
    assert len(first) == (2 if kind == "deepseek_v3" else 4)


def _refused(rank, world_size):
    """Models that cannot be split; nothing of them is changed."""
    with pytest.raises(CaptureError, match="found no experts"):
        split_experts(nn.Linear(3, 3), max_tokens=4)
    block = Block()
    block.experts.num_experts = 7
    block.experts.up = nn.Parameter(torch.zeros(7, 2, 2))
    block.experts.bias = nn.Parameter(torch.zeros(7, 2))
    with pytest.raises(CaptureError, match="7 experts cannot be divided"):
        split_experts(block, max_tokens=4)
    assert len(block.experts.up) == 7


def test_models_that_cannot_be_split(pool):
    pool.run(_refused)


@pytest.mark.further
def test_the_example_with_fsdp2_has_equal_losses(tmp_path):
    pytest.importorskip("transformers")
    program = ROOT / "examples" / "experts" / "mixtral.py"
    done = subprocess.run(
        [sys.executable, *pages.TORCHRUN.split(), "--nproc-per-node", "4", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    losses = dict(re.findall(r"^(alone|symmplan) +([\d. ]+)$", done.stdout, re.MULTILINE))
    assert losses["alone"] == losses["symmplan"]
    assert len(losses["alone"].split()) == 4
