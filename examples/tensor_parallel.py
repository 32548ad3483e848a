"""Train a small tensor-parallel model on two ranks of this machine, compiled with symmplan.

    python examples/tensor_parallel.py

Two MLP blocks are sharded with DTensor in the usual way. The model does not refer to symmplan. Its
all-gathers and reduce-scatters come from DTensor; the one-sided op `example::peer_max` is defined
here.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import symmplan


@symmplan.symm_args("x", group="group_name", handshake=True)
@torch.library.custom_op("example::peer_max", mutates_args=())
def peer_max(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """The elementwise maximum over all ranks, read from their memory."""
    placed = symmplan.placed.handle(x, group_name)
    placed.barrier()  # the handshake: every rank has written its x
    return torch.stack([placed.peer(rank) for rank in range(placed.world_size)]).amax(0)


@peer_max.register_fake
def _(x: torch.Tensor, _group_name: str) -> torch.Tensor:
    return torch.empty_like(x)


class Block(torch.nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: tokens x width, in and out."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def train(rank: int, world_size: int, store: str) -> None:
    """What every rank runs."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(64), Block(64))
    for block in model:
        styles = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(block, mesh, styles)

    backend = symmplan.backend(inner="eager", timeout=60.0)  # inner="inductor" is the default
    compiled = torch.compile(model, backend=backend)
    largest = torch.compile(
        lambda x: peer_max(x * 1.0, dist.group.WORLD.group_name), backend=backend
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randn(32 // world_size, 64)
    for step in range(3):
        optimizer.zero_grad()
        loss = compiled(tokens).square().mean()
        loss.to_local().backward() if hasattr(loss, "to_local") else loss.backward()
        optimizer.step()
        seen = largest(tokens).max()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}, largest input of any rank {seen:.4f}")
    if rank == 0:
        print(backend.stats)
        print(backend.plans[0].summary())
    dist.barrier()
    backend.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(train, args=(2, f"{directory}/store"), nprocs=2)
