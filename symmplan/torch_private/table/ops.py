"""Ops and what they are called with, the dispatcher, autograd.

See [Note: seams] in `symmplan.torch_private.seams`.
"""

from __future__ import annotations

from symmplan.torch_private.seams import ALL, GRAPHS, RUNS, Seam, names

OPS = Seam(
    "classes of ops",
    "correctness",
    "symmplan knows which op a call runs, and what the op writes",
    ALL,
    names("torch._ops:OpOverload", "_schema _overloadname")
    + names("torch._ops", "OpOverloadPacket HigherOrderOperator")
    + names("torch._library.custom_ops", "CustomOpDef._opoverload"),
)

VALUES = Seam(
    "fake tensors, trees of arguments, dispatch modes",
    "correctness",
    "symmplan knows the arguments and results of each call",
    ALL,
    names("torch._subclasses.fake_tensor", "FakeTensor FakeTensorMode")
    + names("torch.utils._pytree", "tree_leaves tree_map tree_map_only")
    + names("torch.utils._python_dispatch", "TorchDispatchMode"),
)

NAMES = Seam(
    "names of all ops",
    "correctness",
    "sessions catch all declared ops; `symmplan ops` lists all ops, and errors suggest names",
    ("sessions",),
    names("torch._C", "_dispatch_get_all_op_names"),
)

UPSTREAM = Seam(
    "torch's registry of symmetric arguments",
    "speed",
    "ops that are declared there need no second declaration",
    ("capture",),
    names("torch._library.simple_registry", "SymmMemArgsHolder")
    + names("torch._library.simple_registry:singleton", "get _data"),
    only_with="torch.library:Library.register_symm_mem_args",
)

STORAGES = Seam(
    "references to storages",
    "correctness",
    "bytes are reused only when no tensor refers to them",
    ALL,
    names("torch._C", "_storage_Use_Count") + names("torch", "UntypedStorage._cdata"),
)

ADDRESSES = Seam(
    "addresses of storages",
    "speed",
    "parameters live in their placements, and cannot be read when these belong to others",
    ("fsdp",),
    names("torch._C", "_set_throw_on_mutable_data_ptr") + names("torch", "UntypedStorage._cdata"),
    undone="with the storage",
)

ADDRESS_ERRORS = Seam(
    "errors of storages without an address",
    "reporting",
    "who reads a resharded parameter is told its module",
    ("fsdp",),
    names("torch._C", "_set_storage_data_ptr_access_error_msg"),
    only_with="torch._C:_cuda_init",  # builds for the CPU have no such error
)

STREAMS = Seam(
    "events and streams of devices",
    "correctness",
    "a session knows the order of its calls on a device",
    ("sessions",),
    names("torch.cuda", "Event.record Event.wait Event.synchronize Stream.synchronize synchronize"),
    undone="when the recording ends",
)

ALLOCATIONS = Seam(
    "history of torch's allocator",
    "speed",
    "an FSDP2 plan on a device takes no more than fragments leave of what the program had",
    ("fsdp",),
    names("torch.cuda.memory", "_record_memory_history _snapshot")
    + names("torch._C", "_cuda_isHistoryEnabled"),
    undone="when the recorded step is planned",
    only_with="torch._C:_cuda_init",
)

COPY_EACH = Seam(
    "copies of many tensors",
    "correctness",
    "shards are cast straight into a placement",
    ("fsdp",),
    names("torch", "_foreach_copy_"),
)

DISPATCH = Seam(
    "keys of the dispatcher",
    "correctness",
    "a declared op's own kernel runs after symmplan's kernel",
    RUNS,
    names("torch._C", "DispatchKey DispatchKeySet _dispatch_keys _dispatch_keyset_full_after")
    + names("torch._ops:OpOverload", "redispatch has_kernel_for_dispatch_key"),
)

LIBRARIES = Seam(
    "kernels that can be removed",
    "correctness",
    "ops run torch's own kernels again after a session",
    ("sessions", "fsdp"),
    names("torch.library", "Library._destroy"),
)

NODE_NAMES = Seam(
    "names of nodes",
    "reporting",
    "recorded calls have the same names as in traced graphs",
    ("sessions",),
    names("torch.fx", "Graph._target_to_str"),
)

MODES = Seam(
    "active modes",
    "correctness",
    "the race detector sees ops below the program's dispatch modes",
    ("sessions",),
    names("torch.utils._python_dispatch", "_disable_current_modes"),
)

OP_CALLS = Seam(
    "calls from Python into an op",
    "speed",
    "declared calls of a session take less host time",
    ("sessions",),
    names("torch._ops:OpOverload", "_handle _pyobj_dispatcher|redispatch"),
)

THREAD_MARKS = Seam(
    "marks of threads",
    "correctness",
    "a session serves its own thread and autograd's, and no others",
    ("sessions",),
    names("torch._C", "_stash_obj_in_tls _get_obj_in_tls _is_key_in_tls"),
)

BACKWARD = Seam(
    "whether a backward pass runs",
    "correctness",
    "symmplan knows which collectives belong to a backward pass, and when a step ends",
    ("fsdp",),
    names("torch._C", "_current_graph_task_id"),
)

KEEPS_GRAPH = Seam(
    "whether a backward pass keeps its graph",
    "speed",
    "bytes of saved tensors are released early",
    GRAPHS,
    names("torch._C", "_autograd._get_current_graph_task_keep_graph"),
)

SAVED_HOOKS = Seam(
    "hooks of saved tensors",
    "correctness",
    "saved tensors that a hook moves do not stay in placements",
    GRAPHS,
    names("torch._C", "_autograd._top_saved_tensors_default_hooks"),
)

VERSIONS = Seam(
    "versions and parts of tensors",
    "correctness",
    "a gather does not count as a change of a parameter, and gradients are this rank's",
    ("fsdp", "simulate"),
    names("torch.autograd.grad_mode", "_unsafe_preserve_version_counter")
    + names("torch.distributed.tensor", "DTensor._local_tensor"),
)

PROFILES = Seam(
    "whether a profile is being made",
    "reporting",
    "profiles name collectives",
    RUNS,
    names("torch.autograd", "_profiler_enabled"),
)
