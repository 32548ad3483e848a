"""Storages whose address is taken away, and given back."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from symmplan.torch_private import storages
from symmplan.torch_private.storages import Addresses

READS = {
    "sum": lambda t, m: t.sum(),
    "product": lambda t, m: m @ m.t(),
    "address": lambda t, m: t.data_ptr(),
    "item": lambda t, m: t[3].item(),
    "copy": lambda t, m: torch.empty_like(t).copy_(t),
    "clone of a view": lambda t, m: m.t().clone(),
    "write": lambda t, m: t.detach().zero_(),
    "in place": lambda t, m: m.mul_(2),
    "each": lambda t, m: torch._foreach_add([t], 1),
    "numpy": lambda t, m: t.numpy(),
    "print": lambda t, m: repr(t),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_without_an_address_each_access_is_an_error(read):
    tensor = torch.arange(12.0)
    matrix, home = tensor.view(3, 4), tensor.data_ptr()
    address = Addresses([tensor], [0], "it was resharded")
    read(tensor.clone(), matrix.clone())
    address.take()
    with pytest.raises(RuntimeError, match=r"that is invalid|it was resharded"):
        read(tensor, matrix)
    address.give(home)
    assert torch.equal(matrix, torch.arange(12.0).view(3, 4))


def test_what_autograd_has_saved_goes_with_the_storage():
    weight, other = torch.full((3, 4), 2.0), torch.full((3, 4), 5.0)
    home = weight.data_ptr()
    address = Addresses([weight], [0], "")
    x = torch.ones(2, 4, requires_grad=True)
    y = (x @ weight.detach().requires_grad_().t()).sum()
    address.take()
    with pytest.raises(RuntimeError):
        y.backward(retain_graph=True)
    address.give(other.data_ptr())
    y.backward(retain_graph=True)
    assert torch.equal(x.grad, torch.full((2, 4), 15.0))
    address.give(home)
    x.grad = None
    y.backward()
    assert torch.equal(x.grad, torch.full((2, 4), 6.0))


def test_each_storage_has_its_place_in_the_bytes():
    bytes_, first, second = torch.arange(6.0), torch.zeros(2), torch.zeros(3)
    homes = first.data_ptr(), second.data_ptr()
    addresses = Addresses([first, second], [16, 4], "")
    addresses.give(bytes_.data_ptr())
    assert (first.tolist(), second.tolist()) == ([4.0, 5.0], [1.0, 2.0, 3.0])
    addresses.take()
    for tensor in (first, second):
        with pytest.raises(RuntimeError):
            tensor.sum()
    for tensor, home in zip((first, second), homes, strict=True):
        Addresses([tensor], [0], "").give(home)
    assert (first.tolist(), second.tolist()) == ([0.0] * 2, [0.0] * 3)


def test_shapes_and_views_need_no_address():
    tensor = torch.arange(12.0)
    home, address = tensor.data_ptr(), Addresses([tensor], [0], "")
    address.take()
    assert tensor.view(3, 4).t().shape == (4, 3)
    assert tensor.untyped_storage().nbytes() == 48
    assert tensor.detach()._version == tensor._version
    address.give(home)


def test_they_are_found_among_fake_tensors_too():
    storages._found.cache_clear()
    with FakeTensorMode():
        assert storages.can_be_taken()


def test_a_torch_whose_object_is_another_one_has_no_such_addresses(monkeypatch):
    assert storages.can_be_taken()
    for mark in (lambda _: None, lambda t: t.resize_(99)):
        monkeypatch.setattr(torch._C, "_set_throw_on_mutable_data_ptr", mark)
        storages._found.cache_clear()
        assert not storages.can_be_taken()
    monkeypatch.undo()
    storages._found.cache_clear()
    assert storages.can_be_taken()
