"""Who does not come is named on all ranks, also where they hear of it from one that gave up."""

from __future__ import annotations

import os
import signal
import time

import pytest
from memory_plans import hand_made
from ranks import RankPool

pytestmark = pytest.mark.ranks

PATIENCE = 2.0


def gets_lost(how, segment=None):
    if how == "dead":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "late":
        time.sleep(2 * PATIENCE)
    if how == "raises":
        error = ValueError("its own")
        if segment is not None:
            segment.health.break_(error)
        raise error


def in_a_segment(rank, world, who, how, last):
    """Rank ``who`` does not come to a barrier; rank ``last`` begins to wait when others gave up."""
    from symmplan.memory import realize

    with realize(hand_made({"x": 512}), memory="shm", timeout=PATIENCE) as arena:
        segment = arena.segments["s0"]
        segment.barrier()
        if rank == who:
            gets_lost(how, segment)
        if rank == last:
            time.sleep(1.0)
        segment.barrier()


def in_an_exchange(rank, world, who, how, last):
    from symmplan.memory import agree

    agree(hand_made({"x": 512}), timeout=PATIENCE)
    if rank == who:
        gets_lost(how)
    if rank == last:
        time.sleep(1.0)
    agree(hand_made({"x": 512}), timeout=PATIENCE)


def over_two_groups(rank, world):
    """Rank 2 is lost to a group in which it has number 1, and rank 0 hears of it in another."""
    import torch.distributed as dist

    from symmplan.coordination.exchange import Exchange
    from symmplan.coordination.groups import resolve_groups

    members = {"left": [0, 1], "right": [1, 2]}
    made = {name: dist.new_group(ranks) for name, ranks in members.items()}
    groups = {name: made[name] for name, ranks in members.items() if rank in ranks}
    if rank == 2:
        return
    exchange = Exchange(resolve_groups(groups, groups), PATIENCE if rank else 5 * PATIENCE)
    try:
        for turn in range(2):
            exchange.round(f"turn {turn}", b"")
    except BaseException as error:
        exchange.fail(error)
        raise


@pytest.mark.parametrize("last", [0, None])
@pytest.mark.parametrize("how", ["dead", "late", "raises"])
@pytest.mark.parametrize("who", [1, 2])
@pytest.mark.parametrize("where", [in_a_segment, in_an_exchange])
def test_who_does_not_come_is_named(where, who, how, last):
    with RankPool(3, timeout=40.0) as pool:
        outcomes = pool.outcomes(where, who, how, last)
    for rank in {0, 1, 2} - {who}:
        error = outcomes[rank].error
        assert error is not None, outcomes[rank].describe()
        assert error.kind in ("PeerTimeoutError", "PeerLostError"), error.traceback
        named = error.fields.get("missing") or (error.fields["lost_rank"],)
        assert named == (who,), error.text
        assert f": rank {who} " in error.text.splitlines()[0]
        assert error.fields.get("failed_rank", who) == who


@pytest.mark.further
def test_ranks_of_another_group_are_told_apart():
    with RankPool(3, timeout=40.0) as pool:
        first, second, _ = pool.outcomes(over_two_groups)
    assert "rank 1 did not come" in second.error.text
    assert "right" in second.error.text
    assert "rank 1 did not come" in first.error.text
    assert "by the numbers of group 'right'" in first.error.text
