"""Notes collectives of other groups while a step of FSDP2 is recorded.

[Note: listening]
    FSDP2 reports its own collectives only. Other collectives, such as the sums of tensor
    parallelism, are noted while its first step is recorded, and only then. All collectives of
    process groups reach ops of ``c10d::``. Meanwhile these have a kernel at the key BackendSelect
    that notes the call and passes it on. A frozen eager session also has kernels there (see [Note:
    nobody else pays] in `symmplan.integrate.eager.kernels`), and the two exclude each other:
    nothing is noted while there is a session, and a session that begins ends the listening. What
    was noted until then counts.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from symmplan.capture.c10d import NAMES, functional_form
from symmplan.coordination.own import in_own_work
from symmplan.process import PROCESS
from symmplan.registry import bind_arguments
from symmplan.runtime.algorithms import overload_named
from symmplan.runtime.op_cases import ordinary
from symmplan.torch_private import c10d, dispatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmplan.capture.fsdp_recording import Recording

_ALL_TO_ALL = "c10d::alltoall_base_"


def listen(listener: Recording | None, device: torch.device) -> None:
    """Report the collectives of all process groups to ``listener``, except symmplan's own.

    Args:
        listener: What hears; nothing if None.
        device: On tensors of which kind of device.
    """
    if listener is None:
        return
    if PROCESS.listening is None:
        PROCESS.listening = torch.library.Library("c10d", "IMPL")
        try:
            for name in NAMES:
                op = overload_named(f"{name}.default")
                PROCESS.listening.impl(
                    name.partition("::")[2],
                    _kernel(op),
                    "BackendSelect",
                    with_keyset=True,
                    allow_override=False,
                )
        except RuntimeError:  # a session has kernels there
            silence()
            return
    PROCESS.listeners[listener] = device.type
    weakref.finalize(listener, _end).atexit = False


def leave(listener: Recording | None) -> None:
    """``listener`` has heard enough. It need not have listened."""
    if listener is not None:
        PROCESS.listeners.pop(listener, None)
    _end()


def silence() -> None:
    """Stop listening."""
    PROCESS.listeners.clear()
    _end()


def _end() -> None:
    if not PROCESS.listeners and PROCESS.listening is not None:
        dispatch.end_library(PROCESS.listening)
        PROCESS.listening = None


def _kernel(op: Any) -> Callable[..., Any]:
    redispatch, after = dispatch.redispatch_of(op), dispatch.keyset_after_select()

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if PROCESS.listeners and not in_own_work():
            _tell(op, args, kwargs)
        return redispatch(keys & after, *args, **kwargs)

    return kernel


def _tell(op: Any, args: Any, kwargs: Any) -> None:
    functional = functional_form(op, args)
    if op._schema.name == _ALL_TO_ALL:  # as if all parts were equal
        target = torch.ops._c10d_functional.all_to_all_single.default
        given = bind_arguments(op, args, kwargs)
        of, source, bound = c10d.unboxed_group(given["process_group"]), given["input"], {}
        numel, group = source.numel() // of.size() * of.size(), c10d.group_name(of)
    elif functional is not None:
        target = functional.op
        bound = bind_arguments(target, functional.args, functional.kwargs)
        source = bound["input"]
        numel, group = source.numel(), bound["group_name"]
    else:
        return
    ranks = c10d.group_by_name(group).size()
    case = ordinary(target, group, ranks, source.dtype, numel, bound)
    for listener, device in tuple(PROCESS.listeners.items()):
        if device == source.device.type:
            listener.hear(case)
