"""An FX graph -> the `Problem` of its declared tensors.

A buffer stands for a storage, not a tensor: its accesses are those of all its aliases
(see [Note: aliases]). An asynchronous op holds its buffers until its ``wait_tensor``.

[Note: residents]
    Parameters and the like may lie in symmetric memory from run to run, so that nothing is copied
    in. Between runs anybody may write them (an optimizer, say). So their problem begins and ends
    with an operation that stands for the outside and writes them all: what peers still read when
    the graph ends, or read before they have met this rank, then asks for a barrier. It is a problem
    of its own because graphs take turns in the bytes of all others.

[Note: crossing]
    What a forward saves for its backward leaves the one graph and comes into the other, but nobody
    else sees it. So its buffer stays where it is: the forward's problem ends with an operation that
    reads all such buffers, the backward's begins with one, and joined they are one live range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import define, evolve, field
from torch import fx

from symmplan.capture.bounds import sources
from symmplan.capture.decide import Decider, Request, requests_of
from symmplan.capture.graphs import (
    argument_nodes,
    called,
    hidden_calls,
    is_getitem,
    is_wait,
    written_nodes,
)
from symmplan.capture.producers import Write, writes_inductor
from symmplan.capture.sites import Captured, Home, Kept, Site, Step
from symmplan.capture.steps import Steps
from symmplan.capture.values import Value, Values, example_values, is_pure_view
from symmplan.errors import CaptureError
from symmplan.model import Access, Buffer, Operation, OpSpec, Problem, Requirement, Unplanned
from symmplan.registry import bind_arguments, spec_for

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

__all__ = ["capture_fx"]


def capture_fx(
    program: fx.Graph | fx.GraphModule | Any,
    example_inputs: Sequence[Any] | None = None,
    *,
    prefix: str = "",
    lookup: Callable[[Any], OpSpec | None] = spec_for,
    producer: Callable[[fx.Node], Write | None] = writes_inductor,
    skip: Callable[[OpSpec, Requirement], str | None] = lambda _spec, _requirement: None,
    refused: Mapping[fx.Node, str] | None = None,
    keep: frozenset[fx.Node] = frozenset(),
    saved: Collection[int] = (),
    given: Mapping[str, Buffer] | None = None,
) -> Captured:
    """Capture the declared tensors of an FX program.

    Args:
        program: An ``fx.Graph``, a ``GraphModule`` or an ``ExportedProgram``.
        example_inputs: Inputs to propagate (on fake tensors) where nodes carry no sizes.
        prefix: Put before the names of operations and buffers.
        lookup: Gives what is declared of an op, or None.
        producer: Says how a node can write into memory it is given, or None.
        skip: Gives the reason why a requirement is not to be met, or None to meet it.
        refused: ``{node: why its tensors are to be left out}``.
        keep: The inputs that may lie in symmetric memory from run to run.
        saved: Positions of the graph's outputs that only its backward gets. See [Note: crossing].
        given: ``{input: the buffer it lies in}``, of what the forward saved in placements.

    Returns:
        The problem and the decisions behind it.

    Raises:
        CaptureError: The program is of another kind, or has no sizes.

    Collective: no.
    """
    graph, module = _graph_of(program)
    builder = _Builder(
        graph=graph,
        module=module,
        example_inputs=example_inputs,
        prefix=prefix,
        lookup=lookup,
        producer=producer,
        skip=skip,
        refused=refused,
        keep=keep,
        saved=saved,
        given=given or {},
    )
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


@define(eq=False)
class _Builder:
    graph: fx.Graph
    module: fx.GraphModule | None
    example_inputs: Sequence[Any] | None
    prefix: str
    lookup: Callable[[Any], OpSpec | None]
    producer: Callable[[fx.Node], Write | None]
    skip: Callable[[OpSpec, Requirement], str | None]
    refused: Mapping[fx.Node, str] | None
    keep: frozenset[fx.Node]
    saved: Collection[int]
    given: Mapping[str, Buffer]

    order: dict[fx.Node, int] = field(init=False)
    values: Values = field(init=False)
    decider: Decider = field(init=False)
    specs: dict[fx.Node, OpSpec] = field(init=False, factory=dict)

    def build(self) -> Captured:
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}
        declared = [(n, s) for n in self.graph.nodes if (s := self._spec(n)) is not None]
        fakes = example_values(self.graph, self.module, self.example_inputs)
        for node, spec in declared:
            self._require_values(node, spec, fakes)
        self.values = Values.of(self.graph, fakes)
        given = self._given()
        classes: dict[Value, list[Value]] = {}
        for value in self.values.tensors:
            classes.setdefault(self.values.find(value), []).append(value)
        ends = [n for n in self.graph.nodes if is_wait(n)]
        waits = {n: self._waits_of(n, ends) for n, s in declared if s.asynchronous}
        requests = [r for node, spec in declared for r in requests_of(node, spec, self.values)]
        self.specs = dict(declared)
        shunned: frozenset[Value] = frozenset()
        while True:
            self.decider = Decider(
                prefix=self.prefix,
                order=self.order,
                values=self.values,
                classes=classes,
                escaping=self._escaping(waits),
                waits=waits,
                producer=self.producer,
                skip=self.skip,
                refused=self.refused or {},
                symbols=sources(self.graph),
                keep=self.keep,
                shunned=shunned,
            )
            self._decide(requests, given)
            more = self.decider.misplaced()
            if not more:
                break
            shunned |= more
        self.decider.unplanned += self._hidden()
        sites = sorted(self.decider.sites, key=lambda s: self.order[s.node])
        self._plain(sites, ends)
        saved = self._saved()
        problem, residence, steps = self._problems(sites, saved, given)
        return Captured(
            problem=problem,
            sites=tuple(sites),
            steps=steps,
            homes=tuple(self.decider.homes.values()),
            specs=self.specs,
            waits=self.decider.waits,
            values=self.values,
            prefix=self.prefix,
            kept=self._kept(residence),
            residence=residence,
            saved=saved,
            given={node: buffer.name for node, buffer in given.items()},
        )

    def _decide(self, requests: Sequence[Request], given: Mapping[fx.Node, Buffer]) -> None:
        """All results before all arguments."""
        for node, buffer in given.items():
            root = self.values.find((node, ()))
            self.decider.homes.setdefault(root, Home(buffer.name, node, (), "given"))
            self.decider.buffers[buffer.name] = buffer
        for request in requests:
            if request.kind == "result":
                self.decider.result(request)
        for request in requests:
            if request.kind == "argument":
                self.decider.argument(request)

    def _plain(self, sites: Sequence[Site], ends: Sequence[fx.Node]) -> None:
        """Ops that are left out run as they are: asynchronously, if that is what they are."""
        placed = {s.node for s in sites if s.buffer is not None}
        placed |= {h.node for h in self.decider.homes.values() if h.write == "declared"}
        for node, spec in self.specs.items():
            overload = called(node)
            plain = None if overload is None else spec_for(overload)
            if node in placed or plain is None or plain.asynchronous == spec.asynchronous:
                continue
            found = self._waits_of(node, ends)
            if found:
                self.specs[node] = plain
                self.decider.waits[node] = found

    def _given(self) -> dict[fx.Node, Buffer]:
        """The inputs that lie in placements; those of one buffer become one storage."""
        found: dict[fx.Node, Buffer] = {}
        first: dict[str, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.name in self.given:
                found[node] = buffer = self.given[node.name]
                self.values.join((first.setdefault(buffer.name, node), ()), (node, ()))
        return found

    def _outputs(self) -> list[Any]:
        (output,) = (n for n in self.graph.nodes if n.op == "output")
        values = output.args[0]
        return list(values) if isinstance(values, (list, tuple)) else [values]

    def _saved(self) -> dict[int, str]:
        """``{output: its buffer}`` of what crosses into the backward in its placement."""
        outputs = self._outputs() if self.saved else []
        found: dict[int, str] = {}
        for i in sorted(self.saved):
            value = (outputs[i], ())
            if isinstance(outputs[i], fx.Node) and value in self.values.tensors:
                home = self.decider.homes.get(self.values.find(value))
                if home is not None:
                    found[i] = home.buffer
        return found

    def _escaping(self, waits: dict[fx.Node, dict[tuple[int, ...], fx.Node]]) -> set[Value]:
        """The storages that somebody may use after the graph: its results, and work under way."""
        leaving: list[fx.Node] = []
        seen = [value for i, value in enumerate(self._outputs()) if i not in self.saved]
        fx.map_arg(seen, leaving.append)
        for node, ends in waits.items():
            if not ends:
                leaving += [node, *node.all_input_nodes]
        return {self.values.find(v) for n in leaving for v in self.values.of_node(n)}

    def _spec(self, node: fx.Node) -> OpSpec | None:
        overload = called(node)
        return None if overload is None else self.lookup(overload)

    def _hidden(self) -> list[Unplanned]:
        """What is declared of ops that the graph runs, but not as nodes of its own."""
        return [
            Unplanned(f"{self.prefix}{node.name}", spec.op, r.where, self.skip(spec, r) or why)
            for node, overload, why in hidden_calls(self.graph, self.module)
            if (spec := self.lookup(overload)) is not None
            for r in spec.requirements
        ]

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

    def _waits_of(self, node: fx.Node, ends: Sequence[fx.Node]) -> dict[tuple[int, ...], fx.Node]:
        """For each result of an asynchronous node, the first wait after it."""
        roots: dict[Value, list[tuple[int, ...]]] = {}
        for value in self.values.of_node(node):
            roots.setdefault(self.values.find(value), []).append(value[1])
        found: dict[tuple[int, ...], fx.Node] = {}
        for other in ends:
            if self.order[other] <= self.order[node]:
                continue
            for source in other.all_input_nodes:
                for value in self.values.of_node(source):
                    for path in roots.get(self.values.find(value), ()):
                        found.setdefault(path, other)
        return found

    # -- what it does with them --------------------------------------------------------------

    def _problems(
        self, sites: Sequence[Site], saved: Mapping[int, str], given: Mapping[fx.Node, Buffer]
    ) -> tuple[Problem, Problem | None, dict[str, Step]]:
        """What the graph does with its own buffers, and with those that outlive it."""
        steps = Steps(
            self.prefix, self.order, self.specs, self.decider.waits, self._source, self._filled
        )
        by_node: dict[fx.Node, list[Site]] = {}
        for site in sites:
            by_node.setdefault(site.node, []).append(site)
        for node in self.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            mine = by_node.get(node, [])
            touched = {} if is_pure_view(node) and not is_wait(node) else self._touched(node)
            steps.node(node, mine, touched, self._group(mine))
        operations, accesses, does = steps.finish()
        buffers = self.decider.buffers.values()
        kept = {b.name for b in buffers if b.persistent}
        residence = self._residence(kept, operations, accesses) if kept else None
        accesses = tuple(a for a in accesses if a.buffer not in kept)
        if given:
            name = f"{self.prefix}:given"
            does[name] = Step("given")
            operations = (Operation(name, op="symmplan::given"), *operations)
            held = sorted({buffer.name for buffer in given.values()})
            accesses = (*(Access(name, buffer) for buffer in held), *accesses)
        if saved:
            name = f"{self.prefix}:saved"
            does[name] = Step("saved")
            operations = (*operations, Operation(name, op="symmplan::saved"))
            accesses = (*accesses, *(Access(name, b) for b in sorted({*saved.values()})))
        problem = Problem(
            buffers=tuple(b for b in buffers if not b.persistent),
            operations=operations,
            accesses=accesses,
            unplanned=tuple(self.decider.unplanned),
        )
        return problem, residence, does

    def _source(self, site: Site) -> str | None:
        """The buffer in which a site's value lies before it is copied, if any."""
        assert site.source is not None
        return self.decider.buffer_of(self.values.find((site.source, site.path)))

    def _filled(self, site: Site) -> str | Literal[False] | None:
        """The buffer from which an op fills a result before it works there in place.

        None if that lies in ordinary memory; False if the op fills nothing.
        """
        fills = {result: given for given, result in self.specs[site.node].fills}
        given = fills.get(site.head)
        if given is None:
            return False
        overload = called(site.node)
        assert overload is not None
        bound = bind_arguments(overload, site.node.args, site.node.kwargs)
        source = dict(argument_nodes(bound[given]))[site.index]
        return self.decider.buffer_of(self.values.find((source, ())))

    def _residence(
        self, kept: Collection[str], operations: Sequence[Operation], accesses: Sequence[Access]
    ) -> Problem:
        """The problem of what lies in symmetric memory from run to run. See [Note: residents]."""
        names = (f"{self.prefix}:outside", f"{self.prefix}output")
        before, after = (Operation(name, op="outside") for name in names)
        return Problem(
            buffers=tuple(b for b in self.decider.buffers.values() if b.name in kept),
            operations=(before, *operations, after),
            accesses=(
                *(a for a in accesses if a.buffer in kept),
                *(Access(o.name, n, write=True) for o in (before, after) for n in sorted(kept)),
            ),
        )

    def _kept(self, residence: Problem | None) -> tuple[Kept, ...]:
        if residence is None:
            return ()
        inside = {o.name for o in residence.operations if o.op != "outside"}
        written = {a.buffer for a in residence.accesses if a.write and a.operation in inside}
        return tuple(
            evolve(k, written=self.prefix + k.node.name in written)
            for k in self.decider.kept.values()
        )

    def _group(self, sites: list[Site]) -> str | None:
        names = [self.decider.buffers[s.buffer].group for s in sites if s.buffer is not None]
        return names[0] if names else None

    def _touched(self, node: fx.Node) -> dict[str, bool]:
        """Buffers that the node touches through any alias -> whether it may write them."""
        touched: dict[str, bool] = {}
        if is_wait(node):
            return touched
        overload = called(node)
        writes = written_nodes(overload, node)
        for source in node.all_input_nodes:
            if is_getitem(node) and not isinstance(self.values.fakes[source], torch.Tensor):
                continue
            for value in self.values.of_node(source):
                buffer = self.decider.buffer_of(self.values.find(value))
                if buffer is not None:
                    write = overload is None or source in writes
                    touched[buffer] = touched.get(buffer, False) or write
        for value in self.values.of_node(node):
            home = self.decider.homes.get(self.values.find(value))
            if home is not None and home.node is node:
                touched[home.buffer] = True
        return touched
