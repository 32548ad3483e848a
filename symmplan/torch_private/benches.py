"""Private names of torch that benchmarks compare with or set."""

from __future__ import annotations

from typing import Any

__all__ = [
    "MICRO_PIPELINE",
    "ONE_SHOT",
    "all_to_all_single_autograd",
    "enable_symmetric_memory",
    "inductor_settings",
    "waited",
]

#: Inductor's settings for its own pipelines of products.
MICRO_PIPELINE = {"_micro_pipeline_tp": True}
#: Inductor's settings for sums by torch's one-shot kernel: whether, and of at most how many bytes.
ONE_SHOT = "_collective.auto_select", "_collective.one_shot_all_reduce_threshold_bytes"


def inductor_settings() -> Any:
    """The module of Inductor's settings: ``get_config_copy()``, ``patch({name: value})``."""
    from torch._inductor import config

    return config


def enable_symmetric_memory(group_name: str) -> None:
    """Let Inductor's own pipelines of products have a workspace for a group. Collective: no."""
    from torch.distributed import _symmetric_memory

    memory: Any = _symmetric_memory
    memory.enable_symm_mem_for_group(group_name)


def all_to_all_single_autograd(rows: Any, received: list[int], sent: list[int], group: Any) -> Any:
    """Torch's differentiable all-to-all with splits that are known when it is called.

    Collective: yes.
    """
    from torch.distributed import _functional_collectives as functional

    return functional.all_to_all_single_autograd(rows, received, sent, group)


def waited(tensor: Any) -> Any:
    """A tensor of a collective, which the current stream has waited for.

    Torch keeps what a collective reads and writes until then.
    """
    from torch.distributed import _functional_collectives as functional

    return functional.wait_tensor(tensor)
