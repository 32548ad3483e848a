"""What a simulated rank has on its device, with symmplan and without."""

from __future__ import annotations

import functools
import json

import attrs
import idle_bytes
import llama_steps
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simulate_programs import Config, Net, program
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import symmplan
from symmplan.bench.parts.llama import Llama, parts
from symmplan.memory.room import SMALL


@st.composite
def configs(draw):
    """Small programs of two steps or one."""
    kind = draw(st.sampled_from(("fsdp", "hsdp", "fsdp x tp", "tp", "experts")))
    return Config(
        kind=kind,
        ranks=4,
        dim=4 * draw(st.integers(2, 6)),
        widths=tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))),
        steps=draw(st.integers(1, 2)),
        reshard=draw(st.booleans()),
        inner="eager",
    )


@pytest.mark.further
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(configs())
def test_what_a_device_has_without_is_what_it_has_where_all_is_ordinary(config):
    run = functools.partial(program, config)
    report = symmplan.simulate(run, ranks=config.ranks, memory="shm")
    with_nothing = symmplan.simulate(
        functools.partial(ordinary, run), ranks=config.ranks, memory="shm"
    )
    assert with_nothing.peak_bytes == 0
    assert report.device_bytes_without == with_nothing.device_bytes
    assert with_nothing.device_bytes_without == with_nothing.device_bytes
    assert report.device_bytes == report.ordinary_bytes.total + report.peak_bytes
    # What is placed is nowhere else.
    assert report.ordinary_bytes.total <= report.device_bytes_without
    facts = json.loads(report.to_json())
    assert facts["device_bytes"] == report.device_bytes
    assert facts["device_bytes_without"] == report.device_bytes_without
    assert "without symmplan" in report.summary()


def trained(layers, tokens, reduce, replicas):
    """FSDP2 or HSDP in bfloat16, with blocks that are large enough for devices' algorithms."""
    world = dist.get_world_size()
    shape, names = ((world,), None)
    if replicas > 1:
        shape, names = (replicas, world // replicas), ("replicate", "shard")
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce)
    options = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names), "mp_policy": policy}
    model = Net(512, (2,) * layers)
    for block in (*model.blocks, model):
        fully_shard(block, **options)
    symmplan.fsdp.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        model(torch.randn(tokens, 512)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.long
@pytest.mark.parametrize("reduce", [None, torch.float32])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("tokens", [1024, pytest.param(4096, marks=pytest.mark.further)])
def test_a_device_has_no_more_with_pushes_than_without(tokens, replicas, reduce):
    """Where activations count: gathers and slots have bytes that FSDP2 would have."""
    run = functools.partial(trained, 3, tokens, reduce, replicas)
    report = symmplan.simulate(run, ranks=8)
    assert memory_of(report) <= report.device_bytes_without
    if reduce is not None and tokens == 1024:  # FSDP2 widens gradients, and has them so
        assert memory_of(report) < report.device_bytes_without
    assert algorithms_of(report) == {("all_gather", "copy engine"), ("reduce_scatter", "push")}
    if tokens == 1024 and replicas == 1:
        tight = with_capacity(run, report.peak_bytes - 1)
        less = symmplan.simulate(tight, ranks=8)
        assert ("reduce_scatter", "shared push") in algorithms_of(less)
        assert memory_of(less) <= less.device_bytes_without
        # It knows what the slots cost.
        trades = {a.text: a.saves for a in report.plans[0].trades() if a.kind == "demotion"}
        saves = report.peak_bytes - less.peak_bytes
        shared = [text for text in trades if "as shared push instead of push" in text]
        assert max(trades[text] for text in shared) == saves
        assert any(f"{saves:,} bytes less; 0.03 ms more in a step" in text for text in shared)
        assert max(n for text, n in trades.items() if "as ordinary instead of copy" in text) > 0


@pytest.mark.further
@settings(max_examples=5, suppress_health_check=list(HealthCheck), deadline=None)
@given(configs(), st.sampled_from((512, 700, 1024)))
def test_a_device_never_has_more_than_without(config, dim):
    """Whatever that takes: tiny batches leave room for little.

    What the allocator loses to fragments is another sum, which may become more by some. The slots
    of experts are there all the time, which the bytes that they replace are not.
    """
    run = functools.partial(program, attrs.evolve(config, dim=dim))
    report = symmplan.simulate(run, ranks=config.ranks)
    slots = 0
    if config.kind == "experts":
        (slots,) = (p.peak_bytes for p in report.plans if _of_experts(p))
    assert idle_bytes.tensors_of(report) <= report.device_bytes_without + slots
    assert memory_of(report) <= report.device_bytes_without * 1.1 + slots


@st.composite
def large(draw):
    """Arguments of `llama`, of models whose plans are not small."""
    return (
        draw(st.integers(2, 4)),
        draw(st.sampled_from((1024, 2048, 4096, 6144))),
        draw(st.sampled_from((0, 16384, 128256))),
        draw(st.sampled_from((512, 2048, 8192))),
        draw(st.sampled_from((torch.bfloat16, torch.float32))),
        draw(st.booleans()),
    )


def llama(layers, dim, words, tokens, reduce, optimized, models=1):
    """Two steps of models that train one after the other."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce)
    trained = []
    for _ in range(models):
        model = Llama(layers, dim, words)
        for part in (*parts(model), model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        symmplan.fsdp.apply(model)
        trained.append((model, torch.optim.AdamW(model.parameters(), foreach=False)))
    for _ in range(2):
        made = []
        for model, _ in trained:
            x = torch.randn(1, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
            made.append(model(torch.randint(words, (1, tokens)) if words else x).float().sum())
        torch.stack(made).sum().backward()
        for model, optimizer in trained:
            if optimized:
                optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None


@pytest.mark.further
@settings(max_examples=8, suppress_health_check=list(HealthCheck), deadline=None)
@given(large(), st.sampled_from((2, 4, 64)), st.integers(1, 2))
@example((2, 6144, 16384, 512, torch.float32, False), 4, 2)  # room in fragments of a replay alone
@example((2, 4096, 16384, 2048, torch.bfloat16, True), 2, 1)  # states between FSDP2's buffers
def test_a_large_plan_makes_up_for_fragments(given, ranks, models):
    report = symmplan.simulate(functools.partial(llama, *given, models), ranks=ranks)
    if report.peak_bytes <= models * SMALL:
        assert idle_bytes.tensors_of(report) <= report.device_bytes_without
        return
    # From one step to the next fragments may differ. An optimizer's state lies in blocks of its own
    # in what is told, and between FSDP2's buffers where its steps are recorded.
    assert memory_of(report) <= report.device_bytes_without * (1.07 if given[-1] else 1.03)


def test_a_small_batch_has_pushes_and_no_more_bytes():
    """A rank's part of the gradients is there while they are pushed; FSDP2 makes it later."""
    report = symmplan.simulate(functools.partial(trained, 3, 64, None, 1), ranks=64)
    assert memory_of(report) <= report.device_bytes_without
    found = {(c.op, c.algorithm) for c in report.collectives if c.nbytes > 1 << 20}
    pushes = {("reduce_scatter", "push"), ("reduce_scatter", "shared push")}
    assert found - pushes == {("all_gather", "copy engine")}
    assert found & pushes


@pytest.mark.long
def test_gradients_that_are_pushed_count_once():
    """They are kept when autograd drops them; a moment with both would be the peak here.

    So what is beside the plan is at most what FSDP2 alone has without its largest buffer.
    """
    config = Config(kind="fsdp", ranks=4, dim=700, widths=(2, 1))
    run = with_capacity(functools.partial(program, config))
    report = symmplan.simulate(run, ranks=4)
    largest = max(c.nbytes for c in report.collectives if c.algorithm == "push")
    nothing = symmplan.simulate(functools.partial(ordinary, run), ranks=4)
    assert report.ordinary_bytes.total + largest <= nothing.ordinary_bytes.total


def staged(tokens, stages):
    """Pipeline stages of one rank: models that run in turn, and do not see each other's buffers."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models = [Net(512, (2, 2)) for _ in range(stages)]
    for model in models:
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        symmplan.fsdp.apply(model)
    x = torch.randn(tokens, 512)
    for model in models:
        x = model(x)
    x.float().sum().backward()


@pytest.mark.further
@pytest.mark.parametrize("tokens", [4, 512, 2048])
@pytest.mark.parametrize("stages", [2, 3])
def test_several_models_together_keep_to_what_the_program_had(tokens, stages):
    """Each sees the peaks that come while the others run, also those at which others look."""
    report = symmplan.simulate(functools.partial(staged, tokens, stages), ranks=8)
    assert len(report.plans) == stages
    assert memory_of(report) <= report.device_bytes_without


def test_who_asks_for_a_peak_takes_it_from_nobody_else():
    from symmplan.simulation.memory import Storages

    storages, kept = Storages(), []
    assert (storages.lately("a"), storages.lately("b")) == (0, 0)
    for nbytes in (8, 24):
        kept.append(torch.empty(nbytes, dtype=torch.uint8))
        storages.results(kept)
    kept.pop()
    assert storages.lately("a") == 32
    assert storages.lately("a") == 8
    assert storages.lately("b") == 32
    assert storages.lately("c") == 8


@pytest.mark.long
@pytest.mark.parametrize("tokens", [4, 1024])
def test_what_idle_bytes_could_give_is_between_nothing_and_all_of_them(tokens):
    """It may be more than without symmplan: pushed gradients stay until peers have them."""
    run = functools.partial(trained, 3, tokens, None, 1)
    report, lent, without = idle_bytes.bound_of(with_capacity(run), 8)
    assert report.ordinary_bytes.total < lent < idle_bytes.tensors_of(report)
    assert lent <= without * 1.01
    plain, nothing, _ = idle_bytes.bound_of(functools.partial(ordinary, run), 8)
    assert nothing == idle_bytes.tensors_of(plain) == without


def memory_of(report):
    """What allocator and segments have; small models have less than communicators and windows."""
    return report.device_bytes - report.beyond_bytes


#: GiB by the driver of steps on 2 H200, without symmplan and with it; see ``docs/benchmarks.md``.
ON_DEVICES = {0: (20.81, 19.96), 32768: (23.33, 22.75)}


@pytest.mark.parametrize("words", [0, pytest.param(32768, marks=pytest.mark.further)])
def test_a_device_has_what_is_simulated(words):
    def program():
        for _ in llama_steps.steps(1, words):
            pass

    report = symmplan.simulate(program, ranks=2)
    simulated = [report.device_bytes_without / (1 << 30), report.device_bytes / (1 << 30)]
    assert simulated == pytest.approx(ON_DEVICES[words], rel=0.05)
    assert report.device_bytes <= report.device_bytes_without
    tensors = idle_bytes.tensors_of(report) / (1 << 30)
    assert tensors != pytest.approx(ON_DEVICES[words][1], rel=0.05)


def normed(kind):
    """A chain of norms, whose tensors are 4 MiB each."""
    x = torch.randn(1024, 1024, requires_grad=True)
    norms = torch.nn.ModuleList(torch.nn.RMSNorm(1024) for _ in range(4))

    def forward(x):
        for norm in norms:
            x = norm(x)
        return x.sum()

    if kind == "transform":
        torch.func.grad(forward)(x)
    elif kind == "penalty":
        (gradient,) = torch.autograd.grad(forward(x), x, create_graph=True)
        gradient.square().sum().backward()
    else:
        forward(x).backward()


def test_an_rms_norm_keeps_its_input_and_a_number_for_each_row():
    """On devices; the CPU's keeps several tensors of its size."""
    found = {
        memory: symmplan.simulate(functools.partial(normed, "plain"), ranks=2, memory=memory)
        for memory in ("nccl", "shm")
    }
    peaks = {memory: report.ordinary_bytes.total >> 22 for memory, report in found.items()}
    assert peaks["nccl"] == 5  # what the four norms were given, and a result or a gradient
    assert peaks["shm"] >= 9


@pytest.mark.parametrize("kind", ["penalty", "transform"])
def test_an_rms_norm_has_gradients_of_gradients(kind):
    report = symmplan.simulate(functools.partial(normed, kind), ranks=2, memory="nccl")
    assert report.ordinary_bytes.total > 4 << 22


def _of_experts(plan):
    return not any("c10d" in b.op for b in (*plan.problem.buffers, *plan.unplanned))


def algorithms_of(report):
    """How the large collectives run."""
    return {(c.op, c.algorithm) for c in report.collectives if c.nbytes > 1 << 20}


def with_capacity(run, nbytes="1TiB"):
    """A program whose plans may take so many bytes."""

    def program():
        before = symmplan.fsdp.apply
        symmplan.fsdp.apply = functools.partial(before, capacity=nbytes)
        try:
            return run()
        finally:
            symmplan.fsdp.apply = before

    return program


def ordinary(run):
    """A program in which no collective is placed."""
    before = symmplan.fsdp.apply, symmplan.backend, symmplan.expert_parallel
    names = ("apply", "backend", "expert_parallel")
    owners = (symmplan.fsdp, symmplan, symmplan)
    for owner, name, own in zip(owners, names, before, strict=True):
        setattr(owner, name, functools.partial(own, choose="ordinary"))
    try:
        return run()
    finally:
        for owner, name, own in zip(owners, names, before, strict=True):
            setattr(owner, name, own)
