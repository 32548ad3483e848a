"""Autograd: what runs now, what it keeps, and profiles of it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


#: The number of the backward pass that runs in this thread, `NO_TASK` if none does. Asked in each
#: of FSDP2's collectives, so it makes no Python call.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
NO_TASK = -1


def in_backward() -> bool:
    """Whether autograd runs in this thread."""
    return graph_task() != NO_TASK


def keeps_graph() -> bool:
    """Whether the backward pass that runs now keeps what was saved for it."""
    keeps: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps is None or bool(keeps())


def has_saved_tensor_hooks() -> bool:
    """Whether hooks take what is saved for backward now."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks
    return top(True) is not None


def local_part(tensor: Any) -> Any:
    """A DTensor's part on this rank; others are their own."""
    return getattr(tensor, "_local_tensor", tensor)


def same_version(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Writes to ``tensor`` inside do not count as changes for autograd."""
    from torch.autograd import grad_mode

    if tensor.is_inference():  # it has no version
        return contextlib.nullcontext()
    preserve: Any = grad_mode._unsafe_preserve_version_counter
    guard: contextlib.AbstractContextManager[Any] = preserve(tensor)
    return guard


#: Whether a profile is being made, of this thread; called in every one-sided collective.
is_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)


_NOTHING = contextlib.nullcontext()


def shown(name: str) -> contextlib.AbstractContextManager[Any]:
    """A context that has ``name`` in a profile, if one is being made."""
    return torch.profiler.record_function(name) if is_profiled() else _NOTHING
