"""The one way to memory: what one rank cannot have all give back, do without, and say once."""

from __future__ import annotations

import warnings

import pytest
from ranks import pool_of

pytestmark = pytest.mark.ranks

two = pool_of(2)


def attempted(rank, size, victim):
    """Make something that one rank cannot, twice."""
    import torch.distributed as dist

    from symmplan.errors import BackendError
    from symmplan.runtime.options import Options
    from symmplan.runtime.prepare import Preparation

    preparation = Preparation(Options(timeout=20.0), "a program", "a program")
    groups, undone, asked = {"0": dist.group.WORLD}, [], []

    def make():
        asked.append(preparation.refusal is None)
        if preparation.refusal is not None:
            return None
        if rank == victim:
            raise BackendError("no luck", fix="try tomorrow")
        return "made"

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = [preparation.attempt(make, groups, undone.append) for _ in range(2)]
        preparation.refuse(preparation.refusal)  # somebody else finds the same
    return made, asked, undone, preparation.reason, [str(w.message) for w in said]


@pytest.mark.parametrize("victim", [0, 1])
def test_what_one_rank_cannot_have_all_give_back(two, victim):
    results = two.run(attempted, victim)
    for rank, (made, asked, undone, reason, _) in enumerate(results):
        assert made == [None, None]
        assert asked == [True, False, False]
        assert undone == ([] if rank == victim else ["made"])
        assert reason == f"no symmetric memory: rank {victim}: no luck"
    (said,) = [text for *_, texts in results for text in texts]
    assert said.startswith("a program runs in torch's own way")
    assert f"rank {victim}: no luck" in said
    assert "fix: try tomorrow" in said


def failed_in_it(rank, size):
    """What meets in memory fails on this rank alone: nothing stays, on no rank."""
    import torch
    import torch.distributed as dist
    from memory_plans import hand_made

    import symmplan
    from symmplan.errors import BackendError
    from symmplan.runtime.options import Options
    from symmplan.runtime.prepare import Preparation

    preparation = Preparation(Options(timeout=20.0), "a program", "a program")
    device, groups = torch.device("cpu"), {"0": dist.group.WORLD}
    preparation.agree(device, groups)

    def meet(arena):
        assert [s.users for s in symmplan.segments()] == [("a program",)]
        if rank:
            raise BackendError("no luck", fix="try tomorrow")

    def make():
        if preparation.refusal is None:
            return preparation.obtain(hand_made({"x": 64}), device, groups, meet)
        return None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = preparation.attempt(make, groups, lambda made: made[0].release())
    return made, symmplan.segments()


def test_memory_in_which_a_rank_fails_is_given_back(two, shared_memory_is_left_clean):
    assert two.run(failed_in_it) == [(None, ())] * 2
