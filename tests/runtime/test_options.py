"""Ranks with different options hear of it before anything of ours runs; so all do, by any option.

What one rank alone cannot set up all do without.
"""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path

import fsdp_models
import pytest
import torch
from fsdp_models import DEVICE, Net, shard
from ranks import RankPool, pool_of

import symmplan
from symmplan.choose.tuning_table import Table, TuningRow

pytestmark = pytest.mark.ranks

two = pool_of(2, timeout=90.0)
three = pool_of(3, timeout=90.0)

#: Seconds that ranks wait for each other. None of them may need as many.
TIMEOUT = 60.0

_EVERYWHERE = [
    ("choose", "ordinary", "placed"),
    ("choose", "placed", "ordinary"),
    ("choose", "measure", "placed"),
    ("choose", "ordinary", "measure"),
    ("choose", "copy engine", "placed"),
    ("choose", "table", "placed"),
    ("memory", "local", "shm"),
    ("memory", "local", "auto"),
]
_WATCHED = [
    ("debug", "poison", False),
    ("debug", True, False),
    ("debug", True, "poison"),
    ("collectives", "process group", "auto"),
]
#: What may differ: by integration an option, what one rank is given, what its peers are.
OPTIONS = {
    "compiled": [
        *_EVERYWHERE,
        *_WATCHED,
        ("bind", True, False),
        ("inner", "inductor", "eager"),
    ],
    "eager": [*_EVERYWHERE, *_WATCHED],
    "fsdp": [
        *_EVERYWHERE,
        ("choose", "push", "placed"),
        ("unsharded_modules", 2, None),
    ],
    "experts": [*_EVERYWHERE, ("choose", "ordinary", "push"), ("max_tokens", 64, 4)],
}
CASES = [(program, *option) for program, options in OPTIONS.items() for option in options]
#: The first of each option; the others are further ones.
_FIRST = {case[:2]: case for case in reversed(CASES)}


# Programs: which of their steps were wrong, and what was counted.


def _inputs(rank, step):
    return torch.arange(32.0, device=DEVICE[0]).view(4, 8) * (step + 1) + rank


def _body(x, size):
    ops = torch.ops._c10d_functional
    whole = ops.wait_tensor(ops.all_gather_into_tensor(x.sin(), size, "0"))
    return ops.wait_tensor(ops.all_reduce(whole * 2, "sum", "0"))


def compiled(rank, size, **options):
    torch._dynamo.reset()
    backend = symmplan.backend(**{"inner": "eager", **options})
    run = torch.compile(lambda x: _body(x, size), backend=backend)
    inputs = [_inputs(rank, step) for step in range(3)]
    try:
        wrong = [i for i, x in enumerate(inputs) if not torch.equal(run(x), _body(x, size))]
        return wrong, backend.stats
    finally:
        backend.release()


def eager(rank, size, **options):
    inputs = [_inputs(rank, step) for step in range(3)]
    want = [_body(x, size) for x in inputs]
    wrong = []
    with symmplan.eager(**options) as session:
        for i, x in enumerate(inputs):
            wrong += [] if torch.equal(_body(x, size), want[i]) else [i]
            session.step()
        return wrong, session.stats


def fsdp(rank, size, **options):
    def build():
        return shard(Net(2).to(DEVICE[0]))

    close = 0.0 if size == 2 and DEVICE[0] == "cpu" else 1e-3
    look = lambda handle: handle.stats  # noqa: E731
    found = fsdp_models.both(build, fsdp_models.train, rank, look, close, **options)
    return found["differences"], found["looked"]


def experts(rank, size, **options):
    wrong = []
    with symmplan.expert_parallel(**{"max_tokens": 64, **options}) as dispatcher:
        for step in range(3):
            routes = dispatcher.routes([step + 1] * size)
            rows = torch.full((size * (step + 1), 4), float(rank + step), device=DEVICE[0])
            inside = dispatcher.dispatch(rows, routes)
            want = (
                torch.arange(float(size), device=DEVICE[0]).repeat_interleave(step + 1).view(-1, 1)
                + step
            )
            outside = dispatcher.combine(inside * 2, routes)
            good = torch.equal(inside, want.view(-1, 1).expand(-1, 4)) and torch.equal(
                outside, rows * 2
            )
            wrong += [] if good else [step]
        return wrong, dispatcher.stats


PROGRAMS = {"compiled": compiled, "eager": eager, "fsdp": fsdp, "experts": experts}


def _table(path, name, algorithm):
    file = Path(path) / f"{name}.json"
    file.write_text(Table("shm", (TuningRow("all_gather", 2, 64, algorithm),)).to_json())
    return str(file)


def differing(rank, size, program, option, mine, theirs, victim, path):
    """What is raised where one rank's option is another; and afterwards, where it is not."""
    time.sleep(0.05 * ((rank + victim) % size))
    value = mine if rank == victim else theirs
    value = _table(path, victim, "ordinary") if value == "table" else value
    told = None
    try:
        PROGRAMS[program](rank, size, timeout=TIMEOUT, **{option: value})
    except Exception as error:  # noqa: BLE001
        error = getattr(error, "inner_exception", error)
        told = {"kind": type(error).__name__, "text": str(error), **vars(error)}
        told = {k: told.get(k) for k in ("kind", "text", "ranks", "option", "values")}
    again, stats = PROGRAMS[program](rank, size, timeout=TIMEOUT, choose="placed")
    return told, again, stats.served


def judge(found, option, mine, theirs, victim):
    size = len(found)
    by_table = "table" in (mine, theirs)
    for told, again, served in found:
        assert told is not None, "nobody minded"
        assert told["kind"] == "AgreementError"
        assert told["ranks"] == (0, victim or 1)
        assert told["option"] == ("table" if by_table else option)
        assert "fix: " in told["text"]
        what = "read different tuning tables" if by_table else f"were given different {option}="
        assert f"ranks 0 and {victim or 1} {what}" in told["text"].splitlines()[0]
        if not by_table:
            values = (theirs, mine) if victim else (mine, theirs)
            assert told["values"] == tuple(str(v) if option == "choose" else v for v in values)
        assert again == []
        assert served > 0
    assert len({json.dumps(told["values"]) for told, *_ in found}) == 1
    assert size > 1


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("program", "option", "mine", "theirs"),
    [
        case if case in _FIRST.values() else pytest.param(*case, marks=pytest.mark.further)
        for case in CASES
    ],
)
def test_an_option_that_one_of_two_ranks_has_alone(two, program, option, mine, theirs, tmp_path):
    victim = CASES.index((program, option, mine, theirs)) % 2
    found = two.run(differing, program, option, mine, theirs, victim, str(tmp_path))
    judge(found, option, mine, theirs, victim)


@pytest.mark.further
@pytest.mark.all_cases
@pytest.mark.parametrize(
    "program",
    [p if p == "experts" else pytest.param(p, marks=pytest.mark.further) for p in PROGRAMS],
)
def test_an_option_that_one_of_three_ranks_has_alone(three, program, tmp_path):
    for number, (option, mine, theirs) in enumerate(OPTIONS[program]):
        victim = number % 3
        found = three.run(differing, program, option, mine, theirs, victim, str(tmp_path))
        judge(found, option, mine, theirs, victim)


def same_by_other_names(rank, size, program):
    """What is the same on all ranks may be called otherwise, and patience is each rank's own."""
    names = [{"memory": "shm", "choose": "placed"}, {"choose": "symmetric"}, {"choose": "auto"}]
    return PROGRAMS[program](rank, size, timeout=TIMEOUT + rank, **names[rank % 3])[0]


@pytest.mark.long
@pytest.mark.all_cases
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_comes_to_the_same_is_no_difference(two, program):
    assert two.run(same_by_other_names, program) == [[], []]


def tried_twice(rank, size, program):
    """The same object is asked again after the error."""
    options = {"timeout": TIMEOUT, "choose": "ordinary" if rank else "placed"}
    kinds = []
    if program == "experts":
        with symmplan.expert_parallel(max_tokens=4, **options) as dispatcher:
            for _ in range(2):
                try:
                    dispatcher.routes([1] * size)
                except Exception as error:  # noqa: BLE001, PERF203
                    kinds.append(type(error).__name__)
        return kinds
    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", **options)
    for _ in range(2):
        try:
            torch.compile(lambda x: _body(x, size), backend=backend)(_inputs(rank, 0))
        except Exception as error:  # noqa: BLE001, PERF203
            kinds.append(type(getattr(error, "inner_exception", error)).__name__)
    backend.release()
    return kinds


@pytest.mark.all_cases
@pytest.mark.parametrize("program", ["experts", "compiled"])
def test_ranks_that_tried_in_vain_have_not_agreed(two, program):
    assert two.run(tried_twice, program) == [["AgreementError"] * 2] * 2


# A backend that cannot be set up.


def without_a_backend(rank, size, program, victims, options):
    """Memory of any kind fails on some ranks before anything is planned."""
    from symmplan.errors import BackendError
    from symmplan.memory.backends import resolve

    automatic = resolve._automatic

    def fails(*_, **__):
        raise BackendError("its driver is too old", fix="update it")

    if rank in victims:
        resolve._automatic = fails
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            wrong, stats = PROGRAMS[program](rank, size, timeout=TIMEOUT, **options)
    finally:
        resolve._automatic = automatic
    told = [text for w in said if "symmplan" in (text := str(w.message))]
    again, later = PROGRAMS[program](rank, size, timeout=TIMEOUT)
    return wrong, stats, told, again, later.served


@pytest.mark.all_cases
@pytest.mark.parametrize("victims", [(1,), pytest.param((0, 1), marks=pytest.mark.further)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_backend_that_some_rank_cannot_set_up_is_done_without(two, program, victims):
    results = two.run(without_a_backend, program, victims, {})
    for wrong, stats, _, again, served in results:
        assert wrong == again == []
        assert stats.served == stats.segment_bytes == stats.placed == 0
        assert stats.plain > 0
        assert any("its driver is too old" in why for why, _ in stats.reasons)
        assert served > 0
    told = [text for _, _, texts, *_ in results for text in texts]
    assert told
    assert all(f"rank {victims[0]}: its driver is too old" in text for text in told)
    assert all("update it" in text for text in told)


def refused_before(rank, size):
    """Two ranks do without memory already when they compile for the third, too."""
    import torch.distributed as dist

    from symmplan.errors import BackendError
    from symmplan.memory.backends import resolve

    pair, automatic = dist.new_group([0, 1]), resolve._automatic

    def fails(*_, **__):
        raise BackendError("its driver is too old", fix="update it")

    torch._dynamo.reset()
    ops = torch.ops._c10d_functional
    x = _inputs(rank, 0)
    backend = symmplan.backend(inner="eager", timeout=TIMEOUT)
    good = []
    for group in (pair, dist.group.WORLD):
        if rank not in dist.get_process_group_ranks(group):
            continue
        name, count = group.group_name, group.size()

        def body(x, name=name, count=count):
            return ops.wait_tensor(ops.all_gather_into_tensor(x.cos(), count, name))

        resolve._automatic = fails if rank == 1 and group is pair else automatic
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            good.append(torch.equal(torch.compile(body, backend=backend)(x), body(x)))
    stats = backend.stats
    backend.release()
    return good, stats.served, stats.segment_bytes


@pytest.mark.long
def test_who_does_without_already_tells_ranks_that_are_new(three):
    found = three.run(refused_before)
    assert [good for good, *_ in found] == [[True, True], [True, True], [True]]
    assert all(served == nbytes == 0 for _, served, nbytes in found)


def asked_for_by_name(rank, size, program):
    try:
        PROGRAMS[program](rank, size, timeout=TIMEOUT, memory="nccl")
    except Exception as error:  # noqa: BLE001
        error = getattr(error, "inner_exception", error)
        return type(error).__name__, str(error).splitlines()[0]


@pytest.mark.all_cases
@pytest.mark.parametrize("program", PROGRAMS)
def test_memory_asked_for_by_name_that_serves_no_rank_is_an_error(two, program):
    for kind, text in two.run(asked_for_by_name, program):
        assert kind == "BackendError"
        assert "memory='nccl': device cpu is not a CUDA device" in text


# Groups that overlap: who differs meets not all ranks.


def mesh_differing(rank, size, program, victim):
    """Ranks 0 to 3 in rows and columns; a program over both that one rank was given otherwise."""
    import torch.distributed as dist

    lines = [[0, 1], [2, 3], [0, 2], [1, 3]]
    groups = [g for line in lines if (g := dist.new_group(line)) and rank in line]
    torch._dynamo.reset()
    ops = torch.ops._c10d_functional

    def body(x):
        for group in groups:
            x = ops.wait_tensor(ops.all_gather_into_tensor(x.cos(), 2, group.group_name))
        return x

    def run(**options):
        x = _inputs(rank, 0)
        if program == "compiled":
            backend = symmplan.backend(inner="eager", timeout=TIMEOUT, **options)
            try:
                return torch.equal(torch.compile(body, backend=backend)(x), body(x))
            finally:
                backend.release()
        from symmplan.runtime.options import Options
        from symmplan.runtime.prepare import Preparation

        preparation = Preparation(Options(timeout=TIMEOUT, **options), "a test", "a test")
        return preparation.agree(x.device, {g.group_name: g for g in groups}) == "shm"

    told = None
    try:
        run(choose="ordinary" if rank == victim else "placed")
    except Exception as error:  # noqa: BLE001
        error = getattr(error, "inner_exception", error)
        told = type(error).__name__, str(error), error.option, error.ranks
    dist.barrier()
    return told, run()


@pytest.mark.all_cases
@pytest.mark.parametrize("program", ["alone", pytest.param("compiled", marks=pytest.mark.further)])
def test_ranks_that_share_no_group_with_who_differs_hear_of_it(program):
    with RankPool(4, timeout=120.0) as four:
        for victim in range(4):
            for (kind, text, option, ranks), again in four.run(mesh_differing, program, victim):
                assert kind == "AgreementError"
                assert (option, ranks) == ("choose", (0, 1))  # as both their groups number them
                assert "ranks 0 and 1 were given different choose=" in text
                assert again
