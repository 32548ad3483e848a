"""Dynamo, AOTAutograd and Inductor. See [Note: seams] in `symmplan.torch_private.seams`."""

from __future__ import annotations

import functools

from symmplan.torch_private.seams import GRAPHS, Seam, names

#: What every graph needs that is compiled, and what Inductor alone does.
_graphs = functools.partial(Seam, serves=GRAPHS)
_inductor = functools.partial(Seam, serves=("inductor",))

TRACING = _graphs(
    "the context of a compilation",
    "correctness",
    "symmplan knows the graph that is being compiled",
    targets=names("torch._guards:TracingContext", "try_get fw_metadata")
    + names("torch._guards", "tracing detect_fake_mode"),
)

PARTS = _graphs(
    "forward and backward of a graph",
    "correctness",
    "both are planned in one set of segments before they run",
    targets=names("torch._dynamo.backends.common", "aot_autograd")
    + names("torch._functorch.config", "force_non_lazy_backward_lowering")
    + names("torch._functorch.partitioners", "min_cut_rematerialization_partition")
    + names("torch._functorch._aot_autograd.utils", "make_boxed_func")
    + names("torch._inductor.fx_passes.post_grad", "decompose_auto_functionalized")
    + names("torch._inductor.virtualized", "V.set_fake_mode"),
)

DONATED = _graphs(
    "inputs that a backward may write",
    "correctness",
    "compiled code does not overwrite inputs in placements",
    targets=names("torch._functorch._aot_autograd.schemas", "ViewAndMutationMeta.bw_donated_idxs"),
)

AUTOGRAD_CACHE = _inductor(
    "AOTAutograd's cache",
    "correctness",
    "no compiled code comes from a cache that ignores segments",
    targets=names("torch._functorch.config", "enable_autograd_cache")
    + names(
        "torch._functorch.aot_autograd",
        "should_use_local_autograd_cache should_use_remote_autograd_cache",
    ),
    undone="when the graph is compiled",
)

STATIC_INPUTS = _graphs(
    "inputs that keep their address",
    "speed",
    "bind=True keeps parameters in their placements",
    targets=names(
        "torch._functorch._aot_autograd.schemas", "ViewAndMutationMeta.static_input_indices"
    ),
)

SAVED_OUTPUTS = _graphs(
    "outputs of a forward for its backward alone",
    "speed",
    "saved tensors stay in their placements from forward to backward",
    targets=names(
        "torch._functorch._aot_autograd.schemas:ViewAndMutationMeta",
        "num_forward num_symints_saved_for_bw",
    ),
)

FRAMES = _graphs(
    "numbers of compiled frames",
    "speed",
    "each compiled frame has its own bounds of dynamic sizes",
    targets=names("torch._guards", "CompileContext.current_compile_id"),
)

COMPILED_CODE = _graphs(
    "what Dynamo has compiled of a function",
    "correctness",
    "graphs that ranks have agreed not to run any more are compiled again, and sizes that may be "
    "others on other ranks are known",
    targets=names("torch._dynamo.symbolic_convert:InstructionTranslator", "current_tx")
    + names("torch._guards:Guard", "name")
    + names("torch._dynamo.guards", "DeletedGuardManagerWrapper")
    + names("torch._C._dynamo.eval_frame", "_debug_get_cache_entry_list _ExtraState.invalidate"),
)

OUTSIDE = Seam(
    "functions outside of graphs",
    "correctness",
    "compilers do not trace calls that plan",
    ("experts", "fsdp", "sessions"),
    names("torch", "_disable_dynamo"),
)

STANCE = Seam(
    "what calls of compiled functions do",
    "speed",
    "functions that an iteration calls while it is recorded are compiled afterwards",
    ("sessions", "fsdp"),
    names("torch._dynamo.eval_frame", "_stance DynamoStance"),
    undone="when nothing of a program is recorded or watched any more",
)

SIZES = Seam(
    "expressions of sizes",
    "correctness",
    "dynamic sizes have correct bounds",
    ("capture", *GRAPHS),
    names("torch.utils._sympy.functions", "FloorDiv"),
)

INDUCTOR_PASSES = _inductor(
    "Inductor's steps",
    "correctness",
    "Inductor's passes run before a graph is planned, not after",
    targets=names(
        "torch._inductor.compile_fx",
        "compile_fx compile_fx_inner fake_tensor_prop view_to_reshape _recursive_post_grad_passes",
    )
    + names("torch._inductor", "list_mode_options"),
    undone="when the graph is compiled",
)

PASSES_OFF = _inductor(
    "switches of Inductor's passes",
    "correctness",
    "no pass changes a graph that follows a plan",
    targets=names(
        "torch._inductor.config",
        "pattern_matcher reorder_for_locality b2b_gemm_pass "
        "_micro_pipeline_tp _fuse_ddp_communication post_grad_custom_pre_pass "
        "post_grad_custom_post_pass bucket_all_gathers_fx "
        "bucket_reduce_scatters_fx bucket_all_reduces_fx reorder_for_peak_memory "
        "reorder_for_compute_comm_overlap "
        "aten_distributed_optimizations.enable_overlap_scheduling",
    ),
    undone="when the graph is compiled",
)

TUNING_OFF = _inductor(
    "switches of Inductor's tuning",
    "correctness",
    "Inductor times no kernel on a segment that peers write",
    targets=names(
        "torch._inductor.config",
        "triton.autotune_pointwise max_autotune max_autotune_gemm "
        "max_autotune_pointwise coordinate_descent_tuning",
    ),
    undone="when the graph is compiled",
)

WRAPPED = _inductor(
    "wrapped ops",
    "correctness",
    "collectives that overlap scheduling wraps are planned",
    targets=names("torch._inductor.fx_passes.control_dependencies", "control_deps"),
)

READERS = _inductor(
    "readers of a collective's bytes",
    "correctness",
    "no collective moves before earlier reads of the bytes that it writes",
    targets=names("torch._inductor.comms", "_is_fake_dep"),
    undone="when the graph is compiled",
)

KERNEL_ORDER = _inductor(
    "order between kernels",
    "correctness",
    "no kernel overwrites bytes that another kernel still reads",
    targets=names("torch._inductor.scheduler", "SchedulerNode.recompute_size_and_body")
    + names("torch._inductor.dependencies", "StarDep WeakDep ReadWrites.with_read"),
    undone="when the graph is compiled",
)

COPIES = _inductor(
    "copies into buffers",
    "correctness",
    "what is copied back from a placement lies where kernels had it before",
    targets=names("torch._inductor.lowering", "mutate_to")
    + names("torch._inductor.ir", "MutationLayoutSHOULDREMOVE.realize_into StorageBox TensorBox"),
    undone="when the graph is compiled",
)

TYPES = _inductor(
    "lowerings of collectives",
    "correctness",
    "collectives write their placements, not converted copies",
    targets=names("torch._inductor.lowering", "lowerings"),
    undone="when the graph is compiled",
)

FENCES = _inductor(
    "fences in Inductor's code",
    "correctness",
    "pending reads end before the bytes are reused",
    targets=names("torch._inductor.lowering", "register_lowering")
    + names("torch._inductor.ir:FallbackKernel", "create codegen")
    + names("torch._inductor.graph", "GraphLowering.mark_buffer_mutated"),
    undone="never: the op is symmplan's own",
)

CXX = _inductor(
    "the C++ compiler",
    "reporting",
    "`symmplan doctor` reports it",
    targets=names("torch._inductor.cpp_builder", "get_cpp_compiler"),
)
