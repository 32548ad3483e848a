"""The kernels through which a frozen session sees declared ops, and no others.

[Note: nobody else pays]
    The first iteration runs under a dispatch mode, which sees every op. After that there is none:
    declared ops, and only those, get a kernel at the dispatch key BackendSelect. That key is in
    every call's key set, below autograd and above all backends; an op without a kernel for it falls
    through at no cost. The kernel looks what the schedule expects, and hands calls that are not the
    program's (a declared op that runs inside another, work of symmplan's own) to the keys behind
    it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from symmplan import _compat
from symmplan.capture.c10d import NAMES
from symmplan.integrate.eager.direct import MISS, Caught, install_fronts
from symmplan.memory.own import OWN
from symmplan.place.ways import overload_named
from symmplan.registry import all_specs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from symmplan.integrate.eager.session import Session

__all__ = ["declared_names", "install", "overload_name"]

#: Where `wait_tensor` is, which ends what results that leave the iteration wait for.
_PENDING = "_c10d_functional"

#: Their ops run others of the catalogue below autograd, which the session sees.
_FRONTS = ("_c10d_functional_autograd", "_dtensor")


def install(session: Session, ops: Iterable[Any]) -> Callable[[], None]:
    """Kernels for all declared ops. See [Note: nobody else pays].

    Args:
        session: Frozen.
        ops: What its program calls.

    Returns:
        What removes them.
    """
    libraries: dict[str, torch.library.Library] = {}
    after = _compat.keyset_after_select()
    caught = Caught(session)
    for name in declared_names():
        namespace = name.partition("::")[0]
        try:
            op = overload_named(name)
        except AttributeError:
            continue
        library = libraries.get(namespace)
        if library is None:
            library = libraries[namespace] = torch.library.Library(namespace, "IMPL")
        library.impl(
            op._name.partition("::")[2],
            _kernel(caught, op, after),
            "BackendSelect",
            with_keyset=True,
        )
    if session.leaving:
        library = libraries.setdefault(_PENDING, torch.library.Library(_PENDING, "IMPL"))
        library.impl("wait_tensor", _wait_kernel(caught, after), "BackendSelect", with_keyset=True)
    remove_fronts = install_fronts(caught, ops)

    def remove() -> None:
        remove_fronts()
        for library in libraries.values():
            library._destroy()
        caught.forget()

    return remove


def declared_names() -> dict[str, None]:
    """The ops, with overload, that get a kernel."""
    names = [spec.op for spec in all_specs()]
    names += [f"{name}.default" for name in NAMES]
    return {name: None for name in names if name.partition("::")[0] not in _FRONTS}


def overload_name(op: Any) -> str:
    """An op's qualified name, with overload."""
    return f"{op._schema.name}.{op._overloadname}"


def _wait_kernel(caught: Caught, after: Any) -> Callable[..., Any]:
    redispatch = _compat.redispatch_of(torch.ops._c10d_functional.wait_tensor.default)

    def kernel(keys: Any, tensor: torch.Tensor) -> Any:
        result = redispatch(keys & after, tensor)
        session = caught.session
        if session is None or OWN.depth:
            return result
        event = session.leaving.get(tensor.untyped_storage()._cdata)
        if event is not None:
            session.waited(event, tensor)
        return result

    return kernel


def _kernel(caught: Caught, op: Any, after: Any) -> Callable[..., Any]:
    redispatch = _compat.redispatch_of(op)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        session = caught.session
        if OWN.depth or session is None:
            return redispatch(keys & after, *args, **kwargs)
        line = caught.line
        calls, at = line.calls, line.at
        if at < len(calls):
            ready = calls[at]
            if ready is not None and ready.op is op and not kwargs and caught.fits(ready.role):
                try:
                    result = ready.call(keys, args)
                except BaseException as error:
                    caught.faults.found(error)
                    raise
                if result is not MISS:
                    line.at = at + 1
                    return result
        return session.serve(op, keys & after, args, kwargs)

    return kernel
