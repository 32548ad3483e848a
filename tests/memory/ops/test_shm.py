"""The one-sided collectives in real processes: exact against gloo, equal bits on all ranks."""

# ruff: noqa: PLW2901 (test code: plainness first)

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from memory_plans import hand_made
from ranks import pool_of

from examples import examples

pytestmark = pytest.mark.ranks

SEGMENT = 1 << 20
DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64",
        "bool", "complex64",
    )
}  # fmt: skip
GLOO_REDUCES = {"float32", "float64", "float16", "int8", "uint8", "int32", "int64"}


# Rank side. `STATE` lives in the rank's process between calls.

STATE: dict = {}


def set_up(rank, world):
    from symmplan.memory import realize

    subsets = [(0,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    STATE["groups"] = {}
    for subset in subsets:
        if subset[-1] < world:
            group = dist.new_group(subset)  # every rank takes part in making every group
            if rank in subset:
                STATE["groups"][subset] = group
    STATE["arenas"] = {}
    for subset, group in STATE["groups"].items():
        STATE["arenas"][subset] = realize(
            hand_made({"a": SEGMENT, "b": SEGMENT}, groups=("g",)),
            memory="shm",
            groups={"g": group},
            timeout=30,
        )


def tear_down(rank, world):
    for arena in STATE["arenas"].values():
        arena.release()


pool = pool_of(2, 3, 1, setup=set_up, teardown=tear_down)


def values(dtype, shape, seed, *, exact):
    """The input of one rank; small whole numbers when sums must be exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if exact or not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 5, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def place(arena, name, dtype, shape, offset):
    count = 1
    for extent in shape:
        count *= extent
    flat = arena.tensor(name, dtype)
    return flat[offset : offset + count].view(shape)


def digest(tensor):
    return hashlib.sha256(raw(tensor).numpy()).hexdigest()


def raw(tensor):
    """The bytes, whatever the strides of dimensions of size one or zero say."""
    tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def reference(op, inputs, rank, dtype):
    """What c10d means by the op, in rank order and as exactly as the type allows."""
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(dtype, dtype)
    total = inputs[0].to(wide)
    for other in inputs[1:]:
        other = other.to(wide)
        if dtype == torch.bool:
            total = (total | other) if op in ("sum", "max") else (total & other)
        elif op in ("sum", "avg"):
            total = total + other
        elif op == "product":
            total = total * other
        else:
            total = torch.maximum(total, other) if op == "max" else torch.minimum(total, other)
    if op == "avg":
        if wide.is_floating_point or wide.is_complex:
            total = total / len(inputs)
        else:
            total = torch.div(total, len(inputs), rounding_mode="trunc")
    return total.to(dtype)


def run_case(rank, world, case):
    """Run one generated case; ``(digest of the result, complaint)``; None for bystanders."""
    subset = case["subset"]
    if rank not in subset:
        return None
    arena, group = STATE["arenas"][subset], STATE["groups"][subset]
    me, size, name = group.rank(), group.size(), group.group_name
    dtype, shape = DTYPES[case["dtype"]], tuple(case["shape"])
    op, kind, offset = case["op"], case["reduce"], case["offset"]
    ops = torch.ops.symmplan
    whole = (shape[0] * size, *shape[1:])
    if op == "all_gather":
        inputs = [values(dtype, shape, case["seed"] + r, exact=False) for r in range(size)]
        out = place(arena, "a", dtype, whole, offset)
        mine = inputs[me]
        if case["in_place"]:
            out[me * shape[0] : (me + 1) * shape[0]] = mine
            mine = out[me * shape[0] : (me + 1) * shape[0]]
        elif case["strided"]:
            mine = torch.stack([mine, mine], dim=-1)[..., 0]
        ops.all_gather_out(mine, size, name, out=out)
        want = torch.cat(inputs)
        got = out
    elif op == "reduce_scatter":
        inputs = [values(dtype, whole, case["seed"] + r, exact=case["exact"]) for r in range(size)]
        source = place(arena, "a", dtype, whole, offset).copy_(inputs[me])
        part = slice(me * shape[0], (me + 1) * shape[0])
        got = source[part] if case["in_place"] else torch.empty(shape, dtype=dtype)
        if case["strided"] and not case["in_place"]:
            got = torch.empty((*shape, 2), dtype=dtype)[..., 0]
        ops.reduce_scatter_out(source, kind, size, name, out=got)
        want = reference(kind, [i[part] for i in inputs], me, dtype)
    elif op == "all_reduce":
        inputs = [values(dtype, shape, case["seed"] + r, exact=case["exact"]) for r in range(size)]
        source = place(arena, "a", dtype, shape, offset).copy_(inputs[me])
        got = source if case["in_place"] else place(arena, "b", dtype, shape, 0)
        ops.all_reduce_out(source, kind, name, out=got)
        want = reference(kind, inputs, me, dtype)
    elif op == "broadcast":
        inputs = [values(dtype, shape, case["seed"] + r, exact=False) for r in range(size)]
        src = case["seed"] % size
        got = place(arena, "a", dtype, shape, offset)
        mine = got.copy_(inputs[me]) if case["in_place"] else inputs[me]
        ops.broadcast_out(mine, src, name, out=got)
        want = inputs[src]
    else:
        random = torch.Generator().manual_seed(case["seed"])
        rows = torch.randint(0, 4, (size, size), generator=random).tolist()  # [sender][receiver]
        if case["exact"]:
            rows = [[shape[0]] * size for _ in range(size)]
        inputs = [
            values(dtype, (sum(rows[r]), *shape[1:]), case["seed"] + r, exact=False)
            for r in range(size)
        ]
        receives = [rows[r][me] for r in range(size)]
        got = place(arena, "a", dtype, (sum(receives), *shape[1:]), offset)
        splits = ([], []) if case["exact"] else (receives, rows[me])
        ops.all_to_all_single_out(inputs[me], *splits, name, out=got)
        want = torch.cat([torch.split(inputs[r], rows[r])[me] for r in range(size)])
    complaint = None
    if digest(got) != digest(want):
        complaint = f"rank {me}: got {got.flatten()[:8]} want {want.flatten()[:8]}"
    elif op in ("all_gather", "reduce_scatter", "all_reduce"):
        complaint = against_gloo(case, op, inputs[me], got, group)
    return digest(got), complaint


def against_gloo(case, op, mine, got, group):
    """The same by gloo, where it can: bitwise for what is exact."""
    if op == "all_gather":
        as_bytes = raw(mine)
        parts = [torch.empty_like(as_bytes) for _ in range(group.size())]
        if not as_bytes.numel():
            return None
        dist.all_gather(parts, as_bytes, group=group)
        want = torch.cat(parts)
        return None if torch.equal(want, raw(got)) else "gloo differs"
    ops = {
        "sum": dist.ReduceOp.SUM,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
        "product": dist.ReduceOp.PRODUCT,
    }
    exact = case["exact"] or case["reduce"] in ("max", "min")
    if case["reduce"] not in ops or case["dtype"] not in GLOO_REDUCES or not exact:
        return None
    want = mine.clone()
    if not want.numel():
        return None
    dist.all_reduce(want, ops[case["reduce"]], group=group)
    if op == "reduce_scatter":
        want = want.chunk(group.size())[group.rank()]
    return None if torch.equal(want, got) else f"gloo differs: {want} against {got}"


# Parent side.


@st.composite
def cases(draw, world):
    subsets = [s for s in [(0,), (0, 1), (0, 2), (1, 2), (0, 1, 2)] if s[-1] < world]
    op = draw(
        st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"])
    )
    kinds = ["sum", "avg", "max", "min", "product"]
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    if dtype == "complex64":
        kinds = ["sum", "avg", "product"]
    elif dtype == "bool":
        kinds = ["sum", "max", "min", "product"]
    small = st.integers(0, 7)
    shape = draw(
        st.one_of(
            st.lists(small, min_size=1, max_size=3),
            # Around the limits: one-shot, memmove, chunks, shares of cache lines.
            st.sampled_from([[1023], [1024], [2049], [4097], [8192], [17, 257], [40000]]),
        )
    )
    return {
        "op": op,
        "subset": draw(st.sampled_from(subsets)),
        "dtype": dtype,
        "reduce": draw(st.sampled_from(kinds)),
        "shape": shape,
        "offset": draw(st.integers(0, 65)),
        "seed": draw(st.integers(0, 1000)),
        "in_place": draw(st.booleans()),
        "strided": draw(st.booleans()),
        "exact": draw(st.booleans()),
    }


@examples(
    200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_collectives_are_exact(pool, data):
    case = data.draw(cases(pool.world_size))
    answers = [a for a in pool.run(run_case, case) if a is not None]
    assert [complaint for _, complaint in answers] == [None] * len(case["subset"])
    if case["op"] in ("all_gather", "all_reduce", "broadcast"):
        assert len({bits for bits, _ in answers}) == 1, "ranks hold different bits"


def large_sum(rank, world):
    """More than one chunk and one shot: narrow types rounded once, the same bits everywhere."""
    arena = STATE["arenas"][tuple(range(world))]
    name = STATE["groups"][tuple(range(world))].group_name
    x = arena.tensor("a", torch.bfloat16)
    inputs = [values(torch.bfloat16, (x.numel(),), r, exact=False) for r in range(world)]
    x.copy_(inputs[rank])
    torch.ops.symmplan.all_reduce_out(x, "sum", name, out=x)
    total = inputs[0].float()
    for other in inputs[1:]:
        total += other.float()
    return torch.equal(x, total.to(torch.bfloat16)), digest(x)


def test_narrow_types_are_rounded_once(pool):
    answers = pool.run(large_sum)
    assert all(exact for exact, _ in answers)
    assert len({bits for _, bits in answers}) == 1
