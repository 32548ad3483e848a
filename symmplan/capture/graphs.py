"""FX nodes, the tensors that they return, and which of those are the same storage.

[Note: aliases]
    Two values are aliases if the schema of the op that made one says so, or if their fake tensors
    share a storage, or if an op without a schema made one from the other. A wrong alias costs
    bytes; a missed one corrupts. So the three are joined.
"""

from __future__ import annotations

import operator
import pathlib
import re
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from attrs import define, field, frozen
from torch import fx

from symmplan.errors import CaptureError
from symmplan.registry import bind_arguments
from symmplan.torch_private.ops import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
)
from symmplan.torch_private.torch_registry import as_overload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: Where in nested lists and tuples something sits.
Path: TypeAlias = tuple[int, ...]
#: A tensor of a graph: the node that returns it, and where in the node's result it sits.
Value: TypeAlias = tuple[fx.Node, Path]


#: The model itself, as Dynamo calls it: a name of the frame that calls it.
_ROOT = re.compile(r"^(L__self__|L\['\w+'\])[._]*")
#: torch's own files.
_TORCH = f"{pathlib.Path(torch.__file__).parent}/"
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


def stack_of(node: fx.Node) -> tuple[str, ...]:
    """Where the program makes a call, ``"file:line in function"``, the innermost last."""
    if "symmplan_stack" in node.meta:
        return tuple(node.meta["symmplan_stack"])
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    return tuple(f"{file}:{line} in {name}" for file, line, name in found)


def module_of(node: fx.Node) -> str:
    """The module that makes a call, by its name in the program; empty where that is not known.

    Of a call of backward, the module whose forward it belongs to. Of an eager call, the module
    whose parameter it reads.
    """
    if "symmplan_module" in node.meta:
        return str(node.meta["symmplan_module"])
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        for path, *_ in reversed([*(node.meta.get(key) or {}).values()]):
            name = _ROOT.sub("", str(path))
            if name:
                return name
    return ""


def label_of(made: fx.Node, call: fx.Node) -> str:
    """What a tensor of a call is called in the program: its module, or the line that makes it.

    Args:
        made: The node that makes the tensor: what a call is given has the name of the module that
            computed it.
        call: The call: what it returns has the name of the first module inside that reads it.

    Returns:
        The module's name, ``"function, file:line"`` where no module is known, or nothing.
    """
    if made is not call:
        return module_of(made) or module_of(call) or _line_of(made) or _line_of(call)
    own, reader = module_of(call), call
    while reader.users and (reader is call or is_pure_view(reader)):
        reader = next(iter(reader.users))
    name = module_of(reader)
    return (name if name.startswith(own) else own) or _line_of(call)


def _line_of(node: fx.Node) -> str:
    """The user's function and line that make a call, without the file's folder."""
    for frame in reversed(stack_of(node)):
        where, _, function = frame.rpartition(" in ")
        if not where.startswith(_TORCH):
            line = pathlib.Path(where).name
            return line if function == "<module>" else f"{function}, {line}"
    return ""


#: Where a node has it.
AGREED = "symmplan_unequal_parts"


@frozen
class LiveRange:
    """Of what an all-to-all of unequal parts receives or sends: how large, and how long in use.

    Attributes:
        nbytes: Bytes of the storage; of the largest on any rank, where the ranks have agreed.
        since: How many of the iteration's declared calls, and waits for them, some rank has made
            when it asks for the memory; None if a declared call makes it.
        until: How many some rank may have made before it has dropped it; None if that is not a
            whole tensor that the iteration makes, in a placement if told to, and drops.
        asked: When it asks for the memory, as a number in the order in which a rank asks for such
            memory and drops it; the least of all ranks, where they have agreed.
        dropped: When it has dropped it; the greatest of all ranks.
    """

    nbytes: int
    since: int | None
    until: int | None
    asked: int = 0
    dropped: int = 0


@frozen
class UnequalParts:
    """What the ranks have agreed on for an all-to-all whose sizes are others on each of them.

    Attributes:
        received: Of its result.
        sent: Of its input; None if that may lie anywhere.
    """

    received: LiveRange
    sent: LiveRange | None


def unequal_parts(node: fx.Node) -> UnequalParts | None:
    """What the ranks have agreed on for a call of unequal parts; None of other calls."""
    found: UnequalParts | None = node.meta.get(AGREED)
    return found


def overload_of(target: Any) -> OpOverload | None:
    """The overload that a node calls; packets stand for their only or default overload."""
    if isinstance(target, OpOverload):
        return target
    if isinstance(target, OpOverloadPacket):
        names = target.overloads()
        if "default" in names:
            return target.default
        if len(names) == 1:
            return getattr(target, names[0])  # type: ignore[no-any-return]
    return as_overload(target)  # a CustomOpDef may be called directly


def called(node: fx.Node) -> OpOverload | None:
    """The overload that a node calls itself, or None."""
    return overload_of(node.target) if node.op == "call_function" else None


def hidden_calls(
    graph: fx.Graph, module: torch.nn.Module | None
) -> Iterator[tuple[fx.Node, OpOverload, str]]:
    """Yield ``(node, overload, why)`` of every call that is not a node of the graph itself.

    Those are the calls that a node of a higher-order op makes: of the op that it functionalizes,
    and of the ops in its subgraphs (``torch.cond`` and the like).
    """
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            wrapped = overload_of(node.args[0]) if node.args else None
            if wrapped is not None:
                yield node, wrapped, f"its op is wrapped in {node.target.name()}"
        inner = getattr(module, node.target, None) if node.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            why = f"its op is inside {node.target}, a graph that another op runs"
            for call in inner.graph.nodes:
                overload = called(call)
                if overload is not None:
                    yield call, overload, why
            for call, overload, _ in hidden_calls(inner.graph, inner):
                yield call, overload, why


def is_getitem(node: fx.Node) -> bool:
    """Whether the node picks one of several results."""
    return node.target is operator.getitem


def is_wait(node: fx.Node) -> bool:
    """Whether the node ends asynchronous work."""
    overload = called(node)
    return overload is not None and overload._schema.name == "_c10d_functional::wait_tensor"


def is_pure_view(node: fx.Node) -> bool:
    """Whether the node only makes another view of its input, touching no byte."""
    if is_getitem(node):
        return isinstance(node.args[0], fx.Node)
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return is_wait(node) or (bool(target.is_view) and not target._schema.is_mutable)


def target_name(node: fx.Node) -> str:
    """What the node calls, for people."""
    overload = overload_of(node.target)
    return overload.name() if overload is not None else str(node.target)


def written_arguments(overload: OpOverload) -> list[str]:
    """Names of the arguments that the op writes, by its schema."""
    infos = ((a.name, a.alias_info) for a in overload._schema.arguments)
    return [name for name, info in infos if info is not None and info.is_write]


def written_nodes(overload: OpOverload | None, node: fx.Node) -> set[fx.Node]:
    """The nodes whose tensors the op writes, by its schema."""
    if overload is None:
        return set()
    bound = bind_arguments(overload, node.args, node.kwargs)
    written = (bound.get(name) for name in written_arguments(overload))
    return {source for argument in written for _, source in argument_nodes(argument)}


def argument_nodes(argument: Any) -> Iterator[tuple[Path, fx.Node]]:
    """Yield ``(path, node)`` of every node in an argument, lists and tuples opened."""
    return _leaves(argument, fx.Node, ())


def tensor_leaves(value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield ``(path, tensor)`` of every tensor in nested lists and tuples."""
    return _leaves(value, torch.Tensor, ())


def at_path(value: Any, path: Path) -> Any:
    """What sits at a path of nested lists and tuples."""
    for i in path:
        value = value[i]
    return value


def _leaves(value: Any, kind: type, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, kind):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _leaves(item, kind, (*path, i))


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
    modes = (x.fake_mode for x in example_inputs if isinstance(x, FakeTensor))
    mode = next(modes, None) or FakeTensorMode(allow_non_fake_inputs=True)
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
        CaptureError: The example inputs do not fit.
    """
    if example_inputs is not None:
        if module is not None:
            return _propagate(module, example_inputs)
        # GraphModule copies the graph: map its values back to the nodes we were given.
        values = _propagate(fx.GraphModule(torch.nn.Module(), graph), example_inputs)
        by_name = {n.name: v for n, v in values.items()}
        return {n: by_name[n.name] for n in graph.nodes if n.name in by_name}
    found: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if "val" in node.meta or "example_value" in node.meta:
            found[node] = node.meta.get("val", node.meta.get("example_value"))
        elif node.op == "get_attr" and module is not None:
            value: Any = module
            for part in str(node.target).split("."):
                value = getattr(value, part, None)
            found[node] = value
        elif isinstance(node.target, OpOverload) and not node.target._schema.returns:
            found[node] = None
    return found


@define
class Values:
    """Tensors of a graph, and their storage classes.

    Attributes:
        graph: The graph.
        fakes: ``{node: fake value}``.
        order: ``{node: its position}``.
        tensors: ``{value: fake tensor}``.
    """

    graph: fx.Graph
    fakes: Mapping[fx.Node, Any]
    order: dict[fx.Node, int]
    tensors: dict[Value, Any] = field(factory=dict)
    _parent: dict[Value, Value] = field(factory=dict)

    @classmethod
    def of(cls, graph: fx.Graph, fakes: Mapping[fx.Node, Any]) -> Values:
        """Collect the tensors of ``graph`` and join their aliases."""
        self = cls(graph, fakes, {node: i for i, node in enumerate(graph.nodes)})
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

    def classes(self) -> dict[Value, list[Value]]:
        """``{representative: all values of its storage}``, those in graph order."""
        found: dict[Value, list[Value]] = {}
        for value in self.tensors:
            found.setdefault(self.find(value), []).append(value)
        return found

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
        if is_getitem(node) and isinstance(node.args[0], fx.Node):
            source, index = node.args[0], node.args[1]
            for _, path in results:
                full = (source, (index, *path) if isinstance(index, int) else path)
                if full in self._parent:
                    self.join(full, (node, path))
                else:  # indexing a tensor itself
                    self._join_all([source], [(node, path)])
            return
        target: Any = node.target
        if isinstance(target, OpOverloadPacket):
            target = getattr(target, "default", None)
        if not isinstance(target, OpOverload):
            # No schema to ask: whatever came in may be what comes out.
            if not self._has_storages(node, results):
                self._join_all(node.all_input_nodes, results)
            return
        if is_wait(node):
            self._join_all(node.all_input_nodes, results)
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
                    sources += [source for _, source in argument_nodes(given)]
            mine = [v for v in results if len(schema.returns) == 1 or v[1][:1] == (i,)]
            self._join_all(sources, mine)

    def _has_storages(self, node: fx.Node, results: Sequence[Value]) -> bool:
        """Whether fake storages alone can tell the aliases of this node."""
        known = [*results, *(v for n in node.all_input_nodes for v in self.of_node(n))]
        return all(_storage_key(self.tensors[v]) is not None for v in known)


def _storage_key(fake: Any) -> int | None:
    try:
        return int(fake.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None  # subclasses and sparse tensors may have none
