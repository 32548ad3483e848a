"""Operations and accesses of captured graphs, as they will run: with their staging copies.

For debugging, every placement can be overwritten when its live range ends, so that a late reader
gets visibly wrong values. Such a write is an access like any other, because peers may already own
the bytes. So it is part of the problem, and the plan keeps it apart from later accesses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import define, evolve, field

from symmplan.capture.graphs import argument_nodes, called, stack_of
from symmplan.capture.sites import Step
from symmplan.model import Access, Operation, Problem
from symmplan.registry import bind_arguments

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import fx

    from symmplan.capture.decide import Decider
    from symmplan.capture.sites import Captured, CopyKind, Site


def copy_name(kind: CopyKind, prefix: str, site: Site) -> str:
    """Name of the operation that copies a declared tensor. See `Step`."""
    return f"{prefix}{site.node.name}.{site.where}:{kind.removeprefix('copy ')}"


@define(eq=False)
class Steps:
    """Collects the operations that touch a buffer, in the order in which they will run.

    Every copy is an operation of its own, with a read and a write. The source of a copy in counts
    as in use until the op has ended, because an eager caller holds its arguments that long.
    """

    decider: Decider
    operations: list[Operation] = field(init=False, factory=list)
    steps: dict[str, Step] = field(init=False, factory=dict)
    accesses: dict[tuple[str, str], Access] = field(init=False, factory=dict)
    # Buffers that asynchronous work holds until a wait node, and the work that ends there.
    held: dict[fx.Node, list[Access]] = field(init=False, factory=dict)
    ends: dict[fx.Node, list[str]] = field(init=False, factory=dict)
    after: dict[fx.Node, list[Site]] = field(init=False, factory=dict)

    def node(self, node: fx.Node, sites: list[Site], touched: dict[str, bool]) -> None:
        """Add one node of the graph, with its declared tensors.

        ``touched`` are buffers it touches as any op would -> whether it may write them.
        """
        placed = [s for s in sites if s.buffer is not None]
        for site in placed:
            if site.how == "stage" and site.kind == "argument":
                self._copy("copy in", site, self._source(site), site.buffer)
        spec = self.decider.specs.get(node)
        copied = [s for s in placed if s.kind == "result" and s.how == "stage" and s.stays]
        mine = [s for s in placed if s not in copied]
        for site in mine:
            given = self._filled(site)
            if given is not False:
                self._copy("copy in", site, given, site.buffer)
        name = f"{self.decider.prefix}{node.name}"
        if mine:
            first = placed[0].buffer
            assert spec is not None
            assert first is not None
            self._operation(
                Operation(
                    name,
                    group=self.decider.buffers[first].group,
                    handshake=spec.handshake,
                    release=spec.release,
                    synchronizes=spec.synchronizes,
                    op=spec.op,
                    stack=stack_of(node),
                ),
                Step("launch", node),
            )
            for site in mine:
                self._merge(_reach(name, site))
        elif touched or copied or node in self.held:
            op = getattr(node.target, "name", lambda: str(node.target))()
            ends = tuple(self.ends.pop(node, ()))
            self._operation(
                Operation(name, ends=ends, op=op, stack=stack_of(node)), Step("use", node)
            )
        for buffer, write in touched.items():
            self._merge(Access(name, buffer, write=write))
        for site in copied:
            self._copy("copy in", site, None, site.buffer)
        self._schedule_end(node, mine, touched)
        for access in self.held.pop(node, []):
            self._merge(access)
        for site in self.after.pop(node, []):
            self._copy_after(site)

    def _source(self, site: Site) -> str | None:
        """The buffer in which a site's value lies before it is copied, if any."""
        return self.decider.buffer_of(self.decider.values.find(site.value))

    def _filled(self, site: Site) -> str | Literal[False] | None:
        """The buffer from which an op fills a result before it works there in place.

        None if that lies in ordinary memory; False if the op fills nothing.
        """
        fills = {result: given for given, result in self.decider.specs[site.node].fills}
        given = fills.get(site.head)
        if given is None:
            return False
        overload = called(site.node)
        assert overload is not None
        bound = bind_arguments(overload, site.node.args, site.node.kwargs)
        source = dict(argument_nodes(bound[given]))[site.index]
        return self.decider.buffer_of(self.decider.values.find((source, ())))

    def _schedule_end(self, node: fx.Node, placed: list[Site], touched: dict[str, bool]) -> None:
        """Say where the op's hold on its buffers ends, and its copies out happen."""
        spec = self.decider.specs.get(node)
        if spec is None or not spec.asynchronous or not (placed or touched):
            self.after.setdefault(node, []).extend(placed)
            return
        # Never empty: else nothing of the op would be in a placement.
        waits = self.decider.waits[node]
        last = max(waits.values(), key=self.decider.values.order.__getitem__)
        end = f"{self.decider.prefix}{last.name}"
        name = f"{self.decider.prefix}{node.name}"
        held = self.held.setdefault(last, [])
        self.ends.setdefault(last, []).append(name)
        held += (
            Access(end, a.buffer, write=a.write)
            for a in self.accesses.values()
            if a.operation == name and (a.remote or a.buffer in touched)
        )
        for site in placed:
            # A staged result is copied out at its own wait: its readers may come before the last.
            at = waits.get(site.path, last) if site.kind == "result" else last
            self.after.setdefault(at, []).append(site)

    def _copy_after(self, site: Site) -> None:
        if site.leaves:
            self._copy("copy out", site, site.buffer, None)
        elif site.how == "stage" and site.kind == "argument" and site.writes:
            self._copy("copy back", site, site.buffer, self._source(site))

    def _copy(self, kind: CopyKind, site: Site, source: str | None, target: str | None) -> None:
        """A copy; None is ordinary memory."""
        name = copy_name(kind, self.decider.prefix, site)
        self._operation(
            Operation(name, op="aten::copy_", stack=stack_of(site.node)),
            Step(kind, site.node, site),
        )
        if source is not None:
            self._merge(Access(name, source))
        if target is not None:
            self._merge(Access(name, target, write=True))

    def _operation(self, operation: Operation, step: Step) -> None:
        self.operations.append(operation)
        self.steps[operation.name] = step

    def _merge(self, access: Access) -> None:
        key = (access.operation, access.buffer)
        have = self.accesses.get(key)
        if have is not None:
            facts = [a for a in (have, access) if a.remote]
            access = evolve(
                have,
                write=have.write or access.write,
                remote=bool(facts),
                enters=bool(facts) and all(a.enters for a in facts),
                releases=bool(facts) and all(a.releases for a in facts),
            )
        self.accesses[key] = access


def _reach(operation: str, site: Site) -> Access:
    """The accesses of an op to a declared tensor: to this rank's bytes and to peers'."""
    assert site.buffer is not None
    return Access(
        operation,
        site.buffer,
        write=site.kind == "result" or site.writes,
        remote=True,
        enters=site.requirement.enters,
        releases=site.requirement.releases,
    )


def plan_poison(captured: Captured) -> Captured:
    """A captured program with an operation that overwrites each buffer after its last access.

    Buffers that are used on several streams are left alone, because no use may be the last. Buffers
    that a forward saves are left alone, because they end in the backward.
    """
    problem, steps = captured.problem, dict(captured.steps)
    saves = {name for name, step in steps.items() if step.kind == "saved"}
    saved = {a.buffer for a in problem.accesses if a.operation in saves}
    rank = {o.name: i for i, o in enumerate(problem.operations)}
    stream = {o.name: o.stream for o in problem.operations}
    last: dict[str, int] = {}
    streams: dict[str, set[str]] = {}
    for access in problem.accesses:
        last[access.buffer] = max(last.get(access.buffer, 0), rank[access.operation])
        streams.setdefault(access.buffer, set()).add(stream[access.operation])
    dying: dict[int, list[str]] = {}
    for buffer in problem.buffers:
        if buffer.name in saved or len(streams[buffer.name]) > 1:
            continue
        dying.setdefault(last[buffer.name], []).append(buffer.name)
    operations = []
    accesses = list(problem.accesses)
    for i, operation in enumerate(problem.operations):
        operations.append(operation)
        for name in dying.get(i, ()):
            dead = Operation(f"{name}:dead", stream=operation.stream, op="symmplan::poison_")
            operations.append(dead)
            accesses.append(Access(dead.name, name, write=True))
            steps[dead.name] = Step("poison", buffer=name)
    problem = evolve(problem, operations=operations, accesses=accesses)
    return evolve(captured, problem=problem, steps=steps)


def join(problems: Iterable[Problem]) -> Problem:
    """One problem of several that run in the given order on the same stream.

    Their operations must have different names (see the ``prefix`` of `capture_fx`), and so must
    their buffers, but for those that are equal: they cross from one to the other.

    Raises:
        ProblemError: A name appears in two of them and stands for different things.

    Collective: no.
    """
    parts = list(problems)
    return Problem(
        buffers=tuple(dict.fromkeys(b for p in parts for b in p.buffers)),
        operations=tuple(o for p in parts for o in p.operations),
        accesses=tuple(a for p in parts for a in p.accesses),
        edges=tuple(e for p in parts for e in p.edges),
        together=tuple(t for p in parts for t in p.together),
        apart=tuple(a for p in parts for a in p.apart),
        shared_groups=tuple(dict.fromkeys(g for p in parts for g in p.shared_groups)),
        unplanned=tuple(u for p in parts for u in p.unplanned),
    )
