"""`apply` and `Handle.remove` at odd moments: right, or a clear error and nothing lost."""

from __future__ import annotations

import fsdp_handle_programs as programs
import pytest
from ranks import RankPool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as pool:
        yield pool


def same(results):
    for result in results:
        assert result["differences"] == []
    return [result["told"] for result in results]


@pytest.mark.parametrize("reshard", [True, False])
def test_remove_between_forward_and_backward_raises_and_loses_nothing(two, reshard):
    for first, second in same(two.run(programs.removed_before_backward, reshard)):
        assert "between a forward pass and its backward pass" in first
        assert "fix: call it after backward()" in first
        assert second is None


@pytest.mark.parametrize("kind", ["forward", "first forward", "backward", "last backward"])
def test_remove_in_a_hook_raises_or_is_right(two, kind):
    for (told,) in same(two.run(programs.removed_in_hook, kind)):
        if "backward" in kind:
            assert "inside a backward pass" in told
        elif kind == "forward":
            assert "between a forward pass and its backward pass" in told


def test_apply_between_forward_and_backward(two):
    for first, second in same(two.run(programs.applied_before_backward)):
        assert first > 0
        assert second > 0


@pytest.mark.parametrize("again", [True, False])
def test_remove_keeps_gradients_that_are_not_reduced_yet(two, again):
    same(two.run(programs.removed_while_accumulating, again))


def test_remove_keeps_what_is_unsharded(two):
    same(two.run(programs.removed_after_evaluation))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_remove_while_an_error_is_handled_never_hides_it(two, where):
    """A backward pass through what is left of the step raises; it reads no foreign bytes."""
    for (told,) in same(two.run(programs.removed_by_an_error, where)):
        assert "modified by an inplace operation" in told


def test_views_of_parameters_do_not_hinder_remove(two):
    same(two.run(programs.views_kept))
