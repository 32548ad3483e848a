"""Runs the declared ops of a recorded iteration by themselves, to their end.

[Note: recorded collectives run apart]
    Threads of a process group may hold the tensors of a collective for a moment after its wait. The
    release of a storage would then be seen at varying moments. So while recording, declared ops run
    on clones, to their end, and the program gets clones of their results. If a device has no room
    for a clone, the op gets the tensor itself, and counts as ended when only the program refers to
    the tensor.

[Note: scratch]
    Nothing has a placement yet, but an op that reads its peers' memory by itself needs symmetric
    memory all the same. Its declared arguments are copied into symmetric scratch memory. The ranks
    meet before and after the op, so it is safe even if it neither handshakes nor releases.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from symmplan.registry import bind_arguments, resolve_group_name
from symmplan.torch_private import dispatch, works
from symmplan.torch_private.ops import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.capture.c10d import Functional
    from symmplan.model import OpSpec

#: Seconds that are waited for a process group to let go of a tensor.
_PATIENCE = 1.0


def run_apart(
    func: Any,
    args: Any,
    kwargs: Any,
    spec: OpSpec,
    form: Functional | None,
    scratch: Any,
    default_group: str,
) -> Any:
    """Run a declared op; see [Note: recorded collectives run apart].

    Args:
        func: The overload.
        args: Its positional arguments.
        kwargs: The others.
        spec: What is declared of it.
        form: What it returns, if it is a functional collective.
        scratch: The recording's `symmplan.integrate.eager.scratch.ScratchMemory`.
        default_group: As for `symmplan.capture.capture_fx`.

    Returns:
        Clones of the op's results, after its end.

    Collective: as the op.
    """
    clones: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    shared: list[tuple[torch.Tensor, int]] = []
    placed = scratch.serves(spec)
    if placed:
        bound = bind_arguments(func, args, kwargs)
        heads = dict.fromkeys(r.head for r in spec.requirements)  # in one order on all ranks
        given = {id(x): x for h in heads for x in tree_leaves(bound.get(h)) if is_tensor(x)}
        group = resolve_group_name(spec, func, args, kwargs, default_group)
        copies = scratch.copies(group, spec, list(given.values()))
        clones = {id(x): (x, c) for x, c in zip(given.values(), copies, strict=True)}

    def clone(x: Any) -> Any:
        if not is_tensor(x):
            return x
        if id(x) not in clones:
            copy = _clone(x)
            clones[id(x)] = x, x if copy is None else copy
            if copy is None:
                shared.append((x, dispatch.storage_use_count(storage_key(x))))
        return clones[id(x)][1]

    def finished(x: Any) -> Any:
        if not is_tensor(x):
            return x
        if spec.asynchronous or func.namespace == "_c10d_functional":
            x = torch.ops._c10d_functional.wait_tensor(x)
        original = originals.get(identity(x))
        if original is not None:
            return original
        copy = _clone(x)
        if copy is None:
            shared.append((x, 1))
        return x if copy is None else copy

    cloned = tree_map(clone, args), tree_map(clone, kwargs)
    originals = {identity(copy): x for x, copy in clones.values()}
    result = func(*cloned[0], **cloned[1])
    if form is not None:
        boxed = result if form.returns == "nothing" else result[1]
        work = torch.distributed.Work.unbox(boxed)
        if work is not None:  # NCCL has none for what runs on the current stream
            work.wait()
        form.written.copy_(clones[id(form.written)][1])
        _await_release(shared)
        return form.results(works.finished().boxed())
    result = tree_map(finished, result)
    if placed:
        scratch.over()  # before anything is copied back: peers may write it until then
    named = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for x in tree_leaves(named.get(argument.name)):
                if is_tensor(x):
                    x.copy_(clones[id(x)][1])
    _await_release(shared)
    return result


def _clone(tensor: torch.Tensor) -> torch.Tensor | None:
    """A clone; None where the device has no room for it."""
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:
        return None


def _await_release(shared: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Wait until threads of a process group have let go of tensors: of each its other references.

    See [Note: recorded collectives run apart].
    """
    deadline = time.monotonic() + _PATIENCE
    for tensor, uses in shared:
        while dispatch.storage_use_count(storage_key(tensor)) > uses:
            if time.monotonic() > deadline:
                return
            time.sleep(0.0005)


def is_tensor(x: Any) -> bool:
    """Whether it is a tensor of plain bytes: neither sparse nor quantized."""
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_quantized


def identity(x: torch.Tensor) -> tuple[Any, ...]:
    """Returns its argument unchanged, in place of an op that does."""
    return storage_key(x), *view_of(x)


def storage_key(tensor: torch.Tensor) -> int:
    """By what its storage is told from other live ones."""
    return int(tensor.untyped_storage()._cdata)


def view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which part of its storage it is, and of what type."""
    return (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
