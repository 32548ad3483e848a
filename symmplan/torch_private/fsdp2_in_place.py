"""FSDP2's parameter groups whose unsharded parameters live in placements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from symmplan.torch_private.autograd import local_part
from symmplan.torch_private.table.fsdp2 import FSDP_IN_PLACE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: The methods of a parameter group that its direct form replaces.
REPLACED = UNSHARD, WAIT, TO_SHARDED = "unshard", "wait_for_unshard", "_to_sharded"


def has_seam() -> bool:
    """Whether this torch's FSDP2 has what the direct form of its groups replaces and uses."""
    return not FSDP_IN_PLACE.missing()


def can_be_replaced(group: Any) -> bool:
    """Whether an FSDP2 parameter group has the methods that its direct form replaces."""
    return all(hasattr(group, name) for name in REPLACED)


def has_torchs_methods(group: Any) -> bool:
    """Whether the class of a parameter group has them from torch, not from somebody else."""
    methods = [getattr(type(group), name) for name in REPLACED]
    names = [getattr(method, "__globals__", {}).get("__name__", "") for method in methods]
    return all(name.startswith("torch.distributed.fsdp.") for name in names)


class Methods:
    """Other methods of a parameter group, as attributes of the object, and those it had.

    Args:
        group: FSDP2's.
        ours: In the places of `REPLACED`.
    """

    def __init__(self, group: Any, ours: Sequence[Callable[..., None]]) -> None:
        self._group = group
        self._before = {name: group.__dict__.get(name) for name in REPLACED}
        self._of_class = self._now()
        for name, method in zip(REPLACED, ours, strict=True):
            setattr(group, name, method)

    def call_own(self, name: str, *args: Any) -> None:
        """What the group would do without us; also what somebody gave its class meanwhile."""
        before = self._before[name]
        if before is None:
            getattr(type(self._group), name)(self._group, *args)
        else:
            before(*args)

    def unchanged(self) -> bool:
        """Whether the class's methods are those that it had when they were replaced."""
        return self._now() == self._of_class

    def put_back(self) -> None:
        """Give FSDP2 its own methods back."""
        for name, before in self._before.items():
            self._group.__dict__.pop(name, None)
            if before is not None:
                setattr(self._group, name, before)

    def _now(self) -> list[Any]:
        return [getattr(type(self._group), name) for name in REPLACED]


def group_of(group: Any) -> Any:
    """The process group over which a parameter group is gathered."""
    return group._all_gather_process_group


def result_of(group: Any) -> Any:
    """What FSDP2 keeps of a gather that nobody has waited for; None if there is none."""
    return group._all_gather_result


def set_result(group: Any, result: Any) -> None:
    """Let FSDP2 know of a gather that was started; None: of none."""
    group._all_gather_result = result


def state_name(group: Any) -> str:
    """What a parameter group does: ``IDLE``, ``FORWARD``, ``PRE_BACKWARD``, ``POST_BACKWARD``."""
    return str(group._training_state.name)


def gather_streams(group: Any, *, async_op: bool) -> tuple[Any, Any]:
    """Where shards are cast, and where they are gathered, on a device."""
    streams: tuple[Any, Any] = group.comm_ctx.get_all_gather_streams(
        async_op, group._training_state
    )
    return streams


def has_unsharded(group: Any) -> None:
    """FSDP2 takes the parameters of a group for gathered from now on."""
    group._to_unsharded()


def release_gather(group: Any) -> None:
    """Let go of the flat all-gather that FSDP2 keeps until the next one has been waited for."""
    context = group.comm_ctx
    if group._training_state.name != "FORWARD":
        return
    release = getattr(context, "release_all_gather_state_for_comm_reuse", None)
    if release is not None:
        release()
        return
    state = context.all_gather_state
    if state is not None:
        group._wait_all_gather_streams_on_event(state.event)
        context.all_gather_state = None


def one_mesh(group: Any) -> bool:
    """Whether every parameter of a group is resharded to the mesh it is sharded on."""
    return getattr(group, "post_forward_mesh_info", None) in (None, group.mesh_info)


def reshards_elsewhere(group: Any) -> bool:
    """Whether parameters are resharded after forward to another mesh than they are sharded on."""
    return group._use_post_forward_mesh or not one_mesh(group)


# Parameters.


def shard_of(parameter: Any) -> torch.Tensor:
    """This rank's part of a parameter, flat and padded."""
    shard: torch.Tensor = parameter._sharded_param_data
    return shard


def has_own_gather(parameter: Any) -> bool:
    """Whether a parameter's tensor says by itself how it is gathered."""
    return hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")


def size_of(parameter: Any) -> torch.Size:
    """Of a parameter as the module sees it."""
    size: torch.Size = parameter._orig_size
    return size


def unsharded(parameter: Any) -> Any:
    """The unsharded parameter's own tensor; None before the first gather."""
    return local_part(getattr(parameter, "_unsharded_param", None))


def lay(parameter: Any, storage: torch.Tensor) -> None:
    """Let an unsharded parameter be a view of the flat ``storage``, as the same object."""
    view = torch.as_strided(storage, parameter._orig_size, parameter._contiguous_orig_stride)
    unsharded(parameter).data = view


def give_storage(parameter: Any, storage: torch.Tensor) -> None:
    """Let an unsharded parameter live in ``storage``, which FSDP2 does not free.

    In the same object, where there is one that autograd may use.
    """
    parameter.all_gather_outputs = [storage]
    parameter.free_unsharded_param = _nothing
    old = unsharded(parameter)
    if old is None or old.is_inference():
        parameter.__dict__.pop("_unsharded_param", None)
        parameter.init_unsharded_param()
    else:
        lay(parameter, storage)


def emptied(parameter: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """FSDP2's own tensors of an unsharded parameter, whose bytes are freed; None if it has none.

    What it gathers into, and that as the module sees it: what `take_back` takes.
    """
    local, outputs = unsharded(parameter), parameter.all_gather_outputs
    if local is None or len(outputs) != 1 or local.is_inference() or outputs[0].is_inference():
        return None
    storage = outputs[0].untyped_storage()
    if local.untyped_storage()._cdata != storage._cdata:
        return None
    storage.resize_(0)
    return outputs[0], local.detach()


def take_back(parameter: Any, output: torch.Tensor, view: torch.Tensor | None) -> None:
    """Let an unsharded parameter live in ``output``, which FSDP2 frees and fills from now on.

    As ``view``, which needs no bytes; None to make one.
    """
    parameter.__dict__.pop("free_unsharded_param", None)
    parameter.all_gather_outputs = [output]
    if view is None:
        lay(parameter, output)
    else:
        unsharded(parameter).data = view


def _nothing() -> None:
    """The bytes belong to the plan."""
