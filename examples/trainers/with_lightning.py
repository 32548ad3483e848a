"""Lightning with `ModelParallelStrategy`: one line at the end of `configure_model`.

`torchrun --nproc-per-node 2 examples/trainers/with_lightning.py`, on GPUs if there are any, prints

    alone    0.99 0.95 0.90 0.79
    symmplan 0.99 0.95 0.90 0.79
    plan ...: 12 buffers in 1 segment, 36 operations, ...
"""

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import symmplan


class Model(lightning.LightningModule):
    """A few layers, and the methods that Lightning calls."""

    def __init__(self, *, planned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
        self.planned, self.handle, self.losses = planned, None, []

    def configure_model(self) -> None:  # noqa: D102
        for module in (*self.net, self.net):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])
        self.handle = symmplan.fsdp.apply(self.net) if self.planned else None  # the one line

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:  # noqa: D102
        loss = (self.net(batch[0]) - 1).square().mean()
        self.losses.append(f"{loss.item():.2f}")
        return loss

    def on_fit_end(self) -> None:  # noqa: D102
        said = [f"{'symmplan' if self.planned else 'alone':<8} {' '.join(self.losses)}"]
        if self.handle is not None:
            said.append(self.handle.plan.summary())
            self.handle.remove()
        self.print("\n".join(said))


torch.manual_seed(1)
quiet = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
loader = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=8)
for planned in (False, True):
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = lightning.Trainer(devices=2, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(Model(planned=planned), loader)
