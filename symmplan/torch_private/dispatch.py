"""The dispatcher: its keys and modes, and what may go past it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from symmplan.torch_private.ops import FakeTensor
from symmplan.torch_private.table.ops import STORAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def dispatch_key(name: str) -> Any:
    """One of the dispatcher's keys."""
    return getattr(torch._C.DispatchKey, name)


def no_modes() -> Any:
    """A context in which no dispatch mode is active."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def end_library(library: torch.library.Library) -> None:
    """Take the kernels back that a library has registered."""
    library._destroy()


def node_name(graph: Any, op: str) -> str:
    """The name of a node that calls an op, as ``make_fx`` gives it."""
    return str(getattr(graph, "_target_to_str", str)(op))


def wraps_tensors(kind: Any) -> bool:
    """Whether tensors of this class are made of others, on which their ops run."""
    plain = torch.Tensor.__torch_dispatch__
    return kind.__torch_dispatch__ is not plain and not issubclass(kind, FakeTensor)


def redispatch_of(op: Any) -> Callable[..., Any]:
    """``op.redispatch``, without the Python around it."""
    handle: Any = getattr(op, "_handle", None)
    if getattr(op, "_pyobj_dispatcher", None) is None and hasattr(handle, "redispatch_boxed"):
        return handle.redispatch_boxed  # type: ignore[no-any-return]
    return op.redispatch  # type: ignore[no-any-return]


def has_own_bytes(tensor: torch.Tensor) -> bool:
    """Whether only tensors refer to the bytes of a tensor's storage, and no array of NumPy."""
    return bool(tensor.untyped_storage().resizable())


def keyset_after_select() -> Any:
    """The dispatch keys that come after BackendSelect: those of the kernels themselves."""
    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def keyset_below_modes(op: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The dispatch keys of ``op``'s kernel for ``tensors``, behind all modes."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    if tensors:
        keys = functools.reduce(lambda a, b: a | b, map(torch._C._dispatch_keys, tensors))
    keys = keys & keyset_after_select()
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.BackendSelect):
        keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    return keys


#: Copies the tensors of a list into those of another, and casts them; in one kernel where torch has
#: it. Called in each of FSDP2's gathers, so nothing is around it.
copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = torch._foreach_copy_


STORAGES.require()

#: How many references there are to the storage whose ``_cdata`` is given. Called several times in
#: every declared call of an eager session, so nothing is around it.
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
