"""Ops and what they are called with, the dispatcher, autograd.

See [Note: seams] in `symmplan.torch_private.seams`.
"""

from __future__ import annotations

from symmplan.torch_private.seams import ALL, GRAPHS, RUNS, Seam, names

OPS = Seam(
    "classes of ops",
    "correctness",
    "which op a call runs, and what its schema says that it writes",
    ALL,
    names("torch._ops:OpOverload", "_schema _overloadname")
    + names("torch._ops", "OpOverloadPacket HigherOrderOperator")
    + names("torch._library.custom_ops", "CustomOpDef._opoverload"),
)

VALUES = Seam(
    "fake tensors, trees of arguments, dispatch modes",
    "correctness",
    "which tensors a call takes and gives",
    ALL,
    names("torch._subclasses.fake_tensor", "FakeTensor FakeTensorMode")
    + names("torch.utils._pytree", "tree_leaves tree_map tree_map_only")
    + names("torch.utils._python_dispatch", "TorchDispatchMode"),
)

SCHEMAS = Seam(
    "schemas of all ops",
    "reporting",
    "`symmplan ops`, and names that errors suggest",
    ("capture",),
    names("torch._C", "_jit_get_all_schemas"),
)

UPSTREAM = Seam(
    "torch's registry of symmetric arguments",
    "speed",
    "that ops which are declared there need no declaration here",
    ("capture",),
    names("torch._library.simple_registry", "SymmMemArgsHolder")
    + names("torch._library.simple_registry:singleton", "get _data"),
    only_with="torch.library:Library.register_symm_mem_args",
)

STORAGES = Seam(
    "references to storages",
    "correctness",
    "that bytes change hands when nobody holds them any more",
    ALL,
    names("torch._C", "_storage_Use_Count") + names("torch", "UntypedStorage._cdata"),
)

STREAMS = Seam(
    "events and streams of devices",
    "correctness",
    "in which order a session's calls run on a device",
    ("sessions",),
    names(
        "torch.cuda",
        "Event.record Event.wait Event.synchronize Stream.synchronize synchronize",
    ),
    undone="when the recording ends",
)

COPY_EACH = Seam(
    "copies of many tensors",
    "correctness",
    "that shards are cast into their parts of a placement",
    ("fsdp",),
    names("torch", "_foreach_copy_"),
)

DISPATCH = Seam(
    "keys of the dispatcher",
    "correctness",
    "that a declared op's own kernel runs behind that of symmplan",
    RUNS,
    names("torch._C", "DispatchKey DispatchKeySet _dispatch_keys _dispatch_keyset_full_after")
    + names("torch._ops:OpOverload", "redispatch has_kernel_for_dispatch_key"),
)

LIBRARIES = Seam(
    "kernels that are taken back",
    "correctness",
    "that ops run torch's own kernels when a session has ended",
    ("sessions", "fsdp"),
    names("torch.library", "Library._destroy"),
)

NODE_NAMES = Seam(
    "names of nodes",
    "reporting",
    "that recorded calls are named as in traced graphs",
    ("sessions",),
    names("torch.fx", "Graph._target_to_str"),
)

MODES = Seam(
    "active modes",
    "correctness",
    "that ops of a program that is watched for races run below its modes",
    ("sessions",),
    names("torch.utils._python_dispatch", "_disable_current_modes"),
)

OP_CALLS = Seam(
    "what Python calls when it hands on an op",
    "speed",
    "host time of each declared call of a session",
    ("sessions",),
    names("torch._ops:OpOverload", "_handle _pyobj_dispatcher|redispatch"),
)

THREAD_MARKS = Seam(
    "marks of threads",
    "correctness",
    "that a session serves its program's threads, autograd's included, and no others",
    ("sessions",),
    names("torch._C", "_stash_obj_in_tls _get_obj_in_tls _is_key_in_tls"),
)

BACKWARD = Seam(
    "whether a backward pass runs",
    "correctness",
    "which collectives belong to a backward pass, and when a step ends",
    ("fsdp",),
    names("torch._C", "_current_graph_task_id"),
)

KEEPS_GRAPH = Seam(
    "whether a backward pass keeps its graph",
    "speed",
    "that bytes which cross from forward to backward are given back early",
    GRAPHS,
    names("torch._C", "_autograd._get_current_graph_task_keep_graph"),
)

SAVED_HOOKS = Seam(
    "hooks of saved tensors",
    "correctness",
    "that no tensor crosses in a placement which a hook takes elsewhere",
    GRAPHS,
    names("torch._C", "_autograd._top_saved_tensors_default_hooks"),
)

VERSIONS = Seam(
    "versions and parts of tensors",
    "correctness",
    "that a gather is no change of a parameter, and gradients are those of this rank",
    ("fsdp", "simulate"),
    names("torch.autograd.grad_mode", "_unsafe_preserve_version_counter")
    + names("torch.distributed.tensor", "DTensor._local_tensor"),
)

PROFILES = Seam(
    "whether a profile is being made",
    "reporting",
    "names of collectives in profiles",
    RUNS,
    names("torch.autograd", "_profiler_enabled"),
)
