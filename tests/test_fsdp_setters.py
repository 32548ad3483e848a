"""FSDP2's setters and other interfaces, and what is odd about a step: the same bits as without."""

from __future__ import annotations

import fsdp_setter_programs as programs
import pytest
from ranks import RankPool
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_common

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as pool:
        yield pool


def same(results, **wanted):
    """Same bits on every rank; ``wanted`` says how often something was counted."""
    for result in results:
        assert result["differences"] == []
        assert result["stats"]["served"] > 0
        for name, count in wanted.items():
            assert result["stats"][name] == count, result["stats"]
    return results


def needs(name, owner=fsdp.FSDPModule):
    return pytest.mark.skipif(not hasattr(owner, name), reason=f"this torch has no {name}")


USUAL = [
    ("policies", ()),
    ("tied_across", ()),
    ("grouped", ()),
    ("recomputed", (True, False)),
    ("recomputed", (False, False)),
    ("recomputed", (False, True)),
    ("saved_to_disk", (False,)),
    ("saved_to_disk", (True,)),
    ("optimizers", ("foreach",)),
    ("optimizers", ("fused",)),
    ("not_in_backward", (False,)),
    ("from_process_group", ()),
    ("compiled", ()),
    ("scatter_settings", ("set_force_sum_reduction_for_comms", True)),
    ("reduce_hook", ()),
    ("placements", ()),
    ("uneven", ()),
    ("in_backward_optimizer", ()),
    ("moved", ("to",)),
    ("moved", ("assign",)),
    ("meta", ()),
    ("input_gradients", ()),
    ("discarded", ()),
    pytest.param(
        "scatter_settings",
        ("set_separate_reduce_scatter_group", True),
        marks=needs("set_separate_reduce_scatter_group"),
    ),
    pytest.param(
        "scatter_settings",
        ("set_reduce_scatter_max_input_buffers", 2),
        marks=needs("set_reduce_scatter_max_input_buffers"),
    ),
    pytest.param("unused_here", (), marks=needs("set_reduce_scatter_unused_params")),
    pytest.param("finalized", (), marks=needs("set_manual_backward_finalization")),
]


@pytest.mark.parametrize(("name", "args"), USUAL)
def test_what_every_step_does(two, name, args):
    same(two.run(getattr(programs, name), *args), plain=0, copies=0, replans=0)


CHANGES = [
    ("reshard_forward", (False,)),
    ("reshard_forward", (True,)),
    ("reshard_backward", (3,)),
    ("reshard_backward", (4,)),
    ("unsynced_later", (True, False)),
    ("unsynced_later", (False, False)),
    ("unsynced_later", (False, True)),
    ("unsynced_while_others_leave", ()),
    ("frozen_toggled", ()),
    ("not_in_backward", (True,)),
    ("other_method", ()),
    ("by_hand", (True,)),
    ("by_hand", (False,)),
    ("recomputed", (True, True)),
    ("autocast", ()),
    ("shared_context", ()),
]


@pytest.mark.parametrize(("name", "args"), CHANGES)
def test_what_changes_after_the_plan_was_made(two, name, args):
    same(two.run(getattr(programs, name), *args))


@needs("reset_iter_state")
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("where", ["forward", "before backward", "backward"])
def test_a_step_that_is_interrupted_leaves_the_next_ones_right(two, where, index):
    same(two.run(programs.interrupted, where, index))


@needs("ShardPlacementResult", _fsdp_common)
@pytest.mark.parametrize("changes", [False, True])
def test_modules_with_several_parameter_groups(changes):
    with RankPool(4) as four:
        results = same(four.run(programs.groups_of_their_own, changes), plain=0)
    assert all(result["stats"]["modules"] == 7 for result in results)


@pytest.mark.parametrize("what", ["skip", "swap", "twice", "no gradients"])
def test_a_rank_that_departs_alone_ends_in_errors_on_all_ranks(what):
    with RankPool(2) as two:
        outcomes = two.outcomes(programs.alone, what)
    for outcome in outcomes:
        assert outcome.error is not None
        assert "make different calls" in outcome.error.text
