"""A captured program and its plan -> what its declared calls do, and where ranks meet.

Each operation of the captured problem is a `Step`: bytes are copied into a placement, an op is
launched, a result is copied out. A plan adds barriers before some of them. The integration decides
when they come: a compiled graph has them as nodes, an eager session runs those of a call when the
program makes the call.

`symmplan.place.lower` says what a launched call does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from symmplan.capture.bounds import bound as bound_of
from symmplan.capture.graphs import overload_of
from symmplan.capture.steps import copy_name
from symmplan.capture.streams import MARK
from symmplan.place.algorithms import overload_named
from symmplan.place.expected import Expected
from symmplan.registry import bind_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from torch import fx

    from symmplan.capture.sites import Captured, CopyKind, Site
    from symmplan.model import AlgorithmName, Barrier, OpSpec, Plan
    from symmplan.place.algorithms import Lowering, Lowerings


@frozen(eq=False)
class PlacedCall:
    """A declared call of which some tensors have placements.

    Attributes:
        node: Its node.
        operation: Its name in the problem.
        spec: Its declaration.
        overload: The op that stands for it in the graph.
        row: How it runs on the memory backend; None if it runs as it is, or in its out variant.
        group: Name of the process group; empty if there is no row.
        engine: Name of the communicator over which copy engines run it; empty if they do not.
        sites: Its declared tensors, in the order of its schema.
        paths: Where its results sit in what it returns.
        results: ``{path: buffer}`` of results with placements, including those that only a later op
            needs there.
        prefix: The prefix of its operations' names.
        expected: How it is to run, for a check; None if it has no row.
        staged: The arguments that are copied into their placements.
        target: The overload that its row calls; None if it has no row.
    """

    node: fx.Node
    operation: str
    spec: OpSpec
    overload: Any
    row: Lowering | None
    group: str
    engine: str
    sites: tuple[Site, ...]
    paths: tuple[tuple[int, ...], ...]
    results: Mapping[tuple[int, ...], str]
    prefix: str
    expected: Expected | None = None
    staged: tuple[Site, ...] = field(init=False)
    target: Any = field(init=False)

    @staged.default
    def _staged(self) -> tuple[Site, ...]:
        return tuple(s for s in self.sites if s.kind == "argument" and s.how == "stage")

    @target.default
    def _target(self) -> Any:
        return None if self.row is None else overload_named(self.row.target)

    def copy(self, kind: CopyKind, site: Site) -> str:
        """Name of the operation that copies one of its tensors."""
        return copy_name(kind, self.prefix, site)

    def reads(self, site: Site) -> bool:
        """Whether it looks at what an argument holds before it writes there."""
        return self.row is None or self.row.out != site.head or site.head == "input"

    def made_at(self, path: tuple[int, ...]) -> list[Site]:
        """The declared results that sit at ``path`` and have a placement."""
        found = (s for s in self.sites if s.kind == "result" and s.buffer is not None)
        return [s for s in found if s.path == path]


@frozen(eq=False)
class PlacedProgram:
    """A captured program that follows a plan.

    Attributes:
        captured: The program.
        plan: The plan; it may cover other programs, too.
        calls: Its declared calls that have something in a placement, in program order.
        barriers: Its barriers, in program order.
    """

    captured: Captured
    plan: Plan
    calls: Mapping[fx.Node, PlacedCall]
    barriers: Sequence[Barrier]

    @property
    def algorithms(self) -> tuple[AlgorithmName, ...]:
        """The algorithm of each declared call, those that are left out included."""
        return tuple(map(self._algorithm, self.captured.specs))

    def _algorithm(self, node: fx.Node) -> AlgorithmName:
        if node not in self.calls:
            return "ordinary"
        expected = self.calls[node].expected
        return "symmetric" if expected is None else expected.algorithm


def place(
    captured: Captured,
    plan: Plan,
    lowerings: Lowerings,
    algorithm: Callable[[fx.Node], AlgorithmName],
    engines: Mapping[fx.Node, str],
    barriers: Iterable[Barrier],
) -> PlacedProgram:
    """Put a plan into practice.

    Args:
        captured: The program.
        plan: A plan whose problem contains the captured one.
        lowerings: How ops run on the memory backend.
        algorithm: The algorithm of a collective that has placements.
        engines: The communicators of those whose own op runs on copy engines, by name.
        barriers: Those of the plan, and more if the program needs more.

    Collective: no.
    """
    return PlacedProgram(
        captured,
        plan,
        _calls(captured, lowerings, algorithm, engines),
        tuple(_in_order(captured, barriers)),
    )


def _calls(
    captured: Captured,
    lowerings: Lowerings,
    algorithm: Callable[[fx.Node], AlgorithmName],
    engines: Mapping[fx.Node, str],
) -> dict[fx.Node, PlacedCall]:
    sites: dict[fx.Node, list[Site]] = {}
    for site in captured.sites:
        sites.setdefault(site.node, []).append(site)
    made: dict[fx.Node, dict[tuple[int, ...], str]] = {}
    for placed in captured.placed_storages:
        if placed.write == "declared":
            made.setdefault(placed.node, {})[placed.path] = placed.buffer
    found = {}
    for node, mine in sites.items():
        if node not in made and all(s.buffer is None for s in mine):
            continue
        spec, overload = captured.specs[node], overload_of(node.target)
        assert overload is not None
        row = lowerings.row(spec, captured.groups[node])
        results = {s.path: s.buffer for s in mine if s.kind == "result" and s.buffer is not None}
        group = "" if row is None else captured.groups[node]
        found[node] = PlacedCall(
            node=node,
            operation=captured.prefix + node.name,
            spec=spec,
            overload=overload,
            row=row,
            group=group,
            engine=engines.get(node, ""),
            sites=tuple(mine),
            paths=tuple(path for _, path in captured.values.of_node(node)),
            results={**made.get(node, {}), **results},
            prefix=captured.prefix,
            expected=_expected(captured, node, row, lowerings.memory, algorithm(node)),
        )
    return found


def _expected(
    captured: Captured,
    node: fx.Node,
    row: Lowering | None,
    memory: str,
    algorithm: AlgorithmName,
) -> Expected | None:
    overload = overload_of(node.target)
    if row is None or overload is None:
        return None
    bound = bind_arguments(overload, node.args, node.kwargs)
    given = bound["inputs"] if row.each else [bound["input"]]
    fakes = [x.meta["val"] for x in given]
    reduction = bound.get("reduce_op", "")
    return Expected(
        name=captured.prefix + node.name,
        op=captured.specs[node].op,
        group=captured.groups[node],
        memory=memory,
        nbytes=sum((bound_of(f.numel()) or 0) * f.element_size() for f in fakes),
        dtype=str(fakes[0].dtype).removeprefix("torch."),
        algorithm=algorithm,
        reduction=reduction if isinstance(reduction, str) else "",
        target=row.target,
        launches=len(given),
    )


def _in_order(captured: Captured, barriers: Iterable[Barrier]) -> Iterator[Barrier]:
    """The barriers of a program in its order; those of other programs are left out."""
    due: dict[str, list[Barrier]] = {}
    for barrier in barriers:
        due.setdefault(barrier.before, []).append(barrier)
    operations = list(captured.problem.operations)
    if captured.residence is not None:
        operations += captured.residence.operations
    for operation in operations:
        if operation.op != MARK:
            yield from due.pop(operation.name, ())
