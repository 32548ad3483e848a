"""Operations and accesses of a captured graph, as it will run: with its staging copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, evolve, field

from symmplan.model import Access, Operation, OpSpec

if TYPE_CHECKING:
    from torch import fx

    from symmplan.capture.sites import Site

__all__ = ["Steps", "copy_back_name", "copy_in_name", "copy_out_name"]


def copy_in_name(prefix: str, site: Site) -> str:
    """Name of the operation that copies a staged argument into its placement."""
    return f"{prefix}{site.node.name}.{site.where}:in"


def copy_back_name(prefix: str, site: Site) -> str:
    """Name of the operation that copies a staged argument, which the op wrote, back."""
    return f"{prefix}{site.node.name}.{site.where}:back"


def copy_out_name(prefix: str, site: Site) -> str:
    """Name of the operation that copies a staged result out of its placement."""
    return f"{prefix}{site.node.name}.{site.where}:out"


@define(eq=False)
class Steps:
    """Collects the operations that touch a buffer, in the order in which they will run."""

    prefix: str
    order: dict[fx.Node, int]
    specs: dict[fx.Node, OpSpec]
    waits: dict[fx.Node, dict[tuple[int, ...], fx.Node]]
    operations: list[Operation] = field(init=False, factory=list)
    accesses: dict[tuple[str, str], Access] = field(init=False, factory=dict)
    # Buffers that asynchronous work holds until a wait node.
    held: dict[fx.Node, list[Access]] = field(init=False, factory=dict)
    after: dict[fx.Node, list[Site]] = field(init=False, factory=dict)
    ends: dict[fx.Node, tuple[str | None, bool]] = field(init=False, factory=dict)

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
                name = copy_in_name(self.prefix, site)
                self._operation(Operation(name, op="aten::copy_"))
                self._access(name, site, write=True, remote=False)
        name = f"{self.prefix}{node.name}"
        spec = self.specs.get(node)
        if placed:
            assert spec is not None
            ends_here = not spec.asynchronous
            self._operation(
                Operation(
                    name,
                    group=group,
                    handshake=spec.handshake,
                    release=spec.release and ends_here,
                    op=spec.op,
                )
            )
            for site in placed:
                write = site.kind == "result" or site.writes
                self._access(name, site, write=write, remote=True)
        elif touched or node in self.held:
            group, release = self.ends.get(node, (None, False))
            op = getattr(node.target, "name", lambda: str(node.target))()
            self._operation(Operation(name, group=group, release=release, op=op))
        for buffer, write in touched.items():
            self._merge(Access(name, buffer, write=write))
        self._schedule_end(node, placed, touched, group)
        for access in self.held.pop(node, []):
            self._merge(access)
        for site in self.after.pop(node, []):
            self._copy_after(site)

    def _schedule_end(
        self, node: fx.Node, placed: list[Site], touched: dict[str, bool], group: str | None
    ) -> None:
        """Say where the op's hold on its buffers ends, and its copies out happen."""
        spec = self.specs.get(node)
        if spec is None or not spec.asynchronous or not (placed or touched):
            self.after.setdefault(node, []).extend(placed)
            return
        waits = self.waits[node]  # never empty: else nothing of the op would be in a placement
        last = max(waits.values(), key=self.order.__getitem__)
        end = f"{self.prefix}{last.name}"
        held = self.held.setdefault(last, [])
        held += [Access(end, b, write=write) for b, write in touched.items()]
        if not placed:
            return
        held += [Access(end, s.buffer, write=True, remote=True) for s in placed if s.buffer]
        self.ends[last] = (group, spec.release)
        for site in placed:
            # A staged result is copied out at its own wait: its readers may come before the last.
            at = waits.get(site.path, last) if site.kind == "result" else last
            self.after.setdefault(at, []).append(site)

    def _copy_after(self, site: Site) -> None:
        if site.leaves:
            name = copy_out_name(self.prefix, site)
        elif site.how == "stage" and site.kind == "argument" and site.writes:
            name = copy_back_name(self.prefix, site)
        else:
            return
        self._operation(Operation(name, op="aten::copy_"))
        self._access(name, site, write=False, remote=False)

    def finish(self) -> tuple[tuple[Operation, ...], tuple[Access, ...]]:
        """All operations and accesses."""
        return tuple(self.operations), tuple(self.accesses.values())

    def _operation(self, operation: Operation) -> None:
        self.operations.append(operation)

    def _access(self, operation: str, site: Site, *, write: bool, remote: bool) -> None:
        assert site.buffer is not None
        self._merge(Access(operation, site.buffer, write=write, remote=remote))

    def _merge(self, access: Access) -> None:
        key = (access.operation, access.buffer)
        have = self.accesses.get(key)
        if have is not None:
            access = evolve(
                have,
                write=have.write or access.write,
                remote=have.remote or access.remote,
            )
        self.accesses[key] = access
