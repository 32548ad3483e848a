"""FX graphs as tiny programs, from nothing but their nodes.

A graph is run once on fake tensors, which tell what every node's arguments and results are views
of; the schemas tell which of them it writes. So a graph that was rewritten to follow a plan is
judged by what it does, whatever it was meant to do.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from explorer.machine import Symbols, lockstep
from explorer.program import (
    TinyBuffer,
    TinyCall,
    TinyPlan,
    TinyProgram,
    Verdict,
    explore,
    threads_of,
)
from torch import fx

from symmplan.torch_private.ops import OpOverload, tree_leaves

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

__all__ = ["GraphOp", "explore_graph"]

#: Bytes of a cell; sizes of elements and offsets are multiples of it.
WORD = 4


@frozen
class GraphOp:
    """What a custom op does.

    Attributes:
        kind: As in `TinyCall`.
        reads: The arguments that it reads.
        writes: The arguments that it writes, or ``"return"``.
        handshake: As in `TinyCall`.
        release: As in `TinyCall`.
        label: What its results are called; the same for forms of one op.
        group: The argument that names the group.
    """

    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    handshake: bool
    release: bool
    label: str
    group: str = "group_name"


@frozen
class _Form:
    """One form of a collective: where its input is and where its result goes."""

    kind: str
    result: str = "return"
    shm: bool = False  # or a kernel that meets on entry and on exit


_F, _S = "_c10d_functional::", "symmplan::"

#: What the forms of collectives do: torch's ``Functional.cpp``, and
#: `symmplan.memory.ops.one_sided`.
_COLLECTIVES = {
    f"{_F}all_gather_into_tensor": _Form("all_gather"),
    f"{_F}all_gather_into_tensor_out": _Form("all_gather", "out"),
    f"{_F}all_gather_into_tensor_coalesced": _Form("all_gather"),
    f"{_F}reduce_scatter_tensor": _Form("reduce_scatter"),
    f"{_F}reduce_scatter_tensor_out": _Form("reduce_scatter", "out"),
    f"{_F}reduce_scatter_tensor_coalesced": _Form("reduce_scatter"),
    f"{_F}all_reduce": _Form("all_reduce"),
    f"{_F}all_reduce_": _Form("all_reduce", "input"),
    f"{_F}all_reduce_coalesced": _Form("all_reduce"),
    f"{_F}broadcast": _Form("broadcast"),
    f"{_F}broadcast_": _Form("broadcast", "input"),
    f"{_F}all_to_all_single": _Form("all_to_all"),
    f"{_S}all_to_all_single_into": _Form("all_to_all", "out"),
    f"{_S}all_gather_out": _Form("all_gather", "out", shm=True),
    f"{_S}reduce_scatter_out": _Form("reduce_scatter", "out", shm=True),
    f"{_S}all_reduce_out": _Form("all_reduce", "out", shm=True),
    f"{_S}broadcast_out": _Form("broadcast", "out", shm=True),
    f"{_S}all_to_all_single_out": _Form("all_to_all", "out", shm=True),
    f"{_S}kernel_all_reduce_": _Form("all_reduce", "input"),
}

_COPIES = frozenset({"aten::copy_", "aten::clone", "aten::_to_copy"})


def explore_graph(
    module: fx.GraphModule,
    original: fx.GraphModule,
    *,
    ranks: int,
    groups: Mapping[str, tuple[tuple[int, ...], ...]],
    segments: Mapping[str, tuple[str, int]],
    ops: Mapping[str, GraphOp],
    transport: str = "wire",
    limit: int = 200,
) -> Verdict:
    """Run a rewritten graph in every order that its nodes allow, twice in a row.

    Right is what it computes where all ranks meet at each node, provided that its results are then
    those of the original.

    Args:
        module: The graph, with fake values on its inputs.
        original: The graph that it was made from.
        ranks: How many ranks run it.
        groups: ``{name: ranks of each group of that name}``.
        segments: ``{name of an input: (segment, byte at which it begins)}``.
        ops: What custom ops do, by qualified name without overload.
        transport: How process groups move bytes, as in `TinyCall`, where that can be chosen.
        limit: How many orders to run before giving up.

    Returns:
        The verdict; its kind is ``"other results"`` where the two do not compute the same.

    Collective: no.
    """
    symbols = Symbols()
    wanted, got = (
        _Reader(m, segments, ops, transport).program(ranks, groups) for m in (original, module)
    )
    if _results(*wanted, symbols) != _results(*got, symbols):
        return Verdict("other results", 0)
    program, plan = got
    return explore(program, plan, reference=plan, limit=limit)


def _results(program: TinyProgram, plan: TinyPlan, symbols: Symbols) -> dict[Hashable, list[int]]:
    """What a graph returns, by rank and iteration."""
    threads = threads_of(program, plan, apart=True)
    found: dict[Hashable, list[int]] = {}
    for (thread, _), value in sorted(lockstep(threads, symbols).items()):
        if threads[thread].call == "output":
            key = (threads[thread].rank, threads[thread].iteration)
            found.setdefault(key, []).append(value)
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    """The storage of a fake tensor."""
    return int(tensor.untyped_storage()._cdata)


class _Reader(fx.Interpreter):
    """Runs a graph on fake tensors and notes what its nodes do."""

    def __init__(
        self,
        module: fx.GraphModule,
        segments: Mapping[str, tuple[str, int]],
        ops: Mapping[str, GraphOp],
        transport: str,
    ) -> None:
        super().__init__(module)
        self.graph: fx.Graph = module.graph
        self.segments = segments
        self.ops = ops
        self.transport = transport
        self.cells: dict[str, tuple[Hashable, ...]] = {}
        self.calls: list[TinyCall] = []
        self.node: fx.Node | None = None
        self._storages: dict[int, tuple[str, int]] = {}
        self._pending: dict[int, list[str]] = {}
        self._kept: list[torch.Tensor] = []  # so that no storage's number is used again

    def program(
        self, ranks: int, groups: Mapping[str, tuple[tuple[int, ...], ...]]
    ) -> tuple[TinyProgram, TinyPlan]:
        """The graph as a program, in which every tensor that a node touches is a buffer of its own.

        Their cells are words of segments and storages.
        """
        from symmplan.torch_private.ops import FakeTensorMode

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        inputs, own = [], []
        for node in self.graph.find_nodes(op="placeholder"):
            like = node.meta["val"]
            with mode:
                made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            inputs.append(made)
            self._kept.append(made)
            if node.name in self.segments:
                self._storages[_key(made)] = self.segments[node.name]
            else:
                own.append(self._operand(f"input {node.name}", made))
        self.calls.append(TinyCall("inputs", "local", (), own))
        with mode:
            results = self.run(*inputs)
        outputs = [self._operand(f"output {i}", t) for i, t in enumerate(_tensors(results))]
        # Whoever gave an input may look at it again.
        self.calls.append(TinyCall("output", "local", (*outputs, *own)))
        for key in list(self._pending):
            self._end(key)
        buffers = tuple(TinyBuffer(name, len(cells)) for name, cells in self.cells.items())
        return TinyProgram(ranks, buffers, tuple(self.calls), groups), TinyPlan(self.cells)

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(target, OpOverload):
            return super().call_function(target, args, kwargs)
        name = target._schema.name
        given = dict(zip((a.name for a in target._schema.arguments), args, strict=False))
        given.update(kwargs)
        if name == f"{_F}wait_tensor":
            self._end(_key(args[0]))
            return args[0]
        result = super().call_function(target, args, kwargs)
        self._kept += _tensors(result)
        if name == f"{_S}barrier_":
            self._call("barrier", (), (), group=given["group_name"])
        elif name in self.ops:
            self._custom(self.ops[name], given, result)
        elif name in _COLLECTIVES:
            form = _COLLECTIVES[name]
            if form.result != "return" and result is not None:
                result = given[form.result]  # not all fake forms give back what they were given
            self._collective(form, given, result)
        elif name != f"{_S}fence_":
            self._local(target, given, result)
        return result

    def _operand(self, name: str, tensor: torch.Tensor) -> str:
        """A buffer for the words of a tensor, in the order of its elements."""
        where, begin = self._storages.setdefault(_key(tensor), (f"t{len(self._storages)}", 0))
        size = tensor.element_size()
        assert size % WORD == 0
        assert begin % WORD == 0
        places = [tensor.storage_offset()]
        for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
            places = [place + i * stride for place in places for i in range(n)]
        words = size // WORD
        self.cells[name] = tuple(
            (where, begin // WORD + place * words + i) for place in places for i in range(words)
        )
        return name

    def _call(
        self,
        kind: str,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        **facts: Any,
    ) -> str:
        assert self.node is not None
        name = f"{self.node.name}.{len(self.calls)}"
        given = [self._operand(f"{name} reads {i}", t) for i, t in enumerate(reads)]
        made = [self._operand(f"{name} writes {i}", t) for i, t in enumerate(writes)]
        if [self.cells[n] for n in given] == [self.cells[n] for n in made]:
            made = given
        self.calls.append(TinyCall(name, kind, given, made, **facts))
        return name

    def _end(self, key: int) -> None:
        """Wait for all work under way on a storage, as c10d's registry of works does."""
        for name in self._pending.pop(key, ()):
            self.calls.append(TinyCall(f"wait {name}", "wait", of=name))

    def _local(self, target: Any, given: Mapping[str, Any], result: Any) -> None:
        """Any op that touches this rank's bytes alone."""
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        others: list[Any] = []
        for argument in target._schema.arguments:
            value = given.get(argument.name)
            found = _tensors(value)
            written = argument.alias_info is not None and argument.alias_info.is_write
            only = argument.is_out or target._schema.name in ("aten::copy_", f"{_S}poison_")
            writes += found if written else []
            reads += [] if written and only else found
            if not found and not argument.is_out:
                others.append(str(value))
        known = {_key(t) for t in (*reads, *writes)}
        writes += [t for t in _tensors(result) if _key(t) not in known]
        if not writes:
            return  # a view, or a size
        name = target._schema.name
        if (
            name in _COPIES
            and len(reads) == len(writes) == 1
            and (reads[0].shape, reads[0].dtype) == (writes[0].shape, writes[0].dtype)
        ):
            self._call("copy", reads, writes)  # each element as it is
            return
        name = re.sub(r"^symmplan::(b?mm|addmm)_out$", r"aten::\1", name)
        self._call("local", reads, writes, label=(name, *others))

    def _custom(self, op: GraphOp, given: Mapping[str, Any], result: Any) -> None:
        values = {**given, "return": result}
        self._call(
            op.kind,
            (t for name in op.reads for t in _tensors(values[name])),
            (t for name in op.writes for t in _tensors(values[name])),
            group=given[op.group],
            handshake=op.handshake,
            release=op.release,
            label=op.label,
        )

    def _collective(self, form: _Form, given: Mapping[str, Any], result: Any) -> None:
        inputs = _tensors(given["inputs"] if "inputs" in given else given["input"])
        values = {**given, "return": result}
        for source, target in zip(inputs, _tensors(values[form.result]), strict=True):
            in_place = source is target or (
                _key(source) == _key(target) and source.storage_offset() == target.storage_offset()
            )
            name = self._call(
                form.kind,
                [source],
                [target],
                group=given["group_name"],
                handshake=form.shm,
                release=form.shm,
                asynchronous=not form.shm,
                transport=self._transport(form, in_place=in_place),
                root=given.get("src", given.get("distance", 0)),
                label=(form.kind, given.get("reduce_op", "")),
            )
            if not form.shm:
                self._pending.setdefault(_key(target), []).append(name)

    def _transport(self, form: _Form, *, in_place: bool) -> str:
        if form.shm:
            pulls = form.kind == "reduce_scatter" or (form.kind == "all_reduce" and not in_place)
            return "pull" if pulls else "push"
        if form.kind == "reduce_scatter" and self.transport == "push":
            return "pull"
        if form.kind == "all_reduce" and in_place and self.transport == "pull":
            return "push"
        return self.transport
