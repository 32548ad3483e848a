"""The torch library ``symmplan``: the ops of `symmplan.memory` as ``torch.ops.symmplan.*``.

[Note: prepared calls]
    Compiled code calls an op anew in each run, with tensors at the same places of a segment. So the
    first call of some sizes at some places is checked and prepared for good, and those that come
    find it at the rendezvous on which they meet. It has views of its own of the segment, as the
    call's tensors may be leases that end.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from symmplan.memory.ops.kernels import kernel_all_reduce_
from symmplan.memory.ops.one_sided import (
    all_gather_out,
    all_gather_parts_,
    all_reduce_out,
    all_to_all_single_into,
    all_to_all_single_out,
    barrier_,
    broadcast_out,
    reduce_scatter_out,
)
from symmplan.memory.ops.started import all_gather_start, all_reduce_start, reduce_scatter_start
from symmplan.memory.segment import in_segment, locate
from symmplan.torch_private import works

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmplan.memory.ops.one_sided import Run

__all__ = ["IMPLEMENTATIONS"]

_LIBRARY: Any = torch.library.Library("symmplan", "FRAGMENT")
_GATHER = "Tensor input, int group_size, str group_name, *, Tensor(a!) out"
_SCATTER = "Tensor input, str reduce_op, int group_size, str group_name, *, Tensor(a!) out"
_REDUCE = "Tensor input, str reduce_op, str group_name, *, Tensor(a!) out"
_SPLITS = "SymInt[] output_split_sizes, SymInt[] input_split_sizes"
_SCHEMAS: dict[Callable[..., Run], str] = {
    all_gather_out: _GATHER,
    reduce_scatter_out: _SCATTER,
    all_reduce_out: _REDUCE,
    all_to_all_single_out: f"Tensor input, {_SPLITS}, str group_name, *, Tensor(a!) out",
    broadcast_out: "Tensor input, int src, str group_name, *, Tensor(a!) out",
    all_gather_parts_: "Tensor(a!) whole, int[] offsets, int[] nbytes, int group_size, "
    "str group_name",
    barrier_: "Tensor(a!) segment, str group_name",
    all_to_all_single_into: f"Tensor input, {_SPLITS}, str group_name, *, Tensor(a!) out",
    all_gather_start: _GATHER,
    reduce_scatter_start: _SCATTER,
    all_reduce_start: _REDUCE,
    kernel_all_reduce_: "Tensor(a!) input, str reduce_op, str group_name",
}

#: ``{qualified name: function}`` of these ops, for whoever need not ask the dispatcher. Each checks
#: a call and returns what makes it, as often as wanted.
IMPLEMENTATIONS = {f"symmplan::{op.__name__}": op for op in _SCHEMAS}

#: The symmetric tensors of ops whose calls are prepared once. Ranks meet on the segment of the
#: first one.
_PREPARED: dict[Callable[..., Run], tuple[str, ...]] = {
    all_gather_out: ("out",),
    reduce_scatter_out: ("input",),
    all_reduce_out: ("input", "out"),
    broadcast_out: ("out",),
}
#: So many calls are remembered of a segment and a group.
_MOST = 1024


def _fake(*args: object, **kwargs: object) -> None:
    """They change ``out`` in place and return nothing: no shape to compute."""


def _made(implementation: Callable[..., Run]) -> Callable[..., None]:
    """An op's kernel. What is not over then ends in ``wait_tensor`` of ``out``."""
    prepare: Callable[..., Run] = implementation
    if implementation in _PREPARED:
        prepare = functools.partial(_prepared, implementation, _PREPARED[implementation])

    def kernel(*args: Any, **kwargs: Any) -> None:
        work = prepare(*args, **kwargs)()
        if work is not None:
            works.ended_by_wait(kwargs["out"], work)

    return kernel


def _prepared(
    implementation: Callable[..., Run],
    symmetric: tuple[str, ...],
    input: torch.Tensor,  # noqa: A002 (what torch calls it)
    *args: Any,
    out: torch.Tensor,
) -> Run:
    """What makes a call; see [Note: prepared calls]."""
    tensors = {"input": input, "out": out}
    met: list[Any] = []
    places: list[int] = []
    for name in symmetric:
        found = locate(tensors[name])
        if found is None or not tensors[name].is_contiguous() or not tensors[name].numel():
            return implementation(input, *args, out=out)
        met.append(found[0].meeting(args[-1]))
        places += found[1:]
    given = input.shape, input.dtype, input.device, out.shape, out.dtype, out.device
    key = (implementation, args, *places, *met[1:], *given)
    calls, others = met[0].calls, [x for name, x in tensors.items() if name not in symmetric]
    if key in calls:
        return functools.partial(calls[key], *others)
    run = implementation(input, *args, out=out)
    if len(calls) >= _MOST:
        calls.clear()
    # Without memory for its tensors it is not kept: no rank may fail here while its peers go on.
    # What is made here outlives the caller's mode.
    with contextlib.suppress(RuntimeError), torch.inference_mode(mode=False):
        own = {n: in_segment(x) if n in symmetric else _like(x) for n, x in tensors.items()}
        calls[key] = implementation(own["input"], *args, out=own["out"])
    return run


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, of one element's bytes."""
    return tensor.new_empty(()).expand(tensor.shape)


def _register() -> None:
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    for implementation, arguments in _SCHEMAS.items():
        name = implementation.__name__
        _LIBRARY.define(f"{name}({arguments}) -> ()", tags=tags)
        _LIBRARY.impl(name, _made(implementation), "CompositeExplicitAutograd")
        # No formula and no warning about it: whoever differentiates does so above these ops.
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"symmplan::{name}", _fake, lib=_LIBRARY)


_register()
