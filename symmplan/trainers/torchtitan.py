"""torchtitan's trainer, its FSDP2 collectives in planned symmetric memory.

torchtitan starts from a function of a config registry. `planned` turns its config into one of
`PlannedTrainer`; the function goes into a module of the user's, which ``--module`` names::

    from torchtitan.models.llama3.config_registry import llama3_8b
    from symmplan.trainers.torchtitan import planned

    def llama3_8b_planned():
        return planned(llama3_8b())
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from symmplan.fsdp import apply
from symmplan.trainers.metrics import watched
from symmplan.trainers.versions import require_tested

require_tested("torchtitan")

from torchtitan.tools.logging import logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

if TYPE_CHECKING:
    import torch

    from symmplan.fsdp import Handle

__all__ = ["PlannedTrainer", "SymmplanConfig", "planned"]


@dataclass(kw_only=True, slots=True)
class SymmplanConfig:
    """Options of `symmplan.fsdp.apply`, as ``--symmplan.choose push`` on the command line."""

    memory: str = "auto"
    """Name of a memory backend."""

    choose: str = "auto"
    """How the algorithms of collectives are chosen."""

    capacity: str | None = None
    """Most bytes of symmetric memory on a rank, such as 40GiB."""

    unsharded_modules: int | None = None
    """How many modules may hold unsharded parameters at the same time."""


class PlannedTrainer(Trainer):
    """torchtitan's trainer with `symmplan.fsdp.apply` on each part of its model.

    The plan is made after the first forward and backward pass, before torchtitan captures a CUDA
    graph. `symmplan.trainers.watched` goes to TensorBoard and W&B with torchtitan's own metrics;
    the plan, and its numbers at the end, to torchtitan's log.

    Attributes:
        handles: What `symmplan.fsdp.apply` returned for each part of the model.

    Collective: all methods are called on all ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's own, and the options of symmplan."""

        symmplan: SymmplanConfig = field(default_factory=SymmplanConfig)

    def __init__(self, config: Config) -> None:
        self.handles: list[Handle] = []
        super().__init__(_without_symm_mem(config))
        options = {f.name: getattr(config.symmplan, f.name) for f in fields(config.symmplan)}
        self.handles += [apply(part, **options) for part in self.model_parts]

    def forward_backward_step(self, **inputs: Any) -> torch.Tensor:
        """Run torchtitan's step; after the first one, plan what it did. Collective: yes."""
        loss: torch.Tensor = super().forward_backward_step(**inputs)
        for handle in self.handles:
            if not handle.planned:
                handle.freeze()
        return loss

    def train_step(self, data_iterator: Any) -> None:
        """Run torchtitan's step, then log the numbers, as often as torchtitan. Collective: yes."""
        super().train_step(data_iterator)
        if self.metrics_processor.should_log(self.step):
            self.metrics_processor.logger.log(self._numbers(), self.step)

    def close(self) -> None:
        """Log the numbers, give FSDP2 its own collectives back, and the memory."""
        if self.handles:
            said = ", ".join(f"{name} {n}" for name, n in self._numbers().items())
            logger.info(f"step {self.step}: {said}")
        super().close()  # drops the CUDA graphs, which have addresses of placements
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _numbers(self) -> dict[str, int]:
        """The numbers of all parts of the model on this rank."""
        parts = [watched(handle) for handle in self.handles]
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: sum(part.get(name, 0) for part in parts) for name in names}


def planned(config: Trainer.Config) -> PlannedTrainer.Config:
    """The config of a `PlannedTrainer` that trains what another config does.

    Args:
        config: What a function of torchtitan's config registries returns.
    """
    return PlannedTrainer.Config(**{f.name: getattr(config, f.name) for f in fields(config)})


def _without_symm_mem(config: Any) -> Any:
    """Without torchtitan's own symmetric memory: an FSDP module has one set of collectives."""
    if not config.parallelism.enable_fsdp_symm_mem:
        return config
    logger.warning(
        "parallelism.enable_fsdp_symm_mem is off in this run: FSDP2's collectives lie in the "
        "segments that symmplan plans, and not in one pool for each of them"
    )
    return replace(config, parallelism=replace(config.parallelism, enable_fsdp_symm_mem=False))
