"""Rows of experts over several hosts: as in torch's own way, and each token once to each host."""

from __future__ import annotations

import pytest
import torch
from host_programs import experts, routed
from hosts import HostPool, hosts_pool, why_no_hosts
from hypothesis import given
from hypothesis import strategies as st

from symmplan.integrate.moe import host_rows

needs_hosts = pytest.mark.skipif(
    bool(why_no_hosts()), reason=f"no hosts on one machine: {why_no_hosts()}"
)
pool = hosts_pool((2, 2), (2, 2, 2), (3, 3))


@given(st.lists(st.integers(0, 3), max_size=12), st.sampled_from([8, 5]), st.booleans())
def test_equal_rows_are_one(values, width, alike):
    rows = torch.tensor(values, dtype=torch.bfloat16).view(-1, 1).repeat(1, width)
    with pytest.MonkeyPatch.context() as patch:
        if alike:  # all rows have one hash
            patch.setattr(host_rows, "_hashes", lambda flat: torch.zeros(len(flat)))
        first, at = host_rows.distinct(rows)
    assert torch.equal(rows[first][at], rows)
    assert first.tolist() == sorted(first.tolist())
    if not alike:
        assert len(first) == len(set(values))


@needs_hosts
@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize("per_host", [(2, 1), (1, 1)], ids=str)
def test_experts_that_two_levels_do_not_serve_are_ordinary(per_host):
    with HostPool(per_host, timeout=120.0) as ranks:
        for wrong, served, reasons, _ in ranks.run(experts, "auto"):
            assert not wrong
            assert served == 0
            (reason,) = reasons
            assert reason.startswith("no symmetric memory: rank ")
            assert "hosts" in reason


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
    from symmplan.memory.counterparts import Counterparts

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
            return max(crossed), tokens.nbytes, len(inside)
    finally:
        Counterparts.exchange = exchange


@needs_hosts
@pytest.mark.ranks
def test_a_token_for_several_experts_of_a_host_crosses_once():
    with HostPool((3, 3), timeout=120.0) as ranks:
        for crossed, nbytes, rows in ranks.run(_doubled):
            places = 3 * 16 * 4  # of the rows on the other side
            assert crossed == nbytes + places
            assert rows == 6 * 16


@needs_hosts
@pytest.mark.ranks
def test_experts_measure_two_levels_beside_the_ordinary_way(pool):
    for wrong, _, reasons, measured in pool.run(experts, "auto"):
        assert not wrong
        assert not reasons
        assert measured == [["ordinary", "two-level"]]


@needs_hosts
@pytest.mark.ranks
def test_experts_run_in_two_levels(pool):
    for wrong, served, reasons, _ in pool.run(experts, "two-level"):
        assert not wrong
        assert served > 0
        assert not reasons
