"""One iteration of an eager program -> the `Problem` that its FX graph would give.

The iteration is written down as an FX graph while it runs: a node for each op, a placeholder for
each tensor that came from elsewhere, an output for each storage that outlives the iteration. The
graph then goes the way of all graphs through `capture_fx`, see `symmplan.capture.eager_problem`.

[Note: threads of a program]
    A session records and serves the thread that entered it, and the threads in which autograd runs
    that thread's backward: torch carries a mark of the thread over to them. Calls of other threads
    run in torch's own way, in every iteration. The collective of a checkpoint or a metric comes
    when its thread makes it, so ranks could not agree on an order. If such a thread is the last to
    drop a tensor, the tensor counts as one that leaves the iteration, because the moment of the
    drop differs from iteration to iteration.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from symmplan.capture.apart import is_tensor, run_apart, storage_key, view_of
from symmplan.capture.c10d import Functional, functional_form, reader_of
from symmplan.capture.module_names import name_modules, parameter_owners
from symmplan.capture.recorded import Recorded, Storage, opaque
from symmplan.capture.signatures import signature, stand_in
from symmplan.capture.stacks import called_at, is_by_torch, stack
from symmplan.capture.streams import Timeline
from symmplan.device import device_of
from symmplan.torch_private import compilers, dispatch, threads, works
from symmplan.torch_private.op_modes import OpByOpMode
from symmplan.torch_private.ops import HigherOrderOperator, tree_leaves, tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from symmplan.capture.producers import Write
    from symmplan.capture.streams import DeviceStreams
    from symmplan.model import OpSpec

_WAIT = "_c10d_functional::wait_tensor"
#: The name of nodes that are calls over other groups.
_ELSEWHERE = "elsewhere"
#: Of the marks that threads of a program have.
_PROGRAM = "symmplan program"


def threads_of_program() -> Callable[[], bool]:
    """Begin a program in this thread; those of autograd that work for it are of the program, too.

    Returns:
        Whether the thread that asks is one of them. Asked on every declared call.
    """
    mark = object()  # of this program; it holds nothing else
    threads.mark_thread(_PROGRAM, mark)
    return lambda: threads.thread_mark(_PROGRAM) is mark


def _without_bytes(storage: torch.UntypedStorage) -> str:
    """Stands for a storage that an op is given: the recording must not keep it alive."""
    return f"storage of {storage.nbytes()} bytes"


def _end(*written: torch.Tensor) -> Any:
    """What another stream waits for when it waits for what ran on this one; None on the CPU."""
    for tensor in written:
        done = device_of(tensor.device).record_event()
        if done is not None:
            return done
    return None


class Recorder(OpByOpMode):
    """Writes down what runs while it is active.

    Args:
        lookup: Gives what is declared of an op, or None.
        elsewhere: Says of an op and its arguments whether they are a call over another group.
        before: Called with each declared op and its arguments, before it runs.
        aside: Whether the code that runs now is not the program's, so that it is not recorded.
        streams: Those of the device; None where there are none.
        scratch: Gives declared ops symmetric memory to run on.
        default_group: As for `capture_fx`.
        is_program: Whether the thread that asks is one of the program.

    Attributes:
        graph: The graph so far.
        calls: The program's calls of declared ops and of `symmplan.placed.empty`, in order.
        lines: ``{node: where in the user's program it was called}``.
        by_torch: Nodes that the program did not call itself: its modules, DTensor or autograd did.
        writes: How ops write into given memory, as the program says by `placed.empty` and
            `placed.out`.
        filled: ``{call: node}`` of collectives that overwrite all of a tensor that the iteration
            made and that nobody has used before: the node makes it, right before the call.
        timeline: The streams and events that were seen.
        made: Storages that the iteration made, by their first value.
    """

    def __init__(
        self,
        lookup: Callable[[Any], OpSpec | None],
        elsewhere: Callable[[Any, Any, Any], bool],
        before: Callable[[Any, Any, Any], None],
        aside: Callable[[], bool],
        *,
        streams: DeviceStreams | None,
        scratch: Any,
        default_group: str,
        is_program: Callable[[], bool],
    ) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.calls: list[Recorded] = []
        self.lines: dict[fx.Node, str] = {}
        self.by_torch: set[fx.Node] = set()
        self._lookup = lookup
        self._elsewhere = elsewhere
        self._before = before
        self._aside = aside
        self._streams = streams
        self._scratch = scratch
        self._default_group = default_group
        self._is_program = is_program
        self.timeline = Timeline(streams)
        self._inside = contextlib.ExitStack()
        #: ``{storage of a pending result: its mark, and the event behind it on a device}``.
        self._works: dict[int, tuple[str, Any]] = {}
        self._handles: list[Any] = []  # the Python halves of works that the program got
        self._storages: dict[int, Storage] = {}
        self._watches: dict[int, Any] = {}
        self.made: dict[tuple[fx.Node, tuple[int, ...]], Storage] = {}
        self.writes: dict[fx.Node, Write] = {}
        self.filled: dict[fx.Node, fx.Node] = {}
        self._names = self._declared = 0  # how many inputs and declared calls there were
        self._closed = self._entered = False

    def __enter__(self) -> Self:
        self.timeline.current()  # the stream on which it starts
        if self._streams is not None:
            self._inside.enter_context(self._streams.watching(self.timeline))
        super().__enter__()
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        self._inside.close()
        if not compilers.in_compiled_call():
            self.leave()

    def leave(self) -> None:
        """Be no dispatch mode any more, if it is one. Not in a call of a compiled function."""
        if self._entered:
            self._entered = False
            super().__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._closed or self._aside():
            return func(*args, **kwargs)
        if any(map(dispatch.wraps_tensors, types)):
            return NotImplemented  # a wrapper: let it run the ops that it is made of
        if isinstance(func, HigherOrderOperator):
            # Its functions may use all that it is given, and what it makes comes from elsewhere.
            self._node(opaque, self._nodes_of((args, kwargs)), None)
            return func(*args, **kwargs)
        if func._schema.name == "aten::record_stream":
            self._used_until_released(args[0], args[1])
            return func(*args, **kwargs)
        if self._elsewhere(func, args, kwargs):
            return self._run_elsewhere(func, args, kwargs)
        spec = self._lookup(func)
        if spec is not None:
            self._before(func, args, kwargs)
        given = self._arguments((args, kwargs))
        form = functional_form(func, args)
        if spec is None or (func.namespace == "c10d" and form is None):
            result = func(*args, **kwargs)
        else:
            result = run_apart(func, args, kwargs, spec, form, self._scratch, self._default_group)
        if func.namespace == "c10d":
            return self._c10d(func, spec, form, args, kwargs, result)
        if func._schema.name == _WAIT:
            mark, done = self._works.pop(storage_key(args[0]), (None, None))
            if mark is not None:
                self.timeline.wait(mark)
            if done is not None:
                done.wait()
        node = self._node(func, given, result, self._name_of_wait(func, args))
        if spec is not None:
            named = {name: stand_in(x, f"kwargs[{name!r}]") for name, x in kwargs.items()}
            form = Functional(func, stand_in(args), named)
            self._call(node, func, form, args, kwargs, result)
            if spec.asynchronous:
                tensors = [x for x in tree_leaves(result) if is_tensor(x)]
                end = self.timeline.record(), _end(*tensors)
                self._works.update((storage_key(tensor), end) for tensor in tensors)
        return result

    def _c10d(
        self,
        func: Any,
        spec: OpSpec | None,
        form: Functional | None,
        args: Any,
        kwargs: Any,
        result: Any,
    ) -> Any:
        if form is None:
            node = self._opaque(args, kwargs)
            if spec is not None:
                self._call(node, func, None, args, kwargs)
            return result
        unused = self._unused(form.kwargs.get("out"), form.args)
        made = None if unused is None else self._made_now(unused, form.written)
        given = self._arguments((form.args, form.kwargs))
        node = self._node(form.op, given, form.written)
        if made is not None:
            self.filled[node] = made
        self._call(node, func, functional_form(func, args, stand_in), args, kwargs)
        if not form.asynchronous:
            self._wait(node, form.written)
            return result
        there = device_of(form.written.device)
        mark, done = self.timeline.record(), there.record_event()

        def waited() -> None:
            if not self._closed:
                self.timeline.wait(mark)
                self._wait(node, form.written)

        work = None if done is None else works.queued_work(done, form.written)
        handle, boxed = works.watched_work(work, waited, form.written, there.record_event)
        self._handles.append(handle)
        return form.results(boxed)

    def _unused(self, tensor: torch.Tensor | None, others: Any) -> Storage | None:
        """The storage of a tensor, if the iteration made it and nothing was done with it yet.

        Nor is anything done by the call, which gets the ``others``, but to overwrite it.
        """
        storage = None if tensor is None else self._storages.get(storage_key(tensor))
        if storage is None or tensor is None or not storage.made or storage.origin.users:
            return None
        whole = len(storage.nodes) == 1 and (storage.origin, ()) in self.made
        same = view_of(tensor) in storage.nodes and tensor.nbytes == storage.meta.nbytes()
        own = not tensor.requires_grad and dispatch.has_own_bytes(tensor)
        used = storage in self._storages_of(others) or storage.origin in self.writes
        used = used or any(call.node is storage.origin for call in self.calls)
        return storage if whole and same and own and not used else None

    def _made_now(self, storage: Storage, tensor: torch.Tensor) -> fx.Node:
        """A node that makes an unused tensor; it has one name on all ranks, as the call has."""
        del self.made[storage.origin, ()]
        storage.nodes.clear()
        like = torch.empty(storage.meta.nbytes(), dtype=torch.uint8, device="meta")
        storage.meta = like.untyped_storage()
        empty, name = torch.ops.aten.empty.memory_format, f"filled_{self._declared}"
        storage.origin = self._node(empty, ((list(tensor.shape),), {}), tensor, name)
        return storage.origin

    def _run_elsewhere(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a collective over another group, and note which tensors it uses."""
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            self._opaque(args, kwargs)
        else:
            self._node(func, self._arguments((args, kwargs)), result, _ELSEWHERE)
        for storage in self._storages_of((args, kwargs, result)):
            storage.elsewhere = True
        return result

    def _name_of_wait(self, func: Any, args: Any) -> str:
        """A name for waits that not all ranks make, so that other waits have equal names."""
        if func._schema.name != _WAIT:
            return ""
        storage = self._storages.get(storage_key(args[0]))
        return _ELSEWHERE if storage is not None and storage.elsewhere else ""

    def _opaque(self, args: Any, kwargs: Any) -> fx.Node:
        for storage in self._storages_of((args, kwargs)):
            storage.opaque = True
        return self._node(opaque, self._nodes_of((args, kwargs)), None)

    def _nodes_of(self, values: Any) -> tuple[Any, Any]:
        """Arguments of `opaque`: the nodes of all tensors."""
        given = tree_leaves(self._arguments(values))
        return tuple(n for n in given if isinstance(n, fx.Node)), {}

    def _storages_of(self, values: Any) -> tuple[Storage, ...]:
        keys = dict.fromkeys(storage_key(x) for x in tree_leaves(values) if is_tensor(x))
        return tuple(self._storages[key] for key in keys if key in self._storages)

    def _wait(self, node: fx.Node, written: torch.Tensor) -> None:
        self._node(torch.ops._c10d_functional.wait_tensor.default, ((node,), {}), written)

    def _used_until_released(self, tensor: torch.Tensor, stream: Any) -> None:
        storage = self._storages.get(storage_key(tensor))
        number = getattr(stream, "cuda_stream", None)
        if storage is not None and number is not None:
            storage.users.append(self.timeline.name(number))

    def _call(
        self,
        node: fx.Node,
        op: Any,
        form: Functional | None,
        args: Any,
        kwargs: Any,
        result: Any = None,
    ) -> None:
        given = signature(reader_of(op)(args)), signature(kwargs), self.lines.get(node, "")
        stream, used = self.timeline.streams[node.name], self._storages_of((args, kwargs, result))
        self.calls.append(Recorded(node, op, form, "op", *given, stream, used))
        self._declared += 1

    def memory(self, tensor: torch.Tensor, kind: str, write: Write, args: Any, kwargs: Any) -> None:
        """``tensor`` was just made by `placed.empty` or `placed.out`, called with ``args``."""
        storage = self._storages.get(storage_key(tensor))
        if storage is None or not storage.made:
            return
        self.writes[storage.origin] = write
        given = signature(args), signature(kwargs), called_at(), storage.stream
        self.calls.append(Recorded(storage.origin, None, None, kind, *given))

    def _arguments(self, given: Any) -> Any:
        nodes = tree_map_only(torch.Tensor, self._of_any, given)
        return tree_map_only(torch.UntypedStorage, _without_bytes, nodes)

    def _of_any(self, tensor: torch.Tensor) -> fx.Node | str:
        """A text stands for what has no plain bytes, such as a sparse tensor."""
        return self._of(tensor) if is_tensor(tensor) else f"{tensor.layout} {tensor.dtype}"

    def _of(self, tensor: torch.Tensor) -> fx.Node:
        """The node that stands for a tensor."""
        storage = self._storages.get(storage_key(tensor))
        if storage is None:
            with self.graph.inserting_before():  # all else
                node = self.graph.placeholder(f"input_{self._names}")
            self._names += 1
            node.meta["val"] = self._enter(tensor, node, made=False)
            return node
        view = view_of(tensor)
        found = storage.nodes.pop(view, None)
        if found is not None:
            storage.nodes[view] = found
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
        key, view = storage_key(tensor), view_of(tensor)
        storage = self._storages.get(key)
        with dispatch.no_modes():  # those of the program would trace stand-ins
            if storage is None:
                real = tensor.untyped_storage()
                meta = torch.empty(real.nbytes(), dtype=torch.uint8, device="meta")
                stream = self.timeline.current()
                storage = Storage(meta.untyped_storage(), node, made, stream=stream)
                self._storages[key] = storage
                self._watches[key] = weakref.ref(real, lambda _: self._released(key, storage))
            stand_in = torch.empty(0, dtype=tensor.dtype, device="meta")
            stand_in.set_(storage.meta, *view[:3])
        if made:
            self.made[(node, path)] = storage
        storage.nodes.pop(view, None)
        storage.nodes[view] = node
        return stand_in

    def _released(self, key: int, storage: Storage) -> None:
        if self._is_program():  # see [Note: threads of a program]
            storage.dropped = self.timeline.now()
        if self._storages.get(key) is storage:
            del self._storages[key], self._watches[key]

    def _node(self, target: Any, given: tuple[Any, Any], result: Any, name: str = "") -> fx.Node:
        packet = getattr(target, "overloadpacket", target)
        name = name or dispatch.node_name(self.graph, packet.__name__)
        node = self.graph.create_node("call_function", target, *given, name)
        self.timeline.ran(node.name)
        frames = node.meta["symmplan_stack"] = stack()
        if is_by_torch():
            self.by_torch.add(node)
        self.lines[node] = frames[-1].partition(" in ")[0] if frames else ""
        node.meta["val"] = self._results(node, result, ())
        return node

    def _results(self, node: fx.Node, result: Any, path: tuple[int, ...]) -> Any:
        if is_tensor(result):
            if not path:
                return self._enter(result, node, made=True)
            stand_in = self._enter(result, node, made=True, path=path)
            item = node
            for index in path:
                item = self.graph.call_function(operator.getitem, (item, index))
            item.meta["val"] = stand_in
            self._enter(result, item, made=False)
            return stand_in
        if isinstance(result, (list, tuple)):
            return [self._results(node, r, (*path, i)) for i, r in enumerate(result)]
        return result

    def close(self) -> None:
        """End the recording: what is still alive leaves the graph. Idempotent."""
        if self.graph.find_nodes(op="output"):
            return
        made = dict.fromkeys(x for x in self.made.values() if x.made and not x.dropped)
        # The last view, not the origin: that may return several storages.
        output = self.graph.output(tuple(list(x.nodes.values())[-1] for x in made))
        output.meta["val"] = None
        self._watches.clear()
        owners = parameter_owners()
        given = {x.origin: owners[key] for key, x in self._storages.items() if key in owners}
        name_modules(self.graph, given)
