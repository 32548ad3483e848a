"""What is remembered of ops on fake tensors is what torch gives: random programs, op by op."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from symmplan.torch_private.fake_world import WatchMode

OPS = {
    "add": lambda x: x + 1,
    "multiply in place": lambda x: x.mul_(2) if not x.requires_grad else x * 2,
    "transpose": lambda x: x.t(),
    "first": lambda x: x[:2],
    "last": lambda x: x[2:],
    "row": lambda x: x[1:],
    "view": lambda x: x.reshape(-1).view(-1, 2),
    "copy": lambda x: x.contiguous(),
    "product": lambda x: x.to(torch.float32) @ x.to(torch.float32).t(),
    "two": lambda x: torch.max(x, 0, keepdim=True)[0],
    "halves": lambda x: x.chunk(2)[-1],
    "new": lambda x: torch.zeros(x.shape[0], 2),
    "like": torch.empty_like,
    "int": lambda x: x.to(torch.int64),
    "true": lambda x: torch.full((2, 2), True) & (x[:1, :1] > 0),
    "one": lambda x: torch.full((2, 2), 1) + x[:1, :1],
    "resize": lambda x: x.detach().clone().resize_(2, 4),
    "detach": lambda x: x.detach(),
    "trained": lambda x: x.detach().float().requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x.detach().float()),
}


def run(names):
    """What is known of each tensor of a program."""
    tensors = [torch.ones(4, 4)]
    for name in names:
        tensors.append(OPS[name](tensors[-1]))
    storages = [t.untyped_storage()._cdata for t in tensors]
    return [
        (
            type(t),
            t.shape,
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.device,
            t.requires_grad,
            t.is_leaf,
            t._is_view(),
            t._version,
            t.untyped_storage().nbytes(),
            storages.index(t.untyped_storage()._cdata),
            torch._C._dispatch_keys(t).raw_repr(),
            {name: value for name, value in vars(t).items() if name != "fake_mode"},
        )
        for t in tensors
    ]


PLAIN, REMEMBERED = FakeTensorMode(), FakeTensorMode()
PLAIN.cache_enabled = False
WATCH = WatchMode(
    lambda *_: None, REMEMBERED
)  # one for all programs: none may get another's results


@settings(max_examples=30)
@given(st.lists(st.sampled_from(sorted(OPS)), max_size=6))
@example(["one"])
@example(["true"])
@example(["add"])
@example(["transpose", "add"])
@example(["first", "detach"])
@example(["last", "detach"])
def test_a_remembered_result_is_torchs(names):
    try:
        with PLAIN:
            expected = run(names)
    except (RuntimeError, IndexError):
        reject()  # no program: a row too few
    with REMEMBERED, WATCH:
        for _ in range(3):
            assert run(names) == expected


@pytest.fixture
def watched():
    with FakeTensorMode() as mode, WatchMode(lambda *_: None, mode) as watch:
        yield watch._results


def test_what_torch_remembers_is_not_asked_again(watched, monkeypatch):
    a, b = torch.empty(2, 3), torch.empty(3, 2)
    for _ in range(3):
        a @ b
    monkeypatch.setattr(FakeTensorMode, "_dispatch_impl", None)
    monkeypatch.setattr(FakeTensorMode, "_cached_dispatch_impl", None)
    made = a @ b
    assert type(made) is FakeTensor
    assert made.shape == (2, 2)
    with pytest.raises(TypeError, match="NoneType"):
        a @ b.t().contiguous().t()


def test_other_modes_make_their_own(watched):
    for _ in range(3):
        torch.empty(2)
    with unset_fake_temporarily():
        assert type(torch.empty(2)) is torch.Tensor
    with FakeTensorMode() as other:
        assert torch.empty(2).fake_mode is other
    assert torch.empty(2).fake_mode is watched.mode
    with torch.inference_mode():
        assert torch.empty(2).is_inference()
