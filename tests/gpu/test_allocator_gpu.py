"""The model of torch's caching allocator has what the allocator of a device has."""

from __future__ import annotations

import random

import pytest
import torch

from symmplan.device.allocator import CachingAllocator

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.mark.parametrize("seed", range(20))
def test_reserves_what_the_allocator_reserves(seed):
    draw = random.Random(seed)
    device = torch.device("cuda", torch.cuda.current_device())
    streams = [torch.cuda.current_stream(device), torch.cuda.Stream(device)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # What other tests hold in part may serve this one.
    pool, before = torch.cuda.MemPool(), torch.cuda.memory_reserved()
    model, live = CachingAllocator(), []
    with torch.cuda.use_mem_pool(pool):
        for _ in range(300):
            if live and draw.random() < 0.45:
                tensor, block = live.pop(draw.randrange(len(live)))
                del tensor
                model.drop(block)
            else:
                nbytes = int(2 ** draw.uniform(0, 26))
                number = draw.randrange(2)
                with torch.cuda.stream(streams[number]):
                    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
                live.append((tensor, model.take(nbytes, number)))
            assert torch.cuda.memory_reserved() - before == model.reserved
        live.clear()
