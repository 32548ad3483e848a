"""Buffers carry the names that the program has for them, and no plan depends on these."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from attrs import evolve
from torch import nn
from torch.distributed.fsdp import fully_shard

import symmplan


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(64, 64, bias=False)
        self.wo = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        if not torch.compiler.is_compiling():  # under FSDP2
            return self.wo(self.wq(x))
        world = dist.group.WORLD
        whole = functional.all_gather_tensor_autograd(x, 0, world)
        return functional.reduce_scatter_tensor_autograd(self.wo(self.wq(whole)), "sum", 0, world)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return self.attention(x).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def compiled():
    torch._dynamo.reset()
    net = Net().requires_grad_(False)  # so that backward reads nothing gathered
    model = torch.compile(net, backend=symmplan.backend(inner="eager", choose="placed"))
    model(torch.randn(16, 64, requires_grad=True)).square().mean().backward()


def sharded():
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    symmplan.fsdp.apply(model, choose="placed")
    for _ in range(2):
        model(torch.randn(16, 64)).square().mean().backward()


def test_tensors_of_a_graph_are_called_after_their_modules():
    report = symmplan.simulate(compiled, ranks=2, memory="shm")
    buffers = [b for plan in report.plans for b in plan.problem.buffers]
    labels = {(b.name.split(".")[0], b.where, b.label) for b in buffers}
    for i in range(2):
        inside = f"layers.{i}.attention"
        assert ("forward", "return", f"{inside}.wq") in labels  # what is gathered, for whom
        assert ("forward", "input", f"{inside}.wo") in labels  # what is summed, from whom
        assert ("backward", "return", f"{inside}.wo") in labels
        assert ("backward", "input", f"{inside}.wq") in labels
    assert all(label for *_, label in labels)


def test_buffers_of_fsdp2_are_called_after_their_modules():
    (plan,) = symmplan.simulate(sharded, ranks=2, memory="shm").plans
    labels = {b.label for b in plan.problem.buffers}
    assert {f"layers.{i} {what}" for i in (0, 1) for what in ("parameters", "gradients")} == labels


def test_labels_change_no_fingerprint_and_are_in_the_json():
    (plan,) = symmplan.simulate(sharded, ranks=2, memory="shm").plans
    named = symmplan.Plan.from_json(plan.to_json())
    assert named.problem.buffers[0].label == min(plan.problem.buffers, key=lambda b: b.name).label
    bare = [evolve(b, label="") for b in plan.problem.buffers]
    assert evolve(plan, problem=evolve(plan.problem, buffers=bare)).fingerprint == plan.fingerprint
