"""Random module trees and schedules under FSDP2, planned and not: the same bits."""

from __future__ import annotations

import fsdp_programs as programs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import RankPool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as pool:
        yield pool


@st.composite
def random_programs(draw):
    """Arguments of `fsdp_programs.random_program`."""
    count = draw(st.integers(1, 4))
    blocks = draw(
        st.lists(
            st.sampled_from(["whole", "parts", "both", "none"]), min_size=count, max_size=count
        )
    )
    hidden = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    options = {"reshard_after_forward": draw(st.booleans()), "bf16": draw(st.booleans())}
    usual = tuple(range(count))
    # Mostly the usual order, else any: blocks may be left out, repeated, in another order.
    order = st.one_of(
        st.just(usual), st.lists(st.integers(0, count - 1), max_size=count + 2).map(tuple)
    )
    steps = draw(
        st.lists(
            st.tuples(order, st.integers(1, 2), st.booleans(), st.booleans()),
            min_size=3,
            max_size=6,
        )
    )
    # FSDP2 itself cannot skip the gradients of a module that it never gathered.
    first = (draw(st.permutations(usual).map(tuple)), *steps[0][1:])
    return blocks, hidden, options, [first, *steps[1:]]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=random_programs())
def test_random_programs_have_the_same_bits(two, arguments):
    for result in two.run(programs.random_program, *arguments):
        assert result["differences"] == []
        peak, bound, _ = result["bytes"]
        assert peak >= bound
        assert result["barriers"] == 0
