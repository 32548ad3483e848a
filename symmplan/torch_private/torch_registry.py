"""Every torch name that the registry needs and torch does not promise to keep.

Features are detected, versions are never compared. What a torch lacks answers as "nothing there",
so that the rest of the registry reads the same on all of them.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._ops import OpOverload, OpOverloadPacket

#: Modules whose import defines the ops of the built-in catalogue.
_DEFINING_MODULES = (
    "torch.distributed",
    "torch.distributed._functional_collectives",
    "torch.distributed._symmetric_memory",
    "torch.distributed.tensor._collective_utils",
)


@functools.cache
def define_distributed_ops() -> tuple[str, ...]:
    """Import what defines torch's distributed ops; returns the modules that this torch has."""
    import torch.distributed

    if not torch.distributed.is_available():
        return ()
    loaded = []
    for name in _DEFINING_MODULES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        loaded.append(name)
    return tuple(loaded)


def as_overload(ref: object) -> OpOverload | None:
    """``ref`` as an ``OpOverload``: itself, or what ``torch.library.custom_op`` made, else None."""
    from torch._library.custom_ops import CustomOpDef
    from torch._ops import OpOverload

    found = ref._opoverload if isinstance(ref, CustomOpDef) else ref
    return found if isinstance(found, OpOverload) else None


def as_packet(ref: object) -> OpOverloadPacket | None:
    """``ref`` if it is an ``OpOverloadPacket``, else None."""
    from torch._ops import OpOverloadPacket

    return ref if isinstance(ref, OpOverloadPacket) else None


def raw_schema(op: OpOverload) -> Any:
    """The schema object of an op, as torch keeps it."""
    return op._schema


def op_names() -> list[str]:
    """The qualified names, with overload, of all ops of this process."""
    import torch

    names = torch._C._dispatch_get_all_op_names()
    return [n if "." in n.partition("::")[2] else f"{n}.default" for n in names]


def declared_arguments(op: OpOverload) -> tuple[str, ...]:
    """Names in upstream's own registry of symmetric arguments, as given there; () if none."""
    if _simple_registry() is None:
        return ()
    for name in _spellings(op):
        holder = _holder(name)
        if holder is not None:
            return tuple(holder.get() or ())
    return ()


@functools.lru_cache(maxsize=4096)
def _spellings(op: OpOverload) -> tuple[str, ...]:
    """Keys under which upstream may know an op: its own leaves ``.default`` out, people may not."""
    schema = raw_schema(op)
    if schema.overload_name:
        return (f"{schema.name}.{schema.overload_name}",)
    return schema.name, f"{schema.name}.default"


def _holder(qualified: str) -> Any:
    registry = _simple_registry()
    entry = None if registry is None else registry.get(qualified)
    holder = getattr(entry, "symm_mem_args", None)
    if holder is None or not holder.is_registered():
        return None
    return holder


@functools.cache
def _simple_registry() -> Any:
    try:
        from torch._library import simple_registry
    except ImportError:
        return None
    if not hasattr(simple_registry, "SymmMemArgsHolder"):
        return None
    # `get` does not create an entry, unlike `find`; without it nothing can have been registered.
    singleton = simple_registry.singleton
    return singleton if hasattr(singleton, "get") else None


def names_declared_upstream() -> list[str]:
    """Qualified names, as upstream spells them, of all ops in its registry; sorted."""
    entries = getattr(_simple_registry(), "_data", {})
    return sorted(name for name in list(entries) if _holder(name) is not None)


def process_group_of(value: object) -> object:
    """Unwrap a boxed ``ProcessGroup`` (a script object, or a fake of one); others pass through."""
    import torch
    import torch.distributed

    for attribute in ("real_obj", "wrapped_obj"):
        inner = getattr(value, attribute, None)
        if inner is not None:
            value = inner
    if isinstance(value, torch.ScriptObject):
        unbox = getattr(getattr(torch.distributed, "ProcessGroup", None), "unbox", None)
        if unbox is not None:
            try:
                return unbox(value)
            except (RuntimeError, TypeError):
                return value
    return value


def default_group_name() -> str | None:
    """Name of the default process group, or None while there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD
    return None if group is None else str(group.group_name)
