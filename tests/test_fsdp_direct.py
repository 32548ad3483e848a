"""FSDP2's unsharded parameters in placements: where they lie, and programs in which they move."""

from __future__ import annotations

import fsdp_direct_programs as programs
import fsdp_programs
import fsdp_setter_programs
import fsdp_user_programs
import pytest
from ranks import RankPool

pytestmark = pytest.mark.ranks

BLOCKS = [f"blocks.{i}" for i in range(3)]


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as pool:
        yield pool


def same(results):
    for result in results:
        assert result["differences"] == []
        assert result["stats"]["served"] > 0


def test_parameters_lie_in_the_segment_in_forward_and_backward(two):
    for inside, counts in two.run(programs.addresses):
        assert inside
        assert counts == {str(block): (6, 1) for block in range(3)}


@pytest.mark.parametrize("steps", [(2, 3), (0, 1, 2, 5)])
def test_a_prefetch_that_nobody_needs_does_no_harm(two, steps):
    same(two.run(programs.unused, steps))


def test_a_plan_that_is_frozen_before_backward_leaves_the_graph_right(two):
    for told in two.run(programs.frozen_between):
        assert told["differences"] == []
        assert told["placed"] > 0


def test_parameters_that_are_needed_at_once_make_room(two):
    results = two.run(programs.kept_unsharded)
    same(results)
    for result in results:
        assert (
            "other modules' parameters were needed at the same time"
            in dict(result["stats"]["flat"]).values()
        )


@pytest.mark.parametrize(
    ("module", "name", "reasons"),
    [
        (programs, "unused", {}),
        (
            fsdp_programs,
            "float8",
            dict.fromkeys(BLOCKS, "a parameter has its own way to be gathered"),
        ),
        (
            fsdp_programs,
            "offload",
            dict.fromkeys(["model", *BLOCKS], "its shards lie on the CPU"),
        ),
        (fsdp_setter_programs, "uneven", {}),
        (
            fsdp_setter_programs,
            "placements",
            dict.fromkeys(
                ["model", *BLOCKS], "a parameter is not sharded along its first dimension"
            ),
        ),
        (fsdp_user_programs, "replicated", {"blocks.0": "its parameters are not sharded"}),
    ],
)
def test_the_handle_says_why_gathers_are_flat(two, module, name, reasons):
    arguments = [()] if name == "unused" else []
    for result in two.run(getattr(module, name), *arguments):
        assert result["differences"] == []
        assert dict(result["stats"]["flat"]) == reasons


@pytest.mark.parametrize("what", ["keep", "prefetch", "freeze"])
def test_programs_that_change(two, what):
    same(two.run(programs.changed, what))


def test_views_that_the_program_keeps_do_no_harm(two):
    same(two.run(programs.views))


def test_graphs_that_live_across_passes(two):
    same(two.run(programs.graphs))


@pytest.mark.parametrize("world", [3, 2, 5, 7])
def test_what_the_ranks_do_not_divide_is_gathered_in_place(world):
    """Of 12 rows in parts of two or three the last of 5 or 7 ranks have none."""
    with RankPool(world) as ranks:
        for result in ranks.run(programs.llama, 48):
            assert result["differences"] == []
            assert result["stats"]["flat"] == ()
            assert result["stats"]["plain"] == 0


def test_a_plan_follows_prefetch_lists_that_get_longer(two):
    for wrong, seen in two.run(programs.deepened, False):
        assert wrong == []
        late, replans = zip(*seen, strict=True)
        assert late[2] == 0 < late[3]  # what is new has no room yet
        assert late[4] == late[-1]  # but from the next step on
        assert replans[2] == 0 < replans[-1] == replans[4]


@pytest.mark.further
def test_parameters_stay_while_a_rank_has_views_of_them(two):
    for wrong, seen in two.run(programs.deepened, True):
        assert wrong == []
        assert seen[-1][0] > seen[3][0]


@pytest.mark.further
@pytest.mark.parametrize("when", [3, 0])
def test_methods_that_somebody_replaces_on_the_class_run(two, when):
    for result, calls in two.run(programs.replaced, when):
        same([result])
        plain, planned = calls[:5], calls[5:]
        assert plain == planned
        assert bool(plain[when])
        assert set(dict(result["stats"]["flat"]).values()) == {"methods of its class were replaced"}
