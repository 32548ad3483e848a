"""Where modules' parameters lie in a plan, and what of evaluations has room: random programs."""

from __future__ import annotations

import hypothesis.strategies as st
from attrs import evolve
from hypothesis import given

from examples import examples
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.planner.parameters import plan_with_parameters, without_room


@st.composite
def programs(draw):
    """Gathers of modules that are unsharded one after the other, or several at once.

    Returns:
        The problem, and the gathers outside of training passes in their order.
    """
    count = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    operations, accesses, buffers, together, asked = [], [], [], [], []
    first = {}
    for number in range(draw(st.integers(1, 4))):
        outside = number > 0 and draw(st.booleans())
        live = []
        for module in draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=8)):
            if module in [m for m, _ in live]:
                continue
            name = f"{len(buffers):02d}.{module}"
            operations.append(Operation(f"{name}.begin", group="g"))
            accesses.append(Access(f"{name}.begin", name, write=True))
            persistent = draw(st.integers(0, 12)) == 0
            buffers.append(Buffer(name, sizes[module] * 64, "g", align=64, persistent=persistent))
            if first.setdefault(module, name) != name:
                together.append((first[module], name))
            asked += [name] if outside else []
            live.append((module, name))
            while len(live) > draw(st.integers(1, 6)):
                _, done = live.pop(draw(st.integers(0, len(live) - 1)))
                operations.append(Operation(f"{done}.end"))
                accesses.append(Access(f"{done}.end", done))
        for _, done in live:
            operations.append(Operation(f"{done}.end"))
            accesses.append(Access(f"{done}.end", done))
    return Problem(buffers, operations, accesses, together=together), asked


def parameters_of(problem):
    return frozenset(b.name for b in problem.buffers)


def without(problem, names):
    """The problem without some gathers; who was first of a module may be another one then."""
    module = {other: first for first, other in problem.together}
    first, together = {}, []
    for b in problem.buffers:
        of = module.get(b.name, b.name)
        if b.name not in names and first.setdefault(of, b.name) != b.name:
            together.append((first[of], b.name))
    return evolve(
        problem,
        buffers=[b for b in problem.buffers if b.name not in names],
        accesses=[a for a in problem.accesses if a.buffer not in names],
        together=together,
    )


def planned(problem):
    plan = plan_with_parameters(problem, parameters_of(problem))
    plan.verify()
    return plan


@examples(40)
@given(programs())
def test_each_module_has_one_offset_and_only_those_at_once_are_apart(program):
    problem, _ = program
    plan = planned(problem)
    for first, other in problem.together:
        assert plan.placements[first].offset == plan.placements[other].offset
    sizes = {b.name.partition(".")[2]: b.nbytes for b in problem.buffers}
    assert plan.peak_bytes <= sum(sizes.values())


def steps(*orders):
    """Programs one after the other in which two modules are unsharded at a time, "t" to the end."""
    operations, accesses, buffers, together = [], [], [], []
    first = {}
    for number, order in enumerate(orders):
        live = []
        for module in [*order, None, None]:
            if module is not None:
                name = f"{number}.{module}"
                operations.append(Operation(f"{name}.begin", group="g"))
                accesses.append(Access(f"{name}.begin", name, write=True))
                buffers.append(Buffer(name, 64, "g", align=64))
                if first.setdefault(module, name) != name:
                    together.append((first[module], name))
                live.append(name)
            if len(live) > 2 or module is None:
                done = live.pop(0 if not live[0].endswith("t") or len(live) == 1 else 1)
                operations.append(Operation(f"{done}.end"))
                accesses.append(Access(f"{done}.end", done))
    return Problem(buffers, operations, accesses, together=together)


def test_a_module_that_an_evaluation_leaves_unsharded_takes_bytes_of_its_own_and_no_other_does():
    training = "abcdefgh" + "t"
    assert planned(steps(training)).peak_bytes == 3 * 64
    assert planned(steps(training, "t" + "abcdefgh")).peak_bytes == 4 * 64


@examples(40)
@given(programs())
def test_what_is_outside_of_training_takes_no_more_than_one_module_more(program):
    problem, asked = program
    left = without_room(problem, parameters_of(problem), asked)
    assert left <= frozenset(asked)
    largest = max(b.nbytes for b in problem.buffers)
    least = planned(without(problem, asked)).peak_bytes
    assert planned(without(problem, left)).peak_bytes <= least + largest
    if planned(problem).peak_bytes <= least + largest:
        assert not left
