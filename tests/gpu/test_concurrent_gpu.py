"""FSDP2 beside tensor-parallel sums of another group of the same two devices: measured beside them.

python -m pytest tests/gpu/test_concurrent_gpu.py -m gpu
"""

from __future__ import annotations

import torch
from devices import needs_devices, pool_on

pytestmark = needs_devices()

pool = pool_on(2, timeout=180)


def _steps(rank, world_size, choose):
    """The choices, whether somebody still listens, and how far results are from FSDP2's."""
    import torch.distributed as dist
    from two_groups import TwoGroups

    from symmplan.process import PROCESS
    from symmplan.runtime import trials

    trials.forget()
    other = dist.new_group(range(world_size))
    groups = dist.group.WORLD, other
    options = {"ranks": world_size, "width": 2048, "layers": 3}
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(1024, 2048, generator=generator).cuda().to(torch.bfloat16)
    found = {}
    for side in ("plain", choose):
        made = TwoGroups("FSDP2", side, options, groups, x)
        found[side] = made()
        torch.cuda.synchronize()
        choices = [
            (c.op, c.nbytes, c.algorithm, c.concurrent, sorted(c.seconds)) for c in made.choices
        ]
        made.end()
    apart = float((found[choose] - found["plain"]).abs().max() / found["plain"].abs().max())
    dist.destroy_process_group(other)
    return choices, PROCESS.listening is not None, apart


def test_fsdp_is_measured_beside_the_sums_of_another_group(pool):
    first, second = pool.run(_steps, "measure")
    assert first[0] == second[0]
    choices, listening, apart = first
    assert listening == 0
    assert apart < 0.05
    concurrent = [c for c in choices if c[3]]
    assert {c[0] for c in concurrent} == {"all_gather", "reduce_scatter"}
    assert all("all_reduce_" in c[3] and {"ordinary", "symmetric"} <= {*c[4]} for c in concurrent)
