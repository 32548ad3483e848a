"""What FSDP2 is combined with: compilers, meshes, errors in the middle, late initialization."""

from __future__ import annotations

import fsdp_user_programs as programs
import pytest
from ranks import RankPool
from test_fsdp_setters import same

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def two():
    with RankPool(2, timeout=240.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def four():
    with RankPool(4, timeout=240.0) as pool:
        yield pool


@pytest.mark.parametrize("when", ["before sharding", "before", "after", "planned"])
@pytest.mark.parametrize("what", ["in place", "model"])
def test_compiled_modules(two, what, when):
    same(two.run(programs.compiled, what, when, "aot_eager"), plain=0, copies=0)


@pytest.mark.further
def test_modules_compiled_by_inductor(two):
    same(two.run(programs.compiled, "in place", "after", "inductor"), plain=0, copies=0)


@pytest.mark.parametrize("kind", ["forward", "no_grad", "smaller"])
@pytest.mark.parametrize("index", [0, 2])
def test_a_forward_pass_that_ran_out_of_memory_leaves_the_next_ones_right(two, kind, index):
    same(two.run(programs.out_of_memory, kind, index))


def test_a_rank_that_runs_out_of_memory_alone_ends_in_errors_on_all_ranks():
    with RankPool(2) as two:
        outcomes = two.outcomes(programs.out_of_memory_alone)
    for outcome in outcomes:
        assert outcome.error is not None
        assert "make different calls" in outcome.error.text


MODELS = [
    ("ignored", ()),
    ("tiny", ()),
    ("filled_later", (False,)),
    ("filled_later", (True,)),
    ("loss_scaled", ()),
    ("used_twice", ()),
    ("replicated", ()),
]


@pytest.mark.parametrize(("name", "args"), MODELS)
def test_kinds_of_models(two, name, args):
    same(two.run(getattr(programs, name), *args), plain=0, copies=0, replans=0)


def test_parts_of_a_model_have_a_plan_each(two):
    for result in two.run(programs.parts):
        assert result["differences"] == []
        assert all(result["placed"])
        assert result["plain"] == [0, 0]


def test_modules_on_meshes_of_their_own(four):
    same(four.run(programs.experts), plain=0, copies=0, replans=0)


@pytest.mark.parametrize("kind", ["experts", "hybrid", "partial"])
def test_meshes_have_the_same_bits_where_the_group_reduces(four, kind):
    """Gathers are placed, over pairs and over four."""
    for result in same(four.run(programs.exactly, kind), copies=0, replans=0):
        assert all("torch's own way" in reason for reason in result["stats"]["reasons"])
