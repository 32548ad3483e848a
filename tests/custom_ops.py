"""Declared custom ops for tests: one-sided ops that find their peers by themselves.

``peer_mean`` reads its peers' input and ends without a release; ``push_next`` writes its result
into the next rank's memory, through an out variant and without a handshake: the plan must add the
barriers. ``bump`` updates its argument in place. ``peer_sum`` cannot write its declared result into
given memory; ``scale`` can, through an out variant that returns what it was given. ``mix`` is
``peer_mean`` times another tensor. ``peer_mean``, ``mix`` and ``push_next`` fall back to c10d when
their tensors have no placement, so that the same program runs without symmplan.
"""

from __future__ import annotations

import functools

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
    placed = symmplan.handle(x)
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

    placed = symmplan.handle(out)
    placed.peer((placed.rank + 1) % placed.world_size).copy_(x)
    placed.barrier()  # every push has landed


def _mix(x: torch.Tensor, y: torch.Tensor, group_name: str) -> torch.Tensor:
    return _peer_mean(x, group_name) * y


def _bump(x: torch.Tensor, group_name: str) -> None:
    x.mul_(0.5)


def _scale_out(x: torch.Tensor, _group: str, *, out: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 3, out=out)


def _under_way(x):
    """How many collectives nobody has waited for yet."""
    return x.new_full((1,), torch._C._distributed_c10d._get_work_registry_size())


@functools.cache
def load() -> None:
    """Define and declare the ops, once per process."""
    import symmplan

    lib = torch.library.Library("symmplan_test", "FRAGMENT")
    _KEEP.append(lib)
    lib.define("peer_mean(Tensor x, str group_name) -> Tensor")
    lib.define("push_next(Tensor x, str group_name) -> Tensor")
    lib.define("push_next_out(Tensor x, str group_name, *, Tensor(a!) out) -> ()")
    lib.define("bump(Tensor(a!) x, str group_name) -> ()")
    lib.define("peer_sum(Tensor x, str group_name) -> Tensor")
    lib.impl("peer_sum", _peer_sum, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "symmplan_test::peer_sum", lambda x, _g: torch.empty_like(x), lib=lib
    )
    symmplan.register_symm_mem_args("symmplan_test::peer_sum", ["return"], group="group_name")
    lib.define("scale(Tensor x, str group_name) -> Tensor")
    lib.define("scale.out(Tensor x, str group_name, *, Tensor(a!) out) -> Tensor(a!)")
    lib.impl("scale", lambda x, _g: x * 3, "CompositeExplicitAutograd")
    lib.impl("scale.out", _scale_out, "CompositeExplicitAutograd")
    torch.library.register_fake("symmplan_test::scale", lambda x, _g: torch.empty_like(x), lib=lib)
    torch.library.register_fake("symmplan_test::scale.out", lambda _x, _g, *, out: out, lib=lib)
    lib.define("mix(Tensor x, Tensor y, str group_name) -> Tensor")
    lib.impl("mix", _mix, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "symmplan_test::mix", lambda x, _y, _g: torch.empty_like(x), lib=lib
    )
    symmplan.register_symm_mem_args("symmplan_test::mix", ["x"], group="group_name", handshake=True)
    lib.define("under_way(Tensor x) -> Tensor")
    lib.impl("under_way", _under_way, "CompositeExplicitAutograd")
    torch.library.register_fake("symmplan_test::under_way", lambda x: x.new_empty(1), lib=lib)
    lib.impl("bump", _bump, "CompositeExplicitAutograd")
    torch.library.register_fake("symmplan_test::bump", lambda _x, _g: None, lib=lib)
    lib.impl("peer_mean", _peer_mean, "CompositeExplicitAutograd")
    lib.impl("push_next", _push_next, "CompositeExplicitAutograd")
    lib.impl("push_next_out", _push_next_out, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "symmplan_test::peer_mean", lambda x, _g: torch.empty_like(x), lib=lib
    )
    torch.library.register_fake(
        "symmplan_test::push_next",
        lambda x, _g: torch.empty_like(x, memory_format=torch.contiguous_format),
        lib=lib,
    )
    torch.library.register_fake(
        "symmplan_test::push_next_out", lambda _x, _g, *, out: None, lib=lib
    )
    symmplan.register_symm_mem_args(
        "symmplan_test::peer_mean", ["x"], group="group_name", handshake=True
    )
    symmplan.register_symm_mem_args(
        "symmplan_test::scale", ["return"], group="group_name", out="symmplan_test::scale.out"
    )
    symmplan.register_symm_mem_args("symmplan_test::bump", ["x"], group="group_name")
    symmplan.register_symm_mem_args(
        "symmplan_test::push_next",
        ["return"],
        group="group_name",
        release=True,
        out="symmplan_test::push_next_out",
    )


_KEEP: list[torch.library.Library] = []
