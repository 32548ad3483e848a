"""Right numbers on real ranks, however they are delayed, and with all options.

Random programs of one-sided ops beside collectives, with inputs that change in each iteration and
pauses between and inside ops, bit for bit as without symmplan; and the programs in which a wrong
model of what orders ranks was seen to give wrong numbers. ``SYMMPLAN_EXAMPLES=10000`` draws so many
programs instead of the few of every day.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_sided_programs import Program, here, make_inputs, one_sided_programs, run
from placed_checks import Tracing
from ranks import pool_of

pytestmark = pytest.mark.ranks

EXAMPLES = int(os.environ.get("SYMMPLAN_EXAMPLES", "12"))
ALGORITHMS = ("auto", "process group")
TURNS = 5
_GROUPS: list[str] = []


def _setup(rank, world_size):
    import one_sided_ops
    import torch.distributed as dist

    one_sided_ops.load()
    here(rank)
    second = dist.new_group(range(world_size))
    _GROUPS[:] = [dist.group.WORLD.group_name, second.group_name]


pool = pool_of(
    pytest.param(2, marks=pytest.mark.further, id="2-ranks"),
    pytest.param(3, id="3-ranks"),
    setup=_setup,
    timeout=180.0,
)


def _inputs(program, rank, turn, device):
    return [x.to(device) for x in make_inputs(program, rank, turn)]


def _expected(program, rank, turns, device):
    """What the program gives without symmplan; None if this torch refuses it.

    Some have no collectives of tensors that are not contiguous.
    """
    try:
        return [run(program, _GROUPS, *_inputs(program, rank, t, device)) for t in range(turns)]
    except RuntimeError as error:
        if "is_contiguous" in str(error):
            return None
        raise


def _same(got, expected, turn):
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if not torch.equal(a, b):
            return [f"iteration {turn}, output {i}: {a.tolist()} is not {b.tolist()}"]
    return []


def _eager(
    rank,
    world_size,
    program,
    algorithm,
    most,
    seed,
    late=None,
    *,
    turns=TURNS,
    device="cpu",
    memory="shm",
    debug=False,
):
    import one_sided_ops

    import symmplan

    one_sided_ops.slow(rank, 0.0, seed)
    expected = _expected(program, rank, turns, device)
    if expected is None:
        return [], 0, 0
    one_sided_ops.slow(rank, most, seed, (late or {}).get(rank))
    wrong, rests = [], random.Random(f"{seed} rests")
    how = {"choose": "placed", "debug": debug, "collectives": algorithm}
    with Tracing() as trace, symmplan.eager(timeout=60.0, memory=memory, **how) as session:

        def iteration(turn):
            got = run(program, _GROUPS, *_inputs(program, rank, turn, device))
            # What is compared is copied first: a wrong number must not hold up this rank alone.
            wrong.extend(_same([x.clone() for x in got], expected[turn], turn))
            del got
            session.step()
            if rests.random() < 0.3:
                session.sleep()
                assert session.stats.segment_bytes == 0

        for turn in range(turns - 1):
            iteration(turn)
        if debug:  # then barriers also come behind overwriting
            iteration(turns - 1)
        else:
            trace.check(session, lambda: iteration(turns - 1))
        plan = session.plan
    plan.verify()
    return wrong, len(plan.barriers), len(plan.placements)


def _compiled(
    rank,
    world_size,
    program,
    algorithm,
    most,
    seed,
    late=None,
    *,
    turns=TURNS,
    device="cpu",
    memory="shm",
    inner="eager",
    dynamic=None,
    mode=None,
    **options,
):
    import one_sided_ops

    import symmplan

    one_sided_ops.slow(rank, 0.0, seed)
    expected = _expected(program, rank, turns, device)
    if expected is None:
        return [], 0, 0
    torch._dynamo.reset()
    given = {"inner": inner, "memory": memory, "timeout": 60.0, "collectives": algorithm}
    backend = symmplan.backend(choose="placed", **given, **options)
    compiled = torch.compile(
        lambda *tensors: run(program, _GROUPS, *tensors),
        backend=backend,
        fullgraph=True,
        dynamic=dynamic,
        mode=mode,
    )
    one_sided_ops.slow(rank, most, seed, (late or {}).get(rank))
    wrong, rests = [], random.Random(f"{seed} rests")
    static = _inputs(program, rank, 0, device) if options.get("bind") else []
    for tensor in static:
        torch._dynamo.mark_static_address(tensor)
    try:
        for turn in range(turns):
            inputs = _inputs(program, rank, turn, device)
            for i, tensor in enumerate(static):
                inputs[i] = tensor.copy_(inputs[i])
            got = compiled(*inputs)
            wrong += _same(got, expected[turn], turn)
            del got
            if rests.random() < 0.3:
                backend.sleep()
        for plan in backend.plans:
            plan.verify()
        stats = backend.stats
    finally:
        backend.release()
    return wrong, stats.barriers, stats.placed


def _check(pool, work, program, *given):
    results = pool.run(work, program, *given)
    assert not any(wrong for wrong, *_ in results), results
    assert len({tuple(counts) for _, *counts in results}) == 1, results


MANY = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PAUSES = st.sampled_from((0.0, 0.002))
SEEDS = st.integers(0, 1000)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@MANY
@given(data=st.data())
def test_eager_programs(pool, algorithm, data):
    program = data.draw(one_sided_programs(pool.world_size))
    _check(pool, _eager, program, algorithm, data.draw(PAUSES), data.draw(SEEDS))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@MANY
@given(data=st.data())
def test_compiled_programs(pool, algorithm, data):
    program = data.draw(one_sided_programs(pool.world_size, in_place=False))
    _check(pool, _compiled, program, algorithm, data.draw(PAUSES), data.draw(SEEDS))


def _with_options(rank, world_size, program, algorithm, most, seed, work, options):
    return work(rank, world_size, program, algorithm, most, seed, **options)


DEBUG = st.sampled_from((False, "poison", True))
OPTIONS = {
    _eager: st.fixed_dictionaries({"debug": DEBUG}),
    _compiled: st.fixed_dictionaries(
        {
            "inner": st.sampled_from(("eager", "inductor")),
            "debug": DEBUG,
            "bind": st.booleans(),
            "capacity": st.sampled_from((None, 4096)),
            "dynamic": st.sampled_from((None, True)),
        }
    )
    | st.fixed_dictionaries(
        {
            "inner": st.just("inductor"),
            "mode": st.sampled_from(("reduce-overhead", "max-autotune-no-cudagraphs")),
            "bind": st.booleans(),
        }
    ),
}


@pytest.mark.further
@pytest.mark.parametrize("work", OPTIONS, ids=["eager", "compiled"])
@MANY
@given(data=st.data())
def test_programs_with_options(pool, work, data):
    program = data.draw(one_sided_programs(pool.world_size, in_place=work is _eager))
    algorithm, options = data.draw(st.sampled_from(ALGORITHMS)), data.draw(OPTIONS[work])
    given = algorithm, data.draw(PAUSES), data.draw(SEEDS), work, options
    _check(pool, _with_options, program, *given)


def _program(world, *steps, outputs):
    return Program(world, (2 * world,), steps, outputs)


#: What gave wrong numbers when the model of what orders ranks was not true: the program, whose
#: collectives run, and by how many ranks.
SEEN = {
    "the input copy of an in-place collective": (
        *("process group", (2, 3)),
        (("next", 0), ("read10", 1, 0), ("next", 2), ("reduce", 3, 0)),
        (2, 4),
    ),
    "a start that is no meeting": (
        *("process group", (2, 3)),
        (("next", 0), ("start_gather", 1, 0), ("next", 0), ("push00", 3, 0), ("wait", 2)),
        (2, 4),
    ),
    "a slice that is copied in": (
        *("auto", (2, 3)),
        (("push10", 0, 0), ("part", 1), ("read11", 2, 0)),
        (1, 3),
    ),
    "a transposed tensor that is copied in": (
        *("auto", (2, 3)),
        (("push10", 0, 0), ("turn", 1), ("read11", 2, 0)),
        (1, 3),
    ),
    "a copy for another group": (
        *("auto", (2, 3)),
        (("push10", 0, 0), ("scatter", 1, 1)),
        (1, 2),
    ),
    "two one-sided ops on one buffer": (
        *("auto", (2, 3)),
        (("push00", 0, 0), ("read01", 1, 0)),
        (1, 2),
    ),
    "a collective's own input": (
        *("process group", (2, 3)),
        (("push10", 0, 0), ("gather", 1, 0)),
        (1, 2),
    ),
    "a broadcast between two pushes": (
        *("process group", (3,)),
        (
            *(("push01", 0, 0), ("read00", 1, 0), ("next", 2)),
            *(("broadcast", 3, 0, 0), ("push01", 4, 0)),
        ),
        (2, 4, 5),
    ),
    "a collective that is left out": (
        *("process group", (2, 3)),
        (("push00", 0, 0), ("send", 1, 0, 0)),
        (1, 2),
    ),
    "an argument that is left out of a buffer": (
        *("auto", (2, 3)),
        (
            *(("both10", 0, 0), ("part", 1), ("push_00", 1, 0), ("read_01", 2, 0)),
            *(("both01", 1, 1), ("push00", 0, 0), ("read_11", 4, 1)),
        ),
        (1, 3),
    ),
    "a result that is copied where it is before it is read": (
        *("auto", (2, 3)),
        (("push11", 0, 0), ("read01", 1, 0), ("reduce", 1, 0), ("read00", 3, 0)),
        (2, 4),
    ),
}


def test_a_result_that_is_copied_back_after_a_kernel_was_given_it_by_name(pool):
    """Inductor's scheduler, torch 2.13, failed on a kernel that seemed to read the later buffer."""
    steps = (
        *(("read00", 0, 1), ("start_reduce", 1, 0), ("scatter", 0, 0), ("wait", 2), ("copy", 2)),
        *(("read_01", 3, 1), ("reduces", 3, 2, 0), ("turn", 5), ("read01", 6, 0)),
    )
    program = _program(pool.world_size, *steps, outputs=(0, 5, 8))
    given = program, "auto", 0.0, 0, _compiled, {"inner": "inductor"}
    _check(pool, _with_options, *given)


def _late(rank, world_size, program, algorithm, work, **more_of_it):
    """Every rank late, at every op that peers take part in: before it, or in it."""
    wrong, counts = [], set()
    ops = [kind for kind, *_ in program.steps if kind[-2:].isdigit()]
    for who in range(world_size):
        for moments in (("", ":end"), (":begin",)):
            late = {who: {op + moment: 0.004 for op in ops for moment in moments}}
            found, *more = work(rank, world_size, program, algorithm, 0.0, 0, late, **more_of_it)
            wrong += [(late, text) for text in found]
            counts.add(tuple(more))
    return wrong, *counts


@pytest.mark.parametrize(
    "work",
    [_eager, pytest.param(_compiled, marks=pytest.mark.further)],
    ids=["eager", "compiled"],
)
@pytest.mark.parametrize("name", SEEN)
def test_what_was_seen(pool, name, work):
    algorithm, ranks, steps, outputs = SEEN[name]
    if pool.world_size not in ranks:
        return
    _check(pool, _late, _program(pool.world_size, *steps, outputs=outputs), algorithm, work)


def _watched(rank, world_size, program, algorithm):
    """Under the race detector, which knows nothing of plans."""
    return _eager(rank, world_size, program, algorithm, 0.001, 0, turns=3, debug=True)


@pytest.mark.parametrize("name", SEEN)
def test_the_race_detector_finds_nothing(pool, name):
    algorithm, ranks, steps, outputs = SEEN[name]
    if pool.world_size not in ranks:
        return
    _check(pool, _watched, _program(pool.world_size, *steps, outputs=outputs), algorithm)
