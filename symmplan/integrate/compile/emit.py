"""What rewriting adds to a graph: segments as inputs, placements as views of them, calls.

[Note: segments are inputs]
    The rewritten graph takes each segment as one more input, one-dimensional, and a placement is
    ``as_strided`` of it. So the compiled code holds no address, Inductor sees that placements
    overlap and keeps the order of writes, its code cache keys on offsets alone, and the segments
    can be allocated when the program first runs.

[Note: fences]
    Inductor computes late what it can: a reader of a placement may still be pending when an op that
    overwrites the bytes is lowered, and for ops that are not its own it looks for pending readers
    only after it has queued the op. A fence makes it compute them first. Every operation that
    writes a placement has one before it. A fence costs nothing when the program runs.

    A segment that holds several dtypes is several inputs, one for each dtype, because Inductor has
    no free view that changes the element size; storages of their own and the tensors that a forward
    left in placements for its backward are further inputs. Inductor cannot know that these inputs
    overlap. So where bytes pass from one input to another, the fence covers both inputs. It stays
    in the schedule as a node that does nothing, so that earlier operations stay before it.

    Inductor cannot know either that an asynchronous collective reads its input until its wait,
    because the wait is given only the result. So where such an input's bytes are written again, the
    fence also covers the result that was waited for.

[Note: storages of their own]
    c10d's ``wait_tensor`` waits for all work that was registered on a tensor's *storage*. If all
    placements shared the segment's storage, a wait for one collective would wait for all of them.
    So the results of asynchronous collectives are further inputs, one for each offset, whose
    storage begins there. Work that is under way at the same time never shares an offset.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen
from torch import fx

from symmplan.capture.bounds import sources
from symmplan.integrate.compile.ops import by_segment, without_returns
from symmplan.memory.leased import lease_out
from symmplan.torch_private.ops import OpOverload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.capture.graphs import Path, Value
    from symmplan.capture.sites import Captured, PlacedStorage, Site
    from symmplan.place.program import PlacedCall, PlacedProgram

# Inductor's code cache keys on names, but not on how symmplan lowers a graph: count this up when
# the same graph has to be compiled anew.
_SEGMENT = "symmplan5"

#: Inductor copies inputs that begin elsewhere.
_ALIGNED = 16


@frozen
class SegmentInput:
    """One input that a rewritten graph takes after its own.

    Attributes:
        segment: Name of the segment.
        dtype: Element type that its bytes are seen as.
        numel: How many elements, to the end of the segment.
        begin: First byte, if it is a storage of its own from there on; None for the segment itself.
    """

    segment: str
    dtype: torch.dtype
    numel: int
    begin: int | None = None

    def of(self, segment: torch.Tensor) -> torch.Tensor:
        """The input itself, of the segment's bytes."""
        begin = self.begin or 0
        part = segment[begin : begin + self.numel * self.dtype.itemsize]
        return (part if self.begin is None else lease_out(part)).view(self.dtype)


@define(eq=False)
class Emitter:
    """Adds nodes, with their fake values, at the graph's current insertion point.

    A `symmplan.place.lower.Machine` to which values are nodes.

    Attributes:
        graph: The graph that changes.
        program: What it will follow.
        fake_mode: The mode of the graph's fake tensors.
        apart: The buffers that asynchronous collectives write. See [Note: storages of their own].
        given: ``{buffer: inputs of the graph}`` of what lies in placements before it begins.
        inputs: The segment inputs added so far, in order.
        first: ``{operation: the first node that stands for it now}``, where that has changed.
        origin: The node of the program that what is emitted now belongs to; None if there is none.
        tails: The last node that was inserted behind a node.
    """

    graph: fx.Graph
    program: PlacedProgram
    fake_mode: Any
    apart: frozenset[str] = field(init=False)
    given: dict[str, list[fx.Node]] = field(init=False, factory=dict)
    inputs: dict[SegmentInput, fx.Node] = field(init=False, factory=dict)
    first: dict[str, fx.Node] = field(init=False, factory=dict)
    origin: fx.Node | None = field(init=False, default=None)
    tails: dict[fx.Node, fx.Node] = field(init=False, factory=dict)
    _doing: list[str] = field(init=False, factory=list)
    _numbers: dict[Any, fx.Node] = field(init=False, factory=dict)
    _body: fx.Node = field(init=False)
    _device: torch.device = field(init=False)

    def __attrs_post_init__(self) -> None:
        captured = self.captured
        written: list[PlacedStorage | Site] = [
            s for s in captured.sites if s.kind == "result" or s.writes
        ]
        written += captured.placed_storages
        later = (x.buffer for x in written if captured.waits.get(x.node))
        self.apart = frozenset(buffer for buffer in later if buffer is not None)
        for node, buffer in captured.given.items():
            self.given.setdefault(buffer, []).append(node)
        site = next(s for s in captured.sites if s.buffer is not None)
        assert site.source is not None
        self._device = captured.values.tensors[(site.source, site.path)].device
        # Nothing erases it: it is put here to mark the place, and goes when the graph is done.
        with self.graph.inserting_before(self._behind_inputs()):
            self._body = self.graph.call_function(_begin)

    @property
    def captured(self) -> Captured:
        """What was decided of the graph."""
        return self.program.captured

    @property
    def begin(self) -> fx.Node:
        """The first node behind the graph's inputs and sizes."""
        return self._body.next

    def doing(self, operation: str) -> None:
        """The next node is the first that stands for ``operation``; it says so, too."""
        self._doing.append(operation)

    def finish(self) -> None:
        """The graph is done."""
        self.graph.erase_node(self._body)

    # As a machine.

    def view(self, buffer: str, like: Value, *, contiguous: bool = False) -> fx.Node:
        """The placement as a tensor like one of the graph's."""
        return self.placement(buffer, self.captured.values.tensors[like], contiguous=contiguous)

    def empty(self, like: Value) -> fx.Node:
        """Ordinary memory for a tensor like one of the graph's."""
        fake = self.captured.values.tensors[like]
        how = {"dtype": fake.dtype, "device": fake.device}
        return self.add(torch.ops.aten.empty.memory_format, (self.numbers(fake.shape),), how)

    def copy(self, target: fx.Node, source: fx.Node) -> None:
        """Copy a tensor."""
        self.add(torch.ops.aten.copy_.default, (target, source))

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call an op that writes what it is given."""
        # Torch's own Inductor knows, others must not return what they are given.
        known = op.namespace == "_c10d_functional"
        self.add(op if known else without_returns(op), args, kwargs)

    def original(self, call: PlacedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Call the op itself."""
        of_torch = call.overload.namespace == "symm_mem" and call.overload._schema.returns
        return self.add(by_segment(call.overload) if of_torch else call.overload, args, kwargs)

    def item(self, result: fx.Node, path: Path) -> fx.Node:
        """One tensor of a result."""
        for index in path:
            value = result.meta["val"][index]
            result = self.graph.call_function(operator.getitem, (result, index))
            result.meta["val"] = value
        return result

    @property
    def operations(self) -> dict[str, fx.Node]:
        """``{operation: the first node that stands for it now}``."""
        nodes = {self.captured.prefix + n.name: n for n in self.graph.nodes}
        return {**nodes, **self.first}

    def key(self, buffer: str, dtype: torch.dtype | None = None) -> SegmentInput:
        """The input through which a buffer is reached, as its own or another type."""
        plan, place = self.program.plan, self.program.plan.placements[buffer]
        if dtype is None:
            dtype = getattr(torch, next(b.dtype for b in plan.problem.buffers if b.name == buffer))
        nbytes = next(s.nbytes for s in plan.segments if s.name == place.segment)
        begin = place.offset if buffer in self.apart and not place.offset % _ALIGNED else None
        return SegmentInput(place.segment, dtype, (nbytes - (begin or 0)) // dtype.itemsize, begin)

    def offset(self, buffer: str, dtype: torch.dtype) -> int:
        """Where a buffer begins in its input, in elements."""
        begin = self.key(buffer, dtype).begin or 0
        return (self.program.plan.placements[buffer].offset - begin) // dtype.itemsize

    def reach(self, buffer: str) -> tuple[SegmentInput | str, ...]:
        """Through which inputs the graph reaches a buffer; all of them are in `nodes`."""
        key = self.key(buffer)
        if buffer not in self.given:
            return (key,)
        return (buffer, key) if key in self.inputs else (buffer,)  # poison takes the segment

    @property
    def nodes(self) -> dict[SegmentInput | str, list[fx.Node]]:
        """The inputs that lie in segments, by what `reach` says."""
        found: dict[SegmentInput | str, list[fx.Node]] = {}
        found.update(self.given)
        found.update((key, [node]) for key, node in self.inputs.items())
        return found

    def input(self, key: SegmentInput) -> fx.Node:
        """The input for a key, added when it is first asked for."""
        node = self.inputs.get(key)
        if node is None:
            with self.graph.inserting_before(self._behind_inputs()):
                words = (key.segment, str(key.dtype).removeprefix("torch."), key.begin)
                name = "_".join(str(w) for w in words if w is not None)
                node = self.graph.placeholder(f"{_SEGMENT}_{name}")
            with self.fake_mode:
                node.meta["val"] = torch.empty(key.numel, dtype=key.dtype, device=self._device)
            self.inputs[key] = node
        return node

    def _behind_inputs(self) -> fx.Node:
        """The first node behind the inputs, among which there may be constants."""
        inputs = self.graph.find_nodes(op="placeholder")
        first: fx.Node = next(iter(self.graph.nodes))
        return inputs[-1].next if inputs else first

    def placement(self, buffer: str, like: Any, *, contiguous: bool = False) -> fx.Node:
        """The placement as a tensor like ``like``, inserted at the current point."""
        base = self.input(self.key(buffer, like.dtype))
        stride = _dense(like.shape) if contiguous else like.stride()
        offset = self.offset(buffer, like.dtype)
        args = (base, self.numbers(like.shape), self.numbers(stride), offset)
        return self.add(torch.ops.aten.as_strided.default, args)

    def numbers(self, values: Sequence[int | torch.SymInt]) -> list[int | fx.Node]:
        """Sizes as the graph can use them: those that only its inputs tell, as nodes."""
        symbolic = any(isinstance(v, torch.SymInt) for v in values)
        if symbolic and not self._numbers:
            for symbol, (node, dimension) in sources(self.graph).items():
                self._numbers[symbol] = node
                if dimension is not None:
                    size = self._early(torch.ops.aten.sym_size.int, (node, dimension))
                    self._numbers[symbol] = size
        return [self._number(v.node.expr) if isinstance(v, torch.SymInt) else v for v in values]

    def _number(self, expr: Any) -> int | fx.Node:
        if expr.is_Integer:
            return int(expr)
        if expr not in self._numbers:
            op = operator.floordiv
            if expr.is_Add:
                op = operator.add
            elif expr.is_Mul:
                op = operator.mul
            first, *rest = (self._number(e) for e in expr.args)
            for other in rest:
                first = self._early(op, (first, other))
            assert isinstance(first, fx.Node)
            self._numbers[expr] = first
        return self._numbers[expr]

    def _early(self, op: Any, args: tuple[Any, ...]) -> fx.Node:
        """A call behind the graph's inputs and what was put there before."""
        with self.graph.inserting_before(self._body):
            return self.add(op, args)

    def add(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A call node with its fake value."""
        kwargs = kwargs or {}
        node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = self._value(op, args, kwargs)
        if self._doing:
            self.first.update((operation, node) for operation in self._doing)
            node.meta["operations"] = tuple(self._doing)
            self._doing.clear()
        if self.origin is not None and "stack_trace" in self.origin.meta:
            node.meta["stack_trace"] = self.origin.meta["stack_trace"]
        return node

    def _value(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        returns = op._schema.returns if isinstance(op, OpOverload) else None
        if returns is not None and not returns:
            return None
        given = _written(op, args, kwargs) if returns is not None else None
        if given is not None:
            return given.meta["val"]
        real = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            return op(*real[0], **real[1])

    def fence(self, at: fx.Node, inputs: Sequence[fx.Node]) -> None:
        """Keep all accesses of these inputs before ``at`` before it. See [Note: fences]."""
        with self.graph.inserting_before(at):
            self.add(torch.ops.symmplan.fence_.default, (list(inputs),))


def _begin() -> None:
    """Marks where the graph's own operations begin, while it is rewritten."""


def _dense(shape: Sequence[Any]) -> list[Any]:
    """The strides of a contiguous tensor."""
    steps = itertools.accumulate(reversed(shape), operator.mul, initial=1)
    return [*steps][:-1][::-1]


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
    """The argument that an op writes and returns, if that is what it does."""
    (result, *others) = op._schema.returns
    if others or result.alias_info is None or not result.alias_info.is_write:
        return None
    for i, argument in enumerate(op._schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write and info.before_set & result.alias_info.before_set:
            given = kwargs.get(argument.name, args[i] if i < len(args) else None)
            return given if isinstance(given, fx.Node) else None
    return None
