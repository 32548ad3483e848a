"""Programs in a world that is not there plan what they plan on real ranks."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from held import segments_of_plans
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import HELPERS, ROOT
from ranks import RankPool
from simulate_programs import (
    Config,
    Net,
    _sharded,
    _train,
    program,
    reads_a_table,
    real,
    simulated,
)
from torch.distributed.device_mesh import init_device_mesh

import symmplan
from symmplan.choose.tuning_table import Table, TuningRow
from symmplan.cli import main
from symmplan.errors import OptionError, SimulationError
from symmplan.memory import room
from symmplan.memory.meeting import topology

KINDS = ("fsdp", "experts", "eager", "interleaved", "hsdp", "fsdp x tp", "1f1b", "tp", "compiled")


@st.composite
def configs(draw, kind):
    """Small configurations of one kind, of two to four ranks."""
    few = {"fsdp": (2, 3, 4), "experts": (2, 3), "tp": (2, 4), "compiled": (2, 4)}
    return Config(
        kind=kind,
        ranks=draw(st.sampled_from(few.get(kind, (4,)))),
        dim=4 * draw(st.integers(2, 6)),
        widths=tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))),
        steps=draw(st.integers(1, 3)),
        micro=draw(st.integers(1, 2)),
        low=draw(st.booleans()),
        reshard=draw(st.booleans()),
        prefetch=draw(st.integers(0, 2)),
        inner=draw(st.sampled_from(("inductor", "eager"))),
    )


@pytest.fixture(scope="module")
def pools():
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda ranks: stack.enter_context(RankPool(ranks)))


def check(pools, config):
    there = [simulated(rank, config) for rank in range(config.ranks)]
    assert there == pools(config.ranks).run(real, config)
    assert all(fingerprints and peak for fingerprints, peak in there)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *((kind, 2) for kind in ("fsdp", "experts", "eager", "compiled", "tp")),
        ("fsdp", 4),
        pytest.param("interleaved", 4, marks=pytest.mark.slow),
    ],
)
def test_each_rank_plans_what_it_plans_in_a_real_world(kind, ranks, pools):
    check(pools, Config(kind, ranks, steps=2, widths=(1, 3)))


@pytest.mark.ranks
@pytest.mark.further
@pytest.mark.parametrize(
    "kind",
    [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])],
)
def test_random_programs_plan_what_they_plan_in_a_real_world(kind, pools):
    @settings(max_examples=4, suppress_health_check=list(HealthCheck))
    @given(configs(kind))
    def run(config):
        check(pools, config)

    run()


def plans_of(kind="fsdp", **options):
    config = Config(kind, ranks=options.pop("ranks", 2))
    return symmplan.simulate(functools.partial(program, config), ranks=config.ranks, **options)


def wide(capacity=None, tokens=1024):
    """A model whose modules are large enough for devices' algorithms."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    symmplan.fsdp.apply(model, capacity=capacity)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(tokens, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def large_root(capacity=None):
    """The widths of 405 billion parameters, on 512 ranks: the root holds embedding and head."""
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(128_256, 16_384)
            self.layers = nn.ModuleList(nn.Linear(16_384, 194_560, bias=False) for _ in range(4))
            self.head = nn.Linear(16_384, 128_256, bias=False)

        def forward(self, x):
            x = self.words(x)
            for layer in self.layers:
                x = x + layer(x)[..., :16_384]
            return self.head(x)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = Large()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    symmplan.fsdp.apply(model, capacity=capacity)
    for _ in range(2):
        model(torch.zeros(1, 128, dtype=torch.long)).sum().backward()


@pytest.mark.further
def test_the_root_of_405b_is_demoted_on_a_budget():
    def simulated_in(capacity):
        program = functools.partial(large_root, capacity)
        return symmplan.simulate(program, ranks=512, memory="nccl")

    whole, less = simulated_in("1TiB"), simulated_in("20GiB")
    buffers = whole.plans[0].problem.buffers
    root = [b.nbytes for b in buffers if ".model." in b.name or b.name.startswith("slot")]
    assert sum(root) > 20 << 30
    assert whole.peak_bytes > 30 << 30
    assert 0 < less.peak_bytes <= 20 << 30
    gave = {(g.what.split()[0], g.calls, g.after) for g in less.plans[0].budget.demotions}
    assert gave == {("all_gather", 1, "ordinary"), ("reduce_scatter", 4, "shared push")}
    # The layers keep theirs.
    algorithms = {(c.op, c.algorithm) for c in less.collectives}
    assert {("all_gather", "copy engine"), ("reduce_scatter", "shared push")} <= algorithms
    assert "budget: 33.50 GiB wanted, 20 GiB there" in less.plans[0].summary()


@pytest.mark.further
def test_a_program_that_says_how_large_its_world_is_needs_no_more_than_a_number():
    eight, many = (symmplan.simulate(wide, ranks=ranks, rank=ranks - 1) for ranks in (8, 4096))
    assert eight.plans[0].peak_bytes
    algorithms = {(c.op, c.algorithm) for c in many.collectives}
    assert algorithms == {("all_gather", "copy engine"), ("reduce_scatter", "shared push")}
    assert {c.ranks for c in many.collectives} == {4096}
    assert many.ordinary_bytes.parameters < eight.ordinary_bytes.parameters
    assert eight.ordinary_bytes.optimizer >= 2 * eight.ordinary_bytes.parameters > 0


@pytest.mark.further
def test_what_this_machine_has_and_is_says_nothing_of_another_world(monkeypatch):
    def never(*_):
        raise AssertionError("asked")

    monkeypatch.setattr(room, "free_bytes", never)
    monkeypatch.setattr(topology, "facts_of", never)
    assert symmplan.simulate(functools.partial(wide, "1TiB"), ranks=8).plans[0].budget is None
    report = symmplan.simulate(functools.partial(wide, capacity=0), ranks=8)
    (planned,) = report.plans
    assert planned.budget is not None
    assert not planned.peak_bytes
    costs = [a.text for a in report.advice() if a.kind == "cost"]
    assert len(costs) == len(planned.budget.demotions)
    assert "as ordinary instead of push" in costs[0]


@pytest.mark.further
def test_text_of_a_plan_does_not_grow_with_the_ranks():
    texts = [symmplan.simulate(wide, ranks=ranks).plans[0].to_json() for ranks in (8, 1024)]
    assert abs(len(texts[0]) - len(texts[1])) < 200


def test_a_table_says_how_collectives_run(tmp_path):
    path = tmp_path / "choices.json"
    rows = (
        TuningRow("all_gather", 8, 4 << 20, "symmetric"),
        TuningRow("reduce_scatter", 8, 4 << 20, "push"),
    )
    path.write_text(Table("nccl", rows).to_json())
    report = symmplan.simulate(wide, ranks=16, choices=path)
    assert {(c.op, c.algorithm) for c in report.collectives} == {
        ("all_gather", "symmetric"),
        ("reduce_scatter", "push"),
    }
    path.with_name("none.json").write_text("{}")
    with pytest.raises(
        OptionError, match=r"none\.json' is not a tuning table: it has another format"
    ):
        symmplan.simulate(wide, ranks=16, choices=path.with_name("none.json"))


def test_a_table_serves_real_options(tmp_path):
    path = tmp_path / "choices.json"
    path.write_text(Table("shm", (TuningRow("all_gather", 2, 64, "ordinary"),)).to_json())
    assert symmplan.backend(choose=str(path)).settings.table.rows
    with pytest.raises(OptionError, match="not a tuning table: No such file") as caught:
        symmplan.backend(choose=str(tmp_path / "missing.json"))
    assert caught.value.got


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["fsdp", "compiled", "eager"])
def test_ranks_that_read_different_tables_say_which(kind, tmp_path):
    files = [str(tmp_path / f"{rank}.json") for rank in range(2)]
    for rank, algorithm in enumerate(("ordinary", "symmetric")):
        Path(files[rank]).write_text(
            Table("shm", (TuningRow("all_gather", 2, 64, algorithm),)).to_json()
        )
    says = ("AgreementError", "ranks 0 and 1 read different tuning tables", (0, 1))
    with RankPool(2) as fresh:
        for given in (files, [files[0], "placed"], ["measure", files[1]]):
            assert fresh.run(reads_a_table, given, kind) == [says, says]
        assert min(fresh.run(reads_a_table, ["placed"] * 2, kind)) > 0
        # Also where one changes its own later.
        assert fresh.run(reads_a_table, ["placed", files[1]], kind) == [says, says]
        same = fresh.run(reads_a_table, [files[1]] * 2, kind)
        assert same[0] == same[1] > 0


def test_a_report_answers_questions():
    report = symmplan.simulate(wide, ranks=8)
    facts = json.loads(report.to_json())
    assert facts["peak_bytes"] == report.peak_bytes
    assert report.plans[0].fingerprint in report.summary()
    assert "<table>" in report.to_html()
    needed = report.device_bytes
    tensors = report.peak_bytes + report.ordinary_bytes.total
    assert needed == tensors + report.cached_bytes + report.beyond_bytes
    kinds = {a.kind for a in report.advice(2 * needed)}
    assert kinds >= {"peak", "fits"}
    (short,) = (a for a in report.advice(needed - 1) if a.kind == "fits")
    assert short.nbytes == -1


def trained(steps, prepare=lambda model: model):
    """Shard a small model and train it."""
    model = prepare(Net(16, (1, 3)))
    handle = symmplan.fsdp.apply(_sharded(model, init_device_mesh("cpu", (2,)), Config()))
    _train(model, Config(dim=16, steps=steps))
    return handle


def test_the_optimizer_has_its_state_before_its_first_step():
    one, two = (
        symmplan.simulate(functools.partial(trained, steps), ranks=2).ordinary_bytes
        for steps in (1, 2)
    )
    assert one == two
    assert one.optimizer >= 2 * one.parameters > 0


def test_whole_tensors_of_which_dtensor_asks_the_shape_take_nothing():
    program = functools.partial(wide, tokens=4)
    found = symmplan.simulate(program, ranks=64, memory="shm").ordinary_bytes
    assert found.activations < 64 * found.parameters  # of all layers


@pytest.mark.further
@pytest.mark.parametrize(
    ("convert", "share"),
    [
        (lambda model: model.to("cpu"), 1),
        (lambda model: model.to(torch.float64), 2),
        (lambda model: model.bfloat16().float(), 1),
    ],
)
def test_models_may_be_moved_and_converted(convert, share):
    def tied(model, convert=lambda model: model):
        block = model.blocks[0]
        block.down.weight = block.up.weight
        model = convert(model)
        assert block.down.weight is block.up.weight
        return model

    plain, converted = (
        symmplan.simulate(functools.partial(_once, prepare), ranks=2, memory="shm")
        for prepare in (tied, functools.partial(tied, convert=convert))
    )
    assert plain.ordinary_bytes.parameters > 0
    assert converted.ordinary_bytes.parameters == share * plain.ordinary_bytes.parameters
    assert converted.peak_bytes == pytest.approx(share * plain.peak_bytes, rel=0.05)
    assert plain.peak_bytes > 0


def _once(prepare):
    model = prepare(Net(32, (1, 1)))
    symmplan.fsdp.apply(_sharded(model, init_device_mesh("cpu", (2,)), Config()))
    dtype = model.inlet.weight.dtype
    model(torch.randn(4, 32, dtype=dtype)).sum().backward()


@pytest.mark.further
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_blocks_may_be_compiled_by_others(backend):
    def compiled(model):
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        return model

    plain, other = (
        symmplan.simulate(functools.partial(trained, 2, prepare), ranks=2, memory="shm")
        for prepare in (lambda model: model, compiled)
    )
    assert plain.plans[0].fingerprint == other.plans[0].fingerprint


def test_a_world_leaves_nothing_behind():
    plans_of()
    assert not dist.is_initialized()
    assert not segments_of_plans()
    assert "RANK" not in os.environ
    assert not isinstance(torch.empty(1), torch._subclasses.FakeTensor)


def reads():
    return torch.ones(1).sum().add(1).item()


def by_hand():
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


def cuda():
    torch.cuda.current_stream()


@pytest.mark.parametrize(
    ("run", "options", "says", "fix"),
    [
        (reads, {"ranks": 2}, r"value of a tensor.*test_simulate.*in reads", "read values where"),
        (by_hand, {"ranks": 2}, r"reads a tensor's bytes, at .*in by_hand", "register_fake"),
        (cuda, {"ranks": 2}, "a device that does not exist", 'use "cpu"'),
        (wide, {"ranks": 2, "rank": 2}, "rank 2 is not in a world of 2", "pass rank="),
        (
            functools.partial(init_device_mesh, "cpu", (2, 3)),
            {"ranks": 4},
            "a mesh of 6 ranks in a world of 4",
            "pass ranks=6",
        ),
    ],
)
def test_what_cannot_be_simulated_says_what_to_change(run, options, says, fix):
    if run is cuda and torch.cuda.is_available():
        pytest.skip("the device is there")
    with pytest.raises((SimulationError, OptionError), match=says) as error:
        symmplan.simulate(run, **options)
    assert fix in error.value.fix
    assert not dist.is_initialized()


def test_a_memory_that_cannot_be_simulated():
    with pytest.raises(OptionError, match="cannot be simulated"):
        symmplan.simulate(wide, ranks=2, memory="local")


def test_a_process_that_is_a_rank_simulates_nothing():
    def inside():
        symmplan.simulate(wide, ranks=2)

    with pytest.raises(SimulationError, match="process groups already"):
        symmplan.simulate(inside, ranks=2)


def test_the_programs_own_error_stays_its_own():
    def fails():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        symmplan.simulate(fails, ranks=2)


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", "symmplan", "simulate", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HELPERS, Path(__file__).parent))),
        },
    )


@pytest.mark.slow
def test_the_command(tmp_path):
    page = tmp_path / "report.html"
    done = command("test_simulate:wide", "--ranks", "64", "--rank", "17", "--html", page, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rank"] == 17
    assert "planning" in done.stderr
    assert page.exists()


def test_the_command_names_what_is_missing(capsys):
    assert main(["simulate", "test_simulate:nothing", "--ranks", "64"]) == 1
    assert "has no function" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8,64,8", "1,512,8"])
def test_a_llama_of_405b_is_planned_in_a_minute(mesh):
    words = ["examples/simulate_llama.py:train", "--ranks", "4096", "--rank", "17", "--json"]
    os.environ.update(LLAMA="405B", MESH=mesh)
    try:
        done = command(*words)
    finally:
        del os.environ["LLAMA"], os.environ["MESH"]
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["resident_bytes"] < 4 << 30
    assert result["peak_bytes"] == result["lower_bound_bytes"] > 1 << 30
