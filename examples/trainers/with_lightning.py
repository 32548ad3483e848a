"""Lightning with `ModelParallelStrategy`: one line at the end of `configure_model`.

`torchrun --nproc-per-node 2 examples/trainers/with_lightning.py`, on GPUs if there are any, prints

    alone    0.988 0.949 0.890 0.751 0.439 0.248 | evaluated 0.988 0.904 0.653 0.253
    symmplan 0.988 0.949 0.890 0.751 0.439 0.248 | evaluated 0.988 0.904 0.653 0.253
    {... 'symmplan/plain': 0, ... 'symmplan/flat': 0, 'symmplan/algorithms/symmetric': ...}
    resumed  0.439 0.248 | evaluated 0.653 0.253...
"""

import lightning
import torch
from lightning.pytorch import callbacks, strategies
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import symmplan
from symmplan.trainers import watched


class Model(lightning.LightningModule):  # noqa: D101
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
        self.name, self.planned, self.losses, self.evaluated = name, name != "alone", [], []

    def configure_model(self) -> None:  # noqa: D102
        for module in (*self.net, self.net):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])
        self.handle = symmplan.fsdp.apply(self.net) if self.planned else None  # the one line

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:  # noqa: D102
        loss = (self.net(batch[0]) - 1).square().mean()
        self.losses.append(f"{loss.item():.3f}")
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:  # noqa: D102
        self.evaluated.append(f"{(self.net(batch[0]) - 1).square().mean().item():.3f}")

    def on_fit_end(self) -> None:  # noqa: D102
        self.print(f"{self.name:<8}", *self.losses, "| evaluated", *self.evaluated)
        if self.handle is not None:
            self.print(watched(self.handle))
            self.handle.remove()


torch.manual_seed(1)
loader, held_out = (DataLoader(TensorDataset(torch.randn(n, 64)), batch_size=8) for n in (32, 16))
off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
for name in ("alone", "symmplan", "resumed"):  # every second of six steps is evaluated and saved
    save = callbacks.ModelCheckpoint("with_lightning", name + "-{step}", save_top_k=-1)
    parallel = strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    options = {"devices": 2, "strategy": parallel, "max_epochs": 3, "callbacks": [save]}
    start = "with_lightning/symmplan-step=4.ckpt" if name == "resumed" else None
    lightning.Trainer(**options, **off).fit(Model(name), loader, held_out, ckpt_path=start)
