"""Any allocation of symmplan's may fail on one rank: all ranks go on, and say why."""

from __future__ import annotations

import full_programs as programs
import pytest
from ranks import pool_of

two = pool_of(2, timeout=600)


@pytest.mark.further
@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("name", "choose", "every"),
    [
        ("widening", "shared push", False),
        *(
            pytest.param(name, choose, False, marks=pytest.mark.further)
            for name, choose in (("FSDP2", "measure"), ("mixed", "push"), ("session", "measure"))
        ),
        ("experts", "measure", False),
        *(
            pytest.param(name, choose, True, marks=pytest.mark.further)
            for name, choose in (
                ("FSDP2", "measure"),
                ("FSDP2", "push"),
                ("mixed", "push"),
                ("widening", "shared push"),
                ("widening", "measure"),
                ("weights", "measure"),
                ("kept", "placed"),
                ("compiled", "measure"),
                ("crossing", "placed"),
                ("session", "measure"),
                ("experts", "measure"),
            )
        ),
    ],
)
def test_all_ranks_go_on_whatever_allocation_fails_on_one(
    two, name, choose, every, shared_memory_is_left_clean
):
    places = two.run(programs.full, name, choose, [None])[0][0]["places"]
    first = {place: at for at, place in reversed([*enumerate(places)])}
    which = [at for at, place in enumerate(places) if every or first[place] == at]
    assert which
    hit = 0
    for at, *results in zip(which, *two.run(programs.full, name, choose, which), strict=True):
        # Ranks come to other numbers of allocations where one of them keeps a tensor.
        hit += results[at % 2]["failed"] is not None
        where = at, places[at], results
        for result in results:
            assert result["wrong"] == [], where
            assert result["held"] == 0, where
        assert len({(r["served"], r["plain"]) for r in results}) == 1, where
        refused = any("no luck today" in why for r in results for why in r["reasons"])
        assert sum(len(r["warned"]) for r in results) == refused, where
        # What was measured may stay ordinary for another reason.
        assert results[0]["plain"] or not refused, where
        known = choose == "measure" or name == "widening"  # where gradients become wider
        assert known or refused or not results[0]["plain"], where
    assert hit > len(which) // 2
