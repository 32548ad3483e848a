"""The programs of `test_fsdp_*.py` on real devices, through NCCL.

    python -m pytest tests/gpu/test_fsdp_programs_gpu.py -m gpu

Two devices of one host. Sums of two parts have the same bits in any order.
"""

from __future__ import annotations

import importlib

import pytest
import test_fsdp_algorithms as algorithms
import test_fsdp_divergences as divergences
import test_fsdp_extensions as extensions
import test_fsdp_gathers as all_gathers
import test_fsdp_handle as handles
import test_fsdp_machine as machine
import test_fsdp_setters as setters
import test_fsdp_user as users
from attrs import evolve
from devices import needs_devices, pool_on
from fsdp_conditions import forced, in_flat_buffers
from fsdp_machine import compared, verdict
from fsdp_models import check, needs
from fsdp_programs import Program, Unit, drawn
from ranks import RankPool
from torch.distributed.fsdp import FSDPModule

pytestmark = needs_devices()


class OnDevices(RankPool):
    """Ranks that run every program on their devices."""

    def outcomes(self, fn, *args, timeout=None):
        return super().outcomes(on_device, fn.__module__, fn.__name__, args, timeout=timeout)


two = pool_on(2, make=OnDevices, timeout=120)


# Rank side.


def on_device(rank, world, module, name, args):
    import fsdp_models

    fsdp_models.DEVICE[0] = "cuda"
    return getattr(importlib.import_module(module), name)(rank, world, *args)


# Parent side.


@pytest.mark.parametrize(("program", "args"), setters.USUAL + users.USUAL)
def test_what_every_step_does(two, program, args):
    setters.test_what_every_step_does(two, program, args)


@pytest.mark.parametrize(("program", "args"), setters.CHANGES + users.CHANGES)
def test_what_changes_after_the_plan_was_made(two, program, args):
    setters.test_what_changes_after_the_plan_was_made(two, program, args)


@pytest.mark.parametrize(("dtypes", "touched", "count"), algorithms.ADDED)
def test_sums_are_added_to_gradients_where_these_lie_as_they_were_made(two, dtypes, touched, count):
    algorithms.test_sums_are_added_to_gradients_where_these_lie_as_they_were_made(
        two, dtypes, touched, count
    )


def test_what_forward_writes_past_all_counters_is_gone_in_backward(two):
    all_gathers.test_what_forward_writes_past_all_counters_is_gone_in_backward(two)


@pytest.mark.parametrize("where", ["between", "forward"])
@pytest.mark.parametrize("change", all_gathers.CHANGES)
def test_shards_that_change_on_some_ranks_are_gathered_as_they_are(two, change, where):
    all_gathers.test_shards_that_change_on_some_ranks_are_gathered_as_they_are(two, change, where)


@pytest.mark.parametrize("what", all_gathers.EVALUATIONS)
def test_evaluation_costs_no_placement(two, what):
    all_gathers.test_evaluation_costs_no_placement(two, what, None)


@pytest.mark.parametrize("lists", all_gathers.LISTS)
def test_longer_prefetch_lists_are_settled_at_once(two, lists):
    all_gathers.test_longer_prefetch_lists_are_settled_at_once(two, lists)


@needs("reset_iter_state")
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("where", ["forward", "before backward", "backward"])
def test_a_step_that_is_interrupted_leaves_the_next_ones_right(two, where, index):
    divergences.test_a_step_that_is_interrupted_leaves_the_next_ones_right(two, where, index)


@pytest.mark.parametrize("reshard", [True, False])
def test_remove_between_forward_and_backward_raises_and_loses_nothing(two, reshard):
    handles.test_remove_between_forward_and_backward_raises_and_loses_nothing(two, reshard)


@pytest.mark.parametrize("kind", ["forward", "first forward", "backward", "last backward"])
def test_remove_in_a_hook_raises_or_is_right(two, kind):
    handles.test_remove_in_a_hook_raises_or_is_right(two, kind)


def test_apply_between_forward_and_backward(two):
    handles.test_apply_between_forward_and_backward(two)


@pytest.mark.parametrize("again", [True, False])
def test_remove_keeps_gradients_that_are_not_reduced_yet(two, again):
    handles.test_remove_keeps_gradients_that_are_not_reduced_yet(two, again)


def test_remove_keeps_what_is_unsharded(two):
    handles.test_remove_keeps_what_is_unsharded(two)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_remove_while_an_error_is_handled_never_hides_it(two, where):
    handles.test_remove_while_an_error_is_handled_never_hides_it(two, where)


def test_views_of_parameters_do_not_hinder_remove(two):
    handles.test_views_of_parameters_do_not_hinder_remove(two)


@pytest.mark.parametrize("when", ["before sharding", "after", "planned"])
@pytest.mark.parametrize("what", ["in place", "model"])
def test_compiled_modules(two, what, when):
    users.test_compiled_modules(two, what, when)


@pytest.mark.parametrize("kind", ["forward", "no_grad", "smaller"])
def test_a_forward_pass_that_ran_out_of_memory_leaves_the_next_ones_right(two, kind):
    divergences.test_a_forward_pass_that_ran_out_of_memory_leaves_the_next_ones_right(two, kind, 2)


@pytest.mark.parametrize("program", ["_interleaved", "_parts"])
def test_models_and_parts_of_one_have_a_plan_each(two, program):
    for rendezvous in handles.apart(two, program):
        if program == "_interleaved":  # none in a segment that an earlier test left ready
            assert max(rendezvous) <= 1


@pytest.mark.parametrize("algorithm", ["placed", "copy engine"])
@pytest.mark.parametrize("who", [(0,), (0, 1)])
def test_buffers_that_somebody_keeps_longer_stay_intact(two, who, algorithm):
    """A rank that is in their bytes runs what its peers run."""
    for rank, result in enumerate(
        two.run(forced, algorithm, in_flat_buffers, divergences.holder, who, True, False)
    ):
        assert result["differences"] == []
        assert result["intact"]
        assert result["gathered within"]
        assert (result["stats"]["copies"] > 0) == (rank in who)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("algorithm", ["placed", "copy engine"])
def test_parameters_are_gathered_between_steps(two, algorithm, flat):
    """There the default stream is the current one."""
    acts = (("train",), ("look", 0, 0), ("look", 1, 2), ("unshard_all", False, True), ("train",))
    units = (Unit(), Unit(hidden=17, wrap="none"))
    program = Program(ranks=2, units=units, acts=acts, choose=algorithm, flat=flat)
    for result in machine.check(two, program):
        assert result["refused"] is None


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_have_the_same_bits(two, seed):
    program = drawn(seed, ranks=2)
    if not hasattr(FSDPModule, "reset_iter_state"):
        # After a backward pass that raised, FSDP2's later ones do not wait for their reductions.
        program = evolve(program, acts=tuple(a for a in program.acts if a[0] != "fail"))
    assert not verdict(two.run(compared, program))


@pytest.mark.parametrize("kind", extensions.KINDS)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_weight_makes_of_its_shard_lies_in_a_placement(two, kind, frozen):
    extensions.test_what_a_weight_makes_of_its_shard_lies_in_a_placement(two, kind, frozen)


def test_parameters_of_several_types_lie_in_one_placement(two):
    stats = check(two.run(extensions.as_types, 8))  # NCCL wants whole words of each rank
    assert stats["flat"] == ()


@pytest.mark.parametrize("kind", extensions.KINDS)
@pytest.mark.parametrize("what", extensions.ACTS)
def test_programs_in_which_weights_with_gathers_of_their_own_move(two, kind, what):
    extensions.test_programs_in_which_such_weights_move(two, kind, what)
