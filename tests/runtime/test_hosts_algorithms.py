"""How collectives of groups on several hosts run: forced, measured, by a table; what crosses."""

from __future__ import annotations

import socket

import pytest
import torch
from host_programs import built, given
from hosts import HostPool, hosts_pool, needs_hosts

from symmplan.choose.tuning_table import read_table

pytestmark = needs_hosts()
F = torch.ops._c10d_functional

_LARGER = [pytest.param(shape, marks=pytest.mark.further) for shape in ((2, 2, 2), (3, 3))]
pool = hosts_pool((2, 2), *_LARGER)


def _measured(rank, size, choose):
    """The times that FSDP2's collectives were chosen by, and how they run."""
    from torch.distributed.fsdp import fully_shard

    import symmplan
    from symmplan.choose import trials

    trials.forget()
    model = built()
    for block in model:
        fully_shard(block)
    handle = symmplan.fsdp.apply(model, choose=choose, timeout=30.0)
    for step in range(3):
        model(given(rank, step)[:4]).sum().backward()
    choices = handle.choices
    found = [(sorted(c.seconds), c.algorithm) for c in choices], handle.stats.placed
    handle.remove()
    return found


@pytest.mark.long
def test_two_levels_are_measured_beside_the_ordinary_way(pool):
    for choose in ("measure", "auto"):
        first, *others = pool.run(_measured, choose)
        assert all(other == first for other in others)
        choices, _ = first
        assert choices
        for measured, chosen in choices:
            assert measured == ["ordinary", "two-level"]
            assert chosen in measured


def test_an_algorithm_of_one_host_is_two_levels_on_several(pool):
    for choose in ("two-level", "symmetric", "push", "copy engine", "placed"):
        for _, placed in pool.run(_measured, choose):
            assert placed > 0, choose


def _tabled(rank, size, path, port):
    """The exit code and the text of the command that writes a tuning table."""
    import contextlib
    import io
    import os

    from symmplan.cli import main

    env = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in env.items()})
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = main(["bench", "comm", "--sizes", "16K,64K", "-o", path])
    return code, shown.getvalue()


def _by_table(rank, size, path):
    """How many of FSDP2's collectives run by each algorithm of a table, and what was measured."""
    from torch.distributed.fsdp import fully_shard

    import symmplan

    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(2)))
    for block in model:
        fully_shard(block)
    handle = symmplan.fsdp.apply(model, choose=path, timeout=30.0)
    for _ in range(2):
        model(torch.ones(4, 256)).sum().backward()
    found = handle.algorithms, handle.choices
    handle.remove()
    return found


@pytest.mark.further
def test_launched_ranks_measure_a_table_for_groups_on_several_hosts(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = str(tmp_path / "choices.json")
    with HostPool((2, 2), init=None, timeout=120.0) as ranks:
        (code, shown), *others = ranks.run(_tabled, path, port)
    assert code == 0
    assert f"wrote {path}" in shown
    assert others == [(0, "")] * 3
    rows = read_table(path).rows
    assert [(row.op, row.ranks, row.nbytes) for row in rows] == [
        (op, 4, 4 * part)
        for op in ("all_gather", "reduce_scatter", "all_to_all")
        for part in (1 << 14, 1 << 16)
    ]
    assert all([*row.seconds] == ["ordinary", "two-level"] for row in rows)
    with HostPool((2, 2), timeout=120.0) as ranks:
        for ran, choices in ranks.run(_by_table, path):
            assert {name for name, count in ran.items() if count} == {
                row.algorithm for row in rows if row.nbytes == 4 << 16 and row.op != "all_to_all"
            }
            assert not choices


def _measured_in_a_graph(rank, size):
    """The times that a graph's collectives were chosen by."""
    import torch.distributed as dist

    import symmplan
    from symmplan.choose import trials

    group = dist.group.WORLD.group_name
    trials.forget()
    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", choose="measure", timeout=30.0)

    def program(x):
        return F.wait_tensor(F.all_gather_into_tensor(x + 1, size, group))

    run = torch.compile(program, backend=backend, fullgraph=True)
    right = run(torch.zeros(8)).sum().item() == 8 * size
    found = right, [sorted(c.seconds) for c in backend.choices]
    backend.release()
    return found


@pytest.mark.further
def test_two_levels_are_measured_in_a_graph(pool):
    for right, measured in pool.run(_measured_in_a_graph):
        assert right
        assert measured == [["ordinary", "two-level"]]


def _narrow(rank, size, dtype):
    """This rank's host, sums of narrow numbers, all inputs, and the bytes that crossed."""
    import torch.distributed as dist

    import symmplan
    from symmplan.coordination.groups import host
    from symmplan.memory.meeting.counterparts import Counterparts

    group = dist.group.WORLD.group_name
    backend = symmplan.backend(inner="eager", choose="placed", timeout=30.0)
    torch._dynamo.reset()
    sent, exchange = [], Counterparts.exchange

    def counted(self, output, source, **parts):
        sent.append(source.nbytes)
        return exchange(self, output, source, **parts)

    def program(x):
        scattered = F.wait_tensor(F.reduce_scatter_tensor(x, "sum", size, group))
        mean = F.wait_tensor(F.reduce_scatter_tensor(x, "avg", size, group))
        return scattered, mean, F.wait_tensor(F.all_reduce(x, "avg", group))

    run = torch.compile(program, backend=backend, fullgraph=True)
    large = 6000 if dtype == torch.float16 else 1  # sums of some hosts are too large for it
    inputs = [
        (torch.randn(size * 2111, generator=torch.Generator().manual_seed(r)) + 5).to(dtype) * large
        for r in range(size)
    ]
    inputs[size // 2 :] = [-x / 2 for x in inputs[size // 2 :]]
    Counterparts.exchange = counted
    try:
        got = run(inputs[rank])
    finally:
        Counterparts.exchange = exchange
        placed = backend.stats.placed
        backend.release()
    return host(), [x.double() for x in got], [x.double() for x in inputs], sent, placed


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_narrow_sums_are_rounded_for_the_network_and_at_the_end(pool, dtype):
    found = pool.run(_narrow, dtype)
    hosts, size = [host for host, *_ in found], len(found)
    count = len(set(hosts))
    for rank, (mine, got, inputs, sent, placed) in enumerate(found):
        assert placed > 0
        sums = {
            host: sum(x for x, of in zip(inputs, hosts, strict=True) if of == host)
            for host in hosts
        }
        rounded = {h: x if h == mine else x.to(dtype).double() for h, x in sums.items()}
        if dtype != torch.float16:  # whose sums are too large, but their averages are not
            total = sum(rounded.values()).to(dtype).double()
            assert torch.equal(got[0], total.view(size, -1)[rank])
        means = {h: x / hosts.count(h) for h, x in sums.items()}
        sent_means = [x if h == mine else x.to(dtype).double() for h, x in means.items()]
        mean = (sum(sent_means) / count).to(dtype).double()
        assert torch.equal(got[1], mean.view(size, -1)[rank])
        # Of an all-reduce any host may have summed an element.
        exact, half = sum(inputs) / size, torch.finfo(dtype).eps / 2
        error = half * (exact.abs() + sum(x.abs() for x in means.values()) / count)
        assert bool(((got[2] - exact).abs() <= 1.01 * error).all())
        assert all(torch.equal(got[2], other) for _, (*_, other), *_ in found)
        # Of each number each host sends one, of two bytes; shares are rounded to cache lines.
        needed = 2 * inputs[0].numel() * count // size
        assert sent[:2] == [needed] * 2
        assert len(sent) == 3
        assert sent[2] <= needed + 64 * (count + 1)


def _crossed(rank, size):
    """Bytes that this rank sends to each of its counterparts, for a gather of parts of 1 KiB."""
    import torch.distributed as dist

    import symmplan
    from symmplan.memory.meeting.counterparts import Counterparts

    sent = []
    gather = Counterparts.gather
    Counterparts.gather = lambda self, outputs, source: (
        sent.append(source.nbytes) or gather(self, outputs, source)
    )
    part, whole = torch.full((256,), float(rank)), torch.empty(256 * size)
    try:
        with symmplan.eager(choose="placed", timeout=30.0) as session:
            for _ in range(2):
                dist.all_gather_into_tensor(whole, part)
                session.step()
            sent.clear()
            dist.all_gather_into_tensor(whole, part)
            session.step()
    finally:
        Counterparts.gather = gather
    return sum(sent), whole.view(size, -1)[:, 0].tolist() == [*map(float, range(size))]


def test_every_byte_crosses_once_to_each_host(pool):
    for sent, right in pool.run(_crossed):
        assert sent == 1024
        assert right
