"""How each collective runs once its tensors have placements, by memory backend.

A functional collective allocates its result itself, so it cannot write a placement. Each row names
a form that can, and which of the op's declared tensors that form needs in symmetric memory. The
catalogue says which tensors the *op* can use there, a row which ones *this algorithm* needs.

[Note: both ends]
    NCCL sends between buffers that are registered with it in another way than between others, and
    each rank looks at its own buffer only: if one end is registered and the other is not, a large
    message never comes to an end. Nor does another collective of which one rank alone has all
    tensors there. So in NCCL's memory what is sent and received in an all-to-all lies in placements
    on all ranks, or none of it does. What sends and receives that are not planned move is in
    ordinary memory; in sessions, so is what collectives without a functional form use, and what
    ranks do not pass to the same collectives.
    Source: addP2pToPlan in src/enqueue.cc of NCCL 2.28; seen on two devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from attrs import evolve, frozen
from torch import fx

from symmplan.capture.bounds import bound as bound_of
from symmplan.capture.bounds import contiguous
from symmplan.capture.graphs import at_path, overload_of, unequal_parts
from symmplan.memory import BACKENDS
from symmplan.memory.backends.torch_symm import SPLIT_WORDS, is_whole_words
from symmplan.memory.meeting.calls import TWO_LEVELS
from symmplan.memory.ops.library import IMPLEMENTATIONS
from symmplan.registry import bind_arguments
from symmplan.registry.catalogue import collective_of, is_sent, runs_on_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from symmplan.capture import Captured
    from symmplan.capture.graphs import Value
    from symmplan.capture.producers import Write
    from symmplan.model import OpSpec, Requirement
    from symmplan.torch_private.ops import OpOverload

#: Whose collectives run. See `Lowerings`.
Collectives: TypeAlias = Literal["auto", "process group"]


@frozen
class Lowering:
    """How an op runs by one algorithm.

    Attributes:
        target: Qualified name of the op whose default overload is called instead.
        needs: The declared tensors that must be symmetric; the others may lie anywhere.
        out: Which tensor of the original op the target writes: its result, its ``out`` argument,
            or its input (in-place ops).
        inplace: The target works in place: the input is copied into ``out`` first.
        each: The op takes lists; the target runs once for each element.
        one_sided: The target is one of `symmplan.memory.ops.one_sided`: it meets on entry and
            releases on exit. Otherwise it is a collective of the process group.
        started: Of a one-sided target: it is over when it is waited for, not when it returns.
        equal: It has parts for each rank, all of one size unless the ranks have agreed on others.
        kernel: The target is a kernel of ``torch.ops.symm_mem`` that adds up, see `_SUMS`, on the
            current stream: it meets through the signal pad on entry and on exit.
        why_not: Reason given for the declared tensors that are not needed.
        engine: Whether copy engines can run it.
    """

    target: str
    needs: tuple[str, ...]
    out: Literal["return", "out", "input"] = "return"
    inplace: bool = False
    each: bool = False
    one_sided: bool = False
    started: bool = False
    equal: bool = False
    kernel: bool = False
    why_not: str = ""
    engine: bool = False

    @property
    def synchronous(self) -> bool:
        """Whether it is over when it returns."""
        return self.one_sided and not self.started

    @property
    def two_levels(self) -> bool:
        """Whether it runs over several hosts, too; see `symmplan.memory.meeting.counterparts`."""
        return self.started or self.target in TWO_LEVELS


_PUSHES = "the collective writes its peers' results, so this side may lie anywhere"
_PULLS = "the collective reads its peers' inputs, so its result may lie anywhere"
_COPIED = "it is copied into the result's placement, where the op then works in place"

_F = "_c10d_functional::"
_INTO = "symmplan::all_to_all_single_into"


def _functional(**rows: Lowering) -> dict[str, Lowering]:
    """Rows of functional collectives, by their qualified names."""
    return {f"{_F}{name}.default": row for name, row in rows.items()}


def _own(target: str, needs: str, **more: Any) -> Lowering:
    """A one-sided collective over shared memory; ``needs`` are words."""
    return Lowering(f"symmplan::{target}", tuple(needs.split()), one_sided=True, **more)


def _group(target: str, needs: str, **more: Any) -> Lowering:
    """The process group's own collective, in a form that writes into given tensors."""
    return Lowering(f"{_F}{target}", tuple(needs.split()), **more)


# Synchronous, handshake on entry, release on exit. FSDP2 calls them on streams of its own.
_SHM: Mapping[str, Lowering] = {
    **_functional(
        all_gather_into_tensor=_own("all_gather_out", "return", why_not=_PUSHES),
        all_gather_into_tensor_out=_own("all_gather_out", "out", out="out", why_not=_PUSHES),
        all_gather_into_tensor_coalesced=_own(
            "all_gather_out", "return", each=True, why_not=_PUSHES
        ),
        reduce_scatter_tensor=_own("reduce_scatter_out", "input", why_not=_PULLS),
        reduce_scatter_tensor_out=_own("reduce_scatter_out", "input", out="out", why_not=_PULLS),
        reduce_scatter_tensor_coalesced=_own(
            "reduce_scatter_out", "inputs", each=True, why_not=_PULLS
        ),
        all_reduce=_own("all_reduce_out", "input return"),
        all_reduce_=_own("all_reduce_out", "input", out="input"),
        all_reduce_coalesced=_own("all_reduce_out", "inputs return", each=True),
        all_reduce_coalesced_=_own("all_reduce_out", "inputs", out="input", each=True),
        all_to_all_single=_own("all_to_all_single_out", "return", why_not=_PUSHES),
        broadcast=_own("broadcast_out", "return", why_not=_PUSHES),
        broadcast_=_own("broadcast_out", "input", out="input"),
    ),
    f"{_INTO}.default": _own("all_to_all_single_out", "out", out="out", why_not=_PUSHES),
}

#: On devices over several hosts: see `symmplan.memory.ops.started`.
_STARTED: Mapping[str, Lowering] = {
    op: evolve(row, target=target, started=True)
    for op, row in _SHM.items()
    if (target := TWO_LEVELS.get(row.target))
}

_GATHER = "all_gather_into_tensor_out"
_SCATTER = "reduce_scatter_tensor_out"

_C10D: Mapping[str, Lowering] = {
    **_functional(
        all_gather_into_tensor=_group(_GATHER, "input return", engine=True),
        all_gather_into_tensor_out=_group(_GATHER, "input out", out="out", engine=True),
        all_gather_into_tensor_coalesced=_group(_GATHER, "inputs return", each=True, engine=True),
        reduce_scatter_tensor=_group(_SCATTER, "input return"),
        reduce_scatter_tensor_out=_group(_SCATTER, "input out", out="out"),
        reduce_scatter_tensor_coalesced=_group(_SCATTER, "inputs return", each=True),
        all_reduce=_group("all_reduce_", "return", inplace=True, why_not=_COPIED),
        all_reduce_=_group("all_reduce_", "input", out="input"),
        all_reduce_coalesced=_group(
            "all_reduce_", "return", inplace=True, each=True, why_not=_COPIED
        ),
        all_to_all_single=Lowering(_INTO, ("input", "return"), equal=True, engine=True),
        broadcast=_group("broadcast_", "return", inplace=True, why_not=_COPIED),
        broadcast_=_group("broadcast_", "input", out="input"),
    ),
    f"{_INTO}.default": Lowering(_INTO, ("input", "out"), out="out", equal=True, engine=True),
}

#: Without multicast kernels over peers' memory beat NCCL's all-reduce at all sizes of decoding.
#: They add up in the order of the ranks, so all ranks have the same numbers.
_CUDA: Mapping[str, Lowering] = {
    **_C10D,
    **{
        op: evolve(row, target="symmplan::kernel_all_reduce_", kernel=True)
        for op, row in _C10D.items()
        if row.target == f"{_F}all_reduce_"
    },
}

#: Up to how many bytes they are known to do so.
_MOST_SUMMED = 8 << 20
#: What `Lowering.kernel` adds up.
_SUMS = (torch.float32, torch.bfloat16)
_OTHER_SUM = "torch's kernel adds up contiguous float32 and bfloat16, in whole words of 4 bytes"
_UNEQUAL = "its parts are not all of one size, and only such can be written where they are told"
#: Why an op is ordinary that has no form in two levels.
ONE_HOST = "its group is on several hosts, and it has no form in two levels"
_NO_ALGORITHM = "no form of this op writes into given memory on this backend"


@frozen(eq=False)
class Lowerings:
    """The forms of ops on one memory backend, for capture and the rewriter.

    Attributes:
        memory: Name of the memory backend.
        collectives: The collectives that run: ``"auto"`` for the memory backend's own if it has
            any, ``"process group"`` for the process group's.
        levels: The groups that are served in two levels.
    """

    memory: str
    collectives: Collectives = "auto"
    levels: frozenset[str] = frozenset()

    @staticmethod
    def in_two_levels(op: str) -> Lowering:
        """How an op of FSDP2 runs over several hosts, in whatever memory."""
        return _SHM[op]

    @property
    def registered(self) -> bool:
        """Whether NCCL knows its memory; see [Note: both ends]."""
        return BACKENDS[self.memory].engines

    @property
    def table(self) -> Mapping[str, Lowering]:
        """The rows of this backend, for groups that memory reaches."""
        if self.collectives == "process group":
            return _C10D
        if BACKENDS[self.memory].collectives:
            return _SHM
        return _CUDA if self.memory == "cuda" else _C10D

    @property
    def over_hosts(self) -> Mapping[str, Lowering]:
        """Its rows for groups in two levels."""
        started = BACKENDS[self.memory].devices and self.collectives == "auto"
        return {**self.table, **_STARTED} if started else self.table

    def row(self, spec: OpSpec, group: str) -> Lowering | None:
        """How a declared op is to be run over a group, or None to call it as it is."""
        return (self.over_hosts if group in self.levels else self.table).get(spec.op)

    def producer(self, node: fx.Node, other: Callable[[fx.Node], Write | None]) -> Write | None:
        """How a node can write into given memory: by its row if it has one, else ask ``other``."""
        overload = overload_of(node.target) if node.op == "call_function" else None
        row = None
        if overload is not None:
            row = self.table.get(f"{overload._schema.name}.{overload._overloadname}")
        if row is None or row.out != "return" or why_unfit(row, node):
            return other(node)
        return "declared"

    def as_run(self, spec: OpSpec, group: str) -> OpSpec:
        """The declaration of an op, as it holds for the algorithm by which the op runs."""
        row = self.row(spec, group)
        if row is None:
            return spec
        fills = (("inputs" if row.each else "input", "return"),) * row.inplace
        if row.kernel:
            pads = (evolve(r, signal_pad=r.head in row.needs) for r in spec.requirements)
            spec = evolve(spec, requirements=tuple(pads))
        if row.synchronous:
            spec = evolve(spec, handshake=True, release=True, synchronizes=True)
        return evolve(spec, fills=fills, asynchronous=spec.asynchronous and not row.synchronous)

    def skip(self, spec: OpSpec, group: str, requirement: Requirement) -> str | None:
        """Why a requirement need not or cannot be met on this backend, or None to meet it."""
        row = self.row(spec, group)
        if row is not None:
            return row.why_not if self.anywhere(spec, group, requirement) else None
        if spec.origin == "catalogue" and runs_on_groups(spec.op):
            return _NO_ALGORITHM
        if spec.origin == "catalogue" and not BACKENDS[self.memory].devices:
            return f"the op needs device memory, and this program runs on {self.memory}"
        return None

    def anywhere(self, spec: OpSpec, group: str, requirement: Requirement) -> bool:
        """Whether a tensor may lie anywhere, by the algorithm by which its op runs."""
        row = self.row(spec, group)
        return row is not None and requirement.head not in row.needs

    def partly(self, captured: Captured) -> dict[fx.Node, str]:
        """Ops that cannot run as they were captured, and why.

        Some of their tensors are placed, but not all that their one-sided form needs; or they are
        none for their form, see `why_unfit`; or NCCL cannot gather parts of their size in symmetric
        memory.
        """
        found: dict[fx.Node, str] = {}
        if BACKENDS[self.memory].whole_words:
            found = {n: SPLIT_WORDS for n in captured.specs if _splits_words(captured, n)}
        for node, spec in captured.specs.items():
            row = self.row(spec, captured.groups[node])
            placed = any(s.buffer is not None for s in captured.at(node))
            why = "" if row is None or not placed else why_unfit(row, node)
            if why:
                found[node] = why
            if row is None or not (row.one_sided or row.kernel or self._is_exchange(row)):
                continue
            needed = [s for s in captured.at(node) if s.head in row.needs]
            without = [s for s in needed if s.buffer is None]
            if without and len(without) < len(needed):
                found[node] = f"{without[0].where} of the same op is left out: {without[0].reason}"
        return found

    def _is_exchange(self, row: Lowering) -> bool:
        """Whether an op lies wholly in placements or not at all. See [Note: both ends]."""
        return row.equal and self.registered

    def stray_ends(self, captured: Captured) -> set[Value]:
        """Storages in placements that must not be there. See [Note: both ends]."""
        if not self.registered:
            return set()
        values, there = captured.values, {s.node for s in captured.sites if s.buffer is not None}
        placed = {values.find((s.node, s.path)) for s in captured.placed_storages}
        placed |= {values.find((kept.node, ())) for kept in captured.kept}
        sent = (n for n in values.graph.nodes if n not in there and _is_sent(n))
        ends = (v for n in sent for near in (n, *n.all_input_nodes) for v in values.of_node(near))
        return {values.find(value) for value in ends} & placed


def _is_sent(node: fx.Node) -> bool:
    overload = overload_of(node.target)
    return overload is not None and is_sent(overload._schema.name)


def has_unequal_parts(node: fx.Node) -> bool:
    """Whether an all-to-all has parts of different sizes, or of sizes that are not known.

    Not if its ranks have agreed on them.
    """
    if unequal_parts(node) is not None:
        return False
    overload = overload_of(node.target)
    assert overload is not None
    bound = bind_arguments(overload, node.args, node.kwargs)
    parts = [*bound["output_split_sizes"], *bound["input_split_sizes"]]
    return not all(isinstance(part, int) for part in parts) or len(set(parts)) > 1


def why_unfit(row: Lowering, node: fx.Node) -> str:
    """Why an op cannot run by its row, because of what it is given; empty if it can."""
    if row.equal:
        return _UNEQUAL if has_unequal_parts(node) else ""
    if not row.kernel:
        return ""
    reduction, fakes = _summed(row, node)
    flat = row.inplace or all(map(contiguous, fakes))  # a result is
    whole = all(f.dtype in _SUMS and is_whole_words(f.numel() * f.itemsize) for f in fakes)
    return "" if reduction == "sum" and flat and whole else _OTHER_SUM


def only_sums(calls: Iterable[tuple[fx.Node, OpSpec]]) -> bool:
    """Whether there are declared calls, and kernels over mappings run all of them faster."""
    rows = [(node, _CUDA.get(spec.op)) for node, spec in calls]
    return bool(rows) and all(row is not None and _is_faster(row, node) for node, row in rows)


def _is_faster(row: Lowering, node: fx.Node) -> bool:
    if not row.kernel or why_unfit(row, node):
        return False
    sizes = [(bound_of(f.numel()), f.itemsize) for f in _summed(row, node)[1]]
    return all(n is not None and n * itemsize <= _MOST_SUMMED for n, itemsize in sizes)


def _summed(row: Lowering, node: fx.Node) -> tuple[str, list[torch.Tensor]]:
    """How an all-reduce combines, and what it is given."""
    overload = overload_of(node.target)
    assert overload is not None
    bound = bind_arguments(overload, node.args, node.kwargs)
    given = bound["inputs"] if row.each else [bound["input"]]
    return bound["reduce_op"], [n.meta["val"] for n in given]


def _splits_words(captured: Captured, node: fx.Node) -> bool:
    op = captured.specs[node].op
    if collective_of(op) != "all-gather" or not runs_on_groups(op):
        return False
    sites = captured.at(node)
    given = [
        at_path(s.source.meta["val"], s.path)
        for s in sites
        if s.kind == "argument" and not s.writes
    ]
    placed = any(s.buffer is not None for s in sites)
    return placed and not all(is_whole_words(f.numel() * f.element_size()) for f in given)


def is_target(op: str) -> bool:
    """Whether an op is one that runs in placements, instead of others, on some backend."""
    rows = (*_C10D.values(), *_CUDA.values())
    return op in IMPLEMENTATIONS or any(row.target == op for row in rows)


def overload_named(name: str) -> OpOverload:
    """The overload with a qualified name such as ``"ns::op.out"``; without one the default."""
    qualified, _, overload = name.partition(".")
    namespace, _, op = qualified.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op)
    return getattr(packet, overload or "default")  # type: ignore[no-any-return]
