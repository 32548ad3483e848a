"""One class says what was done, with the same counters for graphs, sessions and FSDP2."""

from __future__ import annotations

import pytest
import torch
from attrs import fields
from ranks import RankPool

pytestmark = pytest.mark.ranks

F = torch.ops._c10d_functional


def _program(x, group):
    """A gather of what is made in place, and a sum of what comes from elsewhere."""
    whole = F.wait_tensor(F.all_gather_into_tensor(x + 1, 2, group))
    return F.wait_tensor(F.reduce_scatter_tensor(whole.sort().values, "sum", 2, group)).sum()


def _counted(rank, size):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import symmplan
    from symmplan.runtime.stats import Stats

    group = dist.group.WORLD.group_name
    backend = symmplan.backend(inner="eager", timeout=30.0, choose="placed")
    compiled = torch.compile(_program, backend=backend, fullgraph=True)
    for turn in range(3):
        compiled(torch.full((4, 4), float(turn)), group)
    found = [backend.stats]
    backend.release()
    with symmplan.eager(timeout=30.0, choose="placed") as session:
        for turn in range(4):
            _program(torch.full((4, 4), float(turn)), group)
            session.step()
        found.append(session.stats)
    model = fully_shard(torch.nn.Linear(8, 8), mesh=dist.init_device_mesh("cpu", (size,)))
    handle = symmplan.fsdp.apply(model, choose="placed")
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
    found.append(handle.stats)
    handle.remove()
    assert all(type(stats) is Stats for stats in found)
    return found


def test_all_count_alike():
    with RankPool(2, timeout=120.0) as ranks:
        first, second = ranks.run(_counted)
    assert first == second
    graph, session, model = first
    for stats in first:
        assert stats.plans == 1
        assert stats.rendezvous == 1
        assert stats.placed == stats.staged + stats.bound > 0
        assert stats.segment_bytes >= stats.lower_bound_bytes > 0
        assert stats.plain == 0
    assert (graph.iterations, graph.served, graph.recorded) == (3, 6, 0)
    assert (session.iterations, session.served, session.recorded) == (4, 6, 2)
    assert (model.served, model.recorded, model.copies) == (6, 2, 0)
    assert graph.staged == session.staged > 0
    assert graph.copies == 3 * graph.staged
    assert session.copies == 3 * session.staged


#: Why a collective is demoted, and the options of the program.
DEMOTIONS = {
    "there was no room for it": {},
    "it was demoted by the budget": {"capacity": 0},
    "symmetric memory was not clearly faster": {"choose": "measure"},
}


def _demoted(rank, size, why):
    """What each integration counts where all of its collectives are demoted."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import symmplan
    from symmplan.choose import trials
    from symmplan.memory import room

    options = {"timeout": 30.0, "choose": "placed", **DEMOTIONS[why]}
    group, found = dist.group.WORLD.group_name, {}
    free = 0 if why == next(iter(DEMOTIONS)) and rank else 1 << 40
    before = room.free_bytes, trials.fastest
    room.free_bytes, trials.fastest = lambda *_: free, lambda *_, **__: "ordinary"
    try:
        backend = symmplan.backend(inner="eager", **options)
        compiled = torch.compile(_program, backend=backend, fullgraph=True)
        for turn in range(3):
            compiled(torch.full((4, 4), float(turn), requires_grad=turn == 2), group)
        found["graph"] = backend.stats
        backend.release()
        with symmplan.eager(**options) as session:
            for turn in range(4):
                _program(torch.full((4, 4), float(turn)), group)
                session.step()
            found["session"] = session.stats
        model = fully_shard(torch.nn.Linear(8, 8), mesh=dist.init_device_mesh("cpu", (size,)))
        handle = symmplan.fsdp.apply(model, **options)
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
        found["model"] = handle.stats
        handle.remove()
    finally:
        room.free_bytes, trials.fastest = before
        torch._dynamo.reset()
    return found


def _in_part(rank, size):
    """One of two gathers has room."""
    import torch.distributed as dist

    import symmplan

    def program(x, group):
        gathers = [F.all_gather_into_tensor(y + 1, 2, group) for y in (x, x[:1])]
        return sum(F.wait_tensor(each).sort().values.sum() for each in gathers)

    backend = symmplan.backend(inner="eager", timeout=30.0, choose="placed", capacity=512)
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    for turn in range(3):
        compiled(torch.full((64, 4), float(turn)), dist.group.WORLD.group_name)
    stats = backend.stats
    backend.release()
    torch._dynamo.reset()
    return stats


@pytest.mark.further
def test_all_say_why_collectives_were_demoted():
    with RankPool(2, timeout=120.0) as ranks:
        for why in DEMOTIONS:
            for found in ranks.run(_demoted, why):
                for name, stats in found.items():
                    said = {reason: n for reason, n in stats.reasons if reason.startswith(why)}
                    assert stats.plain == sum(said.values()) == 6, (name, stats)
                    assert stats.reasons == (*said.items(),), (name, stats)
                    assert stats.served == 0, (name, stats)
        for stats in ranks.run(_in_part):
            assert (stats.served, stats.plain) == (3, 3)
            ((reason, count),) = stats.reasons
            assert reason.startswith("it was demoted by the budget")
            assert count == 3


def test_they_show_what_there_is():
    from symmplan.runtime.stats import Stats

    assert repr(Stats()) == "Stats()"
    some = Stats(plans=1, placed=3, segment_bytes=2048, served=7, reasons=(("late", 2),))
    assert repr(some).splitlines() == [
        "Stats(plans=1, placed=3,",
        "      segment_bytes=2 KiB,",
        "      served=7, reasons=1)",
    ]
    whole = {f.name: 10**9 if f.type == "int" else (("a reason", 3),) * 9 for f in fields(Stats)}
    shown = repr(Stats(**whole))
    assert len(shown.splitlines()) == 3
    assert all(f"{name}=" in shown for name in whole)


def test_metrics_are_numbers_under_names_that_stay():
    from symmplan.runtime.stats import Stats

    none, some = Stats().metrics(), Stats(served=3, reasons=(("late", 2), ("flat", 1))).metrics()
    assert none.keys() == some.keys()
    assert set(none.values()) == {0}
    assert {name: n for name, n in some.items() if n} == {
        "symmplan/served": 3,
        "symmplan/reasons": 2,
    }
    assert all(type(value) is int for value in some.values())
