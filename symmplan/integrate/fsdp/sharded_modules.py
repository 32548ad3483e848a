"""The FSDP2 modules of a model, each with its collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan.errors import CaptureError
from symmplan.integrate.fsdp.comms import PlannedAllGather, PlannedReduceScatter
from symmplan.torch_private import fsdp2

if TYPE_CHECKING:
    from torch import nn


def sharded_modules(model: nn.Module) -> list[tuple[str, Any, Any, Any, Any]]:
    """``(name, module, parameter group, its all-gather, its reduce-scatter)`` of each group.

    Raises:
        CaptureError: The model has no FSDP2 module, or has custom collectives already.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.nn import Module

    if not isinstance(model, Module):
        raise CaptureError(
            "symmplan.fsdp.apply needs a module",
            expected="a torch.nn.Module to which fully_shard was applied",
            got=type(model).__name__,
            fix="pass the model",
        )
    found: list[tuple[str, Any, Any, Any, Any]] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for i, group in enumerate(fsdp2.param_groups(module)):
            if id(group) in seen:  # the module shares it with one before
                continue
            seen.add(id(group))
            comms = fsdp2.comms(group)
            for comm in comms:
                _check_plain(comm, name)
            site = name or "model"
            found.append((site if i == 0 else f"{site}#{i}", module, group, *comms))
    if not found:
        raise CaptureError(
            f"{type(model).__name__} has no FSDP2 module with parameters",
            expected="a module to which torch.distributed.fsdp.fully_shard was applied",
            got=", ".join(_others(model)) or "none",
            fix=_how_to_shard(model),
        )
    return found


def _others(model: nn.Module) -> list[str]:
    """What else shards or replicates modules of the model."""
    names = dict.fromkeys(type(module).__name__ for module in model.modules())
    return [n for n in ("DistributedDataParallel", "FullyShardedDataParallel") if n in names]


def _how_to_shard(model: nn.Module) -> str:
    """What to do for a model without FSDP2 modules."""
    if "DistributedDataParallel" in _others(model):
        return (
            "call fully_shard(model) in place of DistributedDataParallel; on the CPU Accelerate "
            "and Hugging Face's Trainer use that one, whatever their settings for FSDP are, so "
            "there do not pass the model to accelerator.prepare"
        )
    return (
        "call fully_shard(model, ...) first; with accelerate launch, set fsdp_version: 2 in "
        "fsdp_config, and pass the result of accelerator.prepare(model); with Hugging Face's "
        "Trainer, pass TrainingArguments(fsdp=True)"
    )


def _check_plain(comm: Any, name: str) -> None:
    if fsdp2.is_plain_comm(comm):
        return
    kind, site = type(comm), name or "model"
    if isinstance(comm, PlannedAllGather | PlannedReduceScatter):
        raise CaptureError(
            f"symmplan.fsdp is already applied to FSDP module {site!r}",
            expected="a model without a handle",
            got="a second symmplan.fsdp.apply",
            fix="use the handle of the first call, or call handle.remove() before the second call",
            module=name,
        )
    raise CaptureError(
        f"FSDP module {site!r} has custom collectives already: {kind.__name__}",
        expected="FSDP2's own",
        got=f"{kind.__module__}.{kind.__qualname__}",
        fix="do not combine symmplan.fsdp with other custom or symmetric-memory collectives",
        module=name,
    )
