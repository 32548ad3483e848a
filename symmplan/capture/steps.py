"""Operations and accesses of a captured graph, as it will run: with its staging copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import define, evolve, field

from symmplan.capture.sites import Step
from symmplan.model import Access, Operation, OpSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from symmplan.capture.sites import CopyKind, Site

__all__ = ["Steps", "copy_name"]

_SUFFIXES = {"copy in": "in", "copy out": "out", "copy back": "back"}


def copy_name(kind: CopyKind, prefix: str, site: Site) -> str:
    """Name of the operation that copies a declared tensor. See `Step`."""
    return f"{prefix}{site.node.name}.{site.where}:{_SUFFIXES[kind]}"


@define(eq=False)
class Steps:
    """Collects the operations that touch a buffer, in the order in which they will run.

    Every copy is an operation of its own, with a read and a write. What is copied in counts as in
    use until the op has ended, too: an eager caller holds its arguments that long.

    Attributes:
        prefix: What names of operations begin with.
        order: ``{node: its position}``.
        specs: What is declared of nodes.
        waits: ``{asynchronous node: {path of a result: its wait node}}``.
        source: Gives the buffer in which the value of a site lies before it is copied, if any.
        filled: Gives the buffer from which an op fills a result before it works there in place;
            False if it does no such thing.
    """

    prefix: str
    order: dict[fx.Node, int]
    specs: dict[fx.Node, OpSpec]
    waits: dict[fx.Node, dict[tuple[int, ...], fx.Node]]
    source: Callable[[Site], str | None]
    filled: Callable[[Site], str | Literal[False] | None]
    operations: list[Operation] = field(init=False, factory=list)
    steps: dict[str, Step] = field(init=False, factory=dict)
    accesses: dict[tuple[str, str], Access] = field(init=False, factory=dict)
    # Buffers that asynchronous work holds until a wait node, and the work that ends there.
    held: dict[fx.Node, list[Access]] = field(init=False, factory=dict)
    ends: dict[fx.Node, list[str]] = field(init=False, factory=dict)
    after: dict[fx.Node, list[Site]] = field(init=False, factory=dict)

    def node(
        self, node: fx.Node, sites: list[Site], touched: dict[str, bool], group: str | None
    ) -> None:
        """Add one node of the graph.

        Args:
            node: The node.
            sites: Its declared tensors.
            touched: Buffers it touches as any op would -> whether it may write them.
            group: Process group of its declared tensors.
        """
        placed = [s for s in sites if s.buffer is not None]
        for site in placed:
            if site.how == "stage" and site.kind == "argument":
                self._copy("copy in", site, self.source(site), site.buffer)
        spec = self.specs.get(node)
        copied = [s for s in placed if s.kind == "result" and s.how == "stage" and s.stays]
        mine = [s for s in placed if s not in copied]
        for site in mine:
            given = self.filled(site)
            if given is not False:
                self._copy("copy in", site, given, site.buffer)
        name = f"{self.prefix}{node.name}"
        if mine:
            assert spec is not None
            self._operation(
                Operation(
                    name,
                    group=group,
                    handshake=spec.handshake,
                    release=spec.release,
                    meets=spec.meets,
                    op=spec.op,
                ),
                Step("launch", node),
            )
            for site in mine:
                self._merge(self._reach(name, site, spec))
        elif touched or copied or node in self.held:
            op = getattr(node.target, "name", lambda: str(node.target))()
            ends = tuple(self.ends.pop(node, ()))
            self._operation(Operation(name, ends=ends, op=op), Step("use", node))
        for buffer, write in touched.items():
            self._merge(Access(name, buffer, write=write))
        for site in copied:
            self._copy("copy in", site, None, site.buffer)
        self._schedule_end(node, mine, touched)
        for access in self.held.pop(node, []):
            self._merge(access)
        for site in self.after.pop(node, []):
            self._copy_after(site)

    def _reach(self, operation: str, site: Site, spec: OpSpec) -> Access:
        """What an op does with a declared tensor: to its own bytes and to peers'."""
        assert site.buffer is not None
        heads = {r.where.partition(".")[0]: r for r in spec.requirements}
        exact = {r.where: r for r in spec.requirements}
        facts = exact.get(site.where, heads.get(site.head))
        return Access(
            operation,
            site.buffer,
            write=site.kind == "result" or site.writes,
            remote=True,
            enters=facts is not None and facts.enters,
            releases=facts is not None and facts.releases,
        )

    def _schedule_end(self, node: fx.Node, placed: list[Site], touched: dict[str, bool]) -> None:
        """Say where the op's hold on its buffers ends, and its copies out happen."""
        spec = self.specs.get(node)
        if spec is None or not spec.asynchronous or not (placed or touched):
            self.after.setdefault(node, []).extend(placed)
            return
        waits = self.waits[node]  # never empty: else nothing of the op would be in a placement
        last = max(waits.values(), key=self.order.__getitem__)
        end = f"{self.prefix}{last.name}"
        name = f"{self.prefix}{node.name}"
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
            self._copy("copy back", site, site.buffer, self.source(site))

    def finish(self) -> tuple[tuple[Operation, ...], tuple[Access, ...], dict[str, Step]]:
        """All operations and accesses, and what each operation does."""
        return tuple(self.operations), tuple(self.accesses.values()), dict(self.steps)

    def _copy(self, kind: CopyKind, site: Site, source: str | None, target: str | None) -> None:
        """A copy; None is ordinary memory."""
        name = copy_name(kind, self.prefix, site)
        self._operation(Operation(name, op="aten::copy_"), Step(kind, site.node, site))
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
