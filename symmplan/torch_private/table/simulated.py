"""Worlds that are not there. See [Note: seams] in `symmplan.torch_private.seams`."""

from __future__ import annotations

import functools

from symmplan.torch_private.seams import Seam, names

_MESH = "torch.distributed.device_mesh:DeviceMesh"
_FAKE = "torch._subclasses.fake_tensor"
_VOTE = "torch.distributed.pipelining:PipelineStage._warmup_backward_result"
_simulated = functools.partial(Seam, serves=("simulate",), undone="when the simulation ends")

FAKE_WORLD = _simulated(
    "fake process groups",
    "correctness",
    "a simulated program has ranks",
    targets=names("torch.testing._internal.distributed.fake_pg", "FakeStore")
    + names("torch._C._distributed_c10d", "HashStore")
    + names(_FAKE, "unset_fake_temporarily")
    + names("torch.distributed", "init_process_group destroy_process_group")
    + names("torch.distributed.distributed_c10d", "init_process_group destroy_process_group")
    + names(_MESH, "__init__")
    + names("torch.utils", "swap_tensors"),
)

FAKE_RESULTS = _simulated(
    "results of fake ops",
    "correctness",
    "tensors of a simulated program have sizes",
    targets=names(
        "torch._C",
        "_TorchDispatchModeKey _get_dispatch_mode _DisableTorchDispatch"
        " _set_throw_on_mutable_data_ptr _dispatch_keys",
    )
    + names("torch", "Tensor._make_subclass")
    + names(f"{_FAKE}:FakeTensorMode", "cache_hits fake_tensor_converter")
    + names(f"{_FAKE}:FakeTensor", "constant fake_device"),
    undone="",
)

FAKE_MEMORY = _simulated(
    "storages and modules of a simulated program",
    "correctness",
    "simulations count ordinary memory",
    targets=names("torch", "UntypedStorage.resize_ UntypedStorage._cdata")
    + names("torch.nn", "Module.__init__")
    + names("torch.autograd", "backward"),
)

FAKE_NORMS = _simulated(
    "RMS norms of a simulated program",
    "reporting",
    "simulations count what an RMS norm keeps on a device",
    targets=names("torch.nn.functional", "rms_norm"),
)

FAKE_MESHES = _simulated(
    "meshes of a simulated program",
    "reporting",
    "simulated programs can read the ranks of their meshes",
    targets=names(
        _MESH,
        "__getitem__ __repr__ _compute_coordinate_on_dim _compute_coordinates_from_mesh"
        " _concatenate _create_flatten_mesh _create_sub_mesh _create_unflatten_mesh _flatten"
        " _get_all_submeshes _get_mesh_tensor_from_full_mesh _init_process_groups"
        " _setup_world_group_and_device _unflatten get_all_groups",
    ),
)

FAKE_CHUNKS = _simulated(
    "FSDP2's chunks of parameters",
    "speed",
    "simulations of many ranks take less time",
    targets=names("torch.distributed.fsdp._fully_shard._fsdp_param", "_chunk_with_empty"),
)

FAKE_PIPELINES = _simulated(
    "votes of pipeline stages",
    "reporting",
    "pipelines can be simulated with a torch whose stages vote",
    targets=(_VOTE,),
    only_with=_VOTE,
)

FAKE_INDUCTOR = _simulated(
    "Inductor in a simulated program",
    "reporting",
    "simulated programs can call torch.compile",
    targets=names("torch", "_TorchCompileInductorWrapper.__call__")
    + names("torch._inductor.compile_fx", "compile_fx"),
)

FAKE_SHARDING = _simulated(
    "DTensor's reads of whole tensors",
    "reporting",
    "a simulation counts no bytes that do not exist",
    targets=names(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator",
        "_propagate_tensor_meta_non_cached",
    )
    + names("torch.distributed.tensor.debug", "_clear_sharding_prop_cache")
    + names("torch.distributed.tensor", "_redistribute"),
)
