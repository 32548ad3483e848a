"""``inner="inductor"``: the rewritten graphs are compiled by Inductor.

[Note: passes first, plan second]
    Inductor's graph passes assume a functional graph: they drop copies, move reads and merge
    collectives. A plan made before them would be stale after them, and a graph that follows a plan
    would be broken by them. So all of them run first (bucketing and users' own passes included);
    then the graph is captured, planned and rewritten; and then it is compiled with those passes
    off. What is left, Inductor's scheduler and its buffer reuse, keeps the order of all accesses
    to a segment, because it is one tensor that everybody mutates (see [Note: segments are inputs]).

[Note: wrapped ops]
    Overlap scheduling (``aten_distributed_optimizations``) moves collectives and matrix products in
    the graph, and then wraps each in a higher-order op that also takes what must come before it, so
    that the order survives what follows. A collective inside such an op could be neither placed nor
    waited for by itself. So they are all taken out again where they stand, and nothing is moved
    after that: their order is the graph's.

[Note: reordering]
    With ``reorder_for_compute_comm_overlap``, Inductor moves collectives and waits after its graph
    is lowered, so after it was planned. That is right as long as they stay behind the readers of
    the bytes that they write. Some of those passes look only at who needs whose result, and take
    such a reader for a mere hint; for rewritten graphs it counts.

[Note: kernels are not tuned on segments]
    The first time that a Triton kernel with several configurations runs, Inductor times them on the
    real arguments. What the kernel writes it saves before and puts back after, and that is not the
    placement but the whole tensor that the placement is a view of: the segment, into which peers
    write meanwhile. Gathers of the first step were lost that way (four H200, torch 2.11). So
    kernels of rewritten graphs get one configuration. Templates of matrix products are tuned on
    tensors of their own, and still are.

[Note: order between kernels is kept]
    That one kernel overwrites what another has read or written is a dependency that the scheduler
    adds to nodes by hand. To fuse loops of different sizes into one C++ kernel it computes a node's
    dependencies anew, and in torch 2.11 forgot those: a copy into a placement moved in front of the
    last use of what was there. So they are put back where they are missing.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor import comms, dependencies, ir, scheduler
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import V

from symmplan.integrate.compile import ops
from symmplan.integrate.compile.parts import copy_of
from symmplan.integrate.compile.refresh import note, refresh_changed
from symmplan.memory.simulated import current
from symmplan.place.watching import run_by_nodes
from symmplan.torch_private import compilers
from symmplan.torch_private.ops import HigherOrderOperator, OpOverload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from symmplan.integrate.compile.parts import PartName
    from symmplan.integrate.compile.unit import Unit

ops.load()

__all__ = ["compile_inductor", "modes"]

_compile_fx: Any = inductor.compile_fx
_view_to_reshape: Any = inductor.view_to_reshape  # type: ignore[attr-defined]

#: Inductor's graph passes, all of which have run when a graph is rewritten. Names that a torch
#: does not have are left out.
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
    "dedup_reduce_scatters": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
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

_WRAPPER = "control_deps"


def modes() -> dict[str, dict[str, Any]]:
    """Inductor's settings for each mode of ``torch.compile``."""
    from torch._inductor import list_mode_options

    return {"default": {}, **list_mode_options()}


def compile_inductor(
    module: fx.GraphModule, example_inputs: Sequence[Any], unit: Unit, patches: dict[str, Any]
) -> Callable[..., Any]:
    """Compile one Dynamo graph, its parts rewritten; ``patches`` are Inductor's settings for it."""
    # AOTAutograd's cache would hand back compiled code without asking us for the segments;
    # Inductor's own cache stays on: what it keys on is the rewritten graph.
    # Both parts share one set of segments, so both must be known before the first run.
    with (
        compilers.autograd_cache_off(),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
    ):
        compiled: Callable[..., Any] = _compile_fx(
            module,
            list(example_inputs),
            inner_compile=functools.partial(_compile_part, unit),
            **({"config_patches": patches} if patches else {}),
        )
    return compiled


def _compile_part(unit: Unit, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    name: PartName = "forward"
    if kwargs.get("is_backward"):
        name = "backward"
    elif kwargs.get("is_inference"):
        name = "inference"
    mode = compilers.fake_mode_of(inputs)
    if not unit.declares(gm):
        unit.rewrite(gm, name, mode)
        return unit.runner(_code(gm, inputs, kwargs), name)
    plain = functools.partial(_compile_plain, copy_of(gm), mode, inputs, dict(kwargs))
    _view_to_reshape(gm)
    with torch.no_grad():
        inductor.fake_tensor_prop(gm, inputs)
    with unit.record.timed():
        before = note(gm)
    with torch.no_grad(), V.set_fake_mode(mode):
        inductor._recursive_post_grad_passes(gm, is_inference=name == "inference")
    with unit.record.timed():
        ordered = _unwrap(gm)
        refresh_changed(gm, inputs, mode, before)
    part = unit.rewrite(gm, name, mode, fixed=bool(kwargs.get("cudagraphs")))
    if part is not None and unit.watches:
        return unit.runner(run_by_nodes(gm), name, part, plain)
    if part is not None:
        # Segments never move: CUDA graphs must use them where they are, not copy them.
        added = gm.graph.find_nodes(op="placeholder")[len(inputs) :]
        first, end = len(inputs), len(inputs) + len(added)
        kwargs["static_input_idxs"] = [*kwargs.get("static_input_idxs", ()), *range(first, end)]
        inputs = [*inputs, *(n.meta["val"] for n in added)]
    off = inductor_config.patch(_off(ordered=ordered))
    with off, _types_as_given(), _passes_done(gm, mode), _readers_count(), _order_kept():
        return unit.runner(_code(gm, inputs, kwargs), name, part, plain)


def _code(gm: fx.GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Inductor's code; in a simulated world, which needs the plan alone, the graph's ops."""
    if current() is None:
        return inductor.compile_fx_inner(gm, inputs, **kwargs)
    gm.recompile()
    return make_boxed_func(gm)


def _compile_plain(
    gm: fx.GraphModule, mode: Any, inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Compile a part as it was before it was rewritten, when it runs."""
    with compilers.tracing(mode), V.set_fake_mode(mode):
        return _code(gm, inputs, kwargs)


def _unwrap(gm: fx.GraphModule) -> bool:
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
    for node in gm.graph.nodes:
        target = node.target
        if not isinstance(target, HigherOrderOperator) or target.name() != _WRAPPER:
            continue
        inner = getattr(gm, str(node.args[1].target)).graph
        calls = [n for n in inner.nodes if n.op == "call_function"]
        output = inner.output_node()
        if len(calls) == 1 and output.args == (calls[0],):
            yield node, calls[0]


def _passes_done(gm: fx.GraphModule, fake_mode: Any) -> AbstractContextManager[None]:
    """Inductor runs its passes over no graph twice: ``gm`` has had them, and has its values."""
    propagate: Any = inductor.fake_tensor_prop
    passes: Any = inductor._recursive_post_grad_passes

    def propagate_others(given: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return fake_mode if given is gm else propagate(given, *args, **kwargs)

    def pass_others(given: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return None if given is gm else passes(given, *args, **kwargs)

    return compilers.replaced(
        inductor, fake_tensor_prop=propagate_others, _recursive_post_grad_passes=pass_others
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

    return compilers.replaced(scheduler.SchedulerNode, recompute_size_and_body=recompute_and_keep)


def _readers_count() -> AbstractContextManager[None]:
    """Move collectives no further than what they write is free. See [Note: reordering]."""
    return compilers.replaced(comms, _is_fake_dep=lambda _dependency: False)


class _Fence(ir.FallbackKernel):
    """Keeps its place among its neighbours, and costs nothing when the program runs."""

    def codegen(self, wrapper: Any) -> None:
        """Nothing to run."""


@register_lowering(torch.ops.symmplan.fence_.default, type_promotion_kind=None)
def _lower_fence(segments: Sequence[Any]) -> None:
    """Compute pending readers; stay in the schedule only between inputs. See [Note: fences]."""
    for segment in segments:
        V.graph.mark_buffer_mutated(segment.get_name())
    if len(segments) > 1:
        _Fence.create(torch.ops.symmplan.fence_.default, segments)


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
    lowerings.update({op: getattr(f, "__wrapped__", f) for op, f in saved.items()})
    try:
        yield
    finally:
        lowerings.update(saved)


def _off(*, ordered: bool) -> dict[str, Any]:
    """What must not happen to a rewritten graph; ``ordered`` if nothing in it may move."""
    known = inductor_config.get_config_copy()
    settings: dict[str, Any] = {**_PASSES_OFF, **_TUNING_OFF}
    if ordered:
        settings |= {"reorder_for_peak_memory": False, "reorder_for_compute_comm_overlap": False}
    settings["max_autotune_gemm"] = known.get("max_autotune") or known.get("max_autotune_gemm")
    return {name: value for name, value in settings.items() if name in known}
