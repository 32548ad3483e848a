"""Decide of each declared tensor how it gets into symmetric memory: its *site*.

argument, made in the graph by an op that can write     bind   produced in its placement
argument, made by a declared op, or a view of a bound    bind   used where it lies
argument from outside that may be kept in its placement  bind   used where it lies
argument from outside, or that leaves the graph, ...     stage  copied in before the op
result                                                   bind   written there by the op
result that leaves the graph                             stage  copied out after the op or its wait
result of a user's op that cannot write given memory     stage  copied in after the op
any, of work whose end is not in the graph               none   `Unplanned`, with the reason
no size, empty, symbolic without a bound                 none   `Unplanned`, with the reason
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field
from torch import fx

from symmplan.capture.bounds import bound, bounded, contiguous, known, sources
from symmplan.capture.graphs import (
    Path,
    Value,
    Values,
    argument_nodes,
    called,
    is_getitem,
    is_pure_view,
    label_of,
    overload_of,
    target_name,
    tensor_leaves,
    unequal_parts,
    written_arguments,
)
from symmplan.capture.sites import How, Kept, PlacedStorage, Site
from symmplan.model import Buffer, OpSpec, Requirement, Unplanned
from symmplan.registry import bind_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from symmplan.capture.producers import Write

#: Why a tensor stays in ordinary memory that loses nothing there.
ANYWHERE_INPUT = "the ranks send parts of other sizes, which may lie anywhere"
_NOT_ON_ALL = "not all ranks make it for the call alone, and in its placement if they are told to"
_SHUNNED = "an op that runs in torch's own way uses it, too"


def _element(where: str, path: Path) -> str:
    """``"inputs"`` and ``(0,)`` -> ``"inputs.0"``."""
    return ".".join([where, *map(str, path)])


def sites_of(node: fx.Node, spec: OpSpec, values: Values) -> Iterator[Site]:
    """The requirements of one op, each with the tensors that it is about; nothing is decided yet.

    Args:
        node: Its node.
        spec: Its declaration.
        values: The graph's tensors.
    """
    overload = overload_of(node.target)
    assert overload is not None
    bound = bind_arguments(overload, node.args, node.kwargs)
    mutated = written_arguments(overload)
    for requirement in spec.requirements:
        head, index = requirement.head, requirement.index
        if requirement.of_result:
            for path, _ in tensor_leaves(values.fakes.get(node)):
                if index is not None and path[:1] != (index,):
                    continue
                yield Site(node, head, path, "result", node, requirement, path=path, writes=True)
            continue
        for path, source in argument_nodes(bound.get(head)):
            for value_path, _ in tensor_leaves(values.fakes.get(source)):
                yield Site(
                    node,
                    head,
                    (*path, *value_path),
                    "argument",
                    source,
                    requirement,
                    path=value_path,
                    writes=head in mutated,
                )


@define(eq=False)
class Decider:
    """Decides site by site. Its arguments are those of `capture_fx`."""

    prefix: str
    values: Values
    specs: dict[fx.Node, OpSpec]
    groups: Mapping[fx.Node, str]
    escaping: set[Value]  # representatives of the storages that leave the graph
    waits: dict[fx.Node, dict[Path, fx.Node]]  # of asynchronous nodes, by path of the result
    producer: Callable[[fx.Node], Write | None]
    skip: Callable[[OpSpec, str, Requirement], str | None]
    anywhere: Callable[[OpSpec, str, Requirement], bool]
    refused: Mapping[fx.Node, str]
    slower: Collection[fx.Node]
    device: torch.device | None
    keep: frozenset[fx.Node]
    #: Representatives of storages that stay in ordinary memory. See [Note: left out].
    shunned: frozenset[Value]

    placed_storages: dict[Value, PlacedStorage] = field(init=False, factory=dict)
    buffers: dict[str, Buffer] = field(init=False, factory=dict)
    sites: list[Site] = field(init=False, factory=list)
    unplanned: list[Unplanned] = field(init=False, factory=list)
    kept: dict[Value, Kept] = field(init=False, factory=dict)
    #: Storages of which an op wrote a staged copy: from there on the copy counts.
    copied: set[Value] = field(init=False, factory=set)
    #: Storages that arguments of users' ops were left out with.
    _left: set[Value] = field(init=False, factory=set)
    _classes: dict[Value, list[Value]] = field(init=False)
    #: Where the graph's inputs give the symbols of sizes.
    _symbols: Mapping[Any, Any] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._classes = self.values.classes()
        self._symbols = sources(self.values.graph)

    def decide(self, sites: Sequence[Site], given: Mapping[fx.Node, Buffer]) -> None:
        """All results before all arguments, in graph order; ``given`` lies there already."""
        for node, buffer in given.items():
            root = self.values.find((node, ()))
            self.placed_storages.setdefault(root, PlacedStorage(buffer.name, node, (), "given"))
            self.buffers[buffer.name] = buffer
        for kind, decide in (("result", self._result), ("argument", self._argument)):
            for site in sites:
                if site.kind != kind:
                    continue
                reason = self._unplaceable(site)
                if reason is None:
                    decide(site)
                else:
                    self._leave_out(site, reason)

    def misplaced(self) -> frozenset[Value]:
        """Storages in placements that an op uses whose argument was left out.

        [Note: left out]
            A one-sided op that gets an ordinary tensor goes its own other way. If the tensor lies
            in a placement for the sake of another op, it goes the one-sided way, unplanned, maybe
            over a group that the segment never met. So such a storage stays in ordinary memory, and
            the other ops' tensors are copied. The process group's collectives take any memory.
        """
        placed_storages = self.placed_storages
        given = {root for root, placed in placed_storages.items() if placed.write == "given"}
        return frozenset(r for r in self._left - given if self.buffer_of(r) is not None)

    def _leave_out(self, site: Site, reason: str) -> None:
        spec = self.specs[site.node]
        if site.kind == "argument" and spec.origin != "catalogue":
            self._left.add(self.values.find(site.value))
        nbytes = bound(self.values.tensors[site.value].untyped_storage().nbytes())
        name = f"{self.prefix}{site.value[0].name}"
        slower = site.node in self.slower
        needed = not (slower or self.anywhere(spec, self.groups[site.node], site.requirement))
        needed = needed and reason != ANYWHERE_INPUT
        about = (name, spec.op, site.where, reason, nbytes)
        self.unplanned.append(Unplanned(*about, needed=needed))
        self.sites.append(evolve(site, reason=reason))

    def _place(self, site: Site, how: How, buffer: str, reason: str = "", **facts: Any) -> None:
        self.sites.append(evolve(site, how=how, buffer=buffer, reason=reason, **facts))

    def _unplaceable(self, site: Site) -> str | None:
        """Why no tensor like this can be placed, or None."""
        about = self.specs[site.node], self.groups[site.node], site.requirement
        reason = self.refused.get(site.node) or self.skip(*about)
        if reason is not None:
            return reason
        unequal = unequal_parts(site.node) is not None
        if unequal and site.live_range is None:
            return ANYWHERE_INPUT
        if site.node in self.waits and not self.waits[site.node]:
            return "nobody in the graph waits for the op, so it may still run after the graph"
        fake = self.values.tensors[site.value]
        if type(fake).__name__ not in ("FakeTensor", "Tensor", "Parameter"):
            return f"is a {type(fake).__name__}, not a plain tensor"
        if self.device is not None and fake.device != self.device:
            return f"it is on device {fake.device}, and symmetric memory is on {self.device}"
        if fake.layout is not torch.strided:
            return f"has layout {fake.layout}"
        if not bounded(fake, self._symbols):
            return (
                f"its size {tuple(fake.shape)} is symbolic without an upper bound; set one with "
                "torch._dynamo.mark_dynamic(tensor, dim, max=...), or compile with dynamic=False"
            )
        if bound(fake.numel()) == 0 and not unequal:
            return "it has no elements"
        return None

    def _buffer(self, site: Site, name: str, value: Value, *, whole: bool) -> Buffer:
        fake = self.values.tensors[value]
        numel = fake.numel() * fake.element_size()
        nbytes = bound(fake.untyped_storage().nbytes() if whole else numel)
        assert nbytes is not None
        if site.live_range is not None:
            nbytes = max(nbytes, site.live_range.nbytes)
        buffer = Buffer(
            name=self.prefix + name,
            nbytes=nbytes,
            group=self.groups[site.node],
            align=site.requirement.align,
            signal_pad=site.requirement.signal_pad,
            op=self.specs[site.node].op,
            where=site.where,
            dtype=str(fake.dtype).removeprefix("torch."),
            shape=tuple(bound(size) or 0 for size in fake.shape),
            label=label_of(value[0], site.node),
        )
        self.buffers[buffer.name] = buffer
        return buffer

    def _result(self, site: Site) -> None:
        value, spec = site.value, self.specs[site.node]
        root = self.values.find(value)
        if self._origin(root) != value:
            return  # an in-place op returns its argument, whose own site speaks for it
        name = _element(value[0].name, value[1])
        if spec.origin == "catalogue" and not contiguous(self.values.tensors[value]):
            self._leave_out(site, "it is not contiguous")
            return
        copied = self._why_copied(site)
        if copied is not None and value[0] in self.waits:
            self._leave_out(site, f"{copied}, and a copy would not wait for it")
            return
        reason = None
        if root in self.escaping:
            reason = "it leaves the graph"
        elif self._untraceable(root):
            reason = "its aliases cannot be followed"
        elif root in self.shunned:
            reason = _SHUNNED
        if reason is not None:
            if not self._only_waited(value):
                self._leave_out(site, f"{reason}, and it is used other than through one wait")
                return
            buffer = self._buffer(site, f"{name}:result", value, whole=True)
            self._place(site, "stage", buffer.name, reason)
            return
        buffer = self._buffer(site, name, value, whole=True)
        self.placed_storages[root] = PlacedStorage(buffer.name, value[0], value[1], "declared")
        how: How = "bind" if copied is None else "stage"
        self._place(site, how, buffer.name, copied or "", stays=True)

    def _why_copied(self, site: Site) -> str | None:
        """Why a result is copied into its placement, or None if the op writes it there."""
        spec = self.specs[site.node]
        if spec.out is not None or self.producer(site.node) == "declared":
            return None
        if spec.origin == "catalogue":  # how those run is up to whoever runs them
            return None
        return f"{spec.op} has no variant that writes into given memory"

    def _only_waited(self, value: Value) -> bool:
        """Whether an asynchronous result has no other reader than the wait that ends it.

        Only then can it be copied out at the wait, and the copy be given to everybody else.
        """
        ends = self.waits.get(value[0])
        if ends is None:
            return True
        readers = [value[0]]
        if value[1]:
            readers = [n for n in value[0].users if is_getitem(n) and n.args[1] == value[1][0]]
        return {user for n in readers for user in n.users} == {ends.get(value[1])}

    def _argument(self, site: Site) -> None:
        root = self.values.find(site.value)
        reason, by_producer = self._why_stage(site, root), False
        if reason is None and root not in self.placed_storages and self._is_made_here(root):
            reason = self._why_not_written(root)
            by_producer = reason is not None
        if reason is None:
            name = self.buffer_of(root) or self._settle(site, root)
            self._widen(name, site)
            self._place(site, "bind", name)
            return
        if self._is_written_twice(site, root):
            self._leave_out(site, f"{reason}, and the op writes it by two of its arguments")
            return
        if site.writes and self._is_made_here(root):
            self.copied.add(root)
        name = f"{site.node.name}.{site.where}"
        buffer = self._buffer(site, name, site.value, whole=False)
        viewed = site.writes and self._is_viewed_later(site, root)
        self._place(site, "stage", buffer.name, reason, by_producer=by_producer, viewed=viewed)

    def _write_of(self, node: fx.Node) -> Write | None:
        """How a node can write into given memory; what is left out runs as it is."""
        write = self.producer(node)
        return None if write == "declared" and node in self.refused else write

    def _settle(self, site: Site, root: Value) -> str:
        """Let a storage live in a placement from its first byte; the buffer's name."""
        origin = node, path = self._origin(root)
        same_on_all = f"{site.node.name}.{site.where}"
        name = _element(node.name, path) if site.live_range is None else same_on_all
        buffer = self._buffer(site, name, origin, whole=True)
        if node.op == "placeholder":
            index = node.graph.find_nodes(op="placeholder").index(node)
            made = index, buffer.name, self.groups[site.node], self.specs[site.node].op, site.where
            self.kept[root] = Kept(node, *made)
            self.buffers[buffer.name] = evolve(buffer, persistent=True)
        else:
            write = self._write_of(node)
            assert write is not None
            self.placed_storages[root] = PlacedStorage(buffer.name, node, path, write)
        return buffer.name

    def buffer_of(self, root: Value) -> str | None:
        """The buffer that a storage lives in from its first byte, if it does."""
        placed, kept = self.placed_storages.get(root), self.kept.get(root)
        if placed is not None:
            return placed.buffer
        return None if kept is None else kept.buffer

    def _widen(self, name: str, site: Site) -> None:
        """One storage, several requirements: the strictest holds."""
        have, requirement = self.buffers[name], site.requirement
        align, pad = max(have.align, requirement.align), have.signal_pad or requirement.signal_pad
        nbytes = have.nbytes
        if site.live_range is not None:
            nbytes = max(nbytes, site.live_range.nbytes)
        self.buffers[name] = evolve(have, align=align, signal_pad=pad, nbytes=nbytes)

    def _why_stage(self, site: Site, root: Value) -> str | None:
        """Why the argument cannot simply lie in its placement, or None if it can."""
        fake, placed = self.values.tensors[site.value], self.placed_storages.get(root)
        if site.live_range is not None and site.live_range.until is None:
            return _NOT_ON_ALL
        if not contiguous(fake):
            return "it is not contiguous"
        if root in self.copied:
            return "an op before wrote a copy of it"
        if not isinstance(fake.storage_offset(), int):
            return "it begins at an offset that is not known"
        if (fake.storage_offset() * fake.element_size()) % site.requirement.align:
            return f"its view starts off the alignment of {site.requirement.align} bytes"
        if placed is not None:
            if self.buffers[placed.buffer].group != self.groups[site.node]:
                return f"its storage is symmetric over group {self.buffers[placed.buffer].group}"
            return None
        if root in self.shunned:
            return _SHUNNED
        if not self._is_made_here(root):
            return self._why_not_kept(site, root, self._origin(root))
        if root in self.escaping:
            return "its storage leaves the graph"
        return "its aliases cannot be followed" if self._untraceable(root) else None

    def _why_not_written(self, root: Value) -> str | None:
        """Why what makes a storage cannot make it in a placement, or None if it can."""
        origin = self._origin(root)
        if self._write_of(origin[0]) is None:
            return f"its producer {target_name(origin[0])} cannot write into given memory"
        made = self.values.tensors[origin]
        numel = made.numel() * made.element_size()
        dense = known(numel == made.untyped_storage().nbytes())
        if not (dense and known(made.storage_offset() == 0)) or not bounded(made, self._symbols):
            return "its producer's result is not dense"
        return None

    def _why_not_kept(self, site: Site, root: Value, origin: Value) -> str | None:
        """Why an input cannot lie in symmetric memory from run to run, or None if it can."""
        if origin[0] not in self.keep:
            return "it comes from outside the graph"
        kept = self.kept.get(root)
        if kept is not None and kept.group != self.groups[site.node]:
            return f"it comes from outside the graph and is kept for group {kept.group}"
        made = self.values.tensors[origin]
        sizes = (*made.shape, *made.stride(), made.storage_offset())
        if not all(isinstance(size, int) for size in sizes):
            return "it comes from outside the graph, and its size is symbolic"
        if made.numel() * made.element_size() != made.untyped_storage().nbytes():
            return "it comes from outside the graph as a part of a larger tensor"
        if self._untraceable(root):
            return "it comes from outside the graph, and its aliases cannot be followed"
        return None

    def _is_written_twice(self, site: Site, root: Value) -> bool:
        """Whether an op writes a storage by several arguments: a copy of one misses the others."""
        overload = overload_of(site.node.target)
        assert overload is not None
        given = bind_arguments(overload, site.node.args, site.node.kwargs)
        written = [given[name] for name in written_arguments(overload)]
        sources = [source for _, source in argument_nodes(written)]
        values = [value for source in sources for value in self.values.of_node(source)]
        return sum(self.values.find(value) == root for value in values) > 1

    def _is_viewed_later(self, site: Site, root: Value) -> bool:
        """Whether somebody looks at a written storage through another view after the op."""
        order = self.values.order
        at = order[site.node]
        return any(
            order[user] > at
            for value in self._classes[root]
            if value != site.value and order[value[0]] < at
            for user in value[0].users
        )

    def _is_made_here(self, root: Value) -> bool:
        """Whether a node of the graph makes the storage, and no input brings it."""
        return self._origin(root)[0].op == "call_function"

    def _origin(self, root: Value) -> Value:
        """The first value of a storage class, in graph order."""
        return self._classes[root][0]

    def _untraceable(self, root: Value) -> bool:
        """Whether a class joins values of which more than one could be the storage's maker."""
        for node, _ in self._classes[root][1:]:  # but the origin
            if is_pure_view(node):
                continue
            overload = called(node)
            if overload is None:
                return True
            returns = overload._schema.returns  # none where a recorded call gives what it wrote
            if returns and all(r.alias_info is None for r in returns):
                return True
        return False
