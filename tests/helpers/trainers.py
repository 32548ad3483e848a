"""Run a trainer on a rank of the CPU, as `torchrun` starts it, or on devices where there are some.

    torchrun --nproc-per-node 2 tests/helpers/trainers.py FILE-OR-MODULE [OPTION ...]

Accelerate, on which Hugging Face's trainers rest, has FSDP2 on devices alone, and torchtitan asks
its device for what the CPU has not. Here they take CPU ranks for devices.
"""

from __future__ import annotations

import os
import runpy
import sys
import types

import torch

HUGGING_FACE = ("with_accelerate.py", "with_transformers.py", "with_trl.py", "reported_trainer.py")


def accelerate_on_the_cpu():
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def on_the_cpu(state):
        state.device = torch.device("cpu")

    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = on_the_cpu


def torchtitan_on_the_cpu():
    from torch.distributed.fsdp import FSDPModule

    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda *_: "cpu"
    torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30)
    torch.cpu.memory_stats = lambda *_: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
    plain = FSDPModule.set_gradient_divide_factor

    def without_factors_in_sums(module, factor):  # gloo has none
        plain(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = without_factors_in_sums
    import torchtitan.distributed.utils

    torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention._compiled_flex_attn = staticmethod(dense_attention)


def dense_attention(q, k, v, *, block_mask, scale, enable_gqa, **_):
    """Flex attention has no backward pass on the CPU."""
    from torch.nn.attention.flex_attention import AuxOutput, create_mask

    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), AuxOutput()


if __name__ == "__main__":
    del sys.argv[0]
    program = sys.argv[0]
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        if program.endswith(HUGGING_FACE):
            accelerate_on_the_cpu()
        elif "torchtitan" in program:
            torchtitan_on_the_cpu()
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
