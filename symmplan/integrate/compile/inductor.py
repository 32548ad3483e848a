"""``inner="inductor"``: the rewritten graphs are compiled by Inductor.

[Note: passes first, plan second]
    Inductor's graph passes assume a functional graph: they drop copies, move reads and merge
    collectives. They would make an earlier plan stale, and would break a graph that follows a plan.
    So all of them run first, bucketing and users' own passes included. Then the graph is captured,
    planned and rewritten, and compiled with those passes off. Inductor's scheduler and its buffer
    reuse remain. They keep the order of all accesses to a segment, because a segment is one tensor
    that the graph mutates (see [Note: segments are inputs]).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from symmplan.coordination.world import current
from symmplan.integrate.compile import ops
from symmplan.integrate.compile.parts import copy_of
from symmplan.integrate.compile.refresh import note, refresh_changed
from symmplan.runtime.watching import run_by_nodes
from symmplan.torch_private import compilers, inductor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from symmplan.integrate.compile.compiled_graph import CompiledGraph
    from symmplan.integrate.compile.parts import PartName

ops.load()
inductor.lower_fences(torch.ops.symmplan.fence_.default)


def compile_inductor(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    graph: CompiledGraph,
    patches: dict[str, Any],
) -> Callable[..., Any]:
    """Compile one Dynamo graph, its parts rewritten; ``patches`` are Inductor's settings for it."""
    compile_part = functools.partial(_compile_part, graph)
    return inductor.compile_graph(module, example_inputs, compile_part, patches)


def _compile_part(
    graph: CompiledGraph, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
) -> Any:
    name: PartName = "forward"
    if kwargs.get("is_backward"):
        name = "backward"
    elif kwargs.get("is_inference"):
        name = "inference"
    mode = compilers.fake_mode_of(inputs)
    if not graph.declares(gm):
        graph.rewrite(gm, name, mode)
        return graph.runner(_code(gm, inputs, kwargs), name)
    plain = functools.partial(_compile_plain, copy_of(gm), mode, inputs, dict(kwargs))
    inductor.as_reshapes(gm, inputs)
    with graph.record.timed():
        before = note(gm)
    inductor.run_passes(gm, mode, is_inference=name == "inference")
    with graph.record.timed():
        ordered = inductor.unwrap(gm)
        refresh_changed(gm, inputs, mode, before)
    part = graph.rewrite(gm, name, mode, fixed=bool(kwargs.get("cudagraphs")))
    if part is not None and graph.watches:
        return graph.runner(run_by_nodes(gm), name, part, plain)
    if part is not None:
        # Segments never move: CUDA graphs must use them where they are, not copy them.
        added = gm.graph.find_nodes(op="placeholder")[len(inputs) :]
        first, end = len(inputs), len(inputs) + len(added)
        kwargs["static_input_idxs"] = [*kwargs.get("static_input_idxs", ()), *range(first, end)]
        inputs = [*inputs, *(n.meta["val"] for n in added)]
    with inductor.following_a_plan(gm, mode, ordered=ordered):
        return graph.runner(_code(gm, inputs, kwargs), name, part, plain)


def _code(gm: fx.GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Inductor's code; in a simulated world, which needs the plan alone, the graph's ops."""
    if current() is None:
        return inductor.code_of(gm, inputs, kwargs)
    gm.recompile()
    return compilers.boxed(gm)


def _compile_plain(
    gm: fx.GraphModule, mode: Any, inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Compile a part as it was before it was rewritten, when it runs."""
    with compilers.tracing(mode), compilers.values_of(mode):
        return _code(gm, inputs, kwargs)
