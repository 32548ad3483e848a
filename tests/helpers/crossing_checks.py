"""What the tests of crossing activations share: a model, its leaves, and how they are compared."""

from __future__ import annotations

import gc

import torch
from crossing_programs import _Gather

KIB = 1 << 10
GROUPS: list[str] = []


def setup(rank, world_size):
    import custom_ops
    import torch.distributed as dist

    custom_ops.load()
    GROUPS[:] = [dist.group.WORLD.group_name]


def autograd_cache_wanted():
    """As if TORCHINDUCTOR_AUTOGRAD_CACHE=1 had been set when this process began."""
    from torch._functorch import config

    config._config["enable_autograd_cache"].env_value_force = True


def two_gathers(x, w):
    """Saves two gathered tensors, 2 KiB each, for backward."""
    first = _Gather.apply(x, GROUPS[0])
    second = _Gather.apply(torch.sin(first)[: x.shape[0]] * 2, GROUPS[0])
    return (torch.sin(first) @ w).sum() + (second.square() @ w).square().sum()


def leaves_of(rank, rows=16, scale=1.0):
    torch.manual_seed(rank)
    x = (torch.randn(rows, 16) * scale / 4).requires_grad_()
    generator = torch.Generator().manual_seed(5)
    w = (torch.randn(16, 16, generator=generator) * scale / 4).requires_grad_()
    return x, w


def expected_of(rank, function=two_gathers, **options):
    leaves = leaves_of(rank, **options)
    loss = function(*leaves)
    return loss.detach(), torch.autograd.grad(loss, leaves)


def check_grads(loss, leaves, expected, *, keep=False):
    torch.testing.assert_close(loss.detach(), expected[0], rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad(loss, leaves, retain_graph=keep)
    torch.testing.assert_close(grads, expected[1], rtol=1e-4, atol=1e-5)


def new_backend(inner="eager", *, debug=False, **options):
    import symmplan

    torch._dynamo.reset()
    if debug and inner == "inductor":
        debug = "poison"  # what is tested is Inductor's code
    return symmplan.backend(inner=inner, timeout=30.0, debug=debug, **options)


def held_leases(backend):
    gc.collect()
    shared = backend._pool._shared.values()
    leases = [lease for each in shared for lease in each.crossings._leases.values()]
    return sum(lease.held for lease in leases), len(leases)


def in_segment(backend, tensor):
    return any(
        segment.tensor.data_ptr() <= tensor.data_ptr() < segment.tensor.data_ptr() + segment.nbytes
        for arena in backend._pool.arenas
        for segment in arena.segments.values()
    )
