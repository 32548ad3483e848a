"""Private names of torch that benchmarks compare with or set."""

from __future__ import annotations

from typing import Any

__all__ = ["all_to_all_single_autograd", "inductor_settings"]


def inductor_settings() -> Any:
    """The module of Inductor's settings: ``get_config_copy()``, ``patch({name: value})``."""
    from torch._inductor import config

    return config


def all_to_all_single_autograd(rows: Any, received: list[int], sent: list[int], group: Any) -> Any:
    """Torch's differentiable all-to-all with splits that are known when it is called.

    Collective: yes.
    """
    from torch.distributed import _functional_collectives as functional

    return functional.all_to_all_single_autograd(rows, received, sent, group)
