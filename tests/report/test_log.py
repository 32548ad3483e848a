"""The logger `symmplan`: one line for each plan, one warning where nothing is placed."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RankPool

import symmplan
from symmplan.testing import interval_problems

F = torch.ops._c10d_functional


@contextlib.contextmanager
def _heard(level=logging.INFO):
    """``(level, message)`` of what is logged meanwhile."""
    found: list[tuple[str, str]] = []

    class Heard(logging.Handler):
        def emit(self, record):
            found.append((record.levelname, record.getMessage()))

    logger, handler = logging.getLogger("symmplan"), Heard()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _gather(x, group):
    return F.wait_tensor(F.all_gather_into_tensor(x + 1, 2, group)).sum()


def _all(rank, size):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    group = dist.group.WORLD.group_name
    x = torch.ones(4, 4, requires_grad=True)
    with _heard() as plans:
        backend = symmplan.backend(inner="eager", timeout=30.0)
        compiled = torch.compile(lambda x: _gather(x, group), backend=backend, fullgraph=True)
        for _ in range(3):
            compiled(x.detach())
        with symmplan.eager(timeout=30.0) as session:
            for _ in range(3):
                _gather(x.detach(), group)
                session.step()
        model = fully_shard(torch.nn.Linear(8, 8), mesh=dist.init_device_mesh("cpu", (size,)))
        handle = symmplan.fsdp.apply(model)
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
        handle.remove()
        backend.release()
    with _heard() as silent:
        with symmplan.eager(timeout=30.0):
            _gather(x.detach(), group)
        with symmplan.eager(timeout=30.0) as session:
            for _ in range(3):
                x.sum()
                session.step()
        torch._dynamo.reset()
        backend = symmplan.backend(inner="eager", timeout=30.0)
        compiled = torch.compile(lambda x: (x * 2).sum(), backend=backend, fullgraph=True)
        for _ in range(4):
            compiled(x).backward()
        assert backend.stats.graphs == 1
    return plans, silent


@pytest.mark.ranks
def test_each_plan_is_one_line_and_nothing_placed_is_one_warning():
    with RankPool(2, timeout=120.0) as ranks:
        (plans, silent), other = ranks.run(_all)
    assert (plans, silent) == other
    assert [level for level, _ in plans] == ["INFO"] * 3
    for (_, said), who, algorithms in zip(
        plans,
        ("compiled graph (inference)", "eager session", "FSDP2"),
        ("1 symmetric", "1 symmetric", "2 symmetric"),
        strict=True,
    ):
        assert said.startswith(f"{who}: plan ")
        assert "in 1 segment, " in said
        assert "(the minimum)" in said
        assert f"; algorithms: {algorithms}" in said
    warnings = [said for level, said in silent if level == "WARNING"]
    assert [said.partition(": ")[0] for said in warnings] == [
        "nothing was planned",
        "nothing is in symmetric memory",
        "nothing is in symmetric memory",
    ]
    assert "session.step() never came" in warnings[0]
    assert "the iteration called no declared op" in warnings[1]
    assert "no declared op is called in 1 compiled graph " in warnings[2]


def _over_another_group(rank, size):
    """A session of all ranks in which each is in a group with its neighbour."""
    import torch.distributed as dist

    pairs = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("all", "pair"))["pair"]
    with _heard() as said, symmplan.eager(timeout=30.0) as session:
        for _ in range(2):
            _gather(torch.ones(2, 8), pairs.get_group().group_name)
            session.step()
    return said, pairs.get_group().group_name


@pytest.mark.ranks
def test_calls_over_other_groups_alone_are_told_of():
    with RankPool(4, timeout=120.0) as ranks:
        for said, group in ranks.run(_over_another_group):
            (warning,) = [text for level, text in said if level == "WARNING"]
            assert f"declared ops over other groups alone ({group}; the session's is 0)" in warning
            assert warning.endswith("give symmplan.eager() theirs as group=")


@pytest.mark.long
def test_the_default_backend_says_what_it_did_and_that_it_did_nothing():
    torch._dynamo.reset()
    backend = symmplan.default_backend()
    graphs = backend.stats.graphs
    compiled = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)
    with _heard() as said:
        for _ in range(3):
            compiled(torch.ones(2))
    assert backend.stats.graphs == graphs + 1
    assert backend.plans == ()
    backend.release()
    (warning,) = [text for level, text in said if level == "WARNING"]
    assert "no declared op is called" in warning


@settings(max_examples=20)
@given(problem=interval_problems(), left=st.integers(0, 3))
def test_a_plan_is_one_line(problem, left):
    from attrs import evolve

    from symmplan.model import Unplanned

    some = tuple(Unplanned(f"t{i}", "o::p", "x", f"reason\n{i % 2}", 4) for i in range(left))
    with _heard(logging.DEBUG) as said:
        plan = symmplan.plan(evolve(problem, unplanned=some))
    (level, line), (_, summary) = said
    assert level == "INFO"
    assert "\n" not in line
    assert ("left out: " in line) == bool(left)
    assert summary == plan.summary()
    assert "\n" not in repr(plan)
    assert len(repr(plan)) < 120


@pytest.mark.further
@pytest.mark.parametrize(
    "logs", ["symmplan", *(pytest.param(x, marks=pytest.mark.further) for x in ("", "+symmplan"))]
)
def test_torch_logs_sets_how_much_is_said(logs):
    code = (
        "import torch, symmplan\nsymmplan.plan(symmplan.Problem.from_intervals([('a', 0, 1, 8)]))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_LOGS"}
    if logs:
        environment["TORCH_LOGS"] = logs
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert ("symmplan.plan: plan " in done.stderr) == bool(logs)
    assert ("segments:" in done.stderr) == logs.startswith("+")


# Ops that nobody has declared.


def _undeclared(rank, size):
    """Graphs with ops that call torch.distributed inside: what the log says of them."""
    import torch.distributed as dist

    @torch.library.custom_op("undeclared::reduced", mutates_args=())
    def reduced(x: torch.Tensor, comm: str) -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out, group=dist.distributed_c10d._resolve_process_group(comm))
        return out

    @torch.library.custom_op("undeclared::reduce_", mutates_args={"x"})
    def reduce_(x: torch.Tensor, *, group_name: str) -> None:
        dist.all_reduce(x)

    @torch.library.custom_op("undeclared::scaled", mutates_args=())
    def scaled(x: torch.Tensor, how: str) -> torch.Tensor:
        return x * 2

    for op in (reduced, scaled):
        op.register_fake(lambda x, _: torch.empty_like(x))

    def program(x, group):
        y = (
            reduced(x, group)
            + scaled(x, "group_name")
            + F.wait_tensor(F.all_reduce(x, "sum", group))
        )
        reduce_(y, group_name="of somebody's own")
        return reduced(y * 2, group)

    group = dist.group.WORLD.group_name
    x = torch.full((4,), rank + 1.0)
    expected = program(x.clone(), group)
    told, equal = [], []
    for _ in range(2):
        torch.compiler.reset()
        with _heard() as lines:
            backend = symmplan.backend(inner="eager", timeout=30.0)
            compiled = torch.compile(program, backend=backend, fullgraph=True)
            equal.append(torch.equal(compiled(x.clone(), group), expected))
        told.append([text for _, text in lines if "undeclared::" in text])
    symmplan.register_symm_mem_args("undeclared::reduced", ["x", "return"], group="comm")
    return told, equal


@pytest.mark.long
@pytest.mark.ranks
def test_an_undeclared_op_on_a_group_is_named_once_with_what_would_place_it():
    with RankPool(2) as ranks:
        for (first, again), equal in ranks.run(_undeclared):
            assert equal == [True, True]
            assert again == []  # once per op
            (own, other) = sorted(first)
            assert own.startswith("undeclared::reduce_ runs over a process group")
            assert 'torch must know its group "of somebody\'s own", too' in own
            assert other.startswith("undeclared::reduced runs over a process group (its argument")
            assert other.endswith(
                'symmplan.register_symm_mem_args("undeclared::reduced", ["x", "return"], '
                'group="comm")'
            )
