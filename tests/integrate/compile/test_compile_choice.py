"""Symmetric memory or torch's own way, measured for each collective of a compiled graph."""

from __future__ import annotations

import pytest
import torch
from ranks import pool_of

pytestmark = pytest.mark.ranks

F = torch.ops._c10d_functional


def _program(x, w, group):
    started = F.all_gather_into_tensor(x.relu(), 2, group)
    y = x @ w
    gathered = F.wait_tensor(started) + 1
    part = F.wait_tensor(F.reduce_scatter_tensor(gathered @ w, "sum", 2, group))
    total = F.wait_tensor(F.all_reduce(part.sin(), "sum", group))
    a, b = F.all_gather_into_tensor_coalesced([y, total], 2, group)
    return part + 1, F.wait_tensor(a), F.wait_tensor(b) * 2


def _compare(rank, size, algorithm, inner):
    """Run the program plainly and compiled, whatever is measured."""
    import torch.distributed as dist

    import symmplan
    from symmplan.choose import trials

    torch._dynamo.reset()
    trials.forget()
    trials.fastest, saved = lambda *_, **__: algorithm, trials.fastest
    torch.manual_seed(rank)
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    group = dist.group.WORLD.group_name
    expected = _program(x, w, group)
    backend = symmplan.backend(
        inner=inner, timeout=30.0, choose="measure", debug=inner == "eager" or "poison"
    )
    try:
        for _ in range(2):
            got = torch.compile(_program, backend=backend, fullgraph=True)(x, w, group)
            torch.testing.assert_close(got, expected)
        reasons = sorted({(u.reason, u.needed) for p in backend.plans for u in p.unplanned})
        return backend.stats, backend.choices, reasons
    finally:
        trials.fastest = saved
        backend.release()


pair = pool_of(2, timeout=120.0)


@pytest.mark.long
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("algorithm", ["ordinary", "symmetric"])
def test_ranks_choose_alike_and_results_stay(pair, algorithm, inner):
    first, second = pair.run(_compare, algorithm, inner)
    assert first == second
    stats, choices, reasons = first
    # Inductor makes the all-reduce work in place.
    assert [c.op.split("::")[1].split(".")[0].rstrip("_") for c in choices] == [
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_reduce",
        "all_gather_into_tensor_coalesced",
    ]
    assert all(set(c.seconds) == {"ordinary", "symmetric"} for c in choices)
    assert all(seconds > 0 for c in choices for seconds in c.seconds.values())
    if inner == "eager":  # Inductor reorders
        assert [c.beside for c in choices] == [2 * 4 * 8 * 8, 0, 0, 0]
    assert choices[3].copied_out
    assert {c.algorithm for c in choices} == {algorithm}
    if algorithm == "ordinary":
        assert stats.placed == 0
        assert all("symmetric memory was not clearly faster" in reason for reason, _ in reasons)
        assert any("copied out, against" in reason for reason, _ in reasons)
        assert not any(needed for _, needed in reasons)
    else:
        assert stats.placed >= 5


def _other(rank, size):
    import torch.distributed as dist

    import symmplan
    from symmplan.choose import trials

    torch._dynamo.reset()
    trials.forget()
    backend = symmplan.backend(inner="eager", timeout=30.0, choose="measure")
    group = dist.group.WORLD.group_name
    rows = 4 + 4 * rank

    def program(x):
        return F.wait_tensor(F.all_gather_into_tensor(x.sin(), 2, group)) + 1

    torch.compile(program, backend=backend)(torch.ones(rows, 8))


def _raised(error):
    """What symmplan raised: while a graph is compiled, Dynamo wraps every backend's error."""
    inner = error.fields.get("inner_exception")
    assert (inner is not None) == (error.kind == "BackendCompilerFailed")
    return error.kind if inner is None else type(inner).__name__


def test_ranks_that_compile_other_collectives_all_get_an_error(pair):
    for outcome in pair.outcomes(_other):
        assert outcome.error is not None
        assert _raised(outcome.error) == "AgreementError"
        assert "measure different collectives" in outcome.error.text


def _other_later(rank, size):
    """All ranks have measured a gather of four rows; then rank 1 alone has a new one."""
    import torch.distributed as dist

    import symmplan
    from symmplan.choose import trials

    trials.forget()
    # Whatever is measured: a collective that stays torch's own meets its peers in torch.
    trials.fastest, saved = lambda *_, **__: "symmetric", trials.fastest
    group = dist.group.WORLD.group_name

    def program(x):
        return F.wait_tensor(F.all_gather_into_tensor(x.sin(), 2, group)) + 1

    try:
        for rows in (4, 4 + 4 * rank):
            torch._dynamo.reset()
            backend = symmplan.backend(inner="eager", timeout=30.0, choose="measure")
            torch.compile(program, backend=backend, dynamic=False)(torch.ones(rows, 8))
            backend.release()
    finally:
        trials.fastest = saved


def test_a_rank_that_measures_alone_fails_on_all(pair):
    for outcome in pair.outcomes(_other_later):
        assert outcome.error is not None
        assert _raised(outcome.error) == "AgreementError"
        assert "make different calls at the same time" in outcome.error.text


def _counted(x, w, group):
    """Two gathers beside a product, then one of them beside another; one waits at once."""
    long = F.all_gather_into_tensor(x, 2, group)
    short = F.all_gather_into_tensor(x[:2], 2, group)
    y = x @ w
    b = F.wait_tensor(short)
    z = y @ w
    a = F.wait_tensor(long)
    c = F.wait_tensor(F.all_reduce(z, "sum", group))
    return a, b, c @ w


def _counts(rank, size):
    import torch.distributed as dist
    from torch.fx.experimental.proxy_tensor import make_fx

    from symmplan.choose.work import flops_beside

    name = dist.group.WORLD.group_name
    x, w = torch.randn(6, 8), torch.randn(8, 8)
    graph = make_fx(lambda x, w: _counted(x, w, name), tracing_mode="fake")(x, w).graph
    nodes = [
        n for n in graph.nodes if "all_gather" in str(n.target) or "all_reduce" in str(n.target)
    ]
    return list(flops_beside(nodes).values())


def test_products_are_divided_among_what_runs_beside_them(pair):
    product = 2 * 6 * 8 * 8
    for found in pair.run(_counts):
        assert found == [product * 3 / 4 + product, product / 4, 0.0]


def test_products_whose_formula_refuses_their_shapes_are_not_counted(monkeypatch):
    """As that of torch 2.11 refuses attention in which keys have fewer heads than queries."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from symmplan.choose import work

    def refuse(*_args, **_kwargs):
        raise AssertionError("shapes are incompatible")

    x, w = torch.randn(6, 8), torch.randn(8, 8)
    graph = make_fx(lambda x, w: _counted(x, w, "group"), tracing_mode="fake")(x, w).graph
    nodes = [n for n in graph.nodes if "all_gather" in str(n.target)]
    assert all(work.flops_beside(nodes).values())
    monkeypatch.setitem(work.flop_registry, torch.ops.aten.mm, refuse)
    assert not any(work.flops_beside(nodes).values())
