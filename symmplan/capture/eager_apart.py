"""Run the declared ops of an iteration that is being recorded.

[Note: recorded collectives run apart]
    Threads of a process group may hold the tensors of a collective for a moment after its wait, so
    that the release of a storage would be seen now here, now there. While recording, declared ops
    therefore run on clones, to their end, and the program gets clones of their results.

[Note: scratch]
    Nothing has a placement yet, but an op that reads its peers' memory by itself needs symmetric
    memory all the same. Its declared arguments are copied into scratch that is symmetric; the ranks
    meet before the op and behind it, so that it needs no handshake or release of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from symmplan import _compat as compat
from symmplan.capture.c10d import functional_form
from symmplan.registry import bind_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.model import OpSpec

__all__ = ["Scratch", "run_apart"]


class Scratch(Protocol):
    """Symmetric memory for the ops of a recording. See [Note: scratch]."""

    def serves(self, spec: OpSpec) -> bool:
        """Whether the op needs it."""

    def copies(self, group: str, spec: OpSpec, tensors: Sequence[Any]) -> list[Any]:
        """Symmetric copies of ``tensors``; every rank's are complete. Collective."""

    def over(self) -> None:
        """The op has ended; returns when it has on all ranks. Collective."""


def run_apart(func: Any, args: Any, kwargs: Any, spec: OpSpec, scratch: Scratch | None) -> Any:
    """Run a declared op; see [Note: recorded collectives run apart].

    Args:
        func: The op.
        args: Its arguments.
        kwargs: The same by name.
        spec: What is declared of it.
        scratch: See [Note: scratch].

    Returns:
        What the op returns, after its end; nothing of it is the op's own.

    Collective: as the op.
    """
    form = functional_form(func, args, kwargs) if func.namespace == "c10d" else None
    if func.namespace == "c10d" and form is None:
        return func(*args, **kwargs)
    clones: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    placed = scratch is not None and scratch.serves(spec)
    if placed:
        assert scratch is not None
        bound = bind_arguments(func, args, kwargs)
        heads = {r.where.partition(".")[0] for r in spec.requirements}
        given = {id(x): x for h in heads for x in tree_leaves(bound.get(h)) if _is_tensor(x)}
        copies = scratch.copies(str(bound[spec.group]), spec, list(given.values()))
        clones = {id(x): (x, c) for x, c in zip(given.values(), copies, strict=True)}

    def clone(x: Any) -> Any:
        return clones.setdefault(id(x), (x, x.clone()))[1] if _is_tensor(x) else x

    def finished(x: Any) -> Any:
        if not _is_tensor(x):
            return x
        if spec.asynchronous or func.namespace == "_c10d_functional":
            x = torch.ops._c10d_functional.wait_tensor(x)
        original = originals.get(_view(x))
        return x.clone() if original is None else original

    cloned = tree_map(clone, args), tree_map(clone, kwargs)
    originals = {_view(copy): x for x, copy in clones.values()}
    result = func(*cloned[0], **cloned[1])
    if form is not None:
        work = torch.distributed.Work.unbox(result[1])
        if work is not None:  # NCCL has none for what runs on the current stream
            work.wait()
        form.written.copy_(clones[id(form.written)][1])
        return form.results(compat.finished().boxed())
    result = tree_map(finished, result)
    if placed:
        assert scratch is not None
        scratch.over()  # before anything is copied back: peers may write it until then
    named = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for x in tree_leaves(named.get(argument.name)):
                if _is_tensor(x):
                    x.copy_(clones[id(x)][1])
    return result


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _view(x: torch.Tensor) -> tuple[Any, ...]:
    """What an op that returns its argument gives back unchanged."""
    return x.untyped_storage()._cdata, x.data_ptr(), tuple(x.shape), tuple(x.stride()), x.dtype
