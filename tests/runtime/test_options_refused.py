"""Options that no program can be run with are refused where they are given, before all else."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from fsdp_models import Net, shard
from ranks import pool_of

import symmplan
from symmplan.errors import BackendError, OptionError, PlanningError, SimulationError

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
_PLANNED = {"effort": ["none", None, 1], "capacity": ["lots", -1, 1.5, True, "3Gb"]}
_WATCHED = {"debug": [1, 0, "yes", None], "collectives": ["all", None, True]}
BAD = {
    "fsdp": {**_ALL, **_PLANNED, "unsharded_modules": [0, -1, 1.5, "two", True]},
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
        "progress": ["loud", None],
    },
    "plan": {**_PLANNED, "default_group": [3, ["0"]]},
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_options_are_refused_before_the_program_is_looked_at(entry):
    for option, values in BAD[entry].items():
        for value in values:
            with pytest.raises((BackendError, PlanningError, SimulationError)) as caught:
                ENTRIES[entry](**{option: value})
            first = str(caught.value).partition("\n")[0]
            assert str(value) in first, (option, value)
            assert caught.value.expected
            assert caught.value.fix


def test_what_is_right_is_looked_at():
    for entry in ("fsdp", "simulate"):
        with pytest.raises(AssertionError, match="somebody"):
            ENTRIES[entry](**({"timeout": 5} if entry == "fsdp" else {}))


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
