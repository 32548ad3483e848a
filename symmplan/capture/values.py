"""The tensors of an FX graph: their sizes, and which of them are the same storage.

[Note: aliases]
    Two values are aliases if the schema of the op that made one says so, or if their fake tensors
    share a storage, or if an op without a schema made one from the other. A wrong alias costs
    bytes; a missed one corrupts. So the three are joined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from attrs import define, field
from torch import fx

from symmplan.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Value", "Values", "example_values", "is_pure_view", "tensor_leaves"]

#: A tensor of a graph: the node that returns it, and where in the node's result it sits.
Value: TypeAlias = tuple[fx.Node, tuple[int, ...]]

_WAIT = "_c10d_functional::wait_tensor"


def tensor_leaves(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yield ``(path, tensor)`` of every tensor in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensor_leaves(item, (*path, i))


class _Recorder(fx.Interpreter):
    """Runs a graph on fake tensors and keeps every node's value, touching no node's metadata."""

    def __init__(self, module: fx.GraphModule, mode: Any) -> None:
        super().__init__(module)
        self.mode = mode
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "get_attr" and isinstance(value, torch.Tensor):
            value = self.mode.from_tensor(value, static_shapes=True)
        self.values[n] = value
        return value


def _propagate(module: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = next(
        (x.fake_mode for x in example_inputs if isinstance(x, FakeTensor)),
        None,
    ) or FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [
        mode.from_tensor(x, static_shapes=True)
        if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)
        else x
        for x in example_inputs
    ]
    recorder = _Recorder(module, mode)
    wanted = sum(n.op == "placeholder" for n in module.graph.nodes)
    if wanted != len(fakes):
        raise CaptureError(
            "example_inputs do not match the graph's inputs",
            expected=f"{wanted} inputs",
            got=len(fakes),
            fix="pass one example per placeholder, in order",
        )
    try:
        with mode:
            recorder.run(*fakes)
    except Exception as error:
        raise CaptureError(
            f"the graph does not run on the example inputs: {error}",
            fix="pass example_inputs with the shapes and dtypes that the graph was made for",
        ) from error
    return recorder.values


def example_values(
    graph: fx.Graph, module: fx.GraphModule | None, example_inputs: Sequence[Any] | None
) -> dict[fx.Node, Any]:
    """Fake values of all nodes, from metadata or by propagating ``example_inputs``.

    Raises:
        CaptureError: A node has no value and no example inputs are given, or they do not fit.
    """
    if example_inputs is not None:
        if module is None:
            module = fx.GraphModule(torch.nn.Module(), graph)
            # GraphModule copies the graph: map its values back to the nodes we were given.
            values = _propagate(module, example_inputs)
            by_name = {n.name: v for n, v in values.items()}
            return {n: by_name[n.name] for n in graph.nodes if n.name in by_name}
        return _propagate(module, example_inputs)
    found: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        for key in ("val", "example_value"):
            if key in node.meta:
                found[node] = node.meta[key]
                break
        else:
            if node.op == "get_attr" and module is not None:
                found[node] = _attribute(module, node)
            elif _returns_nothing(node):
                found[node] = None
    return found


def _returns_nothing(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and not target._schema.returns


def _attribute(module: torch.nn.Module, node: fx.Node) -> Any:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def is_pure_view(node: fx.Node) -> bool:
    """Whether the node only makes another view of its input, touching no byte."""
    target = node.target
    if target is _getitem():
        return isinstance(node.args[0], fx.Node)
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.name().startswith(_WAIT):
        return True
    return bool(target.is_view) and not target._schema.is_mutable


def _getitem() -> Any:
    import operator

    return operator.getitem


def _input_nodes(node: fx.Node) -> list[fx.Node]:
    return list(node.all_input_nodes)


@define
class Values:
    """Tensors of a graph, and their storage classes.

    Attributes:
        fakes: ``{node: fake value}``.
        tensors: ``{value: fake tensor}``.
    """

    fakes: Mapping[fx.Node, Any]
    tensors: dict[Value, Any] = field(factory=dict)
    _parent: dict[Value, Value] = field(factory=dict)

    @classmethod
    def of(cls, graph: fx.Graph, fakes: Mapping[fx.Node, Any]) -> Values:
        """Collect the tensors of ``graph`` and join their aliases."""
        self = cls(fakes)
        storages: dict[int, Value] = {}
        for node in graph.nodes:
            if node.op == "output":
                continue
            for path, fake in tensor_leaves(fakes.get(node)):
                value = (node, path)
                self.tensors[value] = fake
                self._parent[value] = value
                key = _storage_key(fake)
                if key is not None:
                    self.join(storages.setdefault(key, value), value)
            self._join_by_schema(node)
        return self

    def find(self, value: Value) -> Value:
        """The representative of the value's storage class."""
        root = value
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[value] != root:
            self._parent[value], value = root, self._parent[value]
        return root

    def of_node(self, node: fx.Node) -> list[Value]:
        """All tensors that the node returns."""
        return [(node, path) for path, _ in tensor_leaves(self.fakes.get(node))]

    def join(self, a: Value, b: Value) -> None:
        """Say that two values are the same storage."""
        ra, rb = self.find(a), self.find(b)
        if ra != rb:
            self._parent[rb] = ra

    def _join_all(self, sources: Sequence[fx.Node], results: Sequence[Value]) -> None:
        for source in sources:
            for value in self.of_node(source):
                for result in results:
                    self.join(value, result)

    def _join_by_schema(self, node: fx.Node) -> None:
        results = self.of_node(node)
        if not results or node.op in ("placeholder", "get_attr"):
            return
        if node.target is _getitem() and isinstance(node.args[0], fx.Node):
            source = node.args[0]
            index = node.args[1]
            for _, path in results:
                full = (source, (index, *path) if isinstance(index, int) else path)
                if full in self._parent:
                    self.join(full, (node, path))
                else:  # indexing a tensor itself
                    self._join_all([source], [(node, path)])
            return
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):
            if isinstance(target, torch._ops.OpOverloadPacket):
                target = target.default if hasattr(target, "default") else None
            if target is None or not isinstance(target, torch._ops.OpOverload):
                # No schema to ask: whatever came in may be what comes out.
                if not _has_storages(self, node, results):
                    self._join_all(_input_nodes(node), results)
                return
        if target.name().startswith(_WAIT):
            self._join_all(_input_nodes(node), results)
            return
        schema = target._schema
        for i, ret in enumerate(schema.returns):
            if ret.alias_info is None:
                continue
            sets = ret.alias_info.before_set
            sources = []
            for j, arg in enumerate(schema.arguments):
                if arg.alias_info is not None and arg.alias_info.before_set & sets:
                    given = node.kwargs.get(arg.name, node.args[j] if j < len(node.args) else None)
                    sources += _nodes_in(given)
            mine = [v for v in results if len(schema.returns) == 1 or v[1][:1] == (i,)]
            self._join_all(sources, mine)


def _has_storages(values: Values, node: fx.Node, results: Sequence[Value]) -> bool:
    """Whether fake storages alone can tell the aliases of this node."""
    known = [values.tensors[v] for v in results]
    known += [values.tensors[v] for n in _input_nodes(node) for v in values.of_node(n)]
    return all(_storage_key(t) is not None for t in known)


def _storage_key(fake: Any) -> int | None:
    try:
        return int(fake.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None  # subclasses and sparse tensors may have none


def _nodes_in(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(argument, found.append)
    return found
