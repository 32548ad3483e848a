"""``bind=True``: parameters that programs and their users change between runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from programs import Program, make_inputs, programs, run
from ranks import pool_of
from test_compile_bind import _group, _Model, _setup

pytestmark = pytest.mark.ranks

pool = pool_of(2, setup=_setup, timeout=120.0)


class _Holder(torch.nn.Module):
    """A random program whose inputs are parameters and buffers."""

    def __init__(self, program, groups, tensors):
        super().__init__()
        self.program, self.groups = program, groups
        for i, tensor in enumerate(tensors):
            if i % 2:
                self.register_buffer(f"t{i}", tensor)
            else:
                self.register_parameter(f"t{i}", torch.nn.Parameter(tensor, requires_grad=False))

    def forward(self):
        tensors = [getattr(self, f"t{i}") for i in range(len(self.program.inputs) + 1)]
        return run(self.program, self.groups, *tensors)


_ACTIONS = (
    "nothing",
    "update",
    "data",
    "assign",
    "assign, old one kept",
    "view kept",
    "data kept",
    "flat",
)


def _act(model, actions, turn, kept):
    """Do something to each tensor, the same to a model on ordinary memory."""
    with torch.no_grad():
        for i, action in enumerate(actions):
            tensor = getattr(model, f"t{i}")
            new = torch.full_like(tensor, 0.25 * (turn + 1)) + i
            if action == "update":
                tensor.mul_(0.5).add_(turn)
            elif action in ("data", "data kept"):
                tensor.data = new
                if action != "data":
                    kept.append(new)
            elif action in ("assign", "assign, old one kept"):
                state = model.state_dict()
                if action != "assign":
                    kept.append(state[f"t{i}"])
                model.load_state_dict({**model.state_dict(), f"t{i}": new}, assign=True)
            elif action == "view kept":
                kept.append(tensor.detach()[:1])
            elif action == "flat":  # both are views of one storage now
                flat = torch.cat([new, new])
                kept.append(flat)
                tensor.data = flat[: len(new)]


def _random(rank, size, program, plan_of_actions, inner):
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    groups = [dist.group.WORLD.group_name] * 2
    backend = symmplan.backend(
        inner=inner, timeout=30.0, debug=inner == "eager" or "poison", bind=True
    )
    models = [_Holder(program, groups, make_inputs(program, rank)) for _ in range(2)]
    compiled = torch.compile(models[1], backend=backend, fullgraph=True)
    kept: list[list[torch.Tensor]] = [[], []]
    try:
        for turn, actions in enumerate(plan_of_actions):
            expected = models[0]()
            got = compiled()
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            # One rank does something else than its peers.
            mine = actions if rank == 0 else actions[::-1]
            for model, held in zip(models, kept, strict=True):
                _act(model, mine, turn, held)
            torch.testing.assert_close(kept[1], kept[0])
            now = [dict(m.named_parameters()) | dict(m.named_buffers()) for m in models]
            torch.testing.assert_close(now[1], now[0])
        backend.release()
        torch.testing.assert_close(kept[1], kept[0])
        torch.testing.assert_close(models[1](), models[0]())
        return backend.stats.bound
    finally:
        backend.release()


@pytest.mark.further
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(
    program=Program((4, 4), (("reduce", 0, 0), ("peers", 1, 0)), (2, 3)),
    actions=[["data kept"] * 4, ["update"] * 4, ["update"] * 4],
)
@example(
    # No peer touches what is placed: the op writes its result elsewhere, and it is copied in.
    program=Program((2,), (("sum", 0, 0), ("relu", 1), ("relu", 0)), (0, 2)),
    actions=[["nothing"] * 4] * 2,
)
@given(
    program=programs(groups=1, max_steps=6),
    actions=st.lists(
        st.lists(st.sampled_from(_ACTIONS), min_size=4, max_size=4), min_size=2, max_size=4
    ),
)
def test_random_programs_with_parameters_that_change_between_runs(pool, program, actions):
    plan_of_actions = [a[: len(program.inputs) + 1] for a in actions]
    first, second = pool.run(_random, program, plan_of_actions, "eager")
    assert first == second


@pytest.mark.further
def test_parameters_that_change_between_runs_through_inductor(pool):
    program = Program((8, 8, 4), (("peers", 0, 0), ("reduce", 1, 0), ("scatter", 2, 0)), (3, 4, 5))
    actions = [
        (a, b, c, "nothing") for a, b, c in zip(_ACTIONS, _ACTIONS[2:], _ACTIONS[1:], strict=False)
    ]
    first, second = pool.run(_random, program, actions, "inductor")
    assert first == second >= 3


def _late(rank, size, inner):
    """Rank 1 reads its peers' parameters late; rank 0 updates its own as soon as it may."""
    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner=inner, timeout=30.0, bind=True)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.full((8,), 1.0 + rank), requires_grad=False)
    compiled = torch.compile(
        lambda: torch.ops.symmplan_test.late_sum(model.w, _group()) + 0, backend=backend
    )
    found = []
    try:
        for _ in range(3):
            found.append(compiled()[0].item())
            with torch.no_grad():
                model.w += 10
        torch.distributed.barrier()
        return found, backend.stats.barriers, backend.stats.kept
    finally:
        backend.release()


@pytest.mark.further
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_peers_have_read_a_parameter_before_the_program_updates_it(pool, inner):
    for found, barriers, kept in pool.run(_late, inner):
        assert found == [3.0, 23.0, 43.0]
        assert (barriers, kept) == (1, 1)


def _named(rank, size):
    """A replaced parameter that cannot take its place is named, with what to do."""
    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=30.0, bind=True)
    model = _Model(rank)
    compiled = torch.compile(model, backend=backend)
    try:
        with torch.no_grad():
            compiled(torch.ones(2, 8))
            old = model.state_dict()
            model.load_state_dict({k: v + 1 for k, v in old.items()}, assign=True)
            compiled(torch.ones(2, 8))
            named = backend.staged(), backend.stats.missed, backend.stats.kept
            del old
            compiled(torch.ones(2, 8))
        return named, backend.staged(), backend.stats.missed, backend.stats.kept
    finally:
        backend.release()


@pytest.mark.further
def test_a_replaced_parameter_is_named_until_it_has_moved_in(pool):
    first, second = pool.run(_named)
    assert first == second
    (rows, copies, _), after, all_copies, kept = first
    rows = [r for r in rows if "its storage leaves the graph" not in r[3]]
    assert len(rows) == copies == all_copies == 2
    assert all("drop those (state dicts, detached views)" in r[3] for r in rows)
    assert not any("replaced" in r[3] for r in after)
    assert kept == 2
