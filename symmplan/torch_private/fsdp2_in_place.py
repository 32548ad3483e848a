"""FSDP2's parameter groups whose unsharded parameters live in placements."""

from __future__ import annotations

import functools
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from symmplan.torch_private.autograd import local_part
from symmplan.torch_private.storages import can_be_taken
from symmplan.torch_private.table.fsdp2 import FSDP_IN_PLACE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: The methods of a parameter group that its direct form replaces.
REPLACED = UNSHARD, WAIT, TO_SHARDED = "unshard", "wait_for_unshard", "_to_sharded"
#: Why they are not replaced where somebody else has.
OTHERS = "methods of its class were replaced"


def has_seam() -> bool:
    """Whether this torch's FSDP2 has what the direct form of its groups replaces and uses."""
    return not FSDP_IN_PLACE.missing() and can_be_taken()


def can_be_replaced(group: Any) -> bool:
    """Whether an FSDP2 parameter group has the methods that its direct form replaces."""
    return all(hasattr(group, name) for name in REPLACED)


def has_torchs_methods(group: Any) -> bool:
    """Whether the class of a parameter group has them from torch, not from somebody else."""
    methods = [getattr(type(group), name) for name in REPLACED]
    names = [getattr(method, "__globals__", {}).get("__name__", "") for method in methods]
    return all(name.startswith("torch.distributed.fsdp.") for name in names)


#: The methods `REPLACED` of a class, without a Python call.
_methods: Callable[[type], tuple[Any, ...]] = attrgetter(*REPLACED)
#: Whether a parameter's storage is to stay when it is resharded; torch 2.15 or later.
_is_kept: Callable[[Any], bool] = attrgetter("keep_unsharded_storage")


class Methods:
    """Other methods of a parameter group, as attributes of the object, and those it had.

    Args:
        group: FSDP2's.
        ours: In the places of `REPLACED`.
    """

    def __init__(self, group: Any, ours: Sequence[Callable[..., None]]) -> None:
        self._group = group
        self._before = {name: group.__dict__.get(name) for name in REPLACED}
        self._of_class = _methods(type(group))
        self._can_keep = any(hasattr(p, "keep_unsharded_storage") for p in group.fsdp_params)
        for name, method in zip(REPLACED, ours, strict=True):
            setattr(group, name, method)

    def call_own(self, name: str, *args: Any) -> None:
        """What the group would do without us; also what somebody gave its class meanwhile."""
        before = self._before[name]
        if before is None:
            getattr(type(self._group), name)(self._group, *args)
        else:
            before(*args)

    def why_own(self) -> str:
        """Why FSDP2's own methods must run after what the program did; empty if they need not."""
        if self._can_keep and any(map(_is_kept, self._group.fsdp_params)):
            return "it keeps its unsharded storage"
        return "" if _methods(type(self._group)) == self._of_class else OTHERS

    def put_back(self) -> None:
        """Give FSDP2 its own methods back."""
        for name, before in self._before.items():
            self._group.__dict__.pop(name, None)
            if before is not None:
                setattr(self._group, name, before)


# These are asked in each gather, several times, so they make no Python call.

#: The process group over which a parameter group is gathered.
group_of: Callable[[Any], Any] = attrgetter("_all_gather_process_group")
#: What FSDP2 keeps of a gather that is not yet waited for; None if there is none.
result_of: Callable[[Any], Any] = attrgetter("_all_gather_result")
#: What a parameter group does: ``IDLE``, ``FORWARD``, ``PRE_BACKWARD``, ``POST_BACKWARD``.
state_name: Callable[[Any], str] = attrgetter("_training_state._name_")


def set_result(group: Any, result: Any) -> None:
    """Let FSDP2 know of a gather that was started; None: of none."""
    group._all_gather_result = result


def gather_streams(group: Any, *, async_op: bool) -> tuple[Any, Any]:
    """Where shards are cast, and where they are gathered, on a device."""
    streams: tuple[Any, Any] = group.comm_ctx.get_all_gather_streams(
        async_op, group._training_state
    )
    return streams


def has_unsharded(group: Any) -> None:
    """FSDP2 takes the parameters of a group for gathered from now on, and waits for no gather."""
    group._to_unsharded()
    group._all_gather_result = None


def release_gather(group: Any) -> None:
    """Let go of the flat all-gather that FSDP2 keeps until the next one has been waited for."""
    context = group.comm_ctx
    if state_name(group) != "FORWARD":
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


_sharded_data: Callable[[Any], torch.Tensor] = attrgetter("_sharded_param_data")


def shard_of(parameter: Any) -> torch.Tensor:
    """This rank's part of a parameter, flat and padded."""
    shard: torch.Tensor = parameter._sharded_param_data
    return shard


def flat_shards(group: Any) -> list[torch.Tensor]:
    """`shard_of` all parameters of a group, in one call: it is asked for in each gather."""
    return list(map(_sharded_data, group.fsdp_params))


def has_own_gather(parameter: Any) -> bool:
    """Whether a parameter's tensor says by itself how it is gathered."""
    return hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")


def inputs_of(parameter: Any) -> list[torch.Tensor]:
    """What a parameter's gather is given, flat: its shard, or what its own tensor makes of it.

    Collective: where its tensor communicates then.
    """
    if not has_own_gather(parameter):
        return [shard_of(parameter)]
    inputs: list[torch.Tensor] = parameter.all_gather_inputs  # FSDP2 keeps what belongs to them
    return inputs


def outputs_of(parameter: Any) -> list[torch.Tensor]:
    """What FSDP2 gathers a parameter into, flat; empty before the first gather."""
    return list(parameter.all_gather_outputs)


def finish(parameter: Any) -> None:
    """Let a parameter with a gather of its own see what was gathered."""
    parameter.init_unsharded_param()
    _forget_inner(parameter)


def size_of(parameter: Any) -> torch.Size:
    """Of a parameter as the module sees it."""
    size: torch.Size = parameter._orig_size
    return size


def unsharded(parameter: Any) -> Any:
    """The unsharded parameter's own tensor; None before the first gather."""
    return local_part(getattr(parameter, "_unsharded_param", None))


def shows_its_tensors(parameter: Any) -> bool:
    """Whether `tensors_of` finds all tensors that an unsharded parameter consists of."""
    tensor = unsharded(parameter)
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) or hasattr(
        tensor, "__tensor_flatten__"
    )


def tensors_of(parameter: Any) -> list[torch.Tensor]:
    """The tensors with bytes that an unsharded parameter consists of, each once.

    Without those that FSDP2 gathers into.
    """
    if not has_own_gather(parameter):
        return [unsharded(parameter)]
    seen: dict[int, torch.Tensor] = {id(output): output for output in parameter.all_gather_outputs}
    found = []
    left = [unsharded(parameter), *parameter._unsharded_inner_tensors]
    while left:
        tensor = left.pop()
        if not isinstance(tensor, torch.Tensor) or id(tensor) in seen:
            continue
        seen[id(tensor)] = tensor
        left.append(tensor._base)
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            found.append(tensor)
        else:
            left += [getattr(tensor, name) for name in flatten()[0]]
    return found


def lie_in(tensors: Sequence[torch.Tensor], storage: torch.Tensor) -> list[torch.Tensor]:
    """Those tensors that share the storage of ``storage``."""
    there = storage.untyped_storage()._cdata
    return [tensor for tensor in tensors if tensor.untyped_storage()._cdata == there]


def give_storages(parameter: Any, storages: Sequence[torch.Tensor]) -> None:
    """Let an unsharded parameter live in ``storages``, which FSDP2 does not free.

    In the same object, where there is one that autograd may use.
    """
    own = unsharded(parameter)
    tensors = [] if own is None else tensors_of(parameter)
    moves = [] if own is None else zip(parameter.all_gather_outputs, storages, strict=True)
    moved = [(tensor, new) for old, new in moves for tensor in lie_in(tensors, old)]
    parameter.all_gather_outputs = list(storages)
    parameter.free_unsharded_param = _NOTHING
    if has_own_gather(parameter):
        parameter.free_unsharded_param = functools.partial(_free_inner, parameter)
    # What does not move may be of any mode, as a scale that was computed in an evaluation.
    kinds = [] if own is None else [own, *(tensor for tensor, _ in moved)]
    if kinds and not any(tensor.is_inference() for tensor in kinds):
        for tensor, new in moved:
            tensor.data = _like(tensor, new)
        _forget_inner(parameter)
        return
    parameter.__dict__.pop("_unsharded_param", None)
    parameter._unsharded_inner_tensors = []
    if not has_own_gather(parameter):  # which makes it when it sees what was gathered
        parameter.init_unsharded_param()


#: What FSDP2 calls instead of freeing a parameter: ``bool()`` does nothing, in no Python call.
_NOTHING = bool

#: What FSDP2 gathers a parameter into, and the tensors there with views of them that need no bytes.
Emptied = tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]


def emptied(parameter: Any) -> Emptied | None:
    """FSDP2's own tensors of an unsharded parameter, whose bytes are freed; None if it has none.

    What `take_back` takes.
    """
    outputs = outputs_of(parameter)
    if unsharded(parameter) is None or not outputs:
        return None
    tensors = tensors_of(parameter)
    inside = [t for output in outputs for t in lie_in(tensors, output)]
    if any(tensor.is_inference() for tensor in (*inside, *outputs)):
        return None
    views = [(tensor, tensor.detach()) for tensor in inside]
    if not views and not has_own_gather(parameter):
        return None
    for output in outputs:
        output.untyped_storage().resize_(0)
    return outputs, views


def take_back(parameter: Any, own: Emptied) -> None:
    """Let an unsharded parameter live in FSDP2's own tensors, which it frees and fills from now on.

    Args:
        parameter: FSDP2's.
        own: What `emptied` gave; a tensor that lies in symmetric memory and has no view there gets
            a new one.
    """
    parameter.__dict__.pop("free_unsharded_param", None)
    outputs, views = own
    tensors = tensors_of(parameter)
    before, parameter.all_gather_outputs = parameter.all_gather_outputs, list(outputs)
    known = {id(tensor): view for tensor, view in views}
    for old, new in zip(before, outputs, strict=True):
        for tensor in lie_in(tensors, old):
            view = known.get(id(tensor))
            tensor.data = _like(tensor, new) if view is None else view


def _like(tensor: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
    """A view of ``storage`` as ``tensor`` is one of another."""
    place = storage.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    made: Any = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    view: torch.Tensor = made.set_(*place)
    return view


def _forget_inner(parameter: Any) -> None:
    """FSDP2 allocates and frees those inner tensors only that lie nowhere where it gathers."""
    inner = parameter._unsharded_inner_tensors
    if inner:
        there = [o.untyped_storage()._cdata for o in parameter.all_gather_outputs]
        parameter._unsharded_inner_tensors = [
            t for t in inner if t.untyped_storage()._cdata not in there
        ]


def _free_inner(parameter: Any) -> None:
    """The bytes belong to the plan, except what a parameter's own tensor made of them."""
    for tensor in parameter._unsharded_inner_tensors:
        tensor.untyped_storage().resize_(0)
