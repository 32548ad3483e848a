"""Collectives of a process group without the dispatcher, and where Python's calls are caught.

See [Note: past the dispatcher] in `symmplan.integrate.eager.calls`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan import _compat as compat
from symmplan.memory.own import OWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from symmplan.integrate.eager.session import Session

__all__ = ["METHODS", "MISS", "Caught", "install_fronts", "starter"]

#: What a short way returns if the call is not the expected one.
MISS: Any = object()

#: The op -> the method of a process group by which Python calls it, and of its backend.
METHODS = {
    "c10d::allreduce_": "allreduce",
    "c10d::broadcast_": "broadcast",
    "c10d::_allgather_base_": "_allgather_base",
    "c10d::_reduce_scatter_base_": "_reduce_scatter_base",
}


def starter(
    target: str, group: object, device: torch.device, *, reduction: object, root: object
) -> Callable[[torch.Tensor, torch.Tensor], Any] | None:
    """What a functional collective starts, past the dispatcher.

    Args:
        target: Its qualified name, with overload.
        group: Name of the process group.
        device: Where the tensors lie.
        reduction: Name of the reduction, where there is one.
        root: Rank of the root, where there is one.

    Returns:
        A function of the tensor that is written and the one that is read; it returns the work. None
        if there is no such way here.
    """
    name = target.partition("::")[2].removesuffix(".default")
    asked = compat.collective_options(name, reduction=reduction, root=root)
    backend = compat.group_backend(group, device) if isinstance(group, str) else None
    if asked is None or backend is None:
        return None
    method, options = asked
    run = getattr(backend, method)
    if method in ("allreduce", "broadcast"):
        return lambda out, _: run([out], options)
    return lambda out, source: run(out, source, options)


class Caught:
    """What functions that catch calls know of a session, until it is left.

    Torch keeps kernels for ever, also those that are removed: they hold this, and no session.
    """

    __slots__ = ("faults", "fits", "line", "session")

    def __init__(self, session: Session) -> None:
        self.session: Session | None = session
        self.faults, self.line = session.faults, session.line
        self.fits = session.line.lanes.fits

    def forget(self) -> None:
        """No call is caught any more."""
        self.session = None
        self.line.calls = ()
        del self.faults, self.line, self.fits


def install_fronts(caught: Caught, ops: Iterable[Any]) -> Callable[[], None]:
    """Catch calls of process groups' methods and of ops. See [Note: past the dispatcher].

    Args:
        caught: The session.
        ops: What the program calls.

    Returns:
        What undoes it.
    """
    undo = []
    for op in dict.fromkeys(ops):
        if op is None:
            continue
        names = compat.group_method_names(METHODS.get(op._schema.name, ""))
        undo += [compat.replace_group_method(n, _method(caught, op)) for n in names]
        if op.namespace == "_c10d_functional":
            undo += compat.replace_op_call(op, _call(caught, op))

    def remove() -> None:
        for act in undo:
            act()

    return remove


def _method(caught: Caught, op: Any) -> Callable[[Any], Callable[..., Any]]:
    def make(original: Any) -> Callable[..., Any]:
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            if caught.session is None:
                return original(group, *args, **kwargs)
            line = caught.line
            calls, at = line.calls, line.at
            if at < len(calls) and not OWN.depth:
                ready = calls[at]
                if (
                    ready is not None
                    and ready.front is not None
                    and ready.op is op
                    and not kwargs
                    and caught.fits(ready.role)
                ):
                    try:
                        work = ready.front(group, args)
                    except BaseException as error:
                        caught.faults.found(error)
                        raise
                    if work is not MISS:
                        line.at = at + 1
                        return work
            return original(group, *args, **kwargs)

        return method

    return make


def _call(caught: Caught, op: Any) -> Callable[[Any], Callable[..., Any]]:
    alone = compat.nobody_looks()

    def make(original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if caught.session is None:
                return original(*args, **kwargs)
            line = caught.line
            calls, at = line.calls, line.at
            if at < len(calls) and args and not kwargs and not OWN.depth:
                ready = calls[at]
                if (
                    ready is not None
                    and ready.front is not None
                    and ready.op is op
                    and caught.fits(ready.role)
                    and alone(args[0])
                ):
                    try:
                        result = ready.front(args)
                    except BaseException as error:
                        caught.faults.found(error)
                        raise
                    if result is not MISS:
                        line.at = at + 1
                        return result
            return original(*args, **kwargs)

        return call

    return make
