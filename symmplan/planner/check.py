"""Whether a `Problem` makes sense. Runs on every construction, so it stays linear."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from symmplan.errors import ProblemError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from symmplan.model import Buffer, Problem
    from symmplan.planner.order import Order

__all__ = ["check_problem"]

#: Sizes and offsets stay far below what a signed 64-bit integer holds, sums included.
MAX_BYTES = 1 << 48
#: All buffers side by side; beyond this sums of offsets could overflow.
MAX_TOTAL = 1 << 50
MAX_ALIGN = 1 << 30
#: More than this is no program but a mistake; planning would not end in reasonable time.
MAX_ENTRIES = 4_000_000


def check_problem(problem: Problem) -> None:
    """Raise what `Problem` says if the problem contradicts itself."""
    for kind in ("buffers", "operations", "accesses", "edges", "together", "apart"):
        count = len(getattr(problem, kind))
        if count > MAX_ENTRIES:
            raise ProblemError(
                f"{count} {kind} are more than a plan can hold",
                expected=f"at most {MAX_ENTRIES}",
                got=count,
                fix="plan the parts of the program separately",
            )
    buffers = _unique("buffer", problem.buffers)
    operations = _unique("operation", problem.operations)
    for b in problem.buffers:
        _check_buffer(b)
    total = sum(b.nbytes for b in problem.buffers)
    if total > MAX_TOTAL:
        raise ProblemError(
            f"all buffers have {total} bytes in total",
            expected=f"at most {MAX_TOTAL}",
            got=total,
            fix="check the sizes; they are bytes",
        )
    _check_accesses(problem, buffers, operations)
    for kind in ("together", "apart"):
        for pair in getattr(problem, kind):
            _check_pair(kind, pair, buffers)
    _check_together(problem, buffers)
    for groups in problem.shared_groups:
        _check_shared(groups)
    _check_order(problem, operations)


def _unique(kind: str, entries: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for k, e in enumerate(entries):
        name = e.name
        if type(name) is not str or not name:
            raise ProblemError(
                f"{kind} {k} has the name {name!r}",
                expected="a non-empty string",
                got=repr(name),
                fix=f"give every {kind} a unique name",
            )
        if name in found:
            raise ProblemError(
                f"{kind} {name!r} is listed twice",
                expected="unique names",
                got=f"{name!r} again",
                fix=f"rename one of the {kind}s or merge them",
                name=name,
            )
        found[name] = e
    return found


def _unknown(kind: str, name: str, what: str, drop: str, **fields: Any) -> NoReturn:
    raise ProblemError(
        what,
        expected=f"{'an' if kind == 'operation' else 'a'} {kind} of the problem",
        got=repr(name),
        fix=f"list the {kind} or drop {drop}",
        **fields,
    )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_buffer(b: Buffer) -> None:
    got: object
    if not _whole(b.nbytes) or not 0 < b.nbytes <= MAX_BYTES:
        got, what = b.nbytes, f"has a size of {b.nbytes!r} bytes"
        expected = f"a whole number from 1 to {MAX_BYTES}"
        fix = "leave empty tensors out of the problem; give sizes in bytes as int"
        if _whole(b.nbytes) and b.nbytes > MAX_BYTES:
            what, fix = f"is too large: {b.nbytes} bytes", "check the unit: sizes are in bytes"
    elif not _whole(b.align) or b.align < 1 or b.align & (b.align - 1) or b.align > MAX_ALIGN:
        got, what = b.align, f"asks for an alignment of {b.align!r} bytes"
        expected = f"a power of two, at most {MAX_ALIGN}"
        fix = "use 1, 2, 4, ..., 256, ..."
    elif not isinstance(b.group, str) or not b.group:
        got, what = b.group, f"names the group {b.group!r}"
        expected = "a non-empty string"
        fix = "name the process group over which the buffer is symmetric"
    elif b.offset is not None and not (
        _whole(b.offset) and 0 <= b.offset <= MAX_BYTES and b.offset % b.align == 0
    ):
        got, what = b.offset, f"is pinned at byte {b.offset!r}, its alignment is {b.align}"
        expected = f"a multiple of {b.align}, zero or more"
        fix = "move the pin to an aligned offset or lower the alignment"
    else:
        return
    raise ProblemError(
        f"buffer {b.name!r} {what}", expected=expected, got=repr(got), fix=fix, buffer=b.name
    )


def _check_accesses(problem: Problem, buffers: dict[str, Any], operations: dict[str, Any]) -> None:
    used: set[str] = set()
    for a in problem.accesses:
        if a.buffer not in buffers or a.operation not in operations:
            kind = "operation" if a.buffer in buffers else "buffer"
            what = f"an access of buffer {a.buffer!r} by operation {a.operation!r} names an unknown"
            both = {"buffer": a.buffer, "operation": a.operation}
            _unknown(kind, both[kind], f"{what} {kind}", "the access", **both)
        used.add(a.buffer)
    if len(used) < len(buffers):
        name = min(n for n in buffers if n not in used)
        raise ProblemError(
            f"buffer {name!r} is never accessed",
            expected="at least one access, from which its live range follows",
            got="none",
            fix="add its accesses or leave the buffer out",
            buffer=name,
        )


def _check_pair(kind: str, pair: tuple[str, str], buffers: dict[str, Any]) -> None:
    if len(pair) != 2 or pair[0] == pair[1]:
        raise ProblemError(
            f"{kind} holds {pair!r}",
            expected="two different buffer names",
            got=repr(pair),
            fix=f"drop the entry from {kind}",
        )
    for name in pair:
        if name not in buffers:
            what = f"{kind} names the unknown buffer {name!r}"
            _unknown("buffer", name, what, f"the pair from {kind}", buffer=name)


def _check_together(problem: Problem, buffers: dict[str, Any]) -> None:
    for a, b in problem.together:
        first, second = buffers[a], buffers[b]
        if first.group != second.group:
            raise ProblemError(
                f"buffers {a!r} and {b!r} must share bytes, but are symmetric over different "
                "groups",
                expected=f"group {first.group!r} for both",
                got=repr(second.group),
                fix="drop the pair from together or give both one group",
                buffers=(a, b),
            )


def _check_shared(groups: Any) -> None:
    if (
        isinstance(groups, str)
        or len(set(groups)) != len(groups)
        or not all(isinstance(g, str) and g for g in groups)
    ):
        raise ProblemError(
            f"shared_groups holds {groups!r}",
            expected="a tuple of different group names",
            got=repr(groups),
            fix="list each group of the set once",
        )


def _check_order(problem: Problem, operations: dict[str, Any]) -> None:
    for edge in problem.edges:
        if len(edge) != 2 or edge[0] == edge[1]:
            raise ProblemError(
                f"the edge {edge!r} does not order two operations",
                expected="(earlier, later), two different names",
                got=repr(edge),
                fix="drop the edge",
            )
        for name in edge:
            if name not in operations:
                what = f"the edge {edge!r} names the unknown operation {name!r}"
                _unknown("operation", name, what, "the edge", operation=name)
    from symmplan.planner.order import order_of

    _check_ends(problem, operations, order_of(problem))


def _check_ends(problem: Problem, operations: dict[str, Any], order: Order) -> None:
    ended: dict[str, str] = {}
    for operation in problem.operations:
        if operation.ends and (operation.synchronizes or operation.handshake or operation.release):
            raise ProblemError(
                f"operation {operation.name!r} ends a call, and states facts of a call",
                expected="facts at the operation that begins the call",
                got=f"synchronizes={operation.synchronizes}, handshake={operation.handshake}, "
                f"release={operation.release}",
                fix=f"state them of {operation.ends[0]!r}",
                operation=operation.name,
            )
        for name in operation.ends:
            where = f"operation {operation.name!r} ends the call of {name!r}"
            if name not in operations:
                what = f"{where}, which is unknown"
                _unknown("operation", name, what, "it from ends", operation=operation.name)
            if operations[name].ends:
                raise ProblemError(
                    f"{where}, which is itself the end of {operations[name].ends[0]!r}",
                    expected="a call that begins there",
                    got="the end of one",
                    fix="add a separate operation that begins the call",
                    operation=operation.name,
                )
            if name in ended:
                raise ProblemError(
                    f"{where}, which ends at {ended[name]!r} already",
                    expected="one end of each call",
                    got=f"{ended[name]!r} and {operation.name!r}",
                    fix="let only the last of them end it",
                    operation=operation.name,
                )
            if not order.precedes(order.index[name], order.index[operation.name]):
                raise ProblemError(
                    f"{where}, which does not happen before it",
                    expected=f"{name!r} before {operation.name!r}",
                    got="no such order",
                    fix="add an edge, or put both on one stream in this order",
                    operation=operation.name,
                )
            ended[name] = operation.name
    if not ended:
        return
    listed = {(a.operation, a.buffer) for a in problem.accesses}
    for name, buffer in sorted(listed):
        if name in ended and (ended[name], buffer) not in listed:
            raise ProblemError(
                f"the call of {name!r} touches buffer {buffer!r} until it ends at "
                f"{ended[name]!r}, which does not list it",
                expected="an access by both operations",
                got=f"none by {ended[name]!r}",
                fix="list the buffer at the end of the call, too",
                operation=ended[name],
                buffer=buffer,
            )
