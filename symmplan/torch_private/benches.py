"""Inductor's settings, which have no public name."""

from __future__ import annotations

from typing import Any

__all__ = ["settings"]


def settings() -> Any:
    """The module of Inductor's settings: ``get_config_copy()``, ``patch({name: value})``."""
    from torch._inductor import config

    return config
