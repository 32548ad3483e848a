"""What runs nothing: what integrations hold in a simulated world, and for how long."""

from __future__ import annotations

import torch
import torch.distributed as dist
from held import segments_of_plans

import symmplan


def test_what_was_left_counts_until_the_world_ends():
    """Others may make their segments only then: FSDP2's, at the end of a recorded step.

    What sleeps there gives nothing back.
    """
    made = []

    def program():
        with symmplan.eager() as session:
            whole = torch.empty(4096)
            dist.all_gather_into_tensor(whole, torch.ones(512))
            session.step()
            session.sleep()
            made.append(session)
        with symmplan.expert_parallel(max_tokens=8) as experts:
            routes = experts.routes([1] * 8)
            experts.dispatch(torch.ones(8, 16), routes)
            experts.sleep()
            assert not session.asleep
            assert not experts.asleep
            made.append(experts)
            plans.append(experts.plan)

    plans = []
    report = symmplan.simulate(program, ranks=8, memory="shm")
    plans.insert(0, made[0].plan)
    assert [p.fingerprint for p in report.plans] == [p.fingerprint for p in plans]
    assert report.peak_bytes == sum(p.peak_bytes for p in plans)
    assert min(p.peak_bytes for p in plans) > 0
    assert segments_of_plans() == ()
