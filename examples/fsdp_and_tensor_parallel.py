"""Tensor-parallel blocks, compiled and sharded with FSDP2, on four local ranks, in one segment.

    python examples/fsdp_and_tensor_parallel.py

The blocks are parallelized with DTensor, compiled with symmplan, and sharded over the other
dimension of the mesh. When FSDP2 is planned after the first step, the compiled graphs move into a
suballocation of its segment.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import symmplan

WIDTH, VOCABULARY = 64, 4096


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: tokens x width, in and out."""
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Embeddings, blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shapes: tokens, in; tokens x vocabulary, out."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(rank: int, store: str) -> None:
    """What every rank runs."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Model()
    backend = symmplan.backend(inner="eager", timeout=60.0)  # inner="inductor" is the default
    for i, block in enumerate(model.blocks):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model.blocks[i] = torch.compile(block, backend=backend, fullgraph=True)
        fully_shard(model.blocks[i], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    handle = symmplan.fsdp.apply(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        torch.manual_seed(step + mesh["dp"].get_local_rank())
        tokens = torch.randint(0, VOCABULARY, (16,))
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            held = [f"{s.nbytes} bytes for {' and '.join(s.users)}" for s in symmplan.segments()]
            print(f"step {step}: loss {loss.item():.4f}; {'; '.join(held) or 'nothing yet'}")
    if rank == 0:
        print(handle.plan.summary())
    handle.remove()
    backend.release()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(train, args=(f"{directory}/store",), nprocs=4)
