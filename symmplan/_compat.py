"""Private torch names, in one place, found by looking for the feature and never by version.

Whoever needs another one adds it here: a function with a public-looking name, that says what it
returns where the feature is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

__all__ = ["group_by_name", "group_name", "group_store", "has_process_groups", "world_name"]


def has_process_groups() -> bool:
    """Whether torch.distributed exists and has a default process group."""
    return dist.is_available() and dist.is_initialized()


def group_by_name(name: str) -> ProcessGroup:
    """The process group that torch registered under ``name``.

    Raises:
        LookupError: There is none.
    """
    from torch.distributed import distributed_c10d as c10d

    try:
        return c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (LookupError, RuntimeError, ValueError) as error:
        raise LookupError(name) from error


def group_name(group: ProcessGroup) -> str:
    """The name under which torch registered ``group``; equal on all its ranks."""
    return str(group.group_name)


def world_name() -> str:
    """The name of the default process group."""
    group = dist.group.WORLD
    assert group is not None
    return group_name(group)


def group_store(group: ProcessGroup) -> Store:
    """The key-value store of ``group``, with the group's own prefix."""
    from torch.distributed import distributed_c10d as c10d

    if hasattr(c10d, "_get_process_group_store"):
        return c10d._get_process_group_store(group)
    default: Any = c10d._get_default_store()
    return dist.PrefixStore(f"symmplan/{group_name(group)}", default)
