"""How algorithms are chosen: one vocabulary for graphs, eager programs and FSDP2."""

from __future__ import annotations

import pytest
import torch
from ranks import pool_of

import symmplan
from symmplan.choose.choice import CHOOSE, Choice, fastest
from symmplan.errors import BackendError
from symmplan.place.algorithms import is_target
from symmplan.process import PROCESS
from symmplan.runtime.options import Options

F = torch.ops._c10d_functional


@pytest.mark.parametrize(
    ("op", "runs"),
    [
        ("symmplan::all_gather_out", True),
        ("symmplan::barrier_", True),
        ("_c10d_functional::all_gather_into_tensor_out", True),
        ("_c10d_functional::all_reduce_", True),
        ("_c10d_functional::all_gather_into_tensor", False),
        ("_c10d_functional::all_reduce", False),
        ("mylib::made_out", False),
    ],
)
def test_what_runs_in_placements_is_in_a_row(op, runs):
    assert is_target(op) == runs


@pytest.mark.parametrize(
    ("seconds", "kernels", "beside", "algorithm"),
    [
        ((10, 10, 10), False, True, "symmetric"),
        ((10, 11, 10), False, True, "ordinary"),
        ((10, 10, 10), True, False, "ordinary"),
        ((10, 10, 10), True, True, "copy engine"),
        ((10, 9, 9), True, False, "copy engine"),
        ((10, 8, 9), True, True, "symmetric"),
        ((10, 9.8, None), True, True, "ordinary"),
        ((1e-4, 0.95e-4, None), True, False, "ordinary"),
        ((1e-4, 0.85e-4, None), True, False, "symmetric"),
        ((1e-4, 0.95e-4, None), False, False, "symmetric"),
    ],
)
def test_what_is_about_as_fast_is_told_apart_by_its_cost(seconds, kernels, beside, algorithm):
    algorithms = ("ordinary", "symmetric", "copy engine")
    given = {w: s for w, s in zip(algorithms, seconds, strict=True) if s is not None}
    assert fastest(given, kernels=kernels, beside=beside) == algorithm


def test_what_is_left_out_says_why():
    seconds = {"ordinary": 2e-6, "symmetric": 6e-6, "copy engine": 5e-6}
    choice = Choice("all_gather", 8, "float32", "g", 2, seconds, "ordinary", copied_in=True)
    assert not choice.placed
    assert choice.reason == (
        "symmetric memory was not clearly faster: 5 us, copied in, against 2 us in torch's own way"
    )


def test_a_device_is_measured_and_shared_memory_is_not():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    found = {choose: tuple(map(Options(choose=choose).chosen, (cpu, cuda))) for choose in CHOOSE}
    assert found == {
        "auto": ("symmetric", "measure"),
        "measure": ("measure", "measure"),
        "placed": ("symmetric", "symmetric"),
        "ordinary": ("ordinary", "ordinary"),
        "symmetric": ("symmetric", "symmetric"),
        "copy engine": ("copy engine", "copy engine"),
        "push": ("push", "push"),
        "shared push": ("shared push", "shared push"),
        "two-level": ("two-level", "two-level"),
    }


@pytest.mark.parametrize("make", [symmplan.backend, symmplan.eager])
def test_an_unknown_algorithm_is_refused(make):
    with pytest.raises(BackendError, match="unknown algorithm 'dice'"):
        make(choose="dice")


# On ranks.


def _setup(rank, size):
    """A group that stands for copy engines: gloo has none, but symmplan goes the same way."""
    import torch.distributed as dist

    from symmplan.choose import trials

    made = dist.new_group([0, 1])

    def engines_of(groups, *_):
        PROCESS.engines_made[0, 1] = made
        PROCESS.engines.update(dict.fromkeys(groups.values(), made))
        return dict.fromkeys(groups, made)

    trials.engines_of = engines_of


pair = pool_of(2, setup=_setup, timeout=120.0)


def _on_engines():
    """How many collectives have run over copy engines."""
    made = PROCESS.engines_made.get((0, 1))
    return 0 if made is None else made._get_sequence_number_for_group()


def _program(x, group):
    whole = F.wait_tensor(F.all_gather_into_tensor(x.sin(), 2, group))
    part = F.wait_tensor(F.reduce_scatter_tensor(whole * 2, "sum", 2, group))
    a, b = F.all_gather_into_tensor_coalesced([part.cos(), part + 1], 2, group)
    return F.wait_tensor(a) + F.wait_tensor(b)


def _by_dist(x, _group):
    import torch.distributed as dist

    whole, other = x.new_empty(2 * x.shape[0], 8), x.new_empty(2 * x.shape[0], 8)
    dist.all_gather_into_tensor(whole, x.sin())
    work = dist.all_gather_into_tensor(other, x.cos(), async_op=True)
    whole = whole * 2
    work.wait()
    dist.all_reduce(whole)
    return whole + other


def _exchanges(x, group):
    """All-to-alls: one that is pending, one of unequal parts, one whose result is used at once."""
    import torch.distributed as dist

    pending = F.all_to_all_single(x.sin(), [2, 2], [2, 2], group)
    parts = [1, 3] if dist.get_rank() else [3, 1]  # one row for the other, sent and received
    odd = F.wait_tensor(F.all_to_all_single(x + 1, parts, parts, group))
    even = F.wait_tensor(F.all_to_all_single(x.cos(), [2, 2], [2, 2], group))
    return F.wait_tensor(pending) * 2 + even + odd.sum()


_PROGRAMS = {"functional": _program, "dist": _by_dist, "exchanges": _exchanges}


def _algorithms(rank, size, how, choose, program):
    """Run a program five times; what was chosen, and how often over copy engines."""
    import torch.distributed as dist

    from symmplan.choose import trials

    torch._dynamo.reset()
    trials.forget()
    PROCESS.engines.clear()
    run, group = _PROGRAMS[program], dist.group.WORLD.group_name
    inputs = [torch.randn(4, 8) + rank + turn for turn in range(5)]
    expected = [run(x, group) for x in inputs]
    before = _on_engines()
    if how == "session":
        with symmplan.eager(timeout=30.0, choose=choose, collectives="process group") as session:
            for x, want in zip(inputs, expected, strict=True):
                torch.testing.assert_close(run(x, group), want)
                session.step()
            stats, choices, plans = session.stats, session.choices, [session.plan]
    else:
        inner = "eager" if how == "op by op" else how
        backend = symmplan.backend(inner, timeout=30.0, choose=choose, collectives="process group")
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        for x, want in zip(inputs, expected, strict=True):
            torch.testing.assert_close(compiled(x, group), want)
        stats, choices, plans = backend.stats, backend.choices, backend.plans
        backend.release()
    return {
        "placed": stats.placed,
        "rendezvous": stats.rendezvous,
        "choices": [
            (c.op.partition("::")[2].partition(".")[0], sorted(c.seconds)) for c in choices
        ],
        "reasons": sorted({u.reason for plan in plans for u in plan.unplanned}),
        "on engines": _on_engines() - before,
    }


every_algorithm = pytest.mark.parametrize(
    ("how", "program"),
    [
        ("op by op", "functional"),
        ("inductor", "functional"),
        ("session", "functional"),
        ("session", "dist"),
        ("op by op", "exchanges"),
        ("session", "exchanges"),
    ],
)


@pytest.mark.ranks
@every_algorithm
def test_copy_engines_run_what_they_can(pair, how, program):
    first, second = pair.run(_algorithms, how, "copy engine", program)
    assert first == second
    assert first["placed"] > 0
    assert first["choices"] == []
    assert first["rendezvous"] == 1
    collectives = {"functional": 3, "dist": 2, "exchanges": 2}[program]
    recorded = how == "session"  # the first iteration is torch's own
    unequal = program == "exchanges"
    iterations = 2 if recorded and unequal else int(recorded)
    assert first["on engines"] == collectives * (5 - iterations)
    assert any("of one size" in why for why in first["reasons"]) == (unequal and not recorded)


@pytest.mark.ranks
@every_algorithm
def test_nothing_is_placed_that_shall_be_ordinary(pair, how, program):
    first, second = pair.run(_algorithms, how, "ordinary", program)
    assert first == second
    assert (first["placed"], first["rendezvous"], first["on engines"]) == (0, 0, 0)
    assert "choose='ordinary'" in first["reasons"]


@pytest.mark.ranks
@every_algorithm
@pytest.mark.parametrize("algorithm", ["ordinary", "symmetric", "copy engine"])
def test_every_algorithm_is_measured_and_what_was_chosen_runs(pair, how, program, algorithm):
    first, second = pair.run(_measured, how, algorithm, program)
    assert first == second
    on_engines = ["copy engine", "ordinary", "symmetric"]
    unequal = 0
    for op, algorithms in first["choices"]:
        if "to_all" in op and algorithms == on_engines[1:]:
            unequal += 1
            continue
        assert algorithms == (on_engines if "gather" in op or "to_all" in op else on_engines[1:])
    assert unequal == (how == "session" and program == "exchanges")
    assert (first["placed"] == 0) == (algorithm == "ordinary")
    assert (first["on engines"] > 0) == (algorithm == "copy engine")


def _measured(rank, size, how, algorithm, program):
    """The same, whatever is measured; the measurement's own collectives are not counted."""
    from symmplan.choose import trials

    def chosen(seconds, **_):
        return algorithm if algorithm in seconds else "symmetric"

    trials.fastest, fastest = chosen, trials.fastest
    try:
        _algorithms(rank, size, how, "measure", program)
        forget, trials.forget = trials.forget, lambda: None
        try:
            return _algorithms(rank, size, how, "measure", program)
        finally:
            trials.forget = forget
    finally:
        trials.fastest = fastest
