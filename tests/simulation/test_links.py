"""Predicted times of a simulated program: of each collective, and what is exposed of a step."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import symmplan
from symmplan.cli.shell import main
from symmplan.coordination.world import SimulatedCall, World
from symmplan.errors import OptionError
from symmplan.simulation import PRESETS, Links, simulate
from symmplan.simulation.links import Span, links_of
from symmplan.simulation.run import _left
from symmplan.simulation.timeline import Collective, Ran, predicted, seconds_of

#: A byte takes a second within a domain, two in torch's own way, and ten between.
SLOW = Links(within=1, ordinary=0.5, between=0.1, rails=False)
GATHER, REDUCE, SUM = "all_gather", "reduce_scatter", "c10d::allreduce_"
EXCHANGE = "all_to_all"


@pytest.mark.parametrize(
    ("op", "algorithm", "span", "seconds"),
    [
        # Of 80 bytes in 4 parts, 60 pass each link.
        (GATHER, "ordinary", Span(4), 120),
        (GATHER, "symmetric", Span(4), 60),
        (REDUCE, "push", Span(4), 60),
        (SUM, "ordinary", Span(4), 240),
        (EXCHANGE, "ordinary", Span(4), 120),
        ("c10d::send", "ordinary", Span(4), 160),
        (GATHER, "ordinary", Span(1), 0),
        # On two hosts of two the ring crosses on one rank. 20 bytes cross in two levels, 40 in an
        # exchange; 40 come from the other of the host, while they cross but for a fourth.
        (GATHER, "ordinary", Span(4, 2, 2), 600),
        (GATHER, "two-level", Span(4, 2, 2), 200 + 40 / 4),
        (REDUCE, "two-level", Span(4, 2, 2), 40 + 200),
        (SUM, "two-level", Span(4, 2, 2), 2 * (40 + 200)),
        (EXCHANGE, "ordinary", Span(4, 2, 2), 400),
        (EXCHANGE, "two-level", Span(4, 2, 2), 400 + 40),
    ],
)
def test_bytes_pass_as_each_algorithm_sends_them(op, algorithm, span, seconds):
    assert SLOW.seconds(op, 80, span, algorithm) == pytest.approx(seconds)


def test_a_ring_crosses_on_all_rails_where_there_are_some():
    rails = evolve(SLOW, rails=True)
    assert rails.seconds(GATHER, 80, Span(4, 2, 2), "ordinary") == pytest.approx(60 / 0.2)
    assert rails.seconds(GATHER, 80, Span(40, 4, 10), "ordinary") == pytest.approx(78 / 0.5)


@pytest.mark.parametrize(
    ("op", "algorithm", "span", "steps"),
    [
        (GATHER, "ordinary", Span(8), (7, 0)),
        (GATHER, "symmetric", Span(8), (1, 0)),
        (GATHER, "ordinary", Span(8, 2, 4), (6, 1)),
        (SUM, "ordinary", Span(8, 2, 4), (12, 2)),
        (GATHER, "two-level", Span(8, 4, 2), (1, 3)),
        (EXCHANGE, "two-level", Span(8, 4, 2), (1, 1)),
    ],
)
def test_each_step_has_the_latency_of_what_it_goes_over(op, algorithm, span, steps):
    fast = evolve(SLOW, within=1e15, ordinary=1e15, between=1e15)
    slow = evolve(fast, within_latency=1.0, between_latency=100.0, start=10_000.0)
    near, far = steps
    assert slow.seconds(op, 80, span, algorithm) == pytest.approx(10_000 + near + 100 * far)


@given(st.integers(1, 1 << 40), st.integers(2, 64), st.integers(1, 16))
def test_more_bytes_take_longer_and_a_network_is_no_gain(nbytes, each, domains):
    for machine, op in itertools.product(PRESETS.values(), (GATHER, REDUCE, SUM, EXCHANGE)):
        one, several = Span(each), Span(each * domains, domains, each)
        found = machine.seconds(op, nbytes, one, "ordinary")
        assert found <= machine.seconds(op, 2 * nbytes, one, "ordinary")
        assert found <= machine.seconds(op, nbytes, several, "ordinary") * (1 + 1e-9)


def _ran(*events):
    """A program: numbers are products; names are collectives, of 80 bytes over 4 ranks."""
    ran = Ran(World(4, 0, "shm", devices=False))
    for what in events:
        if isinstance(what, str):
            ran.other(SimulatedCall(what, 80, "g"), placed=True)
        else:
            ran.products(what)
    calls = [call for *_, call in ran.calls]
    took = [seconds_of(call, "symmetric", Span(4), evolve(SLOW, flops=1)) for call in calls]
    return ran, [
        Collective(call.op, 1, call.nbytes, call.group, 4, "symmetric", seconds)
        for call, seconds in zip(calls, took, strict=True)
    ]


@pytest.mark.parametrize(
    ("events", "exposed"),
    [
        # Gathers take 60 s. The first one is waited for, the next comes while products run.
        ((GATHER, 100, GATHER, 100), 60),
        ((GATHER, 50, GATHER, 50), 60 + 10),
        ((GATHER, GATHER, 50), 120),
        # No gather runs more than one module ahead.
        ((GATHER, 100, GATHER, 10, GATHER, 10), 60 + 50),
        # Reductions run behind products, and the last one at the end.
        ((100, REDUCE, 100), 0),
        ((100, REDUCE, 100, REDUCE), 60),
        ((100, REDUCE, 20, REDUCE), 100),
        # Gathers and reductions have streams of their own.
        ((GATHER, 100, REDUCE, GATHER, 100), 60),
        ((100, GATHER, 100), 0),
        # A sum of 120 s is waited for.
        ((100, SUM, 100), 120),
        ((), 0),
    ],
)
def test_what_products_wait_for_is_exposed(events, exposed):
    ran, rows = _ran(*events)
    times = predicted(evolve(SLOW, flops=1), ran, rows)
    assert times.planned.products == sum(e for e in events if not isinstance(e, str))
    assert times.planned.exposed == pytest.approx(exposed)
    assert times.forced["ordinary"].collectives == pytest.approx(2 * times.planned.collectives)


def test_links_are_a_name_or_a_file_or_themselves(tmp_path):
    file = tmp_path / "links.json"
    file.write_text(json.dumps({"within": 2, "ordinary": 1, "between": 1, "name": "mine"}))
    assert links_of(str(file)) == Links(within=2, ordinary=1, between=1, name="mine")
    assert links_of("dgx-h200") is PRESETS["dgx-h200"]
    assert links_of(SLOW) is SLOW
    assert links_of(None) is None
    assert all(preset.source for preset in PRESETS.values())


@pytest.mark.parametrize("text", ["", "[]", '{"within": 1}', '{"within": 0, "ordinary": 1}'])
def test_a_file_without_links_is_an_error(tmp_path, text):
    file = tmp_path / "links.json"
    file.write_text(text)
    with pytest.raises(OptionError, match="neither a file with links") as raised:
        links_of(file)
    assert "dgx-h100" in str(raised.value)


def _trained():
    """FSDP2 over all ranks of the world."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    symmplan.fsdp.apply(model)
    model(torch.ones(64, 1024)).sum().backward()


def test_what_is_ordinary_as_nobody_measured_it_has_the_times_of_two_levels():
    report = simulate(_trained, ranks=8, ranks_per_host=4, links="dgx-h100")
    assert report.memory == "cuda"
    for one in report.collectives:
        assert [*one.seconds] == ["ordinary", "two-level"]
        assert one.algorithm == "ordinary"
    assert {*report.times.forced} == {"ordinary", "two-level"}
    assert report.times.forced["two-level"] != report.times.planned
    for how in ({"ranks_per_host": 4, "memory": "nccl"}, {"ranks_per_host": 1}):
        report = simulate(_trained, ranks=8, links="dgx-h100", **how)
        assert {a for one in report.collectives for a in one.seconds} == {"ordinary"}
    report = simulate(_trained, ranks=8, ranks_per_host=4, memory="nvshmem", links="dgx-h100")
    assert "two-level" not in {a for one in report.collectives for a in one.seconds}


def test_a_report_has_the_times_of_each_algorithm():
    report = simulate(_trained, ranks=8, ranks_per_host=4, memory="shm", links="dgx-h100")
    (gather,) = [c for c in report.collectives if c.op == GATHER]
    assert [*gather.seconds] == ["two-level", "ordinary"]
    span = Span(8, 2, 4)
    for algorithm, seconds in gather.seconds.items():
        assert seconds == PRESETS["dgx-h100"].seconds(GATHER, gather.nbytes, span, algorithm)
    times = report.times
    # Forward, and twice backward but for what the first layer's inputs would need.
    assert times.planned.products == pytest.approx(11 * 2 * 64 * 1024**2 / 989e12)
    assert 0 < times.planned.exposed <= times.planned.collectives
    assert {*times.forced} == {"ordinary", "two-level"}
    assert times.forced["two-level"] == times.planned
    assert "exposed" in report.summary()
    assert "<td>two-level<td>two-level " in report.to_html()
    told = json.loads(report.to_json())
    assert told["times"]["planned"]["exposed"] == times.planned.exposed
    assert told["times"]["machine"]["source"]


def test_nvlink_makes_one_domain_of_hosts():
    given = {"ranks": 8, "ranks_per_host": 4, "links": "gb200-nvl72"}
    apart, joined = (simulate(_trained, **given, ranks_per_domain=n) for n in (None, 8))
    for report, span in ((apart, Span(8, 2, 4)), (joined, Span(8, 1, 8))):
        for c in report.collectives:
            seconds = PRESETS["gb200-nvl72"].seconds(c.op, c.nbytes, span, "ordinary")
            assert c.seconds["ordinary"] == seconds


def test_without_links_there_are_no_times():
    report = simulate(_trained, ranks=8, memory="shm")
    assert report.times is None
    assert not any(c.seconds for c in report.collectives)
    assert "predicted" not in report.summary()


def _command(*words):
    return main(["simulate", f"{__file__}:_trained", *words])


@pytest.mark.further
def test_a_sweep_prints_how_bytes_and_times_grow(capsys):
    words = "--sweep", "ranks=4,16", "--ranks-per-host", "4", "--memory", "shm"
    assert _command(*words, "--links", "dgx-h100") == 0
    out, err = capsys.readouterr()
    head, small, large, _ = (line.split("  ") for line in out.splitlines())
    assert [w.strip() for w in head if w][:4] == ["ranks", "symmetric", "ordinary", "device"]
    assert (small[-1], large[-1]) != ("", "")
    assert "16 ranks, world 2 of 2" in err
    assert _command(*words, "--json") == 0
    worlds = json.loads(capsys.readouterr().out)["worlds"]
    assert [w["ranks"] for w in worlds] == [4, 16]
    assert worlds[0]["ordinary_bytes"]["parameters"] > worlds[1]["ordinary_bytes"]["parameters"]


@pytest.mark.parametrize("sweep", ["64,512", "ranks=", "ranks=a", "hosts=3"])
def test_a_sweep_that_is_none_is_wrong_usage(capsys, sweep):
    assert _command("--sweep", sweep) == 2
    assert "say ranks=64,512,4096" in capsys.readouterr().err


def test_a_sweep_writes_no_files(capsys, tmp_path):
    assert _command("--sweep", "ranks=4", "-o", str(tmp_path / "out.json")) == 2
    assert "--sweep writes no files" in capsys.readouterr().err


def test_what_is_left_of_a_step_is_by_its_gradients():
    assert _left(0, 0.0) == ""
    assert _left(0.25, 5.0) == "; about 15 s left of this step"
    assert _left(0.75, 15.0) == "; about 5 s left of this step"
    assert _left(1, 20.0) == ""


def test_a_simulation_says_what_is_left(monkeypatch):
    from symmplan.simulation import run

    monkeypatch.setattr(run, "_TELL", 0.0)
    said = []

    def program():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(40)))
        for block in model:
            fully_shard(block, mesh=init_device_mesh("cpu", (4,)))
        symmplan.fsdp.apply(model)
        model(torch.ones(4, 8)).sum().backward()

    simulate(program, ranks=4, memory="shm", progress=said.append)
    assert any("left of this step" in line for line in said)
    assert "left" not in said[0]
