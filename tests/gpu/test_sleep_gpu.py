"""What sleeps gives its bytes back to the driver, and goes on with the same bits.

Two devices of one host, or one that two ranks share.
"""

from __future__ import annotations

import time

import pytest
import torch
from devices import SHARED, needs_devices, pool_on

pytestmark = needs_devices()

DIM, TURNS = 8192, 5
MiB = 1 << 20
#: What a rank's first registration sets up for good, in CUDA and in the program's communicator.
STAYS = 90 * MiB

two = pool_on(2, timeout=240)


def _used(world):
    """Bytes that the driver has given, but to torch's allocator; both ranks' on a shared device."""
    import gc

    gc.collect()
    torch.cuda.synchronize()
    torch.distributed.barrier()
    free, total = torch.cuda.mem_get_info()
    mine = torch.tensor([torch.cuda.memory_reserved()], device="cuda")
    reserved = [torch.zeros_like(mine) for _ in range(world)]
    torch.distributed.all_gather(reserved, mine)
    torch.distributed.barrier()
    here = reserved if SHARED else [mine]
    return total - free - sum(int(x) for x in here)


def _turns(rank, world, choose):
    """Bytes before, awake and asleep, seconds to wake, whether all bits are those of FSDP2."""
    from fsdp_models import Net, Trace, batch, differences, mesh, shard
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import symmplan

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def trained(act=None):
        torch.manual_seed(7)
        net = Net(blocks=3, dim=DIM).cuda()
        model = shard(net, mesh=mesh(world, device="cuda"), mp_policy=policy)
        optimizer, trace, handle = torch.optim.SGD(model.parameters(), lr=1e-3), Trace(), None
        for step in range(2 + 2 * TURNS):
            loss = model(batch(step, rank, dim=DIM, device="cuda")).float().pow(2).mean()
            loss.backward()
            trace.add("loss", loss)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0 and act is not None:
                torch.cuda.empty_cache()
                found["before"] = _used(world)
                handle = symmplan.fsdp.apply(model, choose=choose, timeout=60.0)
            elif handle is not None and step and step % 2 == 0:
                act(handle)
        trace.add("weight", next(iter(model.parameters())))
        return trace, handle

    found = {"awake": [], "asleep": [], "seconds": []}

    def act(handle):
        found["awake"].append(_used(world))
        handle.sleep()
        found["asleep"].append(_used(world))
        begin = time.perf_counter()
        handle.wake()
        torch.cuda.synchronize()
        found["seconds"].append(round(time.perf_counter() - begin, 3))

    plain, _ = trained()
    trace, handle = trained(act)
    found["wrong"], found["stats"] = differences(plain, trace), handle.stats
    handle.remove()
    return found


@pytest.mark.first
@pytest.mark.parametrize("choose", ["push"])
def test_a_sleeping_handle_holds_next_to_nothing(two, choose):
    for found in two.run(_turns, choose):
        stats, before = found["stats"], found["before"]
        print({name: x for name, x in found.items() if name != "stats"}, stats.beyond_segments)
        assert found["wrong"] == []
        assert stats.sleeps == TURNS
        ranks = 2 if SHARED else 1  # whose bytes the driver counts
        for awake, asleep in zip(found["awake"], found["asleep"], strict=True):
            assert awake - asleep >= 0.95 * (awake - before)
            assert asleep - before <= ranks * STAYS
        assert max(found["asleep"]) - min(found["asleep"]) <= 2 * MiB  # nothing grows
