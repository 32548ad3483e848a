"""Buffers carry the names that the program has for them, and no plan depends on these."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from attrs import evolve
from torch import nn
from torch.distributed.fsdp import fully_shard

import symmplan
from symmplan.capture.apart import storage_key
from symmplan.capture.module_names import parameter_owners


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


class EagerAttention(Attention):
    def forward(self, x):
        ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
        whole = ops.wait_tensor(ops.all_gather_into_tensor(x, 2, name))
        parts = ops.reduce_scatter_tensor(self.wo(self.wq(whole)), "sum", 2, name)
        return ops.wait_tensor(parts)


class Layer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention()

    def forward(self, x):
        return self.attention(x).relu()


class Net(nn.Module):
    def __init__(self, attention=Attention):
        super().__init__()
        self.layers = nn.ModuleList(Layer(attention) for _ in range(2))

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


def _iterations(forward):
    with symmplan.eager(choose="placed") as session, torch.no_grad():
        for _ in range(2):
            forward(torch.randn(16, 64))
            session.step()


def in_a_session():
    _iterations(Net(EagerAttention))


def without_modules():
    _iterations(_sum_of_doubles)


def _sum_of_doubles(x):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x * 2.0, "sum", dist.group.WORLD.group_name)) + 1.0


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


def test_tensors_of_a_session_are_called_after_the_modules_whose_parameters_are_read():
    (plan,) = symmplan.simulate(in_a_session, ranks=2, memory="shm").plans
    labels = {(b.where, b.label) for b in plan.problem.buffers}
    for i in range(2):
        assert ("return", f"layers.{i}.attention.wq") in labels
        assert ("input", f"layers.{i}.attention.wo") in labels


@pytest.mark.long
@pytest.mark.parametrize("cast", [False, True])
def test_parameters_are_known_through_casts(cast):
    def program():
        net = Net(EagerAttention)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            _iterations(net)

    (plan,) = symmplan.simulate(program, ranks=2, memory="shm").plans
    dtypes = {b.dtype for b in plan.problem.buffers if b.label == "layers.0.attention.wo"}
    assert dtypes == {"bfloat16" if cast else "float32"}


def test_tensors_without_a_module_are_called_after_their_line():
    (plan,) = symmplan.simulate(without_modules, ranks=2, memory="shm").plans
    name = "_sum_of_doubles"
    line = _sum_of_doubles.__code__.co_firstlineno + 2
    assert {b.label for b in plan.problem.buffers} == {f"{name}, test_labels.py:{line}"}


def test_parameters_are_known_by_the_modules_that_have_them():
    model = Net()
    model.layers[1].attention.wo = nn.LazyLinear(64)
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    model.layers[1].sparse = nn.Parameter(torch.eye(2).to_sparse())
    half_made = nn.Module.__new__(Net)  # its `__init__` has not run
    found = parameter_owners()
    for i, name in ((0, "wq"), (0, "wo"), (1, "wq")):
        weight = getattr(model.layers[i].attention, name).weight
        assert found[storage_key(weight)] == f"layers.{i}.attention.{name}"
    assert not vars(half_made)


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
