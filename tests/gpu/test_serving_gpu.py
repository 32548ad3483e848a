"""CUDA graphs captured for each size that a server decodes, in one pool, over one segment."""

from __future__ import annotations

import random

import pytest
import torch
from decoding import LENGTH, decoder, forget, tokens
from devices import SHARED, needs_devices, ranks_on

import symmplan

pytestmark = needs_devices()

_SIZES = (512, 64, 8, 1)
_HOW = {"dtype": torch.bfloat16, "device": "cuda"}


def _captured(compiled, places, sizes):
    """``{size: (graph, input, place, result)}``, each captured after a warm-up with all sizes."""
    for count in sizes:
        for _ in range(2):
            compiled(tokens(count, 0, **_HOW), places[0])
    torch.cuda.synchronize()
    pool = torch.cuda.graph_pool_handle()
    found = {}
    for count in sizes:
        graph, x, place = torch.cuda.CUDAGraph(), tokens(count, 0, **_HOW), places[0].clone()
        with torch.cuda.graph(graph, pool=pool):
            result = compiled(x, place)
        found[count] = graph, x, place, result
    return found


def _serve(rank, world, choose, inner):
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    torch._dynamo.reset()
    mesh = dist.init_device_mesh("cuda", (world,))
    model = decoder(mesh, _SIZES[0], **_HOW)
    memory = "cuda" if SHARED else "auto"
    backend = symmplan.backend(inner=inner, memory=memory, choose=choose, timeout=60.0)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    choice = random.Random(5)
    requests = [choice.choice(_SIZES) for _ in range(2 * LENGTH)]
    with torch.inference_mode():
        places = [torch.tensor([i], device="cuda") for i in range(LENGTH)]
        forget(model)
        expected = [
            model(tokens(count, number, **_HOW), places[number % LENGTH]).clone()
            for number, count in enumerate(requests)
        ]
        graphs = _captured(compiled, places, _SIZES)
        before, held = backend.stats, symmplan.segments()
        taken = torch.cuda.memory_reserved()
        forget(model)
        for number, count in enumerate(requests):
            graph, x, place, result = graphs[count]
            x.copy_(tokens(count, number, **_HOW))
            place.copy_(places[number % LENGTH])
            graph.replay()
            torch.testing.assert_close(result, expected[number], rtol=5e-2, atol=5e-2)
        torch.cuda.synchronize()
        after = backend.stats
        grown = torch.cuda.memory_reserved() - taken
    del graphs
    same = symmplan.segments() == held
    torch.cuda.synchronize()
    dist.barrier()
    backend.release()
    return {
        "rendezvous": (before.rendezvous, after.rendezvous),
        "placed": after.placed,
        "held": held,
        "segments": sum(segment.users != ("epoch counters",) for segment in held),
        "same": same,
        "grown": grown,
    }


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_graphs_of_all_sizes_lie_in_one_segment(inner):
    with ranks_on(2, timeout=200.0) as pool:
        first, second = pool.run(_serve, "placed", inner)
    print(first)
    assert first["rendezvous"] == second["rendezvous"]
    assert first["rendezvous"][0] == first["rendezvous"][1] == 1
    assert first["placed"] > 0
    assert first["segments"] == 1
    assert first["same"]
    assert not first["grown"]
