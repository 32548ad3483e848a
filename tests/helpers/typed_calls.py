"""Calls of the public names as a user writes them, for mypy alone: nobody runs them.

``python -m mypy`` is strict: it also complains about an ignored error that is none, so each wrong
call below must be refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

import symmplan
import symmplan.simulation
from symmplan.fsdp import apply

if TYPE_CHECKING:
    from torch import fx, nn
    from torch.export import ExportedProgram


def results(
    model: nn.Module,
) -> tuple[
    symmplan.CompileBackend,
    symmplan.Session,
    symmplan.ExpertParallel,
    symmplan.Handle,
    symmplan.SimulationReport,
    symmplan.Stats,
]:
    """What entry points return has a public name."""
    handle: symmplan.fsdp.Handle = symmplan.fsdp.apply(model)
    return (
        symmplan.backend("eager", "shm", choose="copy engine"),
        symmplan.eager(None, "local", choose=Path("choices.json"), capacity="1 GiB"),
        symmplan.expert_parallel(max_tokens=8, memory="nccl", choose="push"),
        handle,
        symmplan.simulate(lambda: None, ranks=4, memory="cuda"),
        handle.stats,
    )


def programs(graph: fx.Graph, module: fx.GraphModule, exported: ExportedProgram) -> None:
    """All that can be planned."""
    problem = symmplan.Problem.from_intervals([("a", 0, 2, 64)], align=256)
    plans: list[symmplan.Plan] = [
        symmplan.plan(graph, default_group="g"),
        symmplan.plan(module, [torch.ones(2)]),
        symmplan.plan(exported, capacity=1 << 20),
        symmplan.plan(problem),
    ]
    del plans


def declarations() -> None:
    """One name, or several."""
    symmplan.register_symm_mem_args("mylib::foo", "input")
    symmplan.register_symm_mem_args("mylib::foo", ["input", "return"])
    symmplan.symm_args("input", "return")
    symmplan.symm_args(["input", "return"])


def wrong(model: nn.Module) -> None:
    """Words that do not exist, and what is no program."""
    symmplan.plan(3)  # type: ignore[arg-type]
    symmplan.plan(model)  # type: ignore[arg-type]
    apply(model, choose="fastest")  # type: ignore[arg-type]
    apply(model, memory="shmem")  # type: ignore[arg-type]
    symmplan.backend(choose="fastest")  # type: ignore[arg-type]
    symmplan.backend(memory="shmem")  # type: ignore[arg-type]
    symmplan.backend(inner="xla")  # type: ignore[arg-type]
    symmplan.eager(choose="fastest")  # type: ignore[arg-type]
    symmplan.eager(memory="shmem")  # type: ignore[arg-type]
    symmplan.expert_parallel(max_tokens=8, choose="fastest")  # type: ignore[arg-type]
    symmplan.expert_parallel(max_tokens=8, memory="shmem")  # type: ignore[arg-type]
    symmplan.simulate(lambda: None, ranks=2, memory="local")  # type: ignore[arg-type]
    symmplan.simulation.simulate(lambda: None)  # type: ignore[call-arg]
