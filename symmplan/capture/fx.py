"""An FX graph -> the `Problem` of its declared tensors.

What is decided here, for each declared tensor of each declared op, is its *site*:

    argument, made in the graph by an op that can write     bind   produced in its placement
    argument, made by a declared op, or a view of a bound    bind   used where it lies
    argument from outside, or that leaves the graph, ...     stage  copied in before the op
    result                                                   bind   written there by the op
    result that leaves the graph                             stage  copied out after the op
    no size, empty, symbolic                                 none   `Unplanned`, with the reason

A buffer stands for a storage, not a tensor: its accesses are those of all its aliases
(see [Note: aliases]). An asynchronous op holds its buffers until its ``wait_tensor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from attrs import define, evolve, field, frozen
from torch import fx

from symmplan.capture.producers import Write, writes_inductor
from symmplan.capture.values import Value, Values, example_values, is_pure_view, tensor_leaves
from symmplan.errors import CaptureError
from symmplan.model import (
    Access,
    Buffer,
    Operation,
    OpSpec,
    Problem,
    Requirement,
    Unplanned,
)
from symmplan.registry import bind_arguments, resolve_group_name, spec_for

__all__ = ["Captured", "Home", "Site", "argument_nodes", "capture_fx", "is_wait", "overload_of"]

STREAM = "main"


@frozen(eq=False)
class Site:
    """One declared tensor of one declared op, and how it gets into symmetric memory.

    Attributes:
        node: The declared op's node.
        where: ``"input"``, ``"inputs.0"``, ``"return"``, ``"return.1"``, ...
        kind: Whether it is an argument or a result.
        how: ``"bind"`` (no copy), ``"stage"`` (copied), or None (left out).
        buffer: Name of its buffer, or None if it was left out.
        reason: Why it is staged or left out.
        source: The node that holds the value (of an argument), or the op's node (of a result).
        path: Where the value sits in the result of ``source``.
        writes: Whether the op writes it (arguments only).
    """

    node: fx.Node
    where: str
    kind: Literal["argument", "result"]
    how: Literal["bind", "stage"] | None
    buffer: str | None
    reason: str = ""
    source: fx.Node | None = None
    path: tuple[int, ...] = ()
    writes: bool = False


@frozen(eq=False)
class Home:
    """A storage made in the graph that lives in a placement from its first byte.

    Attributes:
        buffer: Name of its buffer.
        node: The node that makes it.
        path: Where it sits in the node's result.
        write: How the producer writes there; ``"declared"`` if it is a declared op.
    """

    buffer: str
    node: fx.Node
    path: tuple[int, ...]
    write: Write


@frozen(eq=False)
class Captured:
    """What capture found: the problem, and how the graph has to change to follow a plan of it.

    Attributes:
        problem: The input of the planner.
        sites: Every declared tensor, in graph order.
        homes: Every storage that is made in its placement.
        specs: What is declared of the nodes that have sites.
        waits: ``{asynchronous node: {path of a result: its wait node}}``.
        values: The graph's tensors.
        prefix: What operation and buffer names start with.
    """

    problem: Problem
    sites: tuple[Site, ...]
    homes: tuple[Home, ...]
    specs: dict[fx.Node, OpSpec]
    waits: dict[fx.Node, dict[tuple[int, ...], fx.Node]]
    values: Values
    prefix: str = ""

    def at(self, node: fx.Node) -> list[Site]:
        """The sites of one node, in the order of its schema."""
        return [s for s in self.sites if s.node is node]


def capture_fx(
    program: fx.Graph | fx.GraphModule | Any,
    example_inputs: Sequence[Any] | None = None,
    *,
    prefix: str = "",
    lookup: Callable[[Any], OpSpec | None] = spec_for,
    producer: Callable[[fx.Node], Write | None] = writes_inductor,
    skip: Callable[[OpSpec, Requirement], str | None] = lambda _spec, _requirement: None,
) -> Captured:
    """Capture the declared tensors of an FX program.

    Args:
        program: An ``fx.Graph``, a ``GraphModule`` or an ``ExportedProgram``.
        example_inputs: Inputs to propagate (on fake tensors) where nodes carry no sizes.
        prefix: Put before the names of operations and buffers.
        lookup: Gives what is declared of an op, or None.
        producer: Says how a node can write into memory it is given, or None.
        skip: Gives the reason why a requirement is not to be met, or None to meet it.

    Returns:
        The problem and the decisions behind it.

    Raises:
        CaptureError: The program is of another kind, or has no sizes.

    Collective: no.
    """
    graph, module = _graph_of(program)
    builder = _Builder(graph, module, example_inputs, prefix, lookup, producer, skip)
    return builder.build()


def _graph_of(program: Any) -> tuple[fx.Graph, fx.GraphModule | None]:
    if isinstance(program, fx.Graph):
        owner = program.owning_module
        return program, owner if isinstance(owner, fx.GraphModule) else None
    if isinstance(program, fx.GraphModule):
        return program.graph, program
    inner = getattr(program, "graph_module", None)  # ExportedProgram
    if isinstance(inner, fx.GraphModule):
        return inner.graph, inner
    raise CaptureError(
        f"cannot plan a {type(program).__name__}",
        expected="an fx.Graph, a GraphModule, an ExportedProgram or a Problem",
        got=type(program).__name__,
        fix="trace the program first, for example with torch.export.export",
    )


def overload_of(target: Any) -> torch._ops.OpOverload | None:
    """The overload that a node calls; packets stand for their only or default overload."""
    if isinstance(target, torch._ops.OpOverload):
        return target
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = target.overloads()
        if "default" in names:
            return target.default  # type: ignore[no-any-return]
        if len(names) == 1:
            return getattr(target, names[0])  # type: ignore[no-any-return]
    inner = getattr(target, "_opoverload", None)  # a CustomOpDef called directly
    return inner if isinstance(inner, torch._ops.OpOverload) else None


def _element_where(where: str, path: tuple[int, ...]) -> str:
    return ".".join([where, *map(str, path)])


def _static_nbytes(fake: Any) -> int | None:
    """Bytes of the tensor's storage, or None while they are symbolic."""
    nbytes = fake.untyped_storage().nbytes()
    return nbytes if isinstance(nbytes, int) else None


def _is_static(fake: Any) -> bool:
    numbers = [*fake.shape, *fake.stride(), fake.storage_offset()]
    return all(isinstance(n, int) for n in numbers) and _static_nbytes(fake) is not None


@define(eq=False)
class _Request:
    """A requirement, matched with the tensor it is about."""

    node: fx.Node
    spec: OpSpec
    group: str
    requirement: Requirement
    where: str
    kind: Literal["argument", "result"]
    value: Value
    writes: bool


@define(eq=False)
class _Builder:
    graph: fx.Graph
    module: fx.GraphModule | None
    example_inputs: Sequence[Any] | None
    prefix: str
    lookup: Callable[[Any], OpSpec | None]
    producer: Callable[[fx.Node], Write | None]
    skip: Callable[[OpSpec, Requirement], str | None]

    order: dict[fx.Node, int] = field(init=False, factory=dict)
    values: Values = field(init=False)
    classes: dict[Value, list[Value]] = field(init=False, factory=dict)
    escaping: set[Value] = field(init=False, factory=set)
    homes: dict[Value, Home] = field(init=False, factory=dict)
    buffers: dict[str, Buffer] = field(init=False, factory=dict)
    sites: list[Site] = field(init=False, factory=list)
    unplanned: list[Unplanned] = field(init=False, factory=list)
    waits: dict[fx.Node, dict[tuple[int, ...], fx.Node]] = field(init=False, factory=dict)
    specs: dict[fx.Node, OpSpec] = field(init=False, factory=dict)
    wait_nodes: list[fx.Node] = field(init=False, factory=list)

    def build(self) -> Captured:
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}
        declared = [(n, s) for n in self.graph.nodes if (s := self._spec(n)) is not None]
        fakes = example_values(self.graph, self.module, self.example_inputs)
        for node, spec in declared:
            self._require_values(node, spec, fakes)
        self.values = Values.of(self.graph, fakes)
        for value in self.values.tensors:
            self.classes.setdefault(self.values.find(value), []).append(value)
        for node in self.graph.nodes:
            if node.op == "output":
                self.escaping |= {
                    self.values.find(v) for n in node.all_input_nodes for v in self._of(n)
                }
        requests = [r for node, spec in declared for r in self._requests(node, spec)]
        for request in requests:
            self.specs[request.node] = request.spec
        for request in requests:
            if request.kind == "result":
                self._decide_result(request)
        for request in requests:
            if request.kind == "argument":
                self._decide_argument(request)
        self.wait_nodes = [n for n in self.graph.nodes if is_wait(n)]
        for node, spec in declared:
            if spec.asynchronous:
                self.waits[node] = self._waits_of(node)
        rank = {(s.node, s.where): i for i, s in enumerate(self.sites)}
        self.sites.sort(key=lambda s: (self.order[s.node], rank[(s.node, s.where)]))
        return Captured(
            problem=self._problem(),
            sites=tuple(self.sites),
            homes=tuple(self.homes.values()),
            specs=self.specs,
            waits=self.waits,
            values=self.values,
            prefix=self.prefix,
        )

    # -- what is declared --------------------------------------------------------------------

    def _spec(self, node: fx.Node) -> OpSpec | None:
        if node.op != "call_function":
            return None
        overload = overload_of(node.target)
        return None if overload is None else self.lookup(overload)

    def _require_values(self, node: fx.Node, spec: OpSpec, fakes: dict[fx.Node, Any]) -> None:
        for needed in [*node.all_input_nodes, node]:
            if needed not in fakes:
                raise CaptureError(
                    f"node {needed.name!r} has no shape, and {spec.op} needs it",
                    expected="a fake tensor in node.meta['val'] of every node",
                    fix="pass example_inputs, or trace the graph with make_fx or torch.export",
                    node=needed.name,
                    op=spec.op,
                )

    def _of(self, node: fx.Node) -> list[Value]:
        return self.values.of_node(node)

    def _requests(self, node: fx.Node, spec: OpSpec) -> Iterable[_Request]:
        overload = overload_of(node.target)
        assert overload is not None
        bound = bind_arguments(overload, node.args, node.kwargs)
        group = resolve_group_name(spec, overload, node.args, node.kwargs)
        mutated = {
            a.name
            for a in overload._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        }
        for requirement in spec.requirements:
            head, _, rest = requirement.where.partition(".")
            common = (node, spec, group, requirement)
            if head == "return":
                index = (int(rest),) if rest else ()
                several = len(overload._schema.returns) > 1
                for path, _ in tensor_leaves(self.values.fakes.get(node)):
                    if index and (path[:1] if several else path[: len(index)]) != index:
                        continue
                    where = _element_where("return", path)
                    yield _Request(*common, where, "result", (node, path), writes=True)
                continue
            for path, source in argument_nodes(bound.get(head)):
                for value_path, _ in tensor_leaves(self.values.fakes.get(source)):
                    where = _element_where(head, (*path, *value_path))
                    value = (source, value_path)
                    yield _Request(*common, where, "argument", value, writes=head in mutated)

    # -- what is decided ---------------------------------------------------------------------

    def _leave_out(self, request: _Request, reason: str) -> None:
        fake = self.values.tensors[request.value]
        nbytes = _static_nbytes(fake) if _is_static(fake) else None
        name = f"{self.prefix}{request.value[0].name}"
        self.unplanned.append(Unplanned(name, request.spec.op, request.where, reason, nbytes))
        self._site(request, None, None, reason)

    def _site(
        self,
        request: _Request,
        how: Literal["bind", "stage"] | None,
        buffer: str | None,
        reason: str = "",
    ) -> None:
        self.sites.append(
            Site(
                node=request.node,
                where=request.where,
                kind=request.kind,
                how=how,
                buffer=buffer,
                reason=reason,
                source=request.value[0],
                path=request.value[1],
                writes=request.writes,
            )
        )

    def _unplaceable(self, request: _Request) -> str | None:
        reason = self.skip(request.spec, request.requirement)
        if reason is not None:
            return reason
        fake = self.values.tensors[request.value]
        if type(fake).__name__ not in ("FakeTensor", "Tensor", "Parameter"):
            return f"is a {type(fake).__name__}, not a plain tensor"
        if fake.layout is not torch.strided:
            return f"has layout {fake.layout}"
        if not _is_static(fake):
            return f"its size {tuple(fake.shape)} is symbolic; mark it static to plan it"
        if fake.numel() == 0:
            return "it has no elements"
        return None

    def _buffer(self, request: _Request, name: str, value: Value, *, whole: bool) -> Buffer:
        fake = self.values.tensors[value]
        nbytes = _static_nbytes(fake) if whole else fake.numel() * fake.element_size()
        assert nbytes is not None
        buffer = Buffer(
            name=self.prefix + name,
            nbytes=nbytes,
            group=request.group,
            align=request.requirement.align,
            signal_pad=request.requirement.signal_pad,
            op=request.spec.op,
            where=request.where,
            dtype=str(fake.dtype).removeprefix("torch."),
            shape=tuple(fake.shape),
        )
        self.buffers[buffer.name] = buffer
        return buffer

    def _decide_result(self, request: _Request) -> None:
        reason = self._unplaceable(request)
        if reason is not None:
            self._leave_out(request, reason)
            return
        value = request.value
        root = self.values.find(value)
        origin = self._origin(root)
        if origin != value:
            return  # an in-place op returns its argument, whose own site speaks for it
        name = _element_where(value[0].name, value[1])
        if root in self.escaping:
            buffer = self._buffer(request, f"{name}:result", value, whole=True)
            self._site(request, "stage", buffer.name, "it leaves the graph")
            return
        if self._untraceable(root):
            buffer = self._buffer(request, f"{name}:result", value, whole=True)
            self._site(request, "stage", buffer.name, "its aliases cannot be followed")
            return
        buffer = self._buffer(request, name, value, whole=True)
        self.homes[root] = Home(buffer.name, value[0], value[1], "declared")
        self._site(request, "bind", buffer.name)

    def _decide_argument(self, request: _Request) -> None:
        reason = self._unplaceable(request)
        if reason is not None:
            self._leave_out(request, reason)
            return
        root = self.values.find(request.value)
        home = self.homes.get(root)
        reason = self._why_stage(request, root, home)
        if reason is None and home is None:
            origin = self._origin(root)
            write = self.producer(origin[0])
            assert write is not None
            name = _element_where(origin[0].name, origin[1])
            buffer = self._buffer(request, name, origin, whole=True)
            home = self.homes[root] = Home(buffer.name, origin[0], origin[1], write)
        if reason is None:
            assert home is not None
            self._widen(home.buffer, request.requirement)
            self._site(request, "bind", home.buffer)
            return
        if request.writes and not self._is_last_alias(request, root):
            self._leave_out(request, "the op writes it, and other views of it are used later")
            return
        name = f"{request.node.name}.{request.where}"
        buffer = self._buffer(request, name, request.value, whole=False)
        self._site(request, "stage", buffer.name, reason)

    def _widen(self, name: str, requirement: Requirement) -> None:
        """One storage, several requirements: the strictest holds."""
        have = self.buffers[name]
        self.buffers[name] = evolve(
            have,
            align=max(have.align, requirement.align),
            signal_pad=have.signal_pad or requirement.signal_pad,
        )

    def _why_stage(self, request: _Request, root: Value, home: Home | None) -> str | None:
        """Why the argument cannot simply lie in its placement, or None if it can."""
        fake = self.values.tensors[request.value]
        if not fake.is_contiguous():
            return "it is not contiguous"
        itemsize = fake.element_size()
        if (fake.storage_offset() * itemsize) % request.requirement.align:
            return f"its view starts off the alignment of {request.requirement.align} bytes"
        if home is not None:
            if self.buffers[home.buffer].group != request.group:
                return f"its storage is symmetric over group {self.buffers[home.buffer].group}"
            return None
        origin = self._origin(root)
        if origin[0].op != "call_function":
            return "it comes from outside the graph"
        if root in self.escaping:
            return "its storage leaves the graph"
        if self._untraceable(root):
            return "its aliases cannot be followed"
        if self.producer(origin[0]) is None:
            return f"its producer {_target_name(origin[0])} cannot write into given memory"
        made = self.values.tensors[origin]
        dense = made.numel() * made.element_size() == _static_nbytes(made)
        if not dense or made.storage_offset() != 0 or not _is_static(made):
            return "its producer's result is not dense"
        return None

    def _is_last_alias(self, request: _Request, root: Value) -> bool:
        """Whether nobody looks at a written storage through another view after the op.

        Such views of an input see the bytes that are copied back; those of a tensor that the graph
        made would not, because its readers are given the copy instead.
        """
        if self._origin(root)[0].op != "call_function":
            return True
        after = self.order[request.node]
        results = set(self._of(request.node))
        return not any(
            self.order[user] > after
            for value in self.classes[root]
            if value != request.value and value not in results and not is_wait(value[0])
            for user in value[0].users
        )

    def _origin(self, root: Value) -> Value:
        """The first value of a storage class, in graph order."""
        return min(self.classes[root], key=lambda v: (self.order[v[0]], v[1]))

    def _untraceable(self, root: Value) -> bool:
        """Whether a class joins values of which more than one could be the storage's maker."""
        origin = self._origin(root)
        for value in self.classes[root]:
            node = value[0]
            if value == origin or is_pure_view(node):
                continue
            overload = overload_of(node.target) if node.op == "call_function" else None
            if overload is None or not any(
                r.alias_info is not None for r in overload._schema.returns
            ):
                return True
            if overload.is_view and not overload._schema.is_mutable:
                continue
        return False

    def _waits_of(self, node: fx.Node) -> dict[tuple[int, ...], fx.Node]:
        """For each result of an asynchronous node, the first wait after it."""
        roots: dict[Value, list[tuple[int, ...]]] = {}
        for value in self._of(node):
            roots.setdefault(self.values.find(value), []).append(value[1])
        found: dict[tuple[int, ...], fx.Node] = {}
        for other in self.wait_nodes:
            if self.order[other] <= self.order[node]:
                continue
            for source in other.all_input_nodes:
                for value in self._of(source):
                    for path in roots.get(self.values.find(value), ()):
                        found.setdefault(path, other)
        return found

    # -- what it does with them --------------------------------------------------------------

    def _problem(self) -> Problem:
        from symmplan.capture.steps import Steps

        steps = Steps(self.prefix, self.order, self.specs, self.waits)
        by_node: dict[fx.Node, list[Site]] = {}
        for site in self.sites:
            by_node.setdefault(site.node, []).append(site)
        for node in self.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            sites = by_node.get(node, [])
            touched = {} if is_pure_view(node) and not is_wait(node) else self._touched(node)
            steps.node(node, sites, touched, self._group(sites))
        operations, accesses = steps.finish()
        return Problem(
            buffers=tuple(self.buffers.values()),
            operations=operations,
            accesses=accesses,
            unplanned=tuple(self.unplanned),
        )

    def _group(self, sites: list[Site]) -> str | None:
        names = [self.buffers[s.buffer].group for s in sites if s.buffer is not None]
        return names[0] if names else None

    def _touched(self, node: fx.Node) -> dict[str, bool]:
        """Buffers that the node touches through any alias -> whether it may write them."""
        touched: dict[str, bool] = {}
        if is_wait(node):
            return touched
        overload = overload_of(node.target) if node.op == "call_function" else None
        writes = _written_nodes(overload, node)
        for source in node.all_input_nodes:
            if node.target is _GETITEM and not isinstance(self.values.fakes[source], torch.Tensor):
                continue
            for value in self._of(source):
                home = self.homes.get(self.values.find(value))
                if home is not None:
                    write = overload is None or source in writes
                    touched[home.buffer] = touched.get(home.buffer, False) or write
        for value in self._of(node):
            home = self.homes.get(self.values.find(value))
            if home is not None and home.node is node:
                touched[home.buffer] = True
        return touched


def _getitem() -> Any:
    import operator

    return operator.getitem


_GETITEM = _getitem()


def is_wait(node: fx.Node) -> bool:
    overload = overload_of(node.target) if node.op == "call_function" else None
    return overload is not None and overload._schema.name == "_c10d_functional::wait_tensor"


def _target_name(node: fx.Node) -> str:
    overload = overload_of(node.target)
    return overload.name() if overload is not None else str(node.target)


def _written_nodes(overload: Any, node: fx.Node) -> set[fx.Node]:
    if overload is None:
        return set()
    bound = bind_arguments(overload, node.args, node.kwargs)
    return {
        source
        for a in overload._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
        for _, source in argument_nodes(bound.get(a.name))
    }


def argument_nodes(
    argument: Any, path: tuple[int, ...] = ()
) -> Iterable[tuple[tuple[int, ...], fx.Node]]:
    """Yield ``(path, node)`` of every node in an argument, lists and tuples opened."""
    if isinstance(argument, fx.Node):
        yield path, argument
    elif isinstance(argument, (list, tuple)):
        for i, item in enumerate(argument):
            yield from argument_nodes(item, (*path, i))
