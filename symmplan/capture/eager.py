"""One iteration of an eager program -> the `Problem` that its FX graph would give.

The iteration is written down as an FX graph while it runs: a node for each op, a placeholder for
each tensor that came from elsewhere, an output for each storage that outlives the iteration. The
graph then goes the way of all graphs through `capture_fx`.

[Note: held tensors]
    A graph knows the last *use* of a tensor; a running program may hold one longer, and could use
    it at any time. So the moment at which a storage is released is recorded, and where other
    operations lie between last use and release the buffer gets one more access, ``<buffer>:drop``.
    A program that computes nothing in vain and drops each tensor after its last use has none, and
    gives exactly the problem of FX.

[Note: recorded collectives run apart]
    Threads of a process group may hold the tensors of a collective for a moment after its wait, so
    that the release of a storage would be seen now here, now there. While recording, declared ops
    therefore run on clones, to their end, and the program gets clones of their results.
"""

from __future__ import annotations

import operator
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from symmplan import _compat as compat
from symmplan.capture.c10d import functional_form
from symmplan.capture.fx import capture_fx
from symmplan.model import Access, Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmplan.capture.producers import Write
    from symmplan.capture.sites import Captured
    from symmplan.model import OpSpec, Requirement

__all__ = ["Recorded", "Recorder", "opaque", "signature"]


def opaque(*_args: Any) -> None:
    """Stands for a collective that has no functional form: it may write all that it is given."""


@define(eq=False)
class _Storage:
    """A storage that the program uses.

    Attributes:
        meta: Its stand-in on the meta device.
        nodes: ``{(offset, size, stride, dtype): the last node with that view}``.
        origin: The first node.
        made: Whether an op of the iteration made it.
        dropped: The last node before its release; None while it lives.
    """

    meta: Any
    origin: fx.Node
    made: bool
    nodes: dict[Any, fx.Node] = field(factory=dict)
    dropped: fx.Node | None = None


@define(eq=False)
class Recorded:
    """What a program asked the session for: a declared op, or memory.

    Attributes:
        node: Its node.
        op: The op as the program called it, None for memory.
        form: The op that stands for it in the graph.
        kind: ``"op"``, ``"empty"`` or ``"out"``.
        args: Positional arguments, tensors as ``(shape, dtype)``.
        kwargs: The same by name.
        line: Where in the user's program, ``"file:line"``.
    """

    node: fx.Node
    op: Any
    form: Any
    kind: str
    args: Any = ()
    kwargs: Any = field(factory=dict)
    line: str = ""


class Recorder(TorchDispatchMode):
    """Writes down what runs while it is active.

    Args:
        lookup: Gives what is declared of an op, or None.
        before: Called with each declared op and its arguments, before it runs.
        aside: Whether what runs now is not the program's, and is to be left alone.

    Attributes:
        graph: The graph so far.
        calls: The program's calls of declared ops and of `symmplan.empty`, in order.
        lines: ``{node: where in the user's program it was called}``.
    """

    def __init__(
        self,
        lookup: Callable[[Any], OpSpec | None],
        before: Callable[[Any, Any, Any], None],
        aside: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.calls: list[Recorded] = []
        self.lines: dict[fx.Node, str] = {}
        self._lookup = lookup
        self._before = before
        self._aside = aside
        self._storages: dict[int, _Storage] = {}
        self._made: dict[tuple[fx.Node, tuple[int, ...]], _Storage] = {}
        self._watches: dict[int, Any] = {}
        self._marks: dict[fx.Node, Write] = {}
        self._last: fx.Node | None = None
        self._names = 0
        self._closed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._closed or self._aside():
            return func(*args, **kwargs)
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a wrapper: let it run the ops that it is made of
        spec = self._lookup(func)
        if spec is not None:
            self._before(func, args, kwargs)
        given = self._arguments((args, kwargs))
        result = func(*args, **kwargs) if spec is None else _run_apart(func, args, kwargs)
        self._write_down(func, spec, given, args, kwargs, result)
        return result

    def _write_down(
        self, func: Any, spec: OpSpec | None, given: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        if func.namespace == "c10d":
            self._c10d(func, spec, args, kwargs)
            return
        node = self._node(func, given, result)
        if spec is not None:
            self._call(node, func, func, args, kwargs)

    def _c10d(self, func: Any, spec: OpSpec | None, args: Any, kwargs: Any) -> None:
        form = functional_form(func, args, kwargs)
        if form is None:
            given = self._arguments((args, kwargs))
            flat = [n for n in tree_leaves(given) if isinstance(n, fx.Node)]
            node = self._node(opaque, (tuple(flat), {}), None)
            if spec is not None:
                self._call(node, func, opaque, args, kwargs)
            return
        given = self._arguments((form.args, form.kwargs))
        node = self._node(form.op, given, form.written)
        self._call(node, func, form.op, form.args, form.kwargs)
        if not form.asynchronous:
            wait = torch.ops._c10d_functional.wait_tensor.default
            self._node(wait, ((node,), {}), form.written)

    def _call(self, node: fx.Node, op: Any, form: Any, args: Any, kwargs: Any) -> None:
        args, kwargs = signature(args), signature(kwargs)
        self.calls.append(Recorded(node, op, form, "op", args, kwargs, self.lines.get(node, "")))

    def memory(self, tensor: torch.Tensor, kind: str, write: Write, args: Any, kwargs: Any) -> None:
        """``tensor`` was just made by `symmplan.empty` or `symmplan.out`, called with ``args``."""
        storage = self._storages.get(_key(tensor))
        if storage is None or not storage.made:
            return
        self._marks[storage.origin] = write
        args, kwargs = signature(args), signature(kwargs)
        self.calls.append(Recorded(storage.origin, None, None, kind, args, kwargs, _line()))

    # Tensors.

    def _arguments(self, given: Any) -> Any:
        return tree_map(lambda x: self._of(x) if isinstance(x, torch.Tensor) else x, given)

    def _of(self, tensor: torch.Tensor) -> fx.Node:
        """The node that stands for a tensor."""
        storage = self._storages.get(_key(tensor))
        if storage is None:
            first = next(iter(self.graph.nodes), None)
            name = f"input_{self._names}"
            self._names += 1
            if first is None:
                node = self.graph.placeholder(name)
            else:
                with self.graph.inserting_before(first):
                    node = self.graph.placeholder(name)
            node.meta["val"] = self._enter(tensor, node, made=False)
            return node
        view = _view(tensor)
        found = storage.nodes.get(view)
        if found is not None:
            return found
        target = torch.ops.aten.as_strided.default  # a view that no op made
        args = (storage.origin, list(view[1]), list(view[2]), view[0])
        node = self.graph.call_function(target, args)
        node.meta["val"] = self._enter(tensor, node, made=False)
        return node

    def _enter(
        self, tensor: torch.Tensor, node: fx.Node, *, made: bool, path: tuple[int, ...] = ()
    ) -> Any:
        """Remember that ``node`` gives ``tensor``; returns its stand-in."""
        key = _key(tensor)
        storage = self._storages.get(key)
        if storage is None:
            real = tensor.untyped_storage()
            meta = torch.empty(real.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            storage = self._storages[key] = _Storage(meta, node, made)
            self._watches[key] = weakref.ref(real, lambda _: self._released(key, storage))
        if made:
            self._made[(node, path)] = storage
        view = _view(tensor)
        storage.nodes[view] = node
        stand_in = torch.empty(0, dtype=tensor.dtype, device="meta")
        return stand_in.set_(storage.meta, *view[:3])

    def _released(self, key: int, storage: _Storage) -> None:
        storage.dropped = self._last or storage.origin
        if self._storages.get(key) is storage:
            del self._storages[key], self._watches[key]

    def _node(self, target: Any, given: tuple[Any, Any], result: Any) -> fx.Node:
        packet = getattr(target, "overloadpacket", target)
        name = self.graph._target_to_str(packet.__name__)  # as make_fx names it
        node = self.graph.create_node("call_function", target, *given, name)
        self._last = node
        self.lines[node] = _line()
        node.meta["val"] = self._results(node, result, ())
        return node

    def _results(self, node: fx.Node, result: Any, path: tuple[int, ...]) -> Any:
        if isinstance(result, torch.Tensor):
            if not path:
                return self._enter(result, node, made=True)
            stand_in = self._enter(result, node, made=True, path=path)
            item = node
            for index in path:
                item = self.graph.call_function(operator.getitem, (item, index))
            item.meta["val"] = stand_in
            self._enter(result, item, made=False)
            self._last = item
            return stand_in
        if isinstance(result, (list, tuple)):
            return [self._results(node, r, (*path, i)) for i, r in enumerate(result)]
        return result

    # The end.

    def capture(
        self,
        *,
        lookup: Callable[[Any], OpSpec | None],
        producer: Callable[[fx.Node, Callable[[fx.Node], Write | None]], Write | None],
        skip: Callable[[OpSpec, Requirement], str | None],
    ) -> Captured:
        """End the recording and capture it. See `capture_fx` for the arguments."""
        self._closed = True
        # The last view, not the origin: that may return several storages.
        living = [list(s.nodes.values())[-1] for s in self._storages.values() if s.made]
        self._watches.clear()
        output = self.graph.output(tuple(living))
        output.meta["val"] = None
        captured = capture_fx(
            self.graph,
            lookup=lookup,
            producer=lambda node: producer(node, self._marks.get),
            skip=skip,
        )
        return self._with_drops(captured)

    def _with_drops(self, captured: Captured) -> Captured:
        """See [Note: held tensors]."""
        problem = captured.problem
        order = {node.name: i for i, node in enumerate(self.graph.nodes)}
        at = [order[o.name.partition(".")[0].partition(":")[0]] for o in problem.operations]
        position = {o.name: i for i, o in enumerate(problem.operations)}
        last: dict[str, int] = {}
        for access in problem.accesses:
            last[access.buffer] = max(last.get(access.buffer, -1), position[access.operation])
        due: dict[int, list[str]] = {}
        for home in captured.homes:
            storage = self._made.get((home.node, home.path))
            if storage is None or storage.dropped is None:
                continue
            end = sum(i <= order[storage.dropped.name] for i in at)
            if end and at[end - 1] > at[last[home.buffer]]:
                due.setdefault(end, []).append(home.buffer)
        if not due:
            return captured
        operations: list[Operation] = []
        accesses = list(problem.accesses)
        for i, operation in enumerate([*problem.operations, None]):
            for buffer in sorted(due.get(i, ())):
                operations.append(Operation(f"{buffer}:drop"))
                accesses.append(Access(f"{buffer}:drop", buffer))
            if operation is not None:
                operations.append(operation)
        return evolve(captured, problem=evolve(problem, operations=operations, accesses=accesses))


def _run_apart(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a declared op; see [Note: recorded collectives run apart]."""
    form = functional_form(func, args, kwargs) if func.namespace == "c10d" else None
    if func.namespace == "c10d" and form is None:
        return func(*args, **kwargs)
    clones: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clone(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return clones.setdefault(id(x), (x, x.clone()))[1]

    def finished(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if func.namespace == "_c10d_functional":
            x = torch.ops._c10d_functional.wait_tensor(x)
        return originals.get(_key(x)) if _key(x) in originals else x.clone()

    cloned = tree_map(clone, args), tree_map(clone, kwargs)
    originals = {_key(copy): x for x, copy in clones.values()}
    result = func(*cloned[0], **cloned[1])
    if form is not None:
        work = torch.distributed.Work.unbox(result[1])
        if work is not None:  # NCCL has none for what runs on the current stream
            work.wait()
        form.written.copy_(clones[id(form.written)][1])
        return form.results(compat.finished_work())
    result = tree_map(finished, result)
    named = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for x in tree_leaves(named.get(argument.name)):
                if isinstance(x, torch.Tensor):
                    x.copy_(clones[id(x)][1])
    return result


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def signature(value: Any) -> Any:
    """What must be equal when the same call comes again: of a tensor its shape and type."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(signature, value))
    if isinstance(value, dict):
        return {k: signature(v) for k, v in value.items()}
    if isinstance(value, torch.ScriptObject):  # boxed anew for every call
        return None
    return value


def _line() -> str:
    """The innermost frame that is neither torch's nor symmplan's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("symmplan", "torch"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
