"""symmplan: declare, plan and place tensors in symmetric memory for distributed PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from symmplan import errors as errors
    from symmplan import fsdp as fsdp
    from symmplan import placed as placed
    from symmplan import trainers as trainers
    from symmplan.api import plan as plan
    from symmplan.integrate.compile.backend import CompileBackend as CompileBackend
    from symmplan.integrate.compile.backend import backend as backend
    from symmplan.integrate.compile.backend import default_backend as default_backend
    from symmplan.integrate.eager.context import eager as eager
    from symmplan.integrate.eager.session import Session as Session
    from symmplan.integrate.fsdp.apply import Handle as Handle
    from symmplan.integrate.moe.dispatcher import ExpertParallel as ExpertParallel
    from symmplan.integrate.moe.experts import expert_parallel as expert_parallel
    from symmplan.memory.held import segments as segments
    from symmplan.model import Plan as Plan
    from symmplan.model import Problem as Problem
    from symmplan.registry import register_symm_mem_args as register_symm_mem_args
    from symmplan.registry import requirements as requirements
    from symmplan.registry import symm_args as symm_args
    from symmplan.registry import unregister as unregister
    from symmplan.runtime.stats import Stats as Stats
    from symmplan.simulation import SimulationReport as SimulationReport
    from symmplan.simulation import simulate as simulate

# Public name -> module that defines it. Loaded on first use, so that `import symmplan` is cheap
# and does not import torch.
_WHERE = {
    "CompileBackend": "symmplan.integrate.compile.backend",
    "ExpertParallel": "symmplan.integrate.moe.dispatcher",
    "Handle": "symmplan.integrate.fsdp.apply",
    "Plan": "symmplan.model",
    "Problem": "symmplan.model",
    "Session": "symmplan.integrate.eager.session",
    "SimulationReport": "symmplan.simulation",
    "Stats": "symmplan.runtime.stats",
    "backend": "symmplan.integrate.compile.backend",
    "default_backend": "symmplan.integrate.compile.backend",
    "eager": "symmplan.integrate.eager.context",
    "errors": "symmplan.errors",
    "expert_parallel": "symmplan.integrate.moe.experts",
    "fsdp": "symmplan.fsdp",
    "placed": "symmplan.placed",
    "plan": "symmplan.api",
    "register_symm_mem_args": "symmplan.registry",
    "requirements": "symmplan.registry",
    "segments": "symmplan.memory.held",
    "simulate": "symmplan.simulation",
    "symm_args": "symmplan.registry",
    "trainers": "symmplan.trainers",
    "unregister": "symmplan.registry",
}

__all__ = [*sorted(_WHERE), "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'symmplan' has no attribute {name!r}")
    module = importlib.import_module(where)
    value = module if where == f"symmplan.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
