"""What FSDP2's collectives run as, by the profiler: on copy engines, in symmetric kernels, or else.

    python -m pytest tests/gpu/test_fsdp_profile_gpu.py -m gpu

Two and four devices of one host. The layers are large enough to hide a gather.
"""

from __future__ import annotations

import pytest
from devices import finish, pool_on, ranks_on, worlds

pytestmark = pytest.mark.gpu

LAYERS = 4
#: Of a step: all layers are gathered in backward, too.
GATHERS = 1 + 2 * LAYERS
DIM = 2048
TOKENS = 4096


pool = pool_on(2, 4, timeout=180)
#: Ranks whose NCCL gathers with copy engines wherever memory is symmetric.
zero_cta = pool_on(2, 4, timeout=180, env={"NCCL_CTA_POLICY": "2"})


# Rank side.


def seen(rank, world, side, choose="measure", ahead=0, tokens=TOKENS, count=LAYERS, **apply):
    """What ran on the device in a step after the plan was made."""
    import attrs
    import torch.distributed as dist

    import symmplan
    from symmplan.bench.parts.fsdp_sides import Side

    dist.barrier()
    options = {
        "ranks": world,
        "device": "cuda",
        "model": "llama",
        "layers": count,
        "dim": DIM,
        "vocabulary": 0,
        "dtype": "bfloat16",
        "reduce": "bfloat16",
        "choose": [choose],
        "wait": 60.0,
        "compile": False,
        "checkpoint": False,
        "optimizer": None,
        "accumulate": 1,
        "cuda_graph": False,
    }
    trained = Side(side, rank, options)
    if apply:
        trained.handle.remove()
        trained.handle = symmplan.fsdp.apply(trained.model, choose=choose, **apply)
    layers = list(trained.model.layers)
    for i, layer in enumerate(layers if ahead else ()):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + ahead])
    for step in range(4):
        trained.step(step, tokens)
        trained.advance()
    found = trained.profile(tokens)
    handle = trained.handle
    if handle is not None:
        found["stats"] = attrs.asdict(handle.stats)
        found["algorithms"] = {(c.op, c.nbytes): c.algorithm for c in handle.choices}
        handle.remove()
    return found


def seen_forced(rank, world, kind):
    """The same where torch's own way wins for one kind of collective."""
    from fsdp_conditions import forced_kind

    with forced_kind(kind, rank):
        return seen(rank, world, "symmplan")


# Parent side.


def count(found, *words, without=()):
    """How many kernels and copies have all of ``words`` in their names."""
    return sum(
        n
        for name, n in found["collectives"].items()
        if all(word in name for word in words) and not any(word in name for word in without)
    )


def test_plain_fsdp_gathers_in_rings(pool):
    """The other tests' names and counts mean something."""
    for found in pool.run(seen, "plain"):
        print(found)
        assert count(found, "ncclDevKernel_AllGather") == 2 * LAYERS + 1
        assert count(found, "ncclDevKernel_ReduceScatter") == LAYERS + 1
        assert count(found, "Memcpy PtoP") == count(found, "ncclSym") == 0


def test_placed_gathers_run_in_symmetric_kernels(pool):
    for found in pool.run(seen, "symmplan", "placed"):
        print(found)
        assert found["stats"]["plain"] == found["stats"]["copies"] == 0
        assert count(found, "AllGather", without=["ncclSym"]) == count(found, "Memcpy PtoP") == 0
        assert count(found, "ncclSym", "AllGather") >= GATHERS


def test_placed_gathers_run_on_copy_engines_under_zero_cta(zero_cta):
    for found in zero_cta.run(seen, "symmplan", "placed"):
        print(found)
        assert found["stats"]["plain"] == found["stats"]["copies"] == 0
        assert count(found, "AllGather") == 0
        assert count(found, "Memcpy PtoP") >= GATHERS * (zero_cta.world_size - 1)


def test_by_copy_engines_no_gather_runs_in_kernels(pool):
    for found in pool.run(seen, "symmplan", "copy engine"):
        print(found)
        assert found["stats"]["plain"] == found["stats"]["copies"] == 0
        assert count(found, "AllGather") == 0
        assert count(found, "Memcpy PtoP") >= GATHERS * (pool.world_size - 1)


def test_measured_collectives_run_as_the_choices_say(pool):
    results = pool.run(seen, "symmplan", "measure")
    assert len({str(sorted(found["algorithms"].items())) for found in results}) == 1
    # The root's norm alone is too small to be measured, and stays with NCCL.
    algorithms = dict(results[0]["algorithms"])
    for found in results:
        print(found)
        gathers = {algorithm for (kind, _), algorithm in algorithms.items() if kind == "all_gather"}
        reductions = {
            algorithm for (kind, _), algorithm in algorithms.items() if kind == "reduce_scatter"
        }
        assert len(gathers) == len(reductions) == 1
        assert count(found, "ncclDevKernel_AllGather") == 1 + 2 * LAYERS * (gathers == {"ordinary"})
        assert bool(count(found, "ncclSym", "AllGather")) is (gathers == {"symmetric"})
        kernels = 1 + LAYERS * (reductions <= {"ordinary", "symmetric"})
        assert count(found, "nccl", "ReduceScatter") == kernels
        assert bool(count(found, "ncclSym", "ReduceScatter")) is (reductions == {"symmetric"})
        engines = (GATHERS - 1) * (gathers == {"copy engine"})
        engines += LAYERS * (reductions == {"push"})
        assert count(found, "Memcpy PtoP") >= engines * (pool.world_size - 1)
        assert bool(count(found, "Memcpy PtoP")) is bool(engines)


def seen_live(rank, world, live, ahead):
    """With so many products that the host is ahead of the device, under the profiler, too."""
    more = {"tokens": 8 * TOKENS, "count": 2 * LAYERS, "ahead": ahead, "unsharded_modules": live}
    return seen(rank, world, "symmplan", "copy engine", **more)


@pytest.mark.parametrize(("live", "ahead"), [(3, 0), (3, 1), (4, 0), (4, 2), (5, 2)])
@pytest.mark.parametrize("pool", worlds(2), indirect=True)
def test_gathers_run_beside_products_however_many_are_alive(pool, live, ahead):
    """In forward all but the root's, the first layer's, and what is gathered ahead of that.

    A copy engine may gather a module in several pieces.
    """
    for found in pool.run(seen_live, live, ahead):
        print(found)
        assert found["stats"]["plain"] == found["stats"]["replans"] == 0
        gathers, beside = found["forward"]["gathers"], found["forward"]["beside"]
        pieces = -(-gathers // (2 * LAYERS + 1))
        assert gathers - beside <= (2 + ahead) * pieces


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("world", worlds(2))
def test_what_was_only_measured_keeps_no_symmetric_memory(world, kind):
    """In processes of their own: other models' segments would be used again."""
    with ranks_on(world, timeout=180) as own:
        for found in own.run(seen_forced, kind):
            print(found)
            assert {w for (k, _), w in found["algorithms"].items() if k == kind} == {"ordinary"}
            others = {w for (k, _), w in found["algorithms"].items() if k != kind}
            assert others in ({"copy engine"}, {"push"})
            assert found["stats"]["segment_bytes"] == found["stats"]["lower_bound_bytes"] > 0
        own.outcomes(finish)


@pytest.mark.parametrize("pool", worlds(2), indirect=True)
@pytest.mark.parametrize(
    ("side", "gathers"), [("pooled", 2 * LAYERS + 1), ("kept, pool", LAYERS + 1)]
)
def test_the_sides_in_torchs_pool_gather_on_copy_engines(pool, side, gathers):
    """What symmplan is compared with does what FSDP2's own symmetric memory does."""
    for found in pool.run(seen, side):
        print(found)
        assert count(found, "AllGather") == 0
        assert count(found, "Memcpy PtoP") >= gathers
        assert count(found, "ncclDevKernel_ReduceScatter") == LAYERS + 1
