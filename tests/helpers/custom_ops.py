"""Declared custom ops for tests: one-sided ops that find their peers by themselves.

``peer_mean`` reads its peers' input and ends without a release; ``push_next`` writes its result
into the next rank's memory, through an out variant and without a handshake: the plan must add the
barriers. ``bump`` updates its argument in place. ``peer_sum`` cannot write its declared result into
given memory; ``scale`` can, through an out variant that returns what it was given. ``mix`` is
``peer_mean`` times another tensor. ``peer_mean``, ``mix`` and ``push_next`` fall back to c10d when
their tensors have no placement, so that the same program runs without symmplan. ``late_sum`` reads
its peers late on all ranks but the first.
"""

from __future__ import annotations

import functools
import time

import torch
import torch.distributed as dist


def _group(name: str):
    return dist.distributed_c10d._resolve_process_group(name)


def _gathered(x: torch.Tensor, group_name: str) -> torch.Tensor:
    group = _group(group_name)
    out = torch.empty((dist.get_world_size(group), *x.shape), dtype=x.dtype)
    dist.all_gather(list(out.unbind()), x.contiguous(), group=group)
    return out


def _mean(rows: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, rows) / len(rows)


def _peer_mean(x: torch.Tensor, group_name: str) -> torch.Tensor:
    import symmplan
    from symmplan.memory import locate

    if locate(x) is None:
        return _mean(list(_gathered(x, group_name)))
    placed = symmplan.placed.handle(x)
    placed.barrier()  # every peer's input is complete
    return _mean([placed.peer(r) for r in range(placed.world_size)])


def _peer_sum(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return functools.reduce(torch.add, list(_gathered(x, group_name)))


def _push_next(x: torch.Tensor, group_name: str) -> torch.Tensor:
    group = _group(group_name)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return _gathered(x, group_name)[(rank - 1) % size].clone()


def _push_next_out(x: torch.Tensor, group_name: str, *, out: torch.Tensor) -> None:
    import symmplan

    placed = symmplan.placed.handle(out)
    placed.peer((placed.rank + 1) % placed.world_size).copy_(x)
    placed.barrier()  # every push has landed


def _mix(x: torch.Tensor, y: torch.Tensor, group_name: str) -> torch.Tensor:
    return _peer_mean(x, group_name) * y


def _bump(x: torch.Tensor, group_name: str) -> None:
    x.mul_(0.5)


def _scale_out(x: torch.Tensor, _group: str, *, out: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 3, out=out)


def _in_flight(x):
    """How many collectives nobody has waited for yet."""
    return x.new_full((1,), torch._C._distributed_c10d._get_work_registry_size())


def _late_sum(x: torch.Tensor, group_name: str) -> torch.Tensor:
    import symmplan

    placed = symmplan.placed.handle(x, group_name)
    placed.barrier()
    time.sleep(0.3 * placed.rank)
    return torch.stack([placed.peer(r) for r in range(placed.world_size)]).sum(0)


def _same(x, *_others):
    return torch.empty_like(x)


@functools.cache
def load() -> None:
    """Define and declare the ops, once per process."""
    import symmplan

    lib = torch.library.Library("symmplan_test", "FRAGMENT")
    _KEEP.append(lib)

    def define(schema, run, fake=_same, where=(), **facts):
        name = schema.partition("(")[0]
        lib.define(schema)
        lib.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"symmplan_test::{name}", fake, lib=lib)
        if where:
            op = f"symmplan_test::{name}"
            symmplan.register_symm_mem_args(op, list(where), group="group_name", **facts)

    one, out = "Tensor x, str group_name", "Tensor x, str group_name, *, Tensor(a!) out"
    define(f"peer_mean({one}) -> Tensor", _peer_mean, where=["x"], handshake=True)
    define(f"late_sum({one}) -> Tensor", _late_sum, where=["x"], handshake=True)
    define(f"peer_sum({one}) -> Tensor", _peer_sum, where=["return"])
    mixed = "mix(Tensor x, Tensor y, str group_name) -> Tensor"
    define(mixed, _mix, where=["x"], handshake=True)
    define("bump(Tensor(a!) x, str group_name) -> ()", _bump, lambda *_: None, where=["x"])
    define("in_flight(Tensor x) -> Tensor", _in_flight, lambda x: x.new_empty(1))
    define(f"push_next_out({out}) -> ()", _push_next_out, lambda *_, out: None)
    define(
        f"push_next({one}) -> Tensor",
        _push_next,
        lambda x, _: torch.empty_like(x, memory_format=torch.contiguous_format),
        where=["return"],
        release=True,
        out="symmplan_test::push_next_out",
    )
    define(f"scale.out({out}) -> Tensor(a!)", _scale_out, lambda *_, out: out)
    out = "symmplan_test::scale.out"
    define(f"scale({one}) -> Tensor", lambda x, _: x * 3, where=["return"], out=out)
    define(
        "weighted(Tensor[] xs, float a, float b, str group_name) -> Tensor",
        lambda xs, a, b, _: xs[0] * a + xs[1] * b,
        lambda xs, *_: torch.empty_like(xs[0]),
        where=["return"],
    )


_KEEP: list[torch.library.Library] = []
#: Names of two groups of all ranks, once they have met.
GROUPS: list[str] = []


def meet(rank, world_size):
    """Define the ops, and make the groups; what a pool of ranks begins with."""
    load()
    second = dist.new_group(range(world_size))
    GROUPS[:] = [dist.group.WORLD.group_name, second.group_name]
