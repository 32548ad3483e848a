"""Options that no program can be run with are refused where they are given, before all else."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from fsdp_models import Net, shard
from ranks import pool_of

import symmplan
import symmplan.memory
import symmplan.trainers
from symmplan.errors import (
    BackendError,
    NotSymmetricError,
    OptionError,
    ProblemError,
    RunError,
    SimulationError,
    SymmplanError,
)

two = pool_of(2)


class Untouchable:
    """A model, a group or a program that nobody may look at."""

    def __getattribute__(self, name):
        raise AssertionError(f"somebody looked at {name}")

    def __call__(self):
        raise AssertionError("somebody called it")


ENTRIES = {
    "fsdp": lambda **given: symmplan.fsdp.apply(Untouchable(), **given),
    "backend": symmplan.backend,
    "eager": lambda **given: symmplan.eager(Untouchable(), **given),
    "experts": lambda **given: symmplan.expert_parallel(
        Untouchable(), **{"max_tokens": 4, **given}
    ),
    "simulate": lambda **given: symmplan.simulate(Untouchable(), **{"ranks": 2, **given}),
    "plan": lambda **given: symmplan.plan(Untouchable(), **given),
}
_TIMEOUTS = ["long", "5", -1.0, 0, math.inf, math.nan, True, None]
_ALL = {"timeout": _TIMEOUTS, "memory": ["tape", 3, None], "choose": ["dice", None, 3, "no.json"]}
_PLANNED = {"capacity": ["lots", -1, 1.5, True, "3Gb"]}
_WATCHED = {"debug": [1, 0, "yes", None], "collectives": ["all", None, True]}
BAD = {
    "fsdp": {
        **_ALL,
        **_PLANNED,
        "debug": ["poison", 1, None],
        "unsharded_modules": [0, -1, 1.5, "two", True],
    },
    "backend": {
        **_ALL,
        **_PLANNED,
        **_WATCHED,
        "inner": ["xla", None],
        "bind": [1, "yes", None],
        "default_group": [3, ["0"]],
    },
    "eager": {**_ALL, **_PLANNED, **_WATCHED},
    "experts": {**_ALL, "max_tokens": [0, 2.5, "4", True, None]},
    "simulate": {
        "ranks": [0, -1, "4", 2.0, True, None],
        "rank": [2, -1, "0", 0.0, None],
        "memory": ["tape", "local", 3, None],
        "choices": ["no.json", 3],
        "progress": ["loud", 3],
    },
    "plan": {**_PLANNED, "default_group": [3, ["0"]]},
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_options_are_refused_before_the_program_is_looked_at(entry):
    for option, values in BAD[entry].items():
        for value in values:
            with pytest.raises(OptionError) as caught:
                ENTRIES[entry](**{option: value})
            assert isinstance(caught.value, ValueError)
            first = str(caught.value).partition("\n")[0]
            assert str(value) in first, (option, value)
            assert caught.value.expected
            assert caught.value.fix


@pytest.mark.parametrize(
    ("entry", "option", "given", "meant"),
    [
        ("fsdp", "memory", "shmm", "shm"),
        ("backend", "choose", "copy-engine", "copy engine"),
        ("backend", "inner", "inducter", "inductor"),
        ("eager", "debug", "poisoned", "poison"),
        ("simulate", "memory", "nvshm", "nvshmem"),
    ],
)
def test_the_word_that_was_meant_is_named(entry, option, given, meant):
    with pytest.raises(OptionError) as caught:
        ENTRIES[entry](**{option: given})
    assert caught.value.fix == f"did you mean {meant!r}?"


def test_what_is_right_is_looked_at():
    for entry in ("fsdp", "simulate"):
        with pytest.raises(AssertionError, match="somebody"):
            ENTRIES[entry](**({"timeout": 5} if entry == "fsdp" else {}))


PLAN = symmplan.plan(symmplan.Problem.from_intervals([("a", 0, 2, 64)]))


@pytest.mark.parametrize(
    ("call", "option", "what"),
    [
        (lambda: symmplan.memory.realize(3), "plan", "3"),
        (lambda: symmplan.backend().check(3), "step", "3"),
        (lambda: symmplan.simulate(dict, ranks=2, progress="loud"), "progress", "'loud'"),
        (lambda: PLAN.to_html("nothing.html", beside="other.json"), "beside", "'other.json'"),
    ],
)
def test_what_is_no_plan_and_no_function_is_refused(call, option, what):
    with pytest.raises(OptionError, match=f"option is refused: {option} is {what}") as caught:
        call()
    assert caught.value.expected
    assert caught.value.got
    assert caught.value.fix


@pytest.mark.parametrize(
    ("call", "error", "what"),
    [
        (lambda: symmplan.placed.handle(None), NotSymmetricError, "a tensor is a NoneType"),
        (lambda: symmplan.trainers.watched(3), OptionError, "3 is not a handle"),
        (lambda: symmplan.Problem.from_intervals(None), ProblemError, "intervals cannot be read"),
        (lambda: symmplan.Problem.from_intervals([3]), ProblemError, "intervals cannot be read"),
        (lambda: typed_view("float32"), RunError, "'a' was asked for in the type 'float32'"),
    ],
)
def test_what_is_of_another_type_is_refused(call, error, what):
    with pytest.raises(error, match=what) as caught:
        call()
    assert caught.value.expected
    assert caught.value.got
    assert caught.value.fix


def typed_view(dtype):
    with symmplan.memory.realize(PLAN) as arena:
        arena.tensor("a", dtype=dtype)


def test_a_program_that_needs_arguments_is_refused_before_it_is_called():
    def train(steps):
        raise AssertionError(steps)

    with pytest.raises(SimulationError, match="the program needs arguments") as caught:
        symmplan.simulate(train, ranks=2)
    assert "'steps'" in caught.value.got
    assert "lambda" in caught.value.fix


def test_advice_of_a_simulation_takes_sizes_as_text():
    report = symmplan.simulate(lambda: None, ranks=2)
    assert report.advice("80 GiB") == report.advice(80 << 30)
    for wrong in ("80Gb", -1, 1.5):
        with pytest.raises(OptionError, match="capacity is"):
            report.advice(wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("memory", ["nccl", "cuda", "nvshmem"])
@pytest.mark.parametrize("entry", ["fsdp", "backend", "eager", "experts"])
def test_memory_of_devices_is_refused_where_there_is_none(entry, memory):
    with pytest.raises(BackendError, match=f"memory='{memory}': device cpu is not a CUDA device"):
        ENTRIES[entry](memory=memory)


def on_the_cpu(rank, world):
    """A machine with GPUs, and a program that does without: what each entry point says."""
    told = []
    calls = (
        lambda: symmplan.fsdp.apply(shard(Net()), memory="cuda"),
        lambda: symmplan.eager(memory="cuda", device="cpu"),
        lambda: symmplan.expert_parallel(memory="cuda", max_tokens=4, device="cpu"),
        lambda: symmplan.eager(device="gpu"),
    )
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        for call in calls:
            with pytest.raises(BackendError) as caught:
                call()
            told.append((type(caught.value) is OptionError, caught.value.what))
    return told


@pytest.mark.ranks
def test_memory_of_devices_is_refused_for_programs_on_the_cpu(two):
    no = (False, "memory='cuda': device cpu is not a CUDA device")
    assert two.run(on_the_cpu) == [[no, no, no, (True, "device is 'gpu'")]] * 2


def after_the_end(rank, world):
    """What objects say that are used when their time is over."""
    told = []
    handle = symmplan.fsdp.apply(shard(Net()))
    handle.remove()
    session = symmplan.eager()
    experts = symmplan.expert_parallel(max_tokens=4)
    experts.release()
    arena = symmplan.memory.realize(PLAN, memory="shm")
    arena.release()
    calls = (
        handle.__enter__,
        handle.freeze,
        session.step,
        lambda: experts.routes([1] * world),
        lambda: arena.tensor("a", torch.uint8, (64,)),
        lambda: symmplan.eager(device="cuda"),
    )
    for call in calls:
        with pytest.raises(SymmplanError) as caught:
            call()
        error = caught.value
        told.append((error.what, all((error.expected, error.got, error.fix))))
    return told


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_what_is_over_says_so_in_full(two):
    whats = (
        "handle.__enter__() was called after handle.remove()",
        "handle.freeze() was called after handle.remove()",
        "the session was used before it was entered",
        "symmplan.expert_parallel was used after its release",
        "buffer 'a' was asked for after the arena's release",
        "device is 'cuda'",
    )
    assert two.run(after_the_end) == [[(what, True) for what in whats]] * 2
