"""Who looks for cycles, among which objects, while plans and simulations are made."""

from __future__ import annotations

import gc
import weakref

import pytest

from symmplan.planner.uncollected import collected_apart, uncollected


class Cycle:
    """Refers to itself."""

    def __init__(self):
        self.me = self


def dropped():
    """A reference to a cycle that nobody else has."""
    return weakref.ref(Cycle())


@pytest.fixture(params=[False, True])
def frozen(request):
    """Whether the program has frozen what it has, as the tests do; see `conftest.py`."""
    gc.collect()
    gc.unfreeze()
    if request.param:
        gc.freeze()
    yield request.param
    gc.freeze()


@pytest.mark.long
def test_only_what_the_work_has_made_is_looked_at(frozen):
    with uncollected():
        before = dropped()
    with collected_apart():
        made = dropped()
        gc.collect()
        assert (made(), before() is None) == (None, frozen)
        made = dropped()
    assert made() is None
    assert (gc.get_freeze_count() > 0) is frozen
    gc.collect()
    assert before() is None


def test_an_error_leaves_the_collector_as_it_was(frozen):
    with pytest.raises(KeyError), collected_apart():
        raise KeyError
    assert (gc.get_freeze_count() > 0) is frozen
    assert gc.isenabled()
