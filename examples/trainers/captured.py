"""FSDP2's steps in a CUDA graph, with AdamW and gradient clipping: the losses of eager steps.

`torchrun --nproc-per-node 2 examples/trainers/captured.py` (all eager without two GPUs) prints

    alone    1.022 0.801 0.723 0.484 0.412
    symmplan 1.022 0.801 0.723 0.484 0.412
    captured 1.022 0.801 0.723 0.484 0.412
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import symmplan

cuda = torch.cuda.device_count() >= 2
dist.init_process_group("nccl" if cuda else "gloo")
torch.cuda.set_device(dist.get_node_local_rank() if cuda else -1)


def train(name: str, *, planned: bool, captured: bool) -> None:
    """Five steps; those from the third on may be replays."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(64, 64)), nn.GELU(), nn.Linear(64, 1)))
    handle = symmplan.fsdp.apply(model) if planned else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=cuda)
    x = torch.empty(16, 64, device="cuda" if cuda else "cpu")  # a graph reads it here
    graph, losses = None, []

    def step() -> torch.Tensor:
        loss = (model(x) - 1).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    for number in range(5):
        x.copy_(torch.randn(2, 16, 64)[dist.get_rank()])
        if captured and number == 2:  # by now there are a plan and the optimizer's states
            handle.freeze()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # runs nothing yet
                loss = step()
        if graph is None:
            loss = step()
            optimizer.zero_grad()  # what is captured begins without gradients, and makes its own
        else:
            graph.replay()
        losses.append(f"{loss.item():.3f}")
    if dist.get_rank() == 0:
        print(f"{name:<8}", *losses)
    del graph  # before the memory in which it runs
    if planned:
        handle.remove()


for name in ("alone", "symmplan", "captured"):
    train(name, planned=name != "alone", captured=cuda and name == "captured")
dist.destroy_process_group()
