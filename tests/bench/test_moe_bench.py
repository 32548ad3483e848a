"""`symmplan bench moe`: what its sides keep, and which sizes it leaves out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ranks import pool_of

from symmplan.bench import moe
from symmplan.errors import CommandError

two = pool_of(2, timeout=60)

SETTINGS = {"ranks": 2, "width": 4, "layers": 2, "rounds": 1, "capacity": 1.5, "device": "cpu"}
GiB = 1 << 30


def kept(rank, world, what):
    """How many collectives torch still keeps after a round of the side without symmplan."""
    from torch._C import _distributed_c10d as c10d

    work = moe._Layers(what, 8, rank, SETTINGS)
    work.often = 5
    side = moe._Exchanging(work, moe._Plain())
    side.prepare(0)
    result = side.run()
    return c10d._get_work_registry_size(), result.shape[-1]


@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize("what", moe._SHAPES)
def test_each_result_of_the_other_side_is_waited_for(two, what):
    assert two.run(kept, what) == [(0, 4)] * 2


def test_sizes_that_do_not_fit_the_device_are_left_out(monkeypatch):
    ran = []
    settings = {**SETTINGS, "width": 4096, "tokens": [16384, 65536]}
    monkeypatch.setattr(moe.timing, "least_free", lambda _: 16 * GiB)
    monkeypatch.setattr(moe, "_compare", lambda what, tokens, *_: ran.append((what, tokens)))
    found = moe._measure(0, settings)
    assert ran == [(what, 16384) for what in moe._SHAPES] + [
        ("dispatch", 65536),
        ("combine", 65536),
    ]
    row, other = found["left_out"]
    assert (other["what"], other["tokens"]) == ("shared", 65536)
    assert (row["what"], row["tokens"], row["free"]) == ("layers", 65536, 16 * GiB)
    assert row["needs"] > 16 * GiB
    assert "left out: layers of 65536 tokens, " in moe._too_large(row)


def test_sizes_of_which_none_fits_are_an_error(monkeypatch):
    row = {"what": "dispatch", "tokens": 1 << 20, "needs": 200 * GiB, "free": 79 * GiB}
    ranks = [{"rows": [], "left_out": [row]}]
    monkeypatch.setattr(moe.command, "settings_of", lambda *_: {})
    monkeypatch.setattr(moe.command, "measured", lambda *_: ({"tokens": [1 << 20]}, ranks))
    with pytest.raises(CommandError, match="left out: dispatch of 1048576 tokens"):
        moe.run(SimpleNamespace(ranks=2))


def test_the_cpu_says_nothing_of_free_bytes():
    assert moe.timing.least_free(torch.device("cpu")) is None
