"""FSDP2. See [Note: seams] in `symmplan.torch_private.seams`."""

from __future__ import annotations

import functools

from symmplan.torch_private.seams import Seam, names

_fsdp = functools.partial(Seam, serves=("fsdp",))
_PACKAGE = "torch.distributed.fsdp._fully_shard"
_MODULE = "torch.distributed.fsdp:FSDPModule"
_STATE = f"{_PACKAGE}._fsdp_state:FSDPState"
_GROUP = f"{_PACKAGE}._fsdp_param_group:FSDPParamGroup"
_CONTEXT = f"{_PACKAGE}._fsdp_param_group:FSDPCommContext"
_PARAMETER = f"{_PACKAGE}._fsdp_param:FSDPParam"
_COLLECTIVES = f"{_PACKAGE}._fsdp_collectives"

FSDP_GROUPS = _fsdp(
    "FSDP2's parameter groups",
    "correctness",
    "symmplan knows each module's parameters, and when the module is in use",
    targets=names(_MODULE, "_get_fsdp_state")
    + names(_STATE, "_fsdp_param_groups|_fsdp_param_group")
    + names(_GROUP, "_training_state comm_ctx fsdp_params mesh_info")
    + names(_PARAMETER, "sharded_param"),
)

FSDP_COMMS = _fsdp(
    "FSDP2's collectives",
    "correctness",
    "FSDP2 calls the planned collectives, and its own again after removal",
    targets=names(_GROUP, "_all_gather_comm _reduce_scatter_comm")
    + names(_COLLECTIVES, "DefaultAllGather DefaultReduceScatter")
    + names(_MODULE, "set_custom_all_gather set_custom_reduce_scatter"),
    undone="by handle.remove()",
)

FSDP_BASES = _fsdp(
    "FSDP2's interfaces of collectives",
    "reporting",
    "planned collectives are instances of them",
    targets=names(f"{_PACKAGE}._fsdp_api", "AllGather ReduceScatter"),
)

FSDP_IN_PLACE = _fsdp(
    "FSDP2's unsharded parameters",
    "speed",
    "parameters live in their placements, and gathers need no copies",
    targets=names(
        _GROUP,
        "_all_gather_process_group _all_gather_result _to_sharded _to_unsharded"
        " _post_forward_indices _use_post_forward_mesh device is_sharded is_unsharded unshard"
        " post_forward_mesh_info unshard_in_backward wait_for_unshard",
    )
    + names(_CONTEXT, "get_all_gather_streams")
    + names(
        _PARAMETER,
        "_contiguous_orig_stride _orig_size _sharded_local_tensor _sharded_param_data"
        " _unsharded_inner_tensors _unsharded_param all_gather_inputs all_gather_outputs"
        " alloc_all_gather_outputs free_unsharded_param fsdp_placement init_unsharded_param"
        " offload_to_cpu orig_dtype param_dtype",
    )
    + names("torch", "Tensor._base"),
    undone="by handle.remove()",
)

FSDP_HOOKS = _fsdp(
    "FSDP2's hooks",
    "speed",
    "hooks are kept from Dynamo once, not anew in each call",
    targets=names(
        _STATE, "_post_forward _pre_backward _pre_forward _root_post_backward_final_callback"
    )
    + names(_MODULE, "_get_fsdp_state")
    + names(_GROUP, "post_backward pre_backward")
    + names("torch.nn", "Module._forward_hooks Module._forward_pre_hooks"),
    undone="by handle.remove()",
)

FSDP_RELEASE = _fsdp(
    "FSDP2's gather of the module before",
    "correctness",
    "the bytes of a finished gather are free for the next one",
    targets=(
        *names(_CONTEXT, "release_all_gather_state_for_comm_reuse|all_gather_state"),
        " | ".join(
            (
                f"{_CONTEXT}.release_all_gather_state_for_comm_reuse",
                f"{_GROUP}._wait_all_gather_streams_on_event",
            )
        ),
    ),
)

FSDP_COPY_IN = _fsdp(
    "FSDP2's copies of gradients",
    "speed",
    "gradients are pushed to peers without a copy",
    targets=names(_COLLECTIVES, "foreach_reduce_scatter_copy_in foreach_reduce"),
    undone="never: it is torch's own function for whom nothing is planned",
)

FSDP_SUMS = _fsdp(
    "FSDP2's reduced gradients",
    "speed",
    "sums are written in their final type, and accumulate into existing gradients",
    targets=(
        f"{_GROUP}._orig_dtype | {_PARAMETER}.sharded_grad_dtype",
        *names(_GROUP, "_is_hsdp _all_reduce_hook force_sum_reduction_for_comms"),
        *names(_PARAMETER, "_init_sharded_param contiguous_sharded_stride"),
        *names(_PARAMETER, "padded_sharded_param_size sharded_size to_sharded_dtensor"),
        *names("torch", "Tensor._post_accumulate_grad_hooks"),
        *names(_STATE, "_state_ctx"),
    ),
    undone="when FSDP2 has taken the gradient",
)
