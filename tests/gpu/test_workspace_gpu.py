"""All-reduces through workspaces in CUDA graphs: right sums, late peers, and none that hangs."""

from __future__ import annotations

import random
import time

import pytest
import torch
from attrs import evolve
from devices import needs_devices, ranks_on

import symmplan
from symmplan.memory import realize

pytestmark = needs_devices()

_SIZES = (2, 64, 1000, 1024, 40_000, 262_144, 524_288)


def _graphs(group, arena):
    """``{(elements, type): (graph, placement)}``, each of two all-reduces."""
    found = {}
    for numel in _SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            x = arena.tensor("x", torch.uint8)[: numel * dtype.itemsize].view(dtype)
            torch.ops.symmplan.kernel_all_reduce_(x.zero_(), "sum", group)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                torch.ops.symmplan.kernel_all_reduce_(x, "sum", group)
                torch.ops.symmplan.kernel_all_reduce_(x, "sum", group)
            found[numel, dtype] = graph, x
    return found


def _padded(nbytes):
    problem = symmplan.Problem.from_intervals([("x", 0, 1, nbytes)])
    buffers = [evolve(buffer, signal_pad=True) for buffer in problem.buffers]
    return symmplan.plan(evolve(problem, buffers=buffers))


def _replayed(rank, world, rounds):
    """Replays in any order on ranks that are late; what was wrong, and which kernels ran."""
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.set_device(rank)
    group, choice, apart, wrong = dist.group.WORLD, random.Random(1), random.Random(rank), []
    plan = _padded(4 * _SIZES[-1])
    given = {"memory": "cuda", "device": "cuda", "timeout": 60.0}
    with realize(plan, groups={"default": group}, **given) as arena:
        graphs = _graphs(group.group_name, arena)
        for number in range(rounds):
            numel, dtype = choice.choice([*graphs])
            graph, x = graphs[numel, dtype]
            generator = torch.Generator("cuda").manual_seed(number)
            everyone = torch.randn(world, numel, generator=generator, device="cuda").to(dtype)
            x.copy_(everyone[rank])
            if apart.random() < 0.2:
                time.sleep(0.01 * apart.random())
            graph.replay()
            total = torch.zeros(numel, device="cuda")
            for each in everyone:
                total += each.float()
            once = total.to(dtype).float()
            total = torch.zeros(numel, device="cuda")
            for _ in range(world):
                total += once
            if not torch.equal(x, total.to(dtype)):
                wrong.append((number, numel, str(dtype)))
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for graph, _ in graphs.values():
                graph.replay()
            torch.cuda.synchronize()
        names = [event.name for event in found.events()]
        dist.barrier()
        torch.cuda.synchronize()
        del graphs, graph, x
    return wrong, sum("lamport" in n for n in names), sum("two_shot" in n for n in names)


@pytest.mark.first
def test_replays_on_late_ranks_have_the_right_sums():
    with ranks_on(2, timeout=150.0) as pool:
        for wrong, lamport, two_shot in pool.run(_replayed, 400):
            print(lamport, two_shot)
            assert not wrong
            assert lamport == 2 * (2 * len(_SIZES) - 1)
            assert two_shot == 2


def _alone(rank, world):
    """The error of a rank whose peer never comes, and seconds until then."""
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    group = dist.group.WORLD
    given = {"memory": "cuda", "device": "cuda", "timeout": 2.0}
    arena = realize(_padded(4096), groups={"default": group}, **given)
    x = arena.tensor("x", torch.float32).fill_(1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.symmplan.kernel_all_reduce_(x, "sum", group.group_name)
    dist.barrier()
    torch.cuda.synchronize()
    if rank:
        time.sleep(12)
        return "", 0.0
    begin = time.monotonic()
    graph.replay()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0], time.monotonic() - begin
    return "", time.monotonic() - begin


def test_a_missing_peer_is_an_error():
    with ranks_on(2, timeout=60.0) as pool:
        outcomes = pool.outcomes(_alone)
    (text, seconds) = outcomes[0].value
    print(text, seconds)
    assert "CUDA error" in text
    assert seconds < 10
