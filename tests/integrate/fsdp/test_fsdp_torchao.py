"""torchao's weights under FSDP2: float8, int8, NF4. Skipped where torchao is not installed."""

from __future__ import annotations

import pytest
import torch
from fsdp_models import Net, both, changing, check, shard, train_step
from ranks import pool_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

pytestmark = [pytest.mark.ranks, pytest.mark.further]

pytest.importorskip("torchao")

two = pool_of(2)


def float8(model):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model.blocks, config=config)


def int8_weights(model):
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight as Int8

    for block in model.blocks:
        block.up.weight = nn.Parameter(Int8.from_float(block.up.weight.detach()), False)


def int8_products(model):
    from torchao.prototype.quantized_training import int8_mixed_precision as int8

    config = int8.Int8MixedPrecisionTrainingConfig(
        output=False, grad_input=False, grad_weight=False
    )
    for block in model.blocks:
        weight = int8.Int8MixedPrecisionTrainingLinearWeight(block.up.weight.detach(), config)
        block.up.weight = nn.Parameter(weight)


def nf4(model):
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    class Frozen(nn.Linear):
        def forward(self, x):
            return linear_nf4(x, self.weight) + self.bias

    for block in model.blocks:
        up = Frozen(block.up.in_features, block.up.out_features)
        up.weight = nn.Parameter(to_nf4(block.up.weight.detach(), 16, 2), False)
        block.up = up


def trained(rank, world, convert, dtype=None):
    def build():
        model = Net()
        convert(model)
        return shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))

    return both(build, program, rank)


def program(model, trace, rank):
    """Losses and gradients are compared: not all of torchao's weights can be copied."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(5):
        train_step(model, optimizer, trace, step, rank)


@pytest.mark.parametrize("convert", [float8, int8_weights, int8_products, nf4])
def test_weights_of_torchao_lie_in_placements(two, convert):
    stats = check(two.run(trained, convert, torch.bfloat16 if "int8" in convert.__name__ else None))
    assert stats["flat"] == ()


def precomputed(rank, world):
    """Scales of all weights are computed at once, behind the optimizer's step."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    def build():
        model = Net()
        float8(model)
        return shard(model)

    def change(model, step, trace, rank):
        if step:
            precompute_float8_dynamic_scale_for_fsdp(model)

    return both(build, changing(change, steps=6), rank)


def test_scales_that_are_computed_ahead(two):
    stats = check(two.run(precomputed))
    assert stats["flat"] == ()
