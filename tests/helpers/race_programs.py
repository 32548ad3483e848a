"""Six programs that race, and their like that do not; for `test_races`.

``push_HR`` writes its input into the next rank's result, ``read_HR`` takes the maximum of all
inputs; with H they wait for all ranks before they touch a symmetric byte, with R they end when all
ranks' accesses are over. Their declarations are truthful.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

KINDS = ("00", "01", "10", "11")
_KEEP: list[torch.library.Library] = []
PROCESS_GROUP = [False]


def _gathered(x, group_name):
    group = dist.distributed_c10d._resolve_process_group(group_name)
    out = torch.empty((dist.get_world_size(group), *x.shape), dtype=x.dtype)
    dist.all_gather(list(out.unbind()), x.contiguous(), group=group)
    return out


def _push(x, group_name):
    group = dist.distributed_c10d._resolve_process_group(group_name)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return _gathered(x, group_name)[(rank - 1) % size].clone()


def _push_out(kind, x, group_name, *, out):
    import symmplan

    placed = symmplan.placed.handle(out, group_name)
    if kind[0] == "1":
        placed.barrier()
    placed.peer((placed.rank + 1) % placed.world_size).copy_(x)
    if kind[1] == "1":
        placed.barrier()


def _read(kind, x, group_name):
    import symmplan
    from symmplan.memory import locate

    if locate(x) is None:
        return _gathered(x, group_name).amax(0)
    placed = symmplan.placed.handle(x, group_name)
    if kind[0] == "1":
        placed.barrier()
    rows = [placed.peer(r) for r in range(placed.world_size)]
    result = functools.reduce(torch.maximum, rows).clone()
    if kind[1] == "1":
        placed.barrier()
    return result


@functools.cache
def load():
    import symmplan

    lib = torch.library.Library("symmplan_races", "FRAGMENT")
    _KEEP.append(lib)
    for kind in KINDS:
        facts = {"handshake": kind[0] == "1", "release": kind[1] == "1"}
        push, read = f"push_{kind}", f"read_{kind}"
        lib.define(f"{push}(Tensor x, str group_name) -> Tensor")
        lib.define(f"{push}_out(Tensor x, str group_name, *, Tensor(a!) out) -> ()")
        lib.define(f"{read}(Tensor x, str group_name) -> Tensor")
        lib.impl(push, _push, "CompositeExplicitAutograd")
        lib.impl(f"{push}_out", functools.partial(_push_out, kind), "CompositeExplicitAutograd")
        lib.impl(read, functools.partial(_read, kind), "CompositeExplicitAutograd")

        def like(x, _g):
            return torch.empty_like(x, memory_format=torch.contiguous_format)

        def nothing(_x, _g, *, out):
            return None

        torch.library.register_fake(f"symmplan_races::{push}", like, lib=lib)
        torch.library.register_fake(f"symmplan_races::{read}", like, lib=lib)
        torch.library.register_fake(f"symmplan_races::{push}_out", nothing, lib=lib)
        symmplan.register_symm_mem_args(
            f"symmplan_races::{push}",
            ["return"],
            group="group_name",
            out=f"symmplan_races::{push}_out",
            **facts,
        )
        symmplan.register_symm_mem_args(
            f"symmplan_races::{read}", ["x"], group="group_name", **facts
        )


def _op(name, kind):
    return getattr(torch.ops.symmplan_races, f"{name}_{kind}")


def in_place_copy(kind, x, g):
    ops = torch.ops._c10d_functional
    m = _op("read", kind)(x * 2, g)
    return ops.wait_tensor(ops.all_reduce(m + 1000, "sum", g))


def start_and_wait(kind, x, g):
    ops = torch.ops._c10d_functional
    s = ops.all_gather_into_tensor(x, 2, g)
    v = _op("push", kind)(x * 2, g)
    w = ops.wait_tensor(s)
    return w.sum() + v


def source_of_a_copy(kind, x, g):
    v = _op("push", kind)(x * 2, g)
    return _op("read", "11")(v.view(8, 8)[2:6], g)


def one_buffer(kind, x, g):
    return _op("read", "01" if kind == "00" else kind)(_op("push", kind)(x, g), g)


def own_input(kind, x, g):
    ops = torch.ops._c10d_functional
    v = _op("push", kind)(x, g)
    return ops.wait_tensor(ops.all_gather_into_tensor(v, 2, g))


def broadcast_between(kind, x, g):
    ops = torch.ops._c10d_functional
    a = _op("push", kind)(x, g)
    b = a + 1
    c = ops.wait_tensor(ops.broadcast(b, 0, g))
    return _op("push", kind)(c * 2, g) + 1


#: name: (program, ranks, whether its collectives are the process group's, the kind that races)
PROGRAMS = {
    "in_place_copy": (in_place_copy, 2, True, "10"),
    "start_and_wait": (start_and_wait, 2, True, "01"),
    "source_of_a_copy": (source_of_a_copy, 2, False, "10"),
    "one_buffer": (one_buffer, 2, False, "00"),
    "own_input": (own_input, 2, True, "10"),
    "broadcast_between": (broadcast_between, 3, True, "01"),
}


def seed():
    """On this rank: collectives as `PROCESS_GROUP` says, and plans without their barriers."""
    import symmplan.integrate.compile.compiled_graph as compiled_graph
    from symmplan.model import Plan
    from symmplan.place import algorithms
    from symmplan.runtime import prepare

    load()
    algorithms.Lowerings.table = property(
        lambda _: algorithms._C10D if PROCESS_GROUP[0] else algorithms._SHM
    )
    assert compiled_graph.points_of
    compiled_graph.points_of = lambda _barriers: ()
    planned = prepare.plan_problem

    def without_barriers(*args, **kwargs):
        from attrs import evolve

        return evolve(planned(*args, **kwargs), barriers=())

    prepare.plan_problem = without_barriers
    Plan.verify = lambda self: None
