"""A plan for all sizes that a server decodes: one segment, met once, whatever comes."""

from __future__ import annotations

import random
import time

import pytest
import torch
from decoding import LENGTH, decoder, forget, tokens
from held import segments_of_plans
from ranks import pool_of

pytestmark = pytest.mark.ranks

pair = pool_of(2, timeout=280.0)
servers = pool_of(2, 4, timeout=280.0)

_SIZES = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)


def _decode(rank, size, sizes, inner, dynamic):
    """Warm up with all sizes, the largest first, then decode requests of random ones, delayed."""
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    mesh = dist.init_device_mesh("cpu", (size,))
    model = decoder(mesh, max(sizes))
    backend = symmplan.backend(inner=inner, timeout=60.0, debug=inner == "eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    places = [torch.tensor([i]) for i in range(LENGTH)]

    def step(run, count, at, number):
        x = tokens(count, number)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0, min=2, max=max(sizes))
        return run(x, places[at])

    def played(run, requests):
        forget(model)
        found = []
        for number, count in enumerate(requests):
            time.sleep(random.Random(f"{number} {rank}").choice((0.0, 0.0, 0.01)))
            found.append(step(run, count, number % LENGTH, number).clone())
        return found

    choice = random.Random(5)
    requests = [choice.choice(sizes) for _ in range(2 * LENGTH)]
    grown = []
    # Dynamo compiles a function for eight sizes, unless it is told otherwise.
    allowed = torch._dynamo.config.patch(recompile_limit=64)
    try:
        with torch.inference_mode(), allowed:
            expected = played(model, requests)
            for number, count in enumerate(sizes):
                step(compiled, count, 0, number)
                grown.append((backend.stats.rendezvous, segments_of_plans()))
            before = backend.stats
            got = played(compiled, requests)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        return {
            "before": before,
            "after": backend.stats,
            "grown": [(met, [s.nbytes for s in held]) for met, held in grown],
            "held": [s.nbytes for s in segments_of_plans()],
            "plain": backend.stats.plain,
        }
    finally:
        dist.barrier()
        backend.release()


def _judge(told, calls):
    first, *others = told
    assert all(other == first for other in others)
    before, after = first["before"], first["after"]
    # The largest is warmed up first: nobody meets again, and nothing grows, from then on.
    assert {met for met, _ in first["grown"]} == {1}
    assert {tuple(held) for _, held in first["grown"]} == {tuple(first["held"])}
    assert len(first["held"]) == 1
    assert (after.rendezvous, after.graphs, after.plans) == (1, before.graphs, before.plans)
    assert after.segment_bytes == before.segment_bytes
    # Four all-reduces in each request, all of them in placements.
    assert after.served - before.served == calls
    assert after.plain == 0


@pytest.mark.further
@pytest.mark.parametrize("sizes", [_SIZES[::9], _SIZES], ids=len)
def test_a_server_of_many_sizes_has_one_segment_and_meets_once(servers, sizes):
    told = servers.run(_decode, sizes, "eager", False)
    _judge(told, 4 * 2 * LENGTH)
    assert told[0]["after"].graphs == len(sizes)


@pytest.mark.further
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_one_graph_serves_all_sizes_up_to_its_bound(pair, inner):
    told = pair.run(_decode, tuple(s for s in _SIZES if s > 1), inner, True)
    _judge(told, 4 * 2 * LENGTH)
    assert told[0]["after"].graphs == 1
