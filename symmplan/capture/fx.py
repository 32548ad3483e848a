"""An FX graph -> the `Problem` of its declared tensors.

A buffer stands for a storage, not a tensor: its accesses are those of all its aliases
(see [Note: aliases]). An asynchronous op holds its buffers until its ``wait_tensor``.

[Note: pinned inputs]
    Parameters and other inputs may lie in symmetric memory from run to run, so that they are not
    copied in. Between runs other code, such as an optimizer, may write them. So their problem
    begins and ends with an operation that stands for that code and writes them all. If peers may
    still read an input when the graph ends, or before they have met this rank, the plan then has a
    barrier. Pinned inputs have a problem of their own, because graphs take turns in the bytes of
    all other buffers.

[Note: crossing]
    A tensor that a forward saves for its backward leaves the first graph and enters the second, and
    no other code sees it. So its buffer stays where it is. The forward's problem ends with an
    operation that reads all such buffers, and the backward's problem begins with one. When the two
    problems are joined, each buffer has one live range.
"""

from __future__ import annotations

import warnings
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import evolve
from torch import fx

from symmplan.capture.decide import Decider, sites_of
from symmplan.capture.graphs import (
    Path,
    Value,
    Values,
    called,
    example_values,
    hidden_calls,
    is_getitem,
    is_pure_view,
    is_wait,
    written_nodes,
)
from symmplan.capture.producers import Write, writes_inductor
from symmplan.capture.sites import Captured, Kept, Site, Step
from symmplan.capture.steps import Steps
from symmplan.errors import CaptureError
from symmplan.model import Access, Buffer, Operation, OpSpec, Problem, Requirement, Unplanned
from symmplan.registry import resolve_group_name, spec_for

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

#: Modules whose functions call collectives.
_TRACED = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.nn.functional",
)
_NO_OPS = (
    "calls of torch.distributed's functions in a graph are not declared ops: trace with "
    "torch.export or torch.compile, or call torch.ops._c10d_functional"
)


def capture_fx(
    program: fx.Graph | fx.GraphModule | Any,
    example_inputs: Sequence[Any] | None = None,
    *,
    prefix: str = "",
    as_run: Callable[[OpSpec, str], OpSpec] = lambda spec, _group: spec,
    producer: Callable[[fx.Node], Write | None] = writes_inductor,
    skip: Callable[[OpSpec, str, Requirement], str | None] = lambda *_: None,
    anywhere: Callable[[OpSpec, str, Requirement], bool] = lambda *_: False,
    refused: Mapping[fx.Node, str] | None = None,
    slower: Collection[fx.Node] = (),
    ordinary: Collection[Value] = (),
    device: torch.device | None = None,
    keep: frozenset[fx.Node] = frozenset(),
    saved: Collection[int] = (),
    given: Mapping[str, Buffer] | None = None,
    default_group: str | None = None,
) -> Captured:
    """Capture the declared tensors of an FX program.

    Args:
        program: An ``fx.Graph``, a ``GraphModule`` or an ``ExportedProgram``.
        example_inputs: Inputs to propagate (on fake tensors) where nodes carry no sizes.
        prefix: Put before the names of operations and buffers.
        as_run: Gives a declaration as it holds for how the op runs over a group, by its name.
        producer: Says how a node can write into memory it is given, or None.
        skip: Gives the reason why a requirement is not to be met over a group, or None to meet it.
        anywhere: Says whether a tensor may lie anywhere, so that nothing is lost without it.
        refused: ``{node: why its tensors are to be left out}``.
        slower: Those of them that lose nothing by it.
        ordinary: Tensors that stay in ordinary memory, with all views of them.
        device: Where symmetric memory is: tensors elsewhere are left out. None if all lie there.
        keep: The inputs that may lie in symmetric memory from run to run.
        saved: Positions of the graph's outputs that only its backward gets. See [Note: crossing].
        given: ``{input: the buffer it lies in}``, of what the forward saved in placements.
        default_group: Name of the group of ops that name none; the world if None.

    Returns:
        The problem and the decisions behind it.

    Raises:
        CaptureError: The program is of another kind, or has no sizes.

    Collective: no.
    """
    graph, module = _graph_of(program)
    specs = {}
    for node in graph.nodes:
        op = called(node)
        spec = None if op is None else spec_for(op)
        if spec is not None:
            specs[node] = spec
    fakes = example_values(graph, module, example_inputs)
    for node, spec in specs.items():
        _require_values(node, spec, fakes)
    groups, nowhere = _groups(specs, default_group)
    specs = {node: as_run(spec, groups[node]) for node, spec in specs.items()}
    values = Values.of(graph, fakes)
    lying = _given(values, given or {})
    ends = [n for n in graph.nodes if is_wait(n)]
    waits = {n: _waits_of(n, values, ends) for n, s in specs.items() if s.asynchronous}
    undecided = [site for n, spec in specs.items() for site in sites_of(n, spec, values)]
    shunned = frozenset(values.find(value) for value in ordinary)
    while True:
        decider = Decider(
            prefix=prefix,
            values=values,
            specs=specs,
            groups=groups,
            escaping=_escaping(values, waits, saved),
            waits=waits,
            producer=producer,
            skip=skip,
            anywhere=anywhere,
            refused={**nowhere, **(refused or {})},
            slower=slower,
            device=device,
            keep=keep,
            shunned=shunned,
        )
        decider.decide(undecided, lying)
        more = decider.misplaced()
        if not more:
            break
        shunned |= more
    decider.unplanned += (  # what is declared of ops that are no nodes of the graph itself
        Unplanned(f"{prefix}{node.name}", hidden.op, r.where, skip(hidden, "", r) or why)
        for node, overload, why in hidden_calls(graph, module)
        if (hidden := spec_for(overload)) is not None
        for r in hidden.requirements
    )
    decider.unplanned += (
        Unplanned(f"{prefix}{node.name}", spec.op, where, why)
        for node, spec in specs.items()
        for where, why in spec.wrong
    )
    decider.unplanned += _traced_calls(graph, prefix)
    sites = sorted(decider.sites, key=lambda s: values.order[s.node])
    _run_plainly(decider, sites, ends)
    crossing = _saved(decider, saved)
    problem, residence, steps = _problems(decider, sites, crossing, lying)
    return Captured(
        problem=problem,
        sites=tuple(sites),
        steps=steps,
        placed_storages=tuple(decider.placed_storages.values()),
        specs=specs,
        groups=groups,
        waits=waits,
        values=values,
        prefix=prefix,
        kept=_kept(decider, residence),
        residence=residence,
        saved=crossing,
        given={node: buffer.name for node, buffer in lying.items()},
    )


def _graph_of(program: Any) -> tuple[fx.Graph, fx.GraphModule | None]:
    if isinstance(program, fx.Graph):
        owner = program.owning_module
        return program, owner if isinstance(owner, fx.GraphModule) else None
    if isinstance(program, fx.GraphModule):
        return program.graph, program
    inner = getattr(program, "graph_module", None)  # ExportedProgram
    if isinstance(inner, fx.GraphModule):
        return inner.graph, inner
    fix = "trace the program first, for example with torch.export.export"
    if isinstance(program, str | PathLike):
        fix = "read the file with symmplan.Problem.from_csv or from_json"
    elif isinstance(program, list | tuple):
        fix = "make a problem of it: symmplan.Problem.from_intervals"
    raise CaptureError(
        f"cannot plan a {type(program).__name__}",
        expected="an fx.Graph, a GraphModule, an ExportedProgram or a Problem",
        got=type(program).__name__,
        fix=fix,
    )


def _groups(
    specs: Mapping[fx.Node, OpSpec], default: str | None
) -> tuple[dict[fx.Node, str], dict[fx.Node, str]]:
    """The group of each declared op; and why one has none, or not all that is declared of it holds.

    Programs run without symmetric memory, too, so neither is an error: people are told.
    """
    groups: dict[fx.Node, str] = {}
    nowhere: dict[fx.Node, str] = {}
    told = {why: spec.op for spec in specs.values() for _, why in spec.wrong}
    for node, spec in specs.items():
        overload = called(node)
        assert overload is not None
        try:
            groups[node] = resolve_group_name(spec, overload, node.args, node.kwargs, default)
        except CaptureError as error:
            groups[node], nowhere[node] = "", error.what
            told[f"{error.what} ({error.fix})"] = spec.op
    for why in told:
        warnings.warn(f"symmplan: {why}; that stays in ordinary memory", stacklevel=3)
    return groups, nowhere


def _traced_calls(graph: fx.Graph, prefix: str) -> list[Unplanned]:
    """The calls of functions of ``torch.distributed`` that a trace has in place of ops."""
    calls = [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and getattr(node.target, "__module__", "") in _TRACED
        and node.all_input_nodes
    ]
    if calls:
        warnings.warn(f"symmplan: {_NO_OPS}; that stays in ordinary memory", stacklevel=3)
    names = ((n, f"torch.distributed.{n.target.__name__}") for n in calls)
    return [Unplanned(f"{prefix}{n.name}", op, "tensors", _NO_OPS) for n, op in names]


def _require_values(node: fx.Node, spec: OpSpec, fakes: Mapping[fx.Node, Any]) -> None:
    for needed in [*node.all_input_nodes, node]:
        if needed not in fakes:
            raise CaptureError(
                f"node {needed.name!r} has no shape, and {spec.op} needs it",
                expected="a fake tensor in node.meta['val'] of every node",
                fix="pass example_inputs, or trace the graph with make_fx or torch.export",
                node=needed.name,
                op=spec.op,
            )


def _waits_of(node: fx.Node, values: Values, ends: Sequence[fx.Node]) -> dict[Path, fx.Node]:
    """For each result of an asynchronous node, the first wait after it."""
    roots: dict[Value, list[Path]] = {}
    for value in values.of_node(node):
        roots.setdefault(values.find(value), []).append(value[1])
    found: dict[Path, fx.Node] = {}
    for other in ends:
        if values.order[other] <= values.order[node]:
            continue
        for source in other.all_input_nodes:
            for value in values.of_node(source):
                for path in roots.get(values.find(value), ()):
                    found.setdefault(path, other)
    return found


def _given(values: Values, buffers: Mapping[str, Buffer]) -> dict[fx.Node, Buffer]:
    """The inputs that lie in placements; those of one buffer become one storage."""
    found: dict[fx.Node, Buffer] = {}
    first: dict[str, fx.Node] = {}
    for node in values.graph.nodes:
        if node.op == "placeholder" and node.name in buffers:
            found[node] = buffer = buffers[node.name]
            values.join((first.setdefault(buffer.name, node), ()), (node, ()))
    return found


def _outputs(graph: fx.Graph) -> list[Any]:
    (output,) = (n for n in graph.nodes if n.op == "output")
    values = output.args[0]
    return list(values) if isinstance(values, (list, tuple)) else [values]


def _escaping(
    values: Values, waits: Mapping[fx.Node, Mapping[Path, fx.Node]], saved: Collection[int]
) -> set[Value]:
    """The storages that somebody may use after the graph: its results, and work under way."""
    leaving: list[fx.Node] = []
    seen = [value for i, value in enumerate(_outputs(values.graph)) if i not in saved]
    fx.map_arg(seen, leaving.append)
    for node, ends in waits.items():
        if not ends:
            leaving += [node, *node.all_input_nodes]
    return {values.find(v) for n in leaving for v in values.of_node(n)}


def _saved(decider: Decider, saved: Collection[int]) -> dict[int, str]:
    """``{output: its buffer}`` of tensors that cross to the backward in their placements."""
    values = decider.values
    outputs = _outputs(values.graph) if saved else []
    found: dict[int, str] = {}
    for i in sorted(saved):
        value = (outputs[i], ())
        if isinstance(outputs[i], fx.Node) and value in values.tensors:
            placed = decider.placed_storages.get(values.find(value))
            if placed is not None:
                found[i] = placed.buffer
    return found


def _run_plainly(decider: Decider, sites: Sequence[Site], ends: Sequence[fx.Node]) -> None:
    """Ops that are left out run as they are: asynchronously, if that is what they are."""
    placed = {s.node for s in sites if s.buffer is not None}
    placed |= {h.node for h in decider.placed_storages.values() if h.write == "declared"}
    for node, spec in decider.specs.items():
        overload = called(node)
        plain = None if overload is None else spec_for(overload)
        if node in placed or plain is None or plain.asynchronous == spec.asynchronous:
            continue
        found = _waits_of(node, decider.values, ends)
        if found:
            decider.specs[node] = plain
            decider.waits[node] = found


def _problems(
    decider: Decider,
    sites: Sequence[Site],
    saved: Mapping[int, str],
    given: Mapping[fx.Node, Buffer],
) -> tuple[Problem, Problem | None, dict[str, Step]]:
    """The problems of the graph's own buffers and of those that outlive it."""
    steps = Steps(decider)
    by_node: dict[fx.Node, list[Site]] = {}
    for site in sites:
        by_node.setdefault(site.node, []).append(site)
    for node in decider.values.graph.nodes:
        if node.op not in ("placeholder", "output"):
            unseen = is_pure_view(node) or is_wait(node)
            steps.node(node, by_node.get(node, []), {} if unseen else _touched(decider, node))
    operations, accesses = tuple(steps.operations), tuple(steps.accesses.values())
    does = steps.steps
    buffers = decider.buffers.values()
    kept = {b.name for b in buffers if b.persistent}
    residence = _residence(decider, kept, operations, accesses) if kept else None
    accesses = tuple(a for a in accesses if a.buffer not in kept)
    if given:
        first = _crossing(decider, "given", does)
        operations = (first, *operations)
        held = sorted({buffer.name for buffer in given.values()})
        accesses = (*(Access(first.name, buffer) for buffer in held), *accesses)
    if saved:
        last = _crossing(decider, "saved", does)
        operations = (*operations, last)
        accesses = (*accesses, *(Access(last.name, b) for b in sorted({*saved.values()})))
    problem = Problem(
        buffers=tuple(b for b in buffers if not b.persistent),
        operations=operations,
        accesses=accesses,
        unplanned=tuple(decider.unplanned),
    )
    return problem, residence, does


def _crossing(
    decider: Decider, kind: Literal["given", "saved"], does: dict[str, Step]
) -> Operation:
    """The operation at which buffers come from the forward, or go to the backward."""
    operation = Operation(f"{decider.prefix}:{kind}", op=f"symmplan::{kind}")
    does[operation.name] = Step(kind)
    return operation


def _residence(
    decider: Decider,
    kept: Collection[str],
    operations: Sequence[Operation],
    accesses: Sequence[Access],
) -> Problem:
    """The problem of what lies in symmetric memory from run to run. See [Note: pinned inputs]."""
    names = (f"{decider.prefix}:outside", f"{decider.prefix}output")
    before, after = (Operation(name, op="outside") for name in names)
    return Problem(
        buffers=tuple(b for b in decider.buffers.values() if b.name in kept),
        operations=(before, *operations, after),
        accesses=(
            *(a for a in accesses if a.buffer in kept),
            *(Access(o.name, n, write=True) for o in (before, after) for n in sorted(kept)),
        ),
    )


def _kept(decider: Decider, residence: Problem | None) -> tuple[Kept, ...]:
    if residence is None:
        return ()
    inside = {o.name for o in residence.operations if o.op != "outside"}
    written = {a.buffer for a in residence.accesses if a.write and a.operation in inside}
    return tuple(evolve(k, written=k.buffer in written) for k in decider.kept.values())


def _touched(decider: Decider, node: fx.Node) -> dict[str, bool]:
    """Buffers that the node touches through any alias -> whether it may write them."""
    touched: dict[str, bool] = {}
    values, overload = decider.values, called(node)
    writes = written_nodes(overload, node)
    for source in node.all_input_nodes:
        if is_getitem(node) and not isinstance(values.fakes[source], torch.Tensor):
            continue
        for value in values.of_node(source):
            buffer = decider.buffer_of(values.find(value))
            if buffer is not None:
                write = overload is None or source in writes
                touched[buffer] = touched.get(buffer, False) or write
    for value in values.of_node(node):
        placed = decider.placed_storages.get(values.find(value))
        if placed is not None and placed.node is node:
            touched[placed.buffer] = True
    return touched
