"""Every access that a program makes to placements, told to the race detector.

[Note: what is seen]
    A dispatch mode sees all ops: those of the program, the copies that symmplan makes, and what a
    declared op does inside, since the mode stays active for the ops that a custom op calls, and a
    peer's bytes are tensors like others. An op of ATen reads and writes what its schema says. An op
    that calls no other op may work on bare memory; it is assumed to do what its schema says, at its
    end. symmplan's one-sided collectives report their accesses themselves, see
    `symmplan.memory.kernels`.

    A process group's collective reads its own rank's inputs and writes its outputs between its
    start and its wait. Ranks that it makes wait for each other have met then: a rank's wait comes
    after the start of all its peers, or for a broadcast after the start of the root. Before a rank
    waits for the collective, the detector waits until all ranks have started it: a peer that found
    a race never starts, and the other ranks must not wait for it.

    Code that Inductor generates does not call ops. So a watched graph runs op by op.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import fx

from symmplan.capture.apart import is_tensor
from symmplan.capture.c10d import functional_form
from symmplan.device import device_of
from symmplan.memory.races import touch
from symmplan.process import PROCESS
from symmplan.registry import bind_arguments
from symmplan.torch_private import c10d, dispatch, works
from symmplan.torch_private.compilers import takes_a_list
from symmplan.torch_private.op_modes import OpByOpMode
from symmplan.torch_private.ops import (
    FakeTensor,
    HigherOrderOperator,
    tree_leaves,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from symmplan.memory.race_log import AccessRecord
    from symmplan.memory.races import RaceDetector, WatchedSegment

_PLAIN = ("aten", "prims", "inductor_prims", "prim")
_COLLECTIVES = ("c10d", "_c10d_functional")
_WAIT = "_c10d_functional::wait_tensor"

#: Ops that look at a tensor's shape and type alone.
_SHAPES = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("set_", "resize_", "record_stream", "is_pinned", "sym_size", "sym_stride", "sym_numel"),
        *("is_same_size", "_has_same_storage_numel", "detach_", "result_type"),
    )
)

#: The functional collectives in which a rank's wait comes after the start of all its peers.
_MEET = (
    *("all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced"),
    *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    *("reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced"),
)
#: The same of ``c10d::`` ops that have no functional form.
_MEET_C10D = ("barrier", "allgather_", "allgather_into_tensor_coalesced_", "allgather_coalesced_")
#: What ``c10d::`` ops call the tensors that they only read; their schemas say of no tensor whether
#: it is written.
_INPUTS = ("input", "inputs", "input_list", "input_tensor", "input_tensors")
#: Those that not all ranks of the group call.
_BETWEEN_TWO = ("send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops")

_SHORTEST_SLEEP, _LONGEST_SLEEP = 0.00002, 0.001


@define(eq=False)
class _Pending:
    """A collective between its start and its wait."""

    group: str
    numbers: list[tuple[RaceDetector, int]]
    others: tuple[int, ...]
    synchronizes: tuple[int, ...]
    touches: list[tuple[WatchedSegment, AccessRecord]] = field(factory=list)
    over: bool = False

    def wait(self, timeout: float) -> bool:
        """Wait until the others have started it, too; whether they have.

        Raises:
            RaceError: A rank found a race: it may never start.
        """
        deadline, pause = time.monotonic() + timeout, _SHORTEST_SLEEP
        while not all(d.started(self.group, n, r) for d, n in self.numbers for r in self.others):
            for detector, _ in self.numbers:
                detector.check()
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.2, _LONGEST_SLEEP)
        return True

    def end(self) -> None:
        """It was waited for."""
        if self.over:
            return
        self.over = True
        for segment, access in self.touches:
            segment.end(access)
        for detector, number in self.numbers:
            detector.met(self.group, number, self.synchronizes)


class _Work:
    """The work of a collective, for `symmplan.torch_private.works.watched_work`."""

    def __init__(self, work: Any, pending: _Pending, timeout: float) -> None:
        self._work = work
        self._pending = pending
        self._timeout = timeout

    def wait(self, *args: Any) -> Any:
        """Wait for it, but not for a peer that found a race."""
        self._pending.wait(self._timeout)
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Watching(OpByOpMode):
    """Reports accesses while it is active. See [Note: what is seen].

    Peers may take ``timeout`` seconds to start a collective. ``serves`` says whether an op that
    comes now is run by somebody else, who reports what it does.
    """

    def __init__(self, timeout: float, serves: Callable[[Any], bool] = lambda _: False) -> None:
        super().__init__()
        self._timeout = timeout
        self._serves = serves
        self._pending: dict[int, list[_Pending]] = {}
        self._handles: list[tuple[_Pending, Any]] = []
        self._ops = 0
        self._under = 0

    def __enter__(self) -> Self:
        PROCESS.watching.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        PROCESS.watching.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, FakeTensor) for t in types):  # DTensor asks them for shapes
            return func(*args, **kwargs)
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a wrapper: let it run the ops that it is made of
        if self._under:
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            for tensor in _tensors((args, kwargs)):
                touch(tensor, write=False, op=func.name())
            return func(*args, **kwargs)
        self._ops += 1
        name, namespace = func._schema.name, func.namespace
        if not PROCESS.detectors:
            return func(*args, **kwargs)
        if namespace in _PLAIN:
            _touch(func, args, kwargs)
            return func(*args, **kwargs)
        if name == _WAIT:
            return self._wait(func, args, kwargs)
        if self._serves(func):
            return self._inside(func, args, kwargs)
        if _is_collective(func):
            return self.collective(func, args, kwargs, functools.partial(func, *args, **kwargs))
        before = self._ops
        result = self._inside(func, args, kwargs)
        if self._ops == before and namespace != "symmplan":
            _touch(func, args, kwargs)
        return result

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op and see what it calls."""
        PROCESS.thread.ops.append(func._schema.name)
        try:
            with self:
                keys = dispatch.keyset_below_modes(func, _tensors((args, kwargs)))
                return func.redispatch(keys, *args, **kwargs)
        finally:
            PROCESS.thread.ops.pop()

    # Collectives of process groups.

    def collective(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """A collective of a process group starts; ``run`` runs it.

        Raises:
            RaceError: Its accesses at the start are not ordered after accesses of other ranks.
        """
        pending = self._started(func, args, kwargs)
        self._under += 1  # what it is made of accesses nothing else
        try:
            result = run()
        finally:
            self._under -= 1
        if func.namespace == "c10d":
            return self._with_work(result, pending)
        for tensor in _tensors((result, args, kwargs)):
            self._pending.setdefault(tensor.untyped_storage()._cdata, []).append(pending)
        return result

    def _started(self, func: Any, args: Any, kwargs: Any) -> _Pending:
        form = functional_form(func, args)
        if form is not None:
            op, bound = form.op, bind_arguments(form.op, form.args, form.kwargs)
        else:
            op, bound = func, bind_arguments(func, args, kwargs)
        group = _group_of(bound)
        ranks, touches = c10d.group_ranks(group), []
        others = tuple(r for r in ranks if r != torch.distributed.get_rank())
        unknown = func.namespace == "c10d" and form is None
        for argument in op._schema.arguments:
            info = argument.alias_info
            writes = unknown and argument.name not in _INPUTS
            writes |= info is not None and info.is_write
            for tensor in _tensors(bound.get(argument.name)):
                touched = touch(tensor, write=writes, op=func._schema.name, lasting=True)
                if touched is not None:
                    touches.append(touched)
        # Only now: who finds a race never starts.
        detectors = () if _name(op) in _BETWEEN_TWO else PROCESS.detectors
        numbers = [(d, d.start(group)) for d in detectors]
        synchronizes = _who_synchronizes(op, bound, ranks, others)
        pending = _Pending(group, numbers, others, synchronizes, touches)
        for segment, access in pending.touches:
            segment.begin(access)
        return pending

    def _with_work(self, result: Any, pending: _Pending) -> Any:
        """``c10d::`` ops return a work, alone or behind their tensors."""
        several = isinstance(result, (tuple, list))
        boxed = result[-1] if several else result
        work = torch.distributed.Work.unbox(boxed) if boxed is not None else None
        if work is None:
            pending.end()
            return result
        tensors = _tensors(result[:-1]) if several else []
        written = tensors[0] if tensors else torch.empty(0)
        inner = _Work(work, pending, self._timeout)
        done = device_of(written.device).record_event
        handle, watched_box = works.watched_work(inner, pending.end, written, done)
        self._handles = [(p, h) for p, h in self._handles if not p.over]
        self._handles.append((pending, handle))
        return (*result[:-1], watched_box) if several else watched_box

    def _wait(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = args[0].untyped_storage()._cdata
        pending = [p for p in self._pending.pop(key, ()) if not p.over]
        started = [p for p in pending if p.wait(self._timeout)]
        for one in started:  # nothing of the program lies between this and the wait
            one.end()
        result = self._inside(func, args, kwargs)
        for one in pending:
            one.end()
        return result


def watched(op: Any) -> Callable[..., Any]:
    """``op.redispatch``, seen by who watches: for ops that are run past the dispatch mode."""
    redispatch = dispatch.redispatch_of(op)
    if not _is_collective(op):
        return redispatch

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not PROCESS.watching:
            return redispatch(keys, *args, **kwargs)
        start = functools.partial(redispatch, keys, *args, **kwargs)
        watching: Watching = PROCESS.watching[-1]
        return watching.collective(op, args, kwargs, start)

    return run


@functools.cache
def _is_collective(op: Any) -> bool:
    """Whether an op is a collective of a process group: it names one."""
    named = any(a.name in ("group_name", "process_group") for a in op._schema.arguments)
    return named and op.namespace in _COLLECTIVES


def _who_synchronizes(
    op: Any, bound: dict[str, Any], ranks: Sequence[int], others: tuple[int, ...]
) -> tuple[int, ...]:
    """The ranks whose start precedes this rank's wait."""
    name = _name(op)
    if name in (_MEET_C10D if op.namespace == "c10d" else _MEET):
        return others
    if name in ("broadcast", "broadcast_") and op.namespace != "c10d":
        root = ranks[bound["src"]]
        return (root,) if root in others else ()
    if name in ("alltoall_base_", "all_to_all_single", "all_to_all_single_into"):
        splits = [*bound["output_split_sizes"]]
        if op.namespace != "c10d":
            splits += bound["input_split_sizes"]
        # Every rank sends to every other.
        full = len(set(splits)) <= 1 and 0 not in splits and bool(bound["input"].numel())
        return others if full else ()
    return ()


def _name(op: Any) -> str:
    """An op's name without its namespace."""
    return str(op._schema.name.partition("::")[2])


def _group_of(bound: dict[str, Any]) -> str:
    for value in bound.values():
        if isinstance(value, torch.ScriptObject):
            group = c10d.unboxed_group(value)
            if group is not None:
                return c10d.group_name(group)
    return str(bound.get("group_name", ""))


def _touch(func: Any, args: Any, kwargs: Any) -> None:
    """An op accesses what its schema says."""
    schema = func._schema
    infos = [a.alias_info for a in schema.arguments]
    views = [info for info in infos if info is not None]
    if schema.name in _SHAPES or (views and not any(info.is_write for info in views)):
        return
    ops = PROCESS.thread.ops
    name = f"{schema.name} in {ops[-1]}" if ops else schema.name
    named = {a.name: a.alias_info for a in schema.arguments}
    given = [*zip(infos, args, strict=False), *((named.get(k), v) for k, v in kwargs.items())]
    for info, value in given:
        if value is not None:
            writes = info is not None and info.is_write
            for tensor in _tensors(value):
                touch(tensor, write=writes, op=name)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if is_tensor(x)]


class _Nodes(fx.Interpreter):
    """Runs a graph op by op, and says where each came from."""

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        thread = PROCESS.thread
        outer, thread.node = thread.node, (_Nodes.run_node.__code__, _line_of(n))
        try:
            if isinstance(n.target, HigherOrderOperator):
                with dispatch.no_modes():
                    return super().run_node(n)
            return super().run_node(n)
        finally:
            thread.node = outer


def run_by_nodes(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A graph as compiled code, which runs op by op so that it can be watched."""

    def run(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        nodes = _Nodes(module)
        nodes.extra_traceback = False  # the error names the line
        return nodes.run(*given, enable_io_processing=False)

    return takes_a_list(run)


def _line_of(node: fx.Node) -> str:
    """Where in the program a node came from; its name if that is not known."""
    trace = node.meta.get("stack_trace") or ""
    lines = [text.strip() for text in trace.splitlines() if text.strip().startswith('File "')]
    for text in reversed(lines):
        file, _, rest = text.removeprefix('File "').partition('", line ')
        if "/torch/" not in file and "/symmplan/" not in file:
            return f"{file}:{rest.partition(',')[0]}"
    return f"node {node.name}"
