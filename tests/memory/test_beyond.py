"""Bytes of a device beyond segments, by what took them; a driver that is made up counts them."""

from __future__ import annotations

import itertools
import json
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPool, pool_of

import symmplan
from symmplan.device import DeviceMemory
from symmplan.memory import beyond, realize
from symmplan.memory.backends.local import LocalBackend
from symmplan.memory.beyond import beyond_segments, counting
from symmplan.model import Problem
from symmplan.process import PROCESS
from symmplan.report.log import log_plan

CPU, MiB = torch.device("cpu"), 1 << 20

two = pool_of(2, timeout=120)


class _Driver:
    """A device whose driver knows of segments, of torch's allocator, and of ``others``."""

    def __init__(self):
        self.others = 3 << 30  # of another process
        self.reserved = itertools.count(0, 7)

    def memory(self, _):
        reserved, total = next(self.reserved), 1 << 40
        taken = self.others + reserved + sum(s.nbytes for s in PROCESS.segments)
        return DeviceMemory(total - taken, reserved, total=total)

    def takes(self, act, nbytes):
        """The same function, which takes bytes of the device."""

        def taking(*args, **options):
            self.others += nbytes
            return act(*args, **options)

        return taking


@pytest.mark.parametrize(("returned", "left"), [(0, 66), (64, 2), (70, 0)])
def test_what_trials_took_may_be_returned_later(returned, left, monkeypatch):
    driver = _Driver()
    monkeypatch.setattr(beyond, "device_memory", driver.memory)
    monkeypatch.setattr(PROCESS, "beyond", {})
    monkeypatch.setattr(PROCESS, "beyond_before", {})
    for cause, taken in (("windows", 36), ("trials", 66)):
        with counting(cause, CPU):
            driver.others += taken
    driver.others -= returned
    found = beyond_segments()
    assert dict(found["beyond_segments"]) == {"windows": 36, "trials": left}
    assert found["bytes_beyond_segments"] == 36 + left
    assert found["bytes_without_owner"] == min(0, 66 - returned)


_steps = st.recursive(
    st.integers(-50, 50),
    lambda inner: st.tuples(st.sampled_from("abc"), st.lists(inner, max_size=3)),
)


@given(st.lists(_steps, max_size=5))
def test_what_is_taken_counts_once_for_the_innermost_cause(steps):
    driver, wanted = _Driver(), dict.fromkeys("abc", 0)

    def act(step, cause):
        if isinstance(step, int):
            driver.others += step
            wanted[cause] += step
            return
        with counting(step[0], CPU):
            for inner in step[1]:
                act(inner, step[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beyond, "device_memory", driver.memory)
        patch.setattr(PROCESS, "beyond", {})
        patch.setattr(PROCESS, "beyond_before", {})
        act(("a", steps), "")
        found = beyond_segments()
    assert found["bytes_beyond_segments"] == sum(wanted.values())
    by_cause = dict(found["beyond_segments"])
    assert {cause: by_cause.get(cause, 0) for cause in "abc"} == wanted
    assert list(by_cause.values()) == sorted(by_cause.values(), reverse=True)


def test_what_nobody_took_has_no_owner(monkeypatch):
    driver = _Driver()
    monkeypatch.setattr(beyond, "device_memory", driver.memory)
    monkeypatch.setattr(PROCESS, "beyond", {})
    monkeypatch.setattr(PROCESS, "beyond_before", {})
    driver.others += 9  # before anything was counted
    assert beyond_segments()["bytes_without_owner"] == 0
    with counting("a", CPU):
        driver.others += 5
    assert beyond_segments()["bytes_without_owner"] == 0
    driver.others += 3
    with counting("b", CPU):
        driver.others += 7
    found = beyond_segments()
    assert found["bytes_without_owner"] == 3
    assert found["bytes_beyond_segments"] == 12
    monkeypatch.setattr(beyond, "device_memory", lambda _: None)
    assert beyond_segments()["bytes_without_owner"] == 0


def test_the_log_of_a_plan_says_what_else_was_taken(caplog):
    plan = symmplan.plan(Problem.from_intervals([("a", 0, 1, 4096)]))
    with caplog.at_level("INFO", "symmplan"):
        log_plan("x", plan, (), [("communicators", 3 * MiB), ("kernels", 1536)])
    assert "beyond segments: communicators 3 MiB, kernels 1.50 KiB" in caplog.text


def test_what_failed_is_not_counted(monkeypatch):
    driver = _Driver()
    monkeypatch.setattr(beyond, "device_memory", driver.memory)
    monkeypatch.setattr(PROCESS, "beyond", {})
    monkeypatch.setattr(PROCESS, "beyond_before", {})
    with counting("outer", CPU):
        with pytest.raises(ZeroDivisionError), counting("inner", CPU):
            driver.takes(lambda: 1 // 0, 5)()
        driver.others -= 5
    assert PROCESS.beyond == {}


def test_segments_are_not_beyond_segments(monkeypatch):
    driver, plan = _Driver(), symmplan.plan(Problem.from_intervals([("a", 0, 1, 4096)]))
    monkeypatch.setattr(beyond, "device_memory", driver.memory)
    monkeypatch.setattr(PROCESS, "beyond", {})
    monkeypatch.setattr(PROCESS, "beyond_before", {})
    with counting("x", CPU):
        arena = realize(plan, memory="local")
    assert PROCESS.beyond == {}
    with counting("x", CPU):
        arena.release()
    assert PROCESS.beyond == {}


def _trained(rank, world, driven, algorithm="symmetric"):
    """The counters of an FSDP2 model for which some algorithm was fastest, after each step."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from symmplan.choose import trials
    from symmplan.integrate.fsdp import segments as memory
    from symmplan.memory.backends.shm import ShmBackend

    driver, made = _Driver(), {"rendezvous": 3 * MiB, "trials": 5 * MiB, "kernels": 2 * MiB}
    with pytest.MonkeyPatch.context() as patch:
        if driven:
            patch.setattr(beyond, "device_memory", driver.memory)
        for cause, where, name in (
            ("rendezvous", ShmBackend, "rendezvous"),
            ("trials", trials, "clock_of"),
            ("kernels", memory, "warm_up"),
        ):
            patch.setattr(where, name, driver.takes(getattr(where, name), made[cause]))
        patch.setattr(trials, "fastest", lambda *_, **__: algorithm)
        trials.forget()
        PROCESS.beyond.clear()
        PROCESS.beyond_before.clear()
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        for module in (*model, model):
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (world,)))
        handle = symmplan.fsdp.apply(model, choose="measure")
        seen = []
        for _ in range(3):
            model(torch.ones(2, 8) + rank).sum().backward()
            seen.append((handle.stats, handle.metrics()))
        handle.remove()
    return seen


@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize("algorithm", ["symmetric", "ordinary"])
def test_a_program_says_what_it_has_taken_and_by_what(two, algorithm):
    """Trials have a segment. The plan has one if anything was faster there, and needs kernels."""
    planned = int(algorithm == "symmetric")
    taken = {"trials": 5 * MiB, "rendezvous": 3 * MiB * (1 + planned)}
    taken |= {"kernels": 2 * MiB} if planned else {}
    for (recorded, _), *later in two.run(_trained, True, algorithm):
        assert recorded.bytes_beyond_segments == 0
        for stats, metrics in later:
            assert stats.rendezvous == planned
            assert dict(stats.beyond_segments) == taken
            assert stats.bytes_beyond_segments == sum(taken.values())
            assert metrics["symmplan/bytes_beyond_segments"] == sum(taken.values())
            assert metrics["symmplan/beyond_segments"] == len(taken)


@pytest.mark.ranks
def test_the_cpu_has_no_driver_and_nothing_beyond_segments(two):
    for seen in two.run(_trained, False):
        for stats, metrics in seen:
            assert stats.bytes_beyond_segments == metrics["symmplan/bytes_beyond_segments"] == 0
            assert stats.beyond_segments == ()


def test_further_communicators_count_by_themselves(monkeypatch):
    driver, plan = _Driver(), symmplan.plan(Problem.from_intervals([("a", 0, 1, 4096)]))
    monkeypatch.setattr(beyond, "device_memory", driver.memory)
    monkeypatch.setattr(PROCESS, "beyond", {})
    monkeypatch.setattr(PROCESS, "beyond_before", {})
    monkeypatch.setattr(LocalBackend, "rendezvous", driver.takes(LocalBackend.rendezvous, MiB))
    with realize(plan, memory="local") as arena:
        assert PROCESS.beyond == {"rendezvous": MiB}
        arena.join({name: {"other": None} for name in arena.segments})
    assert PROCESS.beyond == {"rendezvous": MiB, "communicators": MiB}


def test_a_simulated_device_has_nothing_beyond_segments():
    def program():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = torch.nn.Linear(1024, 1024)
        fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
        handle = symmplan.fsdp.apply(model, capacity="1 GiB")
        for _ in range(2):
            model(torch.ones(2, 1024)).sum().backward()
        found.append(handle.stats)

    found = []
    symmplan.simulate(program, ranks=8)
    assert found[0].segment_bytes > 0
    assert found[0].bytes_beyond_segments == 0


# What is made when it is needed, and given back.


def _measured_there(rank, world):
    """Whether a clock's tensors are gone when the cache is emptied behind a measurement."""
    import weakref

    import torch.distributed as dist

    from symmplan.choose import trials
    from symmplan.choose.choice import Choice
    from symmplan.choose.clock import at_once
    from symmplan.runtime import measure

    clocks, gone, x = [], [], torch.ones(8)

    def is_gone():
        deadline = time.monotonic() + 10
        while clocks[-1]() is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # the clock's thread ends by itself
        return clocks[-1]() is None

    def clock_of(*given):
        clock = made(*given)
        clocks.append(weakref.ref(clock._out))
        return clock

    group = dist.group.WORLD
    facts = {"op": "all_reduce", "dtype": "float32", "group": "default", "ranks": world}
    choice = Choice(nbytes=32, seconds={}, algorithm="ordinary", **facts)
    with pytest.MonkeyPatch.context() as patch:
        made = trials.clock_of
        patch.setattr(trials, "clock_of", clock_of)
        for module in (trials, measure):
            patch.setattr(module, "empty_cache", lambda _: gone.append(is_gone()))
        acts = {"ordinary": at_once(lambda: dist.all_reduce(x))}
        trials.measure_there(choice, acts, group, CPU, 30.0)
        trials.forget()
        with symmplan.eager(choose="measure", timeout=30.0) as session:
            for turn in range(2):
                _gathers(torch.full((4, 4), float(turn)), group.group_name)
                session.step()
    return len(clocks), gone


@pytest.mark.ranks
def test_what_measuring_takes_is_given_back_to_the_driver(two):
    assert two.run(_measured_there) == [(2, [True, True])] * 2


def _sums(x, group):
    return _wait(torch.ops._c10d_functional.all_reduce(x * 2, "sum", group)) + 1


def _gathers(x, group):
    return _wait(torch.ops._c10d_functional.all_gather_into_tensor(x * 2, 2, group)) + 1


_wait = torch.ops._c10d_functional.wait_tensor


def _asked(rank, world):
    """For which groups communicators were made for copy engines, of two programs."""
    import torch.distributed as dist

    from symmplan.choose import trials
    from symmplan.place import engines

    asked = []

    def engines_of(groups, *given):
        asked.append([*groups])
        return engines.engines_of(groups, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "engines_of", engines_of)
        trials.forget()
        for run in (_sums, _gathers):
            options = {"choose": "measure", "collectives": "process group", "timeout": 30.0}
            with symmplan.eager(**options) as session:
                for turn in range(3):
                    run(torch.full((4, 4), float(turn)), dist.group.WORLD.group_name)
                    session.step()
    return asked


@pytest.mark.ranks
def test_only_groups_whose_collectives_copy_engines_can_run_get_communicators(two):
    for sums, gathers in two.run(_asked):
        assert sums == []
        assert gathers != []


# The command.


def _doctored(rank, world, port, driven, *argv):
    """What ``doctor --group`` prints where each rendezvous takes some bytes."""
    import contextlib
    import io
    import os

    from symmplan.cli import main
    from symmplan.memory.backends.shm import ShmBackend

    env = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in env.items()})
    driver, shown = _Driver(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        if driven:
            patch.setattr(beyond, "device_memory", driver.memory)
            taken = driver.takes(ShmBackend.rendezvous, MiB + rank)
            patch.setattr(ShmBackend, "rendezvous", taken)
        PROCESS.beyond.clear()
        PROCESS.beyond_before.clear()
        code = main(["doctor", "--group", *argv])
    return code, shown.getvalue()


def _port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.further
@pytest.mark.ranks
def test_a_doctor_of_a_group_says_what_its_steps_have_taken():
    with RankPool(2, init=None, timeout=120.0) as ranks:
        (code, text), _ = ranks.run(_doctored, _port(), True, "--json")
        found = json.loads(text)["beyond_segments"]
        assert code == 0
        assert found.keys() == {"rendezvous"}
        assert found["rendezvous"] > MiB
        assert found["rendezvous"] % MiB > 0  # the second rank takes more
        (_, text), _ = ranks.run(_doctored, _port(), True)
        assert "Beyond segments a rank has at most, by its driver: rendezvous " in text
        (_, text), _ = ranks.run(_doctored, _port(), False, "--json")
        assert json.loads(text)["beyond_segments"] == {}
        (_, text), _ = ranks.run(_doctored, _port(), False)
        assert "Beyond" not in text
