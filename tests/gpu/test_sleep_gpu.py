"""What sleeps gives its bytes back to the driver, and goes on with the same bits.

Two devices of one host, or one that two ranks share.
"""

from __future__ import annotations

import time

import pytest
import torch
from devices import SHARED, needs_devices, pool_on

pytestmark = needs_devices()

DIM, TURNS = 4096, 5
MiB = 1 << 20
#: What a first registration sets up in the program's own communicator.
STAYS = 40 * MiB

#: Without what an earlier program has registered.
two = pool_on(2, timeout=240, scope="function")


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


def _turns(rank, world, memory, choose):
    """Bytes before, awake and asleep, seconds to sleep and wake, whether all bits are FSDP2's."""
    from fsdp_models import Net, Trace, batch, differences, mesh, shard
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import symmplan
    from symmplan.process import PROCESS

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
                handle = symmplan.fsdp.apply(model, memory=memory, choose=choose, timeout=60.0)
            elif handle is not None and step and step % 2 == 0:
                act(handle)
        trace.add("weight", next(iter(model.parameters())))
        return trace, handle

    found = {"awake": [], "asleep": [], "to sleep": [], "seconds": []}

    def act(handle):
        found["awake"].append(_used(world))
        begin = time.perf_counter()
        handle.sleep()
        found["to sleep"].append(round(time.perf_counter() - begin, 3))
        assert not PROCESS.engines_made
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


MEASURED = pytest.param(
    *("auto", "measure"),
    marks=pytest.mark.skipif(SHARED, reason="nothing is faster where ranks share a device"),
)


@pytest.mark.first
@pytest.mark.parametrize(("memory", "choose"), [MEASURED, ("cuda", "push")])
def test_a_sleeping_handle_holds_next_to_nothing(two, memory, choose):
    for found in two.run(_turns, memory, choose):
        stats, before = found["stats"], found["before"]
        print({name: x for name, x in found.items() if name != "stats"}, stats.beyond_segments)
        assert found["wrong"] == []
        assert stats.sleeps == TURNS
        ranks = 2 if SHARED else 1  # whose bytes the driver counts
        for awake, asleep in zip(found["awake"], found["asleep"], strict=True):
            assert awake - asleep >= 0.95 * (awake - before) > 0
            assert asleep - before <= ranks * STAYS
        assert max(found["asleep"]) - min(found["asleep"]) <= 2 * MiB  # nothing grows
