"""Where a frozen session catches declared ops, and no others.

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

from symmplan.capture.c10d import NAMES
from symmplan.integrate.eager.calls import METHODS, MISS
from symmplan.integrate.eager.streams import Roles
from symmplan.memory.own import OWN
from symmplan.place.listening import silence
from symmplan.place.ways import overload_named
from symmplan.registry import all_specs
from symmplan.torch_private import c10d, dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import ExitStack

    from symmplan.capture.threads import ProgramThreads
    from symmplan.integrate.eager.schedule import Event
    from symmplan.integrate.eager.session import Session

__all__ = ["Cursor", "declared_names", "install", "overload_name"]

#: Their ops run others of the catalogue below autograd, which the session sees.
_FRONTS = ("_c10d_functional_autograd", "_dtensor")


class Cursor:
    """Where in the schedule the program is.

    Torch keeps kernels for ever, also those that are removed: they hold this, and no session that
    was left.

    Args:
        session: Whose schedule.
        roles: The streams.
        calls: The schedule; empty where nothing takes the short way.
        threads: Of the program; nobody's calls are caught if None.

    Attributes:
        current: Whether this thread is the program's.
        at: Which call comes next.
        before: How many calls the iterations before this one made.
    """

    def __init__(
        self,
        session: Session | None,
        roles: Roles,
        calls: Sequence[Event] = (),
        threads: ProgramThreads | None = None,
    ) -> None:
        self.session = session
        self.roles = roles
        self.current: Callable[[], bool] = bool if threads is None else threads.current
        self.calls = calls
        self.at = 0
        self.before = 0

    def take(self, op: Any, *given: Any) -> Any:
        """Make the call that comes next, if it is this one and just as planned; else `MISS`.

        Args:
            op: What is called; None for memory.
            given: See `Event.short`.
        """
        calls, at = self.calls, self.at  # another thread may take the calls away
        if at < len(calls) and not OWN.depth and self.current():
            event = calls[at]
            short, call = event.short, event.call
            if short is not None and call.op is op and self.roles.fits(call.stream):
                result = short(*given)
                if result is not MISS:
                    self.at = at + 1
                return result
        return MISS

    def start_again(self) -> None:
        """An iteration is over."""
        self.before, self.at = self.before + self.at, 0

    def forget(self) -> None:
        """No call is caught any more."""
        self.session, self.roles, self.calls = None, Roles(None), ()


def install(session: Session, ops: Iterable[Any], stack: ExitStack) -> None:
    """Kernels for all declared ops, and what comes before them in Python for the program's ``ops``.

    See [Note: nobody else pays], and [Note: past the dispatcher] in
    `symmplan.integrate.eager.calls`. They are removed when ``stack`` is closed.
    """
    libraries: dict[str, torch.library.Library] = {}
    cursor = session._cursor
    silence()
    stack.callback(cursor.forget)

    def add(op: Any, kernel: Callable[..., Any]) -> None:
        if op.namespace not in libraries:
            libraries[op.namespace] = torch.library.Library(op.namespace, "IMPL")
            stack.callback(dispatch.end_library, libraries[op.namespace])
        name = op._name.partition("::")[2]
        libraries[op.namespace].impl(name, kernel, "BackendSelect", with_keyset=True)

    for name in declared_names():
        try:
            op = overload_named(name)
        except AttributeError:
            continue
        add(op, _kernel(cursor, op))
    if session._leaving:
        op = torch.ops._c10d_functional.wait_tensor.default
        add(op, _wait_kernel(cursor, op))
    for op in dict.fromkeys(ops):
        if op.namespace == "_c10d_functional":
            for undo in c10d.replace_op_call(op, _call(cursor, op)):
                stack.callback(undo)
        for name in c10d.group_method_names(METHODS.get(op._schema.name, "")):
            stack.callback(c10d.replace_group_method(name, _method(cursor, op)))


def declared_names() -> dict[str, None]:
    """The ops, with overload, that get a kernel."""
    names = [spec.op for spec in all_specs()]
    names += [f"{name}.default" for name in NAMES]
    return {name: None for name in names if name.partition("::")[0] not in _FRONTS}


def overload_name(op: Any) -> str:
    """An op's qualified name, with overload."""
    return f"{op._schema.name}.{op._overloadname}"


def _kernel(cursor: Cursor, op: Any) -> Callable[..., Any]:
    redispatch, after = dispatch.redispatch_of(op), dispatch.keyset_after_select()
    caught_before = op.namespace == "c10d"  # or it is not as planned

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        session, behind = cursor.session, keys & after
        if OWN.depth or session is None or not cursor.current():
            return redispatch(behind, *args, **kwargs)
        result = MISS if kwargs or caught_before else cursor.take(op, behind, args)
        return session._serve(op, behind, args, kwargs) if result is MISS else result

    return kernel


def _wait_kernel(cursor: Cursor, op: Any) -> Callable[..., Any]:
    redispatch, after = dispatch.redispatch_of(op), dispatch.keyset_after_select()

    def kernel(keys: Any, tensor: torch.Tensor) -> Any:
        result = redispatch(keys & after, tensor)
        session = cursor.session
        if session is not None and not OWN.depth:
            session._waited(tensor)
        return result

    return kernel


def _method(cursor: Cursor, op: Any) -> Callable[[Any], Callable[..., Any]]:
    """What takes the place of the method of a process group by which Python calls ``op``."""

    def make(original: Any) -> Callable[..., Any]:
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = MISS if kwargs else cursor.take(op, group, args)
            return original(group, *args, **kwargs) if work is MISS else work

        return method

    return make


def _call(cursor: Cursor, op: Any) -> Callable[[Any], Callable[..., Any]]:
    """What takes the place of what Python calls when it calls a functional collective."""
    alone = dispatch.nobody_looks()

    def make(original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if args and not kwargs and cursor.session is not None and alone(args[0]):
                result = cursor.take(op, None, args)
                if result is not MISS:
                    return result
            return original(*args, **kwargs)

        return call

    return make
