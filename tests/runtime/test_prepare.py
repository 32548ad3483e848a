"""The one way to memory: what one rank cannot have all give back, do without, and say once."""

from __future__ import annotations

import json
import warnings

import attrs
import pytest
from held import segments_of_plans
from ranks import pool_of

from symmplan.errors import AgreementError, BackendError, PeerLostError
from symmplan.runtime.attempt import FIX, Refusal, failure, spread

pytestmark = pytest.mark.ranks

two = pool_of(2)


def attempted(rank, size, victim):
    """Make something that one rank cannot, twice."""
    import torch.distributed as dist

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


def attempted_again(rank, size, luck):
    """Make something for which the driver has bytes once the allocators have no cache."""
    import torch
    import torch.distributed as dist

    from symmplan.memory.device_memory import DeviceMemory
    from symmplan.runtime import prepare
    from symmplan.runtime.options import Options

    preparation = prepare.Preparation(Options(timeout=20.0), "a program", "a program")
    device, groups, acts = torch.device("cpu"), {"0": dist.group.WORLD}, []
    preparation.agree(device, groups)

    def make():
        acts.append("make")
        if preparation.refusal is None and rank and acts.count("make") <= luck:
            raise BackendError("no luck", fix="try tomorrow")
        return "made"

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(prepare, "device_memory", lambda _: DeviceMemory(0))
        patch.setattr(prepare, "empty_cache", lambda _: acts.append("empty"))
        made = preparation.attempt(make, groups, lambda _: acts.append("undo"))
    return made, acts, preparation.reason


@pytest.mark.parametrize("luck", [1, 2])
@pytest.mark.all_cases
def test_where_a_cache_holds_the_device_all_ranks_empty_theirs_once(two, luck):
    for rank, (made, acts, reason) in enumerate(two.run(attempted_again, luck)):
        assert made == "made"
        undo = [] if rank else ["undo"]
        wanted = ["make", *undo, "empty", "make"]
        if luck == 2:
            wanted += [*undo, "make"]
        assert acts == wanted
        assert bool(reason) == (luck == 2)


def failed_in_it(rank, size):
    """What meets in memory fails on this rank alone: nothing stays, on no rank."""
    import torch
    import torch.distributed as dist
    from memory_plans import hand_made

    from symmplan.runtime.options import Options
    from symmplan.runtime.prepare import Preparation

    preparation = Preparation(Options(timeout=20.0), "a program", "a program")
    device, groups = torch.device("cpu"), {"0": dist.group.WORLD}
    preparation.agree(device, groups)

    def meet(arena):
        assert [s.users for s in segments_of_plans()] == [("a program",)]
        if rank:
            raise BackendError("no luck", fix="try tomorrow")

    def make():
        if preparation.refusal is None:
            return preparation.obtain(hand_made({"x": 64}), device, groups, meet)
        return None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = preparation.attempt(make, groups, lambda made: made[0].release())
    return made, segments_of_plans()


def test_memory_in_which_a_rank_fails_is_given_back(two, shared_memory_is_left_clean):
    assert two.run(failed_in_it) == [(None, ())] * 2


@pytest.mark.parametrize(
    ("error", "fatal", "heard"),
    [
        (BackendError("! no luck\nat all", fix="try tomorrow,\nor never"), False, False),
        (OSError("!"), False, False),
        (AgreementError("ranks differ"), True, False),
        (ValueError("a peer failed"), True, False),
        (PeerLostError("rank 1 ended", failed_rank=1), False, True),
    ],
)
@pytest.mark.all_cases
def test_what_ranks_tell_each_other_is_told_by_its_fields(error, fatal, heard, monkeypatch):
    monkeypatch.setattr("symmplan.runtime.attempt.world", lambda: (2, 4))
    refusal = failure(error)
    assert (refusal.fatal, refusal.heard) == (fatal, heard)
    assert Refusal.read(json.loads(json.dumps(attrs.asdict(refusal)))) == refusal
    assert "\n" not in refusal.what
    fix = getattr(error, "fix", None)
    assert refusal.fix == (FIX if fix is None or heard else fix)


def test_who_failed_by_itself_is_heard_before_who_was_told():
    class Told:
        def round(self, phase, mine):
            told = [Refusal("a peer failed", heard=True), None, Refusal("rank 2: no luck")]
            texts = [json.dumps(None if r is None else attrs.asdict(r)).encode() for r in told]
            return {"a": [mine, *texts]}

    assert spread(Told(), None) == Refusal("rank 2: no luck")
    assert spread(Told(), Refusal("rank 0: wrong", fatal=True)).what == "rank 0: wrong"
