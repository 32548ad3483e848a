"""Which collectives of FSDP2's are its own, by their classes."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from symmplan.torch_private.fsdp2 import is_plain_comm


def _made(name):
    kind = getattr(collectives, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    return object.__new__(kind)


@pytest.mark.parametrize("alloc", ["Default", "ProcessGroupAlloc"])
@pytest.mark.parametrize("what", ["AllGather", "ReduceScatter"])
def test_fsdp2_has_collectives_of_its_own(alloc, what):
    assert is_plain_comm(_made(f"{alloc}{what}"))


@pytest.mark.parametrize("what", ["AllGather", "ReduceScatter"])
def test_those_in_symmetric_memory_are_not_taken_for_them(what):
    assert not is_plain_comm(_made(f"SymmMem{what}"))


def test_a_user_s_class_is_none_of_them_whatever_it_derives_from():
    assert not is_plain_comm(type("DefaultAllGather", (type(_made("DefaultAllGather")),), {})())
    assert not is_plain_comm(object())
