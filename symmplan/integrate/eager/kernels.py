"""Where a frozen session catches declared ops, and no others.

[Note: nobody else pays]
    The first iteration runs under a dispatch mode, which sees every op. After that there is none:
    declared ops, and only those, get a kernel at the dispatch key BackendSelect. That key is in
    every call's key set, below autograd and above all backends; an op without a kernel for it falls
    through at no cost. The kernel gives the program's calls to the session, and hands on to the
    keys behind it what is none of those: a declared op that runs inside another, work of
    symmplan's own, what another thread calls, calls over other groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from attrs import define, field

from symmplan.capture.c10d import NAMES, reader_of
from symmplan.coordination.own import in_own_work
from symmplan.place.algorithms import overload_named
from symmplan.registry import all_specs
from symmplan.report.log import LOG
from symmplan.runtime.watching import Watching, watched
from symmplan.torch_private import dispatch
from symmplan.torch_private.compilers import run_op_by_op

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from symmplan.integrate.eager.groups import OwnGroups
    from symmplan.integrate.eager.streams import Roles

    #: Given an op, the dispatch keys behind ours, its arguments, and those that say what it does.
    _Serve: TypeAlias = Callable[..., Any]
    _Waited: TypeAlias = Callable[[torch.Tensor], None]

#: Their ops run others of the catalogue below autograd, which the session sees.
_FRONTS = ("_c10d_functional_autograd", "_dtensor")


@define(eq=False)
class Cursor:
    """Where in the schedule the program is.

    Torch keeps kernels for ever, also those that are removed: they hold this, and no session that
    was left.

    Args:
        serve: Runs a declared op of the program: the first of an iteration.
        waited: Called with tensors that were waited for; None if that is not needed.
        roles: The streams.
        is_program: Whether the thread that asks is one of the program.

    Attributes:
        at: Which call comes next.
        first: Runs the first call of an iteration, or of a turn.
    """

    serve: _Serve | None
    waited: _Waited | None
    roles: Roles
    _is_program: Callable[[], bool]
    at: int = field(init=False, default=0)
    first: _Serve | None = field(init=False)

    @first.default
    def _first(self) -> _Serve | None:
        return self.serve

    def begin(self, serve: _Serve | None) -> None:
        """An iteration begins, with a call for ``serve``."""
        self.at, self.serve = 0, serve

    def caught(self) -> _Serve | None:
        """What runs the call that comes now; None if it is none of the program's."""
        return None if in_own_work() or not self._is_program() else self.serve

    def forget(self) -> None:
        """No call is caught any more."""
        self.serve = self.first = self.waited = None


def install(cursor: Cursor, own_groups: OwnGroups, stack: ExitStack) -> None:
    """Kernels for all declared ops, until ``stack`` is closed. See [Note: nobody else pays]."""
    libraries: dict[str, torch.library.Library] = {}
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
        add(op, _kernel(cursor, op, own_groups.elsewhere(op)))
    if cursor.waited is not None:
        op = torch.ops._c10d_functional.wait_tensor.default
        add(op, _wait_kernel(cursor, op))


def follow(stack: ExitStack, op_by_op: bool, races: float) -> None:
    """What sees that a program goes on as it was recorded, until ``stack`` is closed.

    Args:
        stack: The same as of `install`.
        op_by_op: Whether declared calls were made in compiled functions, which ran op by op. They
            go on so: compilers make other calls of these, and other tensors.
        races: Seconds that ranks wait for each other while races are looked for in what no kernel
            of these catches; 0 if none are.
    """
    if op_by_op:
        LOG.warning(
            "functions under torch.compile make calls that the session plans, so all compiled "
            'functions run op by op until it ends: compile them with backend="symmplan" outside '
            "of a session, or make these calls outside of them"
        )
        stack.callback(run_op_by_op())
    if not races:
        return
    names = declared_names()

    def serves(op: Any) -> bool:
        return not in_own_work() and overload_name(op) in names

    stack.enter_context(Watching(races, serves))


def declared_names() -> dict[str, None]:
    """The ops, with overload, that get a kernel."""
    names = [spec.op for spec in all_specs()]
    names += [f"{name}.default" for name in NAMES]
    return {name: None for name in names if name.partition("::")[0] not in _FRONTS}


def overload_name(op: Any) -> str:
    """An op's qualified name, with overload."""
    return f"{op._schema.name}.{op._overloadname}"


def _kernel(cursor: Cursor, op: Any, elsewhere: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    redispatch, after = dispatch.redispatch_of(op), dispatch.keyset_after_select()
    read, run, meta = reader_of(op), watched(op), dispatch.dispatch_key("Meta")

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        serve, behind = cursor.caught(), keys & after
        if serve is None or keys.has(meta):  # a compiler asks for the shape of the result
            return redispatch(behind, *args, **kwargs)
        said = read(args)
        if elsewhere(said, kwargs):
            return run(behind, *args, **kwargs)
        return serve(op, behind, args, kwargs, said)

    return kernel


def _wait_kernel(cursor: Cursor, op: Any) -> Callable[..., Any]:
    redispatch, after = dispatch.redispatch_of(op), dispatch.keyset_after_select()

    def kernel(keys: Any, tensor: torch.Tensor) -> Any:
        result = redispatch(keys & after, tensor)
        waited = cursor.waited
        if waited is not None and cursor.caught() is not None:
            waited(tensor)
        return result

    return kernel
