"""Inductor: its passes and its code, and settings that would break a graph that follows a plan.

[Note: wrapped ops]
    Overlap scheduling (``aten_distributed_optimizations``) moves collectives and matrix products in
    the graph, and then wraps each in a higher-order op that also takes what must come before it, so
    that the order survives what follows. A collective inside such an op could be neither placed nor
    waited for by itself. So all of these ops are unwrapped where they stand, and nothing is moved
    afterwards: their order is the order of the graph.

[Note: reordering]
    With ``reorder_for_compute_comm_overlap``, Inductor moves collectives and waits after its graph
    is lowered, so after it was planned. That is right as long as they stay after the readers of the
    bytes that they write. Some of those passes look only at data dependencies and may ignore such
    readers. For rewritten graphs the readers count as dependencies.

[Note: kernels are not tuned on segments]
    The first time that a Triton kernel with several configurations runs, Inductor times them on the
    real arguments. It saves the tensors that the kernel writes and restores them afterwards. For a
    placement that is the whole tensor of which it is a view: the segment, into which peers write
    meanwhile. Gathers of the first step were lost in this way (four H200, torch 2.11). So kernels
    of rewritten graphs get one configuration. Templates of matrix products are tuned on tensors of
    their own, and still are.

[Note: order between kernels is kept]
    If a kernel overwrites bytes that another one has read or written, the scheduler adds that
    dependency to the nodes by hand. When it fuses loops of different sizes into one C++ kernel it
    computes a node's dependencies anew, and torch 2.11 forgets the added ones. A copy into a
    placement then moved before the last use of the old bytes. So symmplan adds the missing
    dependencies again.

[Note: copies write the buffer that they name]
    For a copy into a buffer of the graph Inductor lets the tensor have the copy's result as another
    buffer. A kernel that was given the tensor by name before (``out=``) then seems to read that
    later buffer, torch 2.13, and the scheduler fails. Rewritten graphs copy results back from
    placements, so there such a copy writes the buffer that kernels have already. Where kernels
    depend on nothing by name, torch 2.11, copies stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from symmplan.torch_private.table import require
from symmplan.torch_private.table.compilers import COPIES, INDUCTOR_PASSES, KERNEL_ORDER, READERS

require("inductor")

from torch._inductor import compile_fx as inductor
from torch._inductor import config, dependencies, ir, lowering, scheduler
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import V

from symmplan.torch_private import compilers
from symmplan.torch_private.ops import OpOverload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

__all__ = [
    "code_of",
    "compile_graph",
    "following_a_plan",
    "lower_fences",
    "modes",
    "run_passes",
    "unwrap",
]

_compile_fx: Any = inductor.compile_fx
_view_to_reshape: Any = inductor.view_to_reshape  # type: ignore[attr-defined]

#: Inductor's graph passes, all of which have run when a graph is rewritten.
_PASSES_OFF = {
    "pattern_matcher": False,
    "reorder_for_locality": False,
    "b2b_gemm_pass": False,
    "_micro_pipeline_tp": False,
    "_fuse_ddp_communication": False,
    "post_grad_custom_pre_pass": None,
    "post_grad_custom_post_pass": None,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
}

#: Those that not every torch has.
_NEWER_PASSES_OFF = {
    "dedup_reduce_scatters": False,
    "aten_distributed_optimizations.enable_low_contention_collectives": False,
    "aten_distributed_optimizations.allow_comms_decompositions": False,
}

#: See [Note: kernels are not tuned on segments].
_TUNING_OFF = {
    "triton.autotune_pointwise": False,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
}

#: What moves the nodes of Inductor's own graph.
_REORDERING_OFF = {"reorder_for_peak_memory": False, "reorder_for_compute_comm_overlap": False}


def modes() -> dict[str, dict[str, Any]]:
    """Inductor's settings for each mode of ``torch.compile``."""
    from torch._inductor import list_mode_options

    return {"default": {}, **list_mode_options()}


def compile_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_part: Callable[..., Any],
    patches: dict[str, Any],
) -> Callable[..., Any]:
    """Compile one Dynamo graph, whose forward and backward ``compile_part`` compiles.

    Args:
        module: The graph.
        example_inputs: Its inputs, fake or real.
        compile_part: In the place of `code_of`.
        patches: Inductor's settings for it.
    """
    # AOTAutograd's cache would hand back compiled code without asking us for the segments;
    # Inductor's own cache stays on: what it keys on is the rewritten graph.
    with compilers.autograd_cache_off(), compilers.parts_together():
        compiled: Callable[..., Any] = _compile_fx(
            module,
            list(example_inputs),
            inner_compile=compile_part,
            **({"config_patches": patches} if patches else {}),
        )
    return compiled


def code_of(gm: fx.GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Inductor's code for a forward or a backward."""
    return inductor.compile_fx_inner(gm, inputs, **kwargs)


def as_reshapes(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Let views be reshapes, which passes may move, and give all nodes values."""
    _view_to_reshape(gm)
    with torch.no_grad():
        inductor.fake_tensor_prop(gm, inputs)


def run_passes(gm: fx.GraphModule, mode: Any, *, is_inference: bool) -> None:
    """Run Inductor's graph passes, in place."""
    with torch.no_grad(), V.set_fake_mode(mode):
        inductor._recursive_post_grad_passes(gm, is_inference=is_inference)


def unwrap(gm: fx.GraphModule) -> bool:
    """Undo [Note: wrapped ops], in place; whether there were any."""
    found = list(_wrapped(gm))
    for node, call in found:
        inside = call.graph.find_nodes(op="placeholder")
        outside = dict(zip(inside, node.args[2:], strict=True))
        with gm.graph.inserting_before(node):
            new = gm.graph.node_copy(call, outside.__getitem__)
        new.meta = {**call.meta, **node.meta}
        name, attribute = node.name, node.args[1]
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        new.name = name
        assert isinstance(attribute, fx.Node)
        if not attribute.users:
            gm.graph.erase_node(attribute)
    return bool(found)


def _wrapped(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each wrapper with the one call that it wraps."""
    for node in gm.graph.find_nodes(op="call_function", target=control_deps):
        inner = getattr(gm, str(node.args[1].target)).graph
        calls = [n for n in inner.nodes if n.op == "call_function"]
        output = inner.output_node()
        if len(calls) == 1 and output.args == (calls[0],):
            yield node, calls[0]


@contextlib.contextmanager
def following_a_plan(gm: fx.GraphModule, mode: Any, *, ordered: bool) -> Iterator[None]:
    """While inside, Inductor keeps to the order of a rewritten graph.

    Args:
        gm: The graph.
        mode: The fake mode of its values.
        ordered: Whether nothing in it may move.
    """
    off = config.patch(_off(ordered=ordered))
    passes, order = _passes_done(gm, mode), _order_kept()
    with off, _types_as_given(), passes, _readers_count(), order, _copies_in_place():
        yield


def _passes_done(gm: fx.GraphModule, fake_mode: Any) -> AbstractContextManager[None]:
    """Inductor runs its passes over no graph twice: ``gm`` has had them, and has its values."""
    propagate: Any = inductor.fake_tensor_prop
    passes: Any = inductor._recursive_post_grad_passes

    def propagate_others(given: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return fake_mode if given is gm else propagate(given, *args, **kwargs)

    def pass_others(given: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return None if given is gm else passes(given, *args, **kwargs)

    return INDUCTOR_PASSES.replaced(
        fake_tensor_prop=propagate_others, _recursive_post_grad_passes=pass_others
    )


def _order_kept() -> AbstractContextManager[None]:
    """See [Note: order between kernels is kept]."""
    recompute = scheduler.SchedulerNode.recompute_size_and_body

    def recompute_and_keep(self: Any, *args: Any, **kwargs: Any) -> None:
        kinds = (dependencies.StarDep, dependencies.WeakDep)
        added = [dep for dep in self.read_writes.reads if isinstance(dep, kinds)]
        recompute(self, *args, **kwargs)
        for dep in added:
            if dep not in self.read_writes.reads:
                found = self.read_writes.with_read(dep)
                self.set_read_writes(found.rename(self.mutation_renames))

    return KERNEL_ORDER.replaced(recompute_size_and_body=recompute_and_keep)


def _copies_in_place() -> AbstractContextManager[None]:
    """See [Note: copies write the buffer that they name]."""
    if "get_read_writes" not in vars(ir.ExternKernel):
        return contextlib.nullcontext()
    others: Any = lowering.mutate_to

    def mutate_to(changed: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        box = changed.data if isinstance(changed, ir.TensorBox) else changed
        if not isinstance(box, ir.StorageBox) or not isinstance(box.data, ir.Buffer):
            return others(changed, value, *args, **kwargs)
        ir.MutationLayoutSHOULDREMOVE.realize_into(value, box)
        return changed

    return COPIES.replaced(mutate_to=mutate_to)


def _readers_count() -> AbstractContextManager[None]:
    """Move collectives no further than what they write is free. See [Note: reordering]."""
    return READERS.replaced(_is_fake_dep=lambda _dependency: False)


class _Fence(ir.FallbackKernel):
    """Keeps its place among its neighbours, and costs nothing when the program runs."""

    def codegen(self, wrapper: Any) -> None:
        """Nothing to run."""


@functools.cache
def lower_fences(fence: OpOverload) -> None:
    """Let Inductor have code for an op that keeps its place. See [Note: fences].

    Args:
        fence: ``(Tensor(a!)[] segments) -> ()``.
    """

    @register_lowering(fence, type_promotion_kind=None)
    def lower(segments: Sequence[Any]) -> None:
        """Compute pending readers; stay in the schedule only between inputs."""
        for segment in segments:
            V.graph.mark_buffer_mutated(segment.get_name())
        if len(segments) > 1:
            _Fence.create(fence, segments)


@contextlib.contextmanager
def _types_as_given() -> Iterator[None]:
    """Lower collectives without type promotion.

    Inductor promotes the tensors of a collective together with its numbers: a bool tensor and a
    ``group_size`` become int64, so that the op would write a converted copy of its placement.
    """
    saved: dict[Any, Any] = {
        op: lower
        for op, lower in lowerings.items()
        if isinstance(op, OpOverload) and op.namespace == "_c10d_functional"
    }
    lowerings.update({op: f.__wrapped__ for op, f in saved.items()})
    try:
        yield
    finally:
        lowerings.update(saved)


def _off(*, ordered: bool) -> dict[str, Any]:
    """What must not happen to a rewritten graph; ``ordered`` if nothing in it may move."""
    known = config.get_config_copy()
    newer = {name: value for name, value in _NEWER_PASSES_OFF.items() if name in known}
    settings: dict[str, Any] = {**_PASSES_OFF, **newer, **_TUNING_OFF}
    if ordered:
        settings |= _REORDERING_OFF
    settings["max_autotune_gemm"] = known["max_autotune"] or known["max_autotune_gemm"]
    return settings
