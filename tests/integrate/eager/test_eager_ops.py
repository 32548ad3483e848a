"""What a recorded iteration may use of torch beside plain ops on plain tensors."""

from __future__ import annotations

import warnings

import pytest
import torch
from ranks import pool_of

pytestmark = [pytest.mark.ranks, pytest.mark.all_cases]

TURNS = 3

two = pool_of(2, timeout=120.0)


def _cond(x):
    return torch.cond(x.sum() > 12, torch.sin, torch.cos, (x,))


def _while_loop(x):
    from torch._higher_order_ops.while_loop import while_loop

    (x,) = while_loop(lambda x: x.sum() < 100, lambda x: (x * 2,), (x + 1,))
    return x


def _flex_attention(x):
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    q = x.reshape(1, 1, 2, 4)
    return compiled(q, q, q)


def _make_fx(x):
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(lambda x: x.sin() + 1)(x)
    assert len(traced.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)) == 1
    assert len(traced.graph.nodes) == 4, traced.graph
    return traced(x)


def _sparse(x):
    return torch.sparse.mm(x.reshape(2, 4).to_sparse(), x.reshape(4, 2))


def _quantized(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch gives these tensors up
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()


KINDS = {f.__name__[1:]: f for f in (_cond, _while_loop, _flex_attention, _make_fx, _sparse)}
KINDS["quantized"] = _quantized


def _used(rank, world_size, kind, debug):
    """Each makes what one collective sends, and alone reads what another has brought."""
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    use = KINDS[kind]
    with symmplan.eager(memory="shm", timeout=20.0, debug=debug) as session:
        for turn in range(TURNS):
            x = torch.arange(4.0) + rank + turn
            gathered = symmplan.placed.empty(8)
            dist.all_gather_into_tensor(gathered, x)
            read = use(gathered)
            del gathered
            later = symmplan.placed.out(torch.mul, torch.ones(8), float(turn))
            dist.all_reduce(later)  # may have the bytes of what was gathered
            total = use(x.repeat(2)) * 1
            dist.all_reduce(total)
            both = torch.cat([torch.arange(4.0) + r + turn for r in range(world_size)])
            plain = [use((torch.arange(4.0) + r + turn).repeat(2)) for r in range(world_size)]
            assert torch.allclose(read, use(both)), (turn, "read")
            assert torch.equal(later, torch.full((8,), float(turn * world_size))), turn
            assert torch.allclose(total, sum(plain)), (turn, "sent")
            del read, later, total, plain
            session.step()
    return session.stats.served


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_iteration_may_use_it(two, kind, debug):
    assert two.run(_used, kind, debug) == [3 * (TURNS - 1)] * 2


def _read_before(rank, world_size, reads):
    """A tensor that a higher-order operator may have read is not made right before it is filled."""
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    with symmplan.eager(memory="shm", timeout=20.0) as session:
        for turn in range(TURNS):
            filled = torch.zeros(8)
            given = (filled if reads else torch.zeros(8),)
            read = torch.cond(torch.tensor(True), torch.cos, torch.sin, given)
            dist.all_gather_into_tensor(filled, torch.full((4,), float(rank + turn)))
            assert torch.equal(read, torch.ones(8))
            assert filled.sum() == 4 * (2 * turn + 1)
            del filled, given
            session.step()
    return sorted({c.where for c in session.copies})


def test_what_a_higher_order_operator_reads_is_used(two):
    (with_it,), (without,) = ({*map(tuple, two.run(_read_before, r))} for r in (True, False))
    assert {*with_it} - {*without} == {"out"}
