"""Random programs under FSDP2, planned and not: the same bits; and programs that were found so.

`python tests/helpers/fsdp_machine.py SEED` repeats one of them.
"""

from __future__ import annotations

import pytest
from fsdp_machine import Judge, compared, verdict
from fsdp_programs import Program, Unit, drawn
from fsdp_pushed import drawn_pushed
from fsdp_reads import drawn_reading
from ranks import pool_of

pytestmark = pytest.mark.ranks

two = pool_of(2)


@pytest.fixture(scope="module")
def judge():
    with Judge() as ranks:
        yield ranks


def check_seeds(judge, seeds, ranks, draw=drawn):
    """Those of ``seeds`` that are programs of so many ranks."""
    wrong = {}
    for seed in seeds:
        program = draw(seed)
        if program.ranks == ranks:
            said, _ = judge(program)
            if said:
                wrong[seed] = said
    told = [
        f"python tests/helpers/fsdp_machine.py {seed}: {said[-2000:]}"
        for seed, said in wrong.items()
    ]
    assert not wrong, "\n".join([f"wrong: {[*wrong]}", *told])


def test_some_random_programs_have_the_same_bits(judge):
    check_seeds(judge, range(12), 2)


@pytest.mark.further
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_hundred_random_programs_have_the_same_bits(judge, ranks):
    check_seeds(judge, range(100), ranks)


def test_some_programs_that_push_have_the_same_bits(judge):
    check_seeds(judge, range(8), 2, drawn_pushed)


@pytest.mark.further
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_hundred_programs_that_push_have_the_same_bits(judge, ranks):
    check_seeds(judge, range(100), ranks, drawn_pushed)


@pytest.mark.further
def test_some_programs_that_read_parameters_have_the_same_bits_or_errors(judge):
    check_seeds(judge, range(14), 2, drawn_reading)


@pytest.mark.further
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_hundred_programs_that_read_parameters_have_the_same_bits_or_errors(judge, ranks):
    check_seeds(judge, range(100), ranks, drawn_reading)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_thousand_random_programs_have_the_same_bits(judge, ranks):
    check_seeds(judge, range(1000), ranks)


def check(ranks, program):
    """A program by hand, whatever symmplan refuses of it: that on all ranks alike."""
    results = ranks.run(compared, program)
    for result in results:
        assert result["unsupported"] is None
        assert result["refused"] == results[0]["refused"]
    assert not verdict([{**result, "refused": None} for result in results])
    return results


@pytest.mark.parametrize("units", [(Unit(wrap="both"), Unit()), (Unit(),)])
def test_what_a_gather_has_brought_outlives_the_handle(two, units):
    """Shards change between the start of a gather and the end of the wait for it.

    Of several modules some gathers wait for room: nothing has come of them.
    """
    acts = (("train",), ("unshard_all", False, False), ("anew",), ("clamp", 1, "no_grad"))
    check(two, Program(ranks=2, units=units, acts=(*acts, ("train",))))


@pytest.mark.further
def test_a_plan_that_is_made_in_inference_mode_serves_training(two):
    """What is kept from then on must not belong to that mode."""
    check(
        two,
        Program(
            ranks=2,
            units=(Unit(), Unit(hidden=8)),
            acts=(("train",), ("evaluate", "inference"), *[("train",)] * 3),
            flat=True,
            hold=(0, 4),
        ),
    )


@pytest.mark.parametrize(
    ("units", "acts"),
    [
        ((Unit(recompute=True), Unit()), (("prefetch", 2, 2), ("train",), ("order", (1, 1, 0, 1)))),
        (
            (Unit(), Unit(recompute=True), Unit()),
            (("train",), ("postpone",), ("prefetch", 2, 0)),
        ),
        ((Unit(recompute=True), Unit(), Unit()), (("train",), ("prefetch", 2, 0))),
    ],
)
def test_a_prefetch_that_was_forgotten_is_not_put_back_later(two, units, acts):
    """What a block prefetches while it is recomputed misses: it gives way, or waits in vain."""
    for result in check(two, Program(2, units, (*acts, ("train",), ("train",)))):
        assert result["refused"] is None


def test_a_block_is_recomputed_twice_while_others_need_its_bytes(two):
    """The second time FSDP2 has no hook before the graph reads the parameters."""
    units = (Unit(wrap="parts", recompute=True), *(Unit(),) * 3)
    acts = (("train",), ("order", (0, 1, 0)), ("train",), ("train",))
    for result in check(two, Program(2, units, acts, stages=((1, 2),), unsharded_modules=1)):
        assert result["refused"] is None


def test_all_modules_are_unsharded_in_the_middle_of_a_pass(two):
    """Some of those that are done with forward have graphs with views of bytes in use."""
    whole = ("inside", "forward", 1, ("unshard_all", False, True))
    program = Program(2, (Unit(wrap="parts"), Unit()), (("train",), whole, ("train",)))
    for result in check(two, program):
        assert result["refused"] is None


@pytest.mark.long
def test_a_module_that_is_computed_again_in_its_own_backward_keeps_its_bytes(two):
    """No hook of FSDP2's comes before that graph is read, so nothing could be put back."""
    acts = (("train",), ("order", (3, 5, 4)), ("train",), ("train",))
    units = (Unit(wrap="parts", recompute=True), *[Unit()] * 3)
    for result in check(two, Program(2, units, acts, stages=((1, 2),), unsharded_modules=2)):
        assert result["refused"] is None


FOUR = {"ranks": 2, "units": (Unit(),) * 4}
USUAL = (("train",), ("train",))


@pytest.mark.further
@pytest.mark.parametrize(
    "then",
    [
        (("after_forward", False, True), ("train",)),
        (("after_forward", False, True), ("postpone",)),
        (("unshard_all", False, True), ("postpone",)),
        (("unshard_all", True, True), ("postpone",)),
        (("train", 2, True, False), ("train", 2, True, False)),
    ],
)
def test_modules_make_room_while_graphs_have_views_of_their_parameters(two, then):
    """They are resharded until their backward passes, and leave when these are done."""
    acts = (*USUAL, ("postpone",), *then, ("catch_up",), *USUAL)
    for result in check(two, Program(**FOUR, acts=acts)):
        assert result["refused"] is None
        assert result["counts"]["other modules' parameters were needed at the same time"] > 0
        # One for that, and one for gathers that came late in each of the acts before.
        assert 1 <= result["counts"]["replans"] <= 3


@pytest.mark.further
def test_modules_stay_unsharded_while_graphs_of_others_have_views_of_their_bytes(two):
    acts = (("train",), ("postpone",), ("train",), ("train", 3, True, False), ("catch_up",))
    for result in check(two, Program(2, (Unit(),) * 3, (*acts, ("train",)))):
        assert result["refused"] is None


@pytest.mark.long
@pytest.mark.parametrize("others", [(0, 2), (2, 0), (0, 3)])
@pytest.mark.parametrize("postponed", [True, False])
def test_two_modules_with_graphs_are_in_use_at_once(two, others, postponed):
    """Blocks 0 and 2 have the same bytes: the parameters of one and their views move."""
    between = (("cross", *others),)
    if postponed:
        between = (("postpone",), *between, ("catch_up",))
    for result in check(two, Program(**FOUR, acts=(*USUAL, *between, *USUAL))):
        assert result["refused"] is None


#: What reads a weight when FSDP2 does not know of it.
READS = [
    ("penalty", False, False),
    ("inner", 1),
    ("in_place", 1, 0.5),
    ("keep", 1),
    ("read", 1),
]


@pytest.mark.parametrize("act", READS)
def test_parameters_that_were_resharded_cannot_be_read(two, act):
    """As in plain FSDP2, which has freed them."""
    results = two.run(compared, Program(**FOUR, acts=(*USUAL, ("hold", 1), *USUAL, act)))
    assert not verdict(results)
    for result in results:
        assert result["done"] == 5
        assert "storage of size 0" in result["unsupported"]


@pytest.mark.parametrize("act", [("penalty", True, True), *READS[1:]])
def test_parameters_that_stay_unsharded_are_read_right(two, act):
    """Also where they have left their placements for others."""
    kept = (("after_forward", False, True), ("hold", 1), ("unshard_all", False, True))
    for result in check(two, Program(**FOUR, acts=(*USUAL, *kept, act, *USUAL))):
        assert result["refused"] is None
        assert result["counts"]["copies"] > 0


def test_a_view_that_is_held_over_steps_sees_what_was_gathered_last(two):
    acts = (("hold", 1), *USUAL, ("read_inside", 1), ("hold", 2), ("train",), ("read_inside", 1))
    for result in check(two, Program(**FOUR, acts=(*USUAL, *acts))):
        assert result["refused"] is None


def test_gradients_stay_where_a_weight_with_a_gather_of_its_own_moves_behind_an_evaluation(two):
    """The scale that belongs to what was gathered is of inference mode then."""
    check(
        two,
        Program(
            ranks=2,
            units=(Unit(), Unit(), Unit(reshard=False, own=True)),
            acts=(("train",), ("accumulate", 3, ("evaluate", "inference", 1, False))),
        ),
    )
