"""The longest sequence that trains on a device is no shorter with symmplan than without.

    python -m pytest tests/gpu/test_longest_gpu.py -m gpu -s

Two devices of one host. A ballast leaves `ROOM` bytes of each for what the program has. Longer and
longer sequences are tried, as ranks that run out of memory may leave each other waiting.
"""

from __future__ import annotations

import gc

import pytest
import torch
from devices import needs_devices
from ranks import RankPool, RanksFailed

pytestmark = needs_devices()

ROOM = 8 << 30
LAYERS, DIM, WORDS = 8, 2048, 16384
#: Seconds for the first sequence, for which Inductor compiles.
FIRST = 300
#: What is tried, in tokens.
LENGTHS = range(4096, 16384, 512)
#: What a process leaves of its device to the program.
BALLAST = []


def leave(_rank, _world):
    """From now on the program has `ROOM` bytes of the device."""
    import torch.distributed as dist

    dist.barrier()
    torch.cuda.synchronize()
    left = torch.cuda.mem_get_info()[0] - ROOM
    BALLAST.append(torch.empty(left, dtype=torch.uint8, device="cuda"))


def _steps(rank, world, device, length, reduce, compiled, planned):
    """Some steps, or what the allocator says. Returns the gathers and reductions in placements."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn import functional

    import symmplan
    from symmplan.bench.parts.llama import Llama, parts

    with torch.device(device):
        model = Llama(LAYERS, DIM, WORDS).bfloat16()
    if compiled:
        for layer in model.layers:
            layer.compile(dynamic=True)
    policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, reduce))
    mesh = dist.init_device_mesh(device, (world,))
    for part in (*parts(model), model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    handle = symmplan.fsdp.apply(model, timeout=60.0) if planned else None
    try:
        for step in range(4):
            torch.manual_seed(100 * step + rank)
            words = torch.randint(WORDS, (1, length), device=device)
            made = model(words).float().flatten(0, 1)
            functional.cross_entropy(made, words.roll(-1, 1).flatten()).backward()
            for parameter in model.parameters():
                parameter.grad = None
            del words, made
        return 0 if handle is None else handle.stats.served
    finally:
        if handle is not None:
            handle.remove()


def trains(rank, world, device, *case):
    """Whether this rank has the bytes for a case, and how many collectives were in placements."""
    try:
        found = True, _steps(rank, world, device, *case)
    except torch.OutOfMemoryError:
        found = False, 0
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return found


def _alone(length, *case):
    """What `trains` finds on both ranks, in processes of their own."""
    with RankPool(2, init="nccl", timeout=FIRST) as pool:
        pool.run(leave)
        try:
            return pool.run(trains, "cuda", length, *case)
        except RanksFailed:  # one rank waits for another that is out of memory
            return [(False, 0)]


def _longest(*case):
    """The longest sequence that trains with FSDP2 alone, in tokens.

    What ran before leaves fragments and kernels, so the last ones are tried alone, too.
    """
    longest = 0
    with RankPool(2, init="nccl", timeout=60) as pool:
        pool.run(leave)
        for length in LENGTHS:
            try:
                timeout = None if longest else FIRST
                found = pool.run(trains, "cuda", length, *case, False, timeout=timeout)
            except RanksFailed:  # one rank waits for another that is out of memory
                break
            if not all(fits for fits, _ in found):
                break
            longest = length
    while longest >= LENGTHS[0] and not all(fits for fits, _ in _alone(longest, *case, False)):
        longest -= LENGTHS.step
    return longest


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduce", ["bfloat16", "float32"])
def test_the_longest_sequence_is_no_shorter(reduce, compiled):
    length = _longest(reduce, compiled)
    assert LENGTHS[0] <= length < LENGTHS[-1]
    found = _alone(length, reduce, compiled, True)
    print(length, found)
    assert all(fits for fits, _ in found)
