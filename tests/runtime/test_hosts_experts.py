"""Rows of experts over several hosts: as in torch's own way, and each token once to each host."""

from __future__ import annotations

import operator

import pytest
import torch
from host_programs import experts, routed
from hosts import HostPool, hosts_pool, why_no_hosts
from hypothesis import given
from hypothesis import strategies as st

import symmplan
from symmplan.choose.tuning_table import Table, TuningRow
from symmplan.integrate.moe import host_rows

needs_hosts = pytest.mark.skipif(
    bool(why_no_hosts()), reason=f"no hosts on one machine: {why_no_hosts()}"
)
pool = hosts_pool((2, 2), (2, 2, 2), (3, 3))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=12),
    st.sampled_from([8, 5]),
    st.booleans(),
)
def test_equal_rows_are_one_in_each_part(values, width, alike):
    values.sort(key=operator.itemgetter(1))
    words = torch.tensor([value for value, _ in values], dtype=torch.int16)
    words = words.view(-1, 1).repeat(1, width).flip(0)
    picks = torch.arange(len(values)).flip(0)
    parts = torch.tensor([part for _, part in values], dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        if alike:  # all rows have one hash
            patch.setattr(host_rows, "_hashes", lambda rows: torch.zeros(len(rows)))
        first, at = host_rows.distinct(words, picks, parts)
    kept = first.nonzero().flatten()
    assert torch.equal(words[picks[kept][at]], words[picks])
    assert torch.equal(parts[kept][at], parts)
    assert at[kept].tolist() == [*range(len(kept))]
    if not alike:
        assert len(kept) == len(set(values))


@needs_hosts
@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("per_host", "why"),
    [
        ((2, 1), "two levels need equally many ranks on each host"),
        ((1, 1), "two levels need several ranks on each host"),
    ],
)
def test_experts_that_two_levels_do_not_serve_are_ordinary(per_host, why):
    with HostPool(per_host, timeout=120.0) as ranks:
        for wrong, served, reasons, _ in ranks.run(experts, "auto"):
            assert not wrong
            assert served == 0
            (reason,) = reasons
            assert reason.startswith("no symmetric memory: its ranks are on 2 hosts")
            assert reason.endswith(why)


@needs_hosts
@pytest.mark.ranks
def test_experts_need_not_be_in_the_order_of_hosts():
    with HostPool((2, 2), mixed=True, timeout=120.0) as ranks:
        for wrong, served, reasons, _ in ranks.run(experts, "two-level"):
            assert not wrong
            assert served > 0
            assert not reasons


@needs_hosts
@pytest.mark.ranks
@pytest.mark.parametrize("seed", range(3))
def test_tokens_for_several_experts_move_over_hosts_as_in_torchs_own_way(pool, seed):
    for wrong, served, _, _ in pool.run(routed, seed):
        assert not wrong
        assert served == 4 * 6


def _doubled(rank, size):
    """Bytes that cross when each token goes to all ranks: of the tokens, and in all."""
    import torch.distributed as dist

    import symmplan
    from symmplan.memory.meeting.counterparts import Counterparts

    crossed, exchange = [], Counterparts.exchange
    Counterparts.exchange = lambda self, output, source, *parts: (
        crossed.append(source.nbytes) or exchange(self, output, source, *parts)
    )
    tokens = torch.randn(16, 256, generator=torch.Generator().manual_seed(rank))
    try:
        with symmplan.expert_parallel(
            dist.group.WORLD, max_tokens=16 * size, choose="two-level", timeout=30.0
        ) as layer:
            inside = layer.dispatch(tokens.repeat(size, 1), layer.routes([16] * size))
            assert len(crossed) == 2
            back = layer.combine(inside, layer.routes([16] * size))
            return crossed, tokens.nbytes, len(inside), len(back)
    finally:
        Counterparts.exchange = exchange


@needs_hosts
@pytest.mark.ranks
def test_a_token_for_several_experts_of_a_host_crosses_once():
    with HostPool((3, 3), timeout=120.0) as ranks:
        for crossed, nbytes, rows, back in ranks.run(_doubled):
            ahead = (2 + 3 * 16) * 4  # how many to each host, and the places on the other side
            assert crossed == [ahead, nbytes, 3 * nbytes]
            assert rows == back == 6 * 16


@needs_hosts
@pytest.mark.ranks
def test_experts_measure_two_levels_beside_the_ordinary_way(pool):
    for wrong, _, reasons, measured in pool.run(experts, "auto"):
        assert not wrong
        assert not reasons
        assert measured == [["ordinary", "two-level"]]


def _table(path, *rows):
    """A tuning table with such rows of all sizes, as (algorithm, seconds)."""
    kinds = [
        TuningRow("all_to_all", 4, 1 << power, algorithm, seconds)
        for algorithm, seconds in rows
        for power in range(4, 24, 2)
    ]
    path.write_text(Table("shm", tuple(kinds)).to_json())
    return str(path)


@needs_hosts
@pytest.mark.ranks
def test_experts_move_over_hosts_as_a_table_of_hosts_says(pool, tmp_path):
    near = ("ordinary", {"ordinary": 1.0, "push": 2.0})
    far = {"ordinary": 2.0, "two-level": 1.0}
    ways = {"two-level": [near, ("two-level", far)], "ordinary": [near, ("ordinary", far)]}
    for algorithm, rows in ways.items():
        path = _table(tmp_path / f"{algorithm}.json", *rows)
        for wrong, served, _, measured in pool.run(experts, path):
            assert not wrong
            assert (served > 0) == (algorithm == "two-level")
            assert not measured
        simulated = symmplan.simulate(_dispatched, ranks=8, ranks_per_host=4, choices=path)
        assert {c.algorithm for c in simulated.collectives} == {algorithm}


def _dispatched():
    import torch.distributed as dist

    with symmplan.expert_parallel(dist.group.WORLD, max_tokens=64) as layer:
        routes = layer.routes([4] * 8)
        layer.combine(layer.dispatch(torch.ones(32, 8), routes), routes)


@needs_hosts
@pytest.mark.ranks
def test_experts_run_in_two_levels(pool):
    for wrong, served, reasons, _ in pool.run(experts, "two-level"):
        assert not wrong
        assert served > 0
        assert not reasons
