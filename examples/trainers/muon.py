"""FSDP2 with Muon: each rank orthogonalizes some of the matrices, dealt out by all-to-all.

`torchrun --nproc-per-node 2 examples/trainers/muon.py` prints losses, and the bytes of segments:
the session around the optimizer lies in those of FSDP2, and the result is that of one process

    1.0001 0 49152
    0.9998 49152 0
    0.9995 49152 0
    as in one process: True
"""

import copy
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import symmplan

cuda = torch.cuda.device_count() >= 2
dist.init_process_group("nccl" if cuda else "gloo")
torch.cuda.set_device(dist.get_node_local_rank() if cuda else -1)
device, world, rank = "cuda" if cuda else "cpu", dist.get_world_size(), dist.get_rank()


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix of the same directions whose singular values are about 1, by Newton-Schulz."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Of matrices of one shape, whole, or sharded by rows over all ranks."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters; as many as there are ranks at a time."""
        for group in self.param_groups:
            for first in range(0, len(group["params"]), world):
                parameters = group["params"][first : first + world]
                moved = [self._momentum(p, group["momentum"]) for p in parameters]
                if isinstance(parameters[0], DTensor):
                    changes = list(dealt(moved))
                else:
                    changes = [orthogonalized(x) for x in moved]
                for p, change in zip(parameters, changes, strict=False):
                    local(p).sub_(change, alpha=group["lr"])

    def _momentum(self, p: torch.Tensor, momentum: float) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(local(p))
        return state["momentum"].mul_(momentum).add_(local(p.grad))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def dealt(shards: list[torch.Tensor]) -> torch.Tensor:
    """This rank's rows of as many orthogonalized matrices, each made by one rank."""
    shards = shards + [torch.zeros_like(shards[0])] * (world - len(shards))
    mine, back = (symmplan.placed.empty(world, *shards[0].shape, device=device) for _ in range(2))
    dist.all_to_all_single(mine, symmplan.placed.out(torch.stack, shards))
    update = orthogonalized(mine.flatten(0, 1)).view_as(mine)
    dist.all_to_all_single(back, update)
    return back


torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU()) for _ in range(5)]
whole = nn.Sequential(*layers).to(device)
model = copy.deepcopy(whole)
for layer in model:
    fully_shard(layer)
handle = symmplan.fsdp.apply(fully_shard(model), choose="placed")
optimizer, alone = Muon(model.parameters()), Muon(whole.parameters())
x = torch.randn(world, 16, 64, device=device)


def train(module: nn.Module, optimizer: Muon, x: torch.Tensor) -> float:
    """One step."""
    loss = (module(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


with symmplan.eager(choose="placed", device=device) as session:
    for _ in range(3):
        loss = train(model, optimizer, x[rank])
        session.step()
        train(whole, alone, x)
        if rank == 0:
            print(f"{loss:.4f}", handle.stats.segment_bytes, session.stats.segment_bytes)
pairs = zip(model.parameters(), whole.parameters(), strict=True)
same = [torch.allclose(p.full_tensor(), q, 1e-4, 1e-6) for p, q in pairs]
if rank == 0:
    print("as in one process:", all(same))
handle.remove()
dist.destroy_process_group()
