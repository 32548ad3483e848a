"""torchtitan's token dispatcher gives the same rows and gradients through symmplan."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest
import torch
from ranks import RankPool
from torch import nn

from symmplan.errors import CaptureError

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torchtitan", "triton")),
        reason="needs torchtitan and triton: python -m pip install '.[torchtitan]'",
    ),
    pytest.mark.filterwarnings("ignore"),  # torchtitan's own
    pytest.mark.ranks,
]
EXPERTS, TOP_K, WIDTH = 4, 2, 8


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout=180.0) as ranks:
        yield ranks


class _Layer(nn.Module):
    """What torchtitan's `RoutedExperts` does with a dispatcher."""

    def __init__(self, mesh, weight):
        super().__init__()
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

        config = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
        self.token_dispatcher = AllToAllTokenDispatcher(config)
        self.token_dispatcher.wire_meshes(ep_mesh=mesh)
        self.weight = nn.Parameter(weight)

    def forward(self, x, scores, ids):
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        rows, each, told = self.token_dispatcher.dispatch(x, scores, ids, counts)
        parts = [r @ w for r, w in zip(rows.split(each.tolist()), self.weight, strict=True)]
        return self.token_dispatcher.combine(torch.cat(parts), told, x)


def _compared(rank, world_size, backend):
    from torch.distributed.device_mesh import init_device_mesh

    from symmplan.trainers.torchtitan_experts import plan_experts

    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("ep",))
    torch.manual_seed(rank)
    weight = torch.randn(EXPERTS // world_size, WIDTH, WIDTH)
    plain, ours = _Layer(mesh, weight), _Layer(mesh, weight.clone())
    with pytest.raises(CaptureError, match="found no experts"):
        plan_experts(nn.Linear(2, 2), max_tokens=4)
    via = plan_experts(ours, max_tokens=24, timeout=60.0)
    _steps((("default", plain), (backend, ours)), mesh)
    served = via.stats.served
    via.release()
    return served


@contextlib.contextmanager
def _types(backend, mesh):
    """torchtitan tells shardings by its own types, or by DTensor alone."""
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend(backend)
    typed = backend == "spmd_types"
    with set_current_spmd_mesh(mesh) if typed else contextlib.nullcontext():
        yield


def _steps(layers, mesh):
    """Three, forward and backward, with the same bits.

    Of layers with plain collectives only those run on CPU ranks that have no types.
    """
    for _ in range(3):
        x, scores = torch.randn(12, WIDTH), torch.rand(12, TOP_K)
        ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(12)])
        found = []
        for backend, layer in layers:
            given = x.clone().requires_grad_()
            with _types(backend, mesh):
                out = layer(given, scores, ids)
                out.square().sum().backward()
            found.append((out, given.grad, layer.weight.grad.clone()))
            layer.weight.grad = None
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("backend", ["default", "spmd_types"])
def test_a_dispatcher_gives_the_same_bits(pool, backend):
    assert pool.run(_compared, backend) == [12, 12]  # a dispatch and a combine, there and back
