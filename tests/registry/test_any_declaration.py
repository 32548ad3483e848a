"""Whatever is declared of an op: nothing that compiles without symmplan fails with it.

Random schemas with random declarations, right and wrong, by symmplan and by torch's own registry,
with and without arguments that name a group; and ops of the default group that reach their peers.
"""

from __future__ import annotations

import pytest
import torch
from ranks import RankPool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout=240.0) as ranks:
        yield ranks


def _flat(value):
    return [x for v in value for x in (_flat(v) if isinstance(v, (list, tuple)) else [v])]


def _in_session(rank, world_size, seeds):
    """Run random programs in sessions; what went wrong, and how much of it was placed."""
    import torch.distributed as dist
    from declared_programs import random_program

    import symmplan
    from symmplan.coordination.own import own_work

    placed, wrong = 0, []
    for seed in seeds:
        program, schemas = random_program(seed, dist.group.WORLD.group_name)
        generator = torch.Generator().manual_seed(seed + 100 * rank)

        def drawn(generator=generator):
            return [torch.randint(-9, 9, (4, 4), generator=generator).float() for _ in range(2)]

        try:
            with symmplan.eager(timeout=20.0, memory="shm") as session:
                for _ in range(3):
                    mine = drawn()
                    others = [x.clone() for x in mine]
                    got = program(*mine)
                    with own_work:
                        want = program(*others)
                    pairs = list(zip(_flat([got, mine]), _flat([want, others]), strict=True))
                    assert all(torch.equal(a, b) for a, b in pairs), pairs
                    del got, mine, pairs
                    session.step()
                placed += session.stats.placed
        except Exception as error:  # noqa: BLE001
            wrong.append((seed, schemas, f"{type(error).__name__}: {error}"[:800]))
    return wrong, placed


@pytest.mark.further
@pytest.mark.parametrize("seeds", [range(600, 608), range(608, 640), range(640, 670)])
def test_no_declaration_makes_a_session_fail(pool, seeds):
    for wrong, placed in pool.run(_in_session, seeds):
        assert not wrong
        assert placed > len(seeds)


def _check(rank, world_size, seeds, inner):
    """Compile and plan random programs; what went wrong, and how much of it was placed."""
    import warnings

    import torch.distributed as dist
    from declared_programs import random_program
    from torch.fx.experimental.proxy_tensor import make_fx

    import symmplan

    placed = unplanned = 0
    wrong = []
    for seed in seeds:
        program, schemas = random_program(seed, dist.group.WORLD.group_name)
        generator = torch.Generator().manual_seed(seed + rank)
        inputs = [torch.randn(4, 4, generator=generator) for _ in range(2)]
        expected = program(*(x.clone() for x in inputs))
        plain = "inductor" if inner == "inductor" else "aot_eager"
        torch._dynamo.reset()
        try:
            torch.compile(program, backend=plain)(*(x.clone() for x in inputs))
        except Exception:  # noqa: BLE001
            continue
        torch._dynamo.reset()
        backend = symmplan.backend(inner=inner, timeout=30.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                got = torch.compile(program, backend=backend)(*(x.clone() for x in inputs))
                graph = make_fx(program, tracing_mode="fake")(*(x.clone() for x in inputs))
                symmplan.plan(graph).verify()
                for a, b in zip(_flat(got), _flat(expected), strict=True):
                    torch.testing.assert_close(a, b)
            except Exception as error:  # noqa: BLE001
                wrong.append((seed, schemas, f"{type(error).__name__}: {error}"[:800]))
        placed += backend.stats.placed
        unplanned += backend.stats.unplanned
        dist.barrier()
        backend.release()
    return wrong, placed, unplanned


@pytest.mark.parametrize(
    ("seeds", "inner"),
    [
        (range(4), "eager"),
        (range(4, 14), "eager"),
        (range(100, 104), "inductor"),
        *(
            pytest.param(range(at, at + 50), "eager", marks=pytest.mark.slow)
            for at in range(200, 500, 50)
        ),
        pytest.param(range(500, 530), "inductor", marks=pytest.mark.slow),
    ],
)
def test_random_declarations_never_break_a_compilation(pool, seeds, inner):
    for wrong, placed, unplanned in pool.run(_check, seeds, inner):
        assert not wrong, wrong[0]
        assert placed or len(seeds) < 10
        assert unplanned or len(seeds) < 10


def _default_group(rank, world_size):
    """An op without a group argument reads its peers over the group that is meant."""
    import warnings

    import torch.distributed as dist

    import symmplan
    from symmplan.memory import locate

    library = torch.library.Library("symmtest_near", "FRAGMENT")
    library.define("near(Tensor x) -> Tensor")

    def near(x):
        if locate(x) is None:
            return x + 100
        placed = symmplan.placed.handle(x)
        placed.barrier()
        found = sum(placed.peer(r) for r in range(placed.world_size))
        placed.barrier()
        return found

    library.impl("near", near, "CompositeExplicitAutograd")
    torch.library.register_fake("symmtest_near::near", torch.empty_like, lib=library)
    symmplan.register_symm_mem_args("symmtest_near::near", ["x"])
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    found = {}
    for name, group in (("world", None), ("own", alone), ("by name", alone.group_name)):
        torch._dynamo.reset()
        backend = symmplan.backend(inner="eager", timeout=30.0, default_group=group)
        program = torch.compile(lambda x: torch.ops.symmtest_near.near(x + rank), backend=backend)
        found[name] = [float(program(torch.full((8,), float(i)))[0]) for i in range(3)]
        dist.barrier()
        backend.release()
    with symmplan.eager(timeout=30.0) as session:
        found["eager"] = []
        for i in range(3):
            x = torch.full((8,), float(i)) + rank
            found["eager"].append(float(torch.ops.symmtest_near.near(x)[0]))
            session.step()
        assert session.plan.unplanned == ()
    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", default_group="there is no such group")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        program = torch.compile(lambda x: torch.ops.symmtest_near.near(x + 1), backend=backend)
        found["nowhere"] = [float(program(torch.zeros(8))[0])]
    said = [str(w.message) for w in told if "no such group" in str(w.message)]
    reasons = [u.reason for plan in backend.plans for u in plan.unplanned]
    return found, bool(said), reasons


@pytest.mark.further
def test_ops_without_a_group_run_over_the_default_group(pool):
    for rank, (found, told, reasons) in enumerate(pool.run(_default_group)):
        own = [float(i + rank) for i in range(3)]
        everybody = [2.0 * i + 1 for i in range(3)]
        expected = {"world": everybody, "own": own, "by name": own, "eager": everybody}
        assert found == {**expected, "nowhere": [101.0]}
        assert told
        assert len(reasons) == 1
        assert "no such group" in reasons[0]
