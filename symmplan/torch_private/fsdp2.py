"""FSDP2: its parameter groups, their methods and their collectives."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def param_groups(module: Any) -> list[Any]:
    """The parameter groups that FSDP2 manages for ``module``, an ``FSDPModule``."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13 and later: may be several
    if groups is None:
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return list(groups)


def comms(group: Any) -> tuple[Any, Any]:
    """The all-gather and reduce-scatter objects of an FSDP2 parameter group.

    Torch's defaults where this torch does not say.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    gather = getattr(group, "_all_gather_comm", None) or collectives.DefaultAllGather()
    scatter = getattr(group, "_reduce_scatter_comm", None) or collectives.DefaultReduceScatter()
    return gather, scatter


def set_comms(module: Any, group: Any, gather: Any, scatter: Any) -> None:
    """Let a parameter group of ``module``, an ``FSDPModule``, use these collectives."""
    if len(param_groups(module)) == 1:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)
    else:  # those setters refuse, because one object would serve all groups
        group._all_gather_comm = gather
        group._reduce_scatter_comm = scatter


def comm_bases() -> tuple[type, type]:
    """FSDP2's interfaces ``(AllGather, ReduceScatter)`` for custom collectives.

    Plain classes where this torch has them elsewhere: FSDP2 only calls their methods.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    except ImportError:
        return object, object
    return AllGather, ReduceScatter


def is_plain_comm(comm: object) -> bool:
    """Whether collectives are FSDP2's own, in memory that torch allocates anywhere."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    symmetric = ("SymmMemAllGather", "SymmMemReduceScatter")
    kinds = tuple(getattr(collectives, n) for n in symmetric if hasattr(collectives, n))
    return type(comm) in vars(collectives).values() and not isinstance(comm, kinds)


def group_methods(group: Any) -> list[str]:
    """The methods of a parameter group in which its collectives are issued and awaited."""
    names = ("unshard", "wait_for_unshard", "post_backward")
    return [name for name in names if callable(getattr(group, name, None))]


def shards(group: Any) -> bool:
    """Whether a parameter group is sharded, not only replicated."""
    return getattr(getattr(group, "mesh_info", None), "shard_mesh_dim", None) is not None


def in_step(group: Any) -> bool:
    """Whether a parameter group was used in forward and its backward pass may still come.

    FSDP2 does not know whether a forward pass has one, so that it was one without gradients or
    that its results are gone must be told otherwise.
    """
    return bool(
        group._training_state.name != "IDLE" or getattr(group.comm_ctx, "post_forward_order", ())
    )


def keep_after_forward(group: Any) -> Callable[[], None]:
    """Let a parameter group stay unsharded after forward; returns what undoes that.

    As ``FSDPModule.set_reshard_after_forward(False)``, for one of a module's groups.
    """
    before = group.post_forward_mesh_info
    group.post_forward_mesh_info = None

    def undo() -> None:
        if group.post_forward_mesh_info is None:
            group.post_forward_mesh_info = before

    return undo


# Of parameters; each reduction asks for all, and so makes no Python calls.
_own_dtype, _sharded_parameter = attrgetter("sharded_grad_dtype"), attrgetter("sharded_param")
_requires_grad, _grad_dtype = attrgetter("requires_grad"), attrgetter("grad_dtype")
_offloads, _gradient = attrgetter("offload_to_cpu"), attrgetter("sharded_param.grad")
_hooks = attrgetter("sharded_param._post_accumulate_grad_hooks")


def dtype_of_gradients(group: Any) -> Any:
    """The type of a parameter group's sharded gradients, if nothing else is done to its sums.

    None if FSDP2 reduces them further, gives them to a hook, divides them, casts them to what a
    parameter asks for, or does not say.
    """
    parameters = group.fsdp_params
    dtype = getattr(group, "_orig_dtype", None)
    # In newer torch (2.15) a group's parameters may differ in that, and each says its own.
    if hasattr(parameters[0], "sharded_grad_dtype"):
        dtypes = set(map(_own_dtype, parameters))
        dtype = dtypes.pop() if len(dtypes) == 1 else None
    if (
        getattr(group, "_is_hsdp", True)
        or getattr(group, "_all_reduce_hook", True)
        or getattr(group, "force_sum_reduction_for_comms", True)
    ):
        return None
    weights = list(filter(_requires_grad, map(_sharded_parameter, parameters)))
    asked = set(map(_grad_dtype, weights)) if weights and hasattr(weights[0], "grad_dtype") else ()
    return dtype if {dtype}.issuperset(asked) else None


def become_gradients(group: Any) -> bool:
    """Whether what is reduced next becomes sharded gradients that live until backward is over."""
    parameters, state = group.fsdp_params, getattr(group.modules[0], "_get_fsdp_state", None)
    context = None if state is None else getattr(state(), "_state_ctx", None)
    return (
        getattr(context, "is_last_backward", False)
        # In newer torch (2.15) the program may say when backward is over.
        and not getattr(context, "manual_backward_finalization", False)
        and not any(map(_offloads, parameters))
        and not any(map(_hooks, parameters))
        and not has_gradients(group)
    )


def has_gradients(group: Any) -> bool:
    """Whether some sharded parameter of a group has a gradient."""
    return any(map(operator.is_not, map(_gradient, group.fsdp_params), itertools.repeat(None)))


def gradients_at(group: Any, numel: int, dtype: Any) -> Any:
    """The tensor that the sharded gradients of a parameter group are cut from.

    FSDP2 cuts them from what it reduced first, and adds what it reduces later to each of them. Who
    adds to the tensor itself lets FSDP2 know by `added_to`.

    Args:
        group: The parameter group.
        numel: Elements of what is being reduced.
        dtype: Their type; see `dtype_of_gradients`.

    Returns:
        None if parameters have no gradients yet or are not reduced now, or their gradients lie
        otherwise or have another type, or somebody else has a part in this.
    """
    if not _adds_gradients():
        return None
    whole: Any = None
    at = 0
    for p in group.fsdp_params:
        count = p.padded_sharded_param_size.numel()
        grad: Any = getattr(p.sharded_param.grad, "_local_tensor", None)
        if (
            grad is None
            or not count
            or (grad.dtype, grad.device.type) != (dtype, group.device.type)
            or (grad.shape, grad.stride()) != (p.sharded_size, p.contiguous_sharded_stride)
            or grad.storage_offset() != at
            or grad.requires_grad
            or getattr(p.sharded_param, "_post_accumulate_grad_hooks", None)
        ):
            return None
        if whole is None:
            whole = grad.new_empty(0).set_(grad.untyped_storage())
        elif grad.untyped_storage()._cdata != whole.untyped_storage()._cdata:
            return None
        at += count
    # That many are reduced only if all parameters are.
    return whole if whole is not None and numel == at == whole.numel() else None


def added_to(group: Any) -> None:
    """FSDP2 need not add what it reduces now to the gradients of a parameter group."""
    for p in group.fsdp_params:
        p.to_sharded_dtensor = functools.partial(_same_gradient, p, p.sharded_param.grad)
        p.sharded_param.grad = None


def _same_gradient(parameter: Any, gradient: Any, new: Any) -> Any:
    """What FSDP2 takes for a gradient that it made of ``new``, when it finds none to add to."""
    del parameter.to_sharded_dtensor
    same = new.data_ptr() == gradient._local_tensor.data_ptr()
    return gradient if same else parameter.to_sharded_dtensor(new)


@functools.cache
def _adds_gradients() -> bool:
    """Whether FSDP2 adds to gradients, and makes them, by what `added_to` uses."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    made = set(inspect.unwrap(collectives.foreach_reduce).__code__.co_names)
    sizes = set(inspect.unwrap(FSDPParam._init_sharded_param).__code__.co_names)
    return {"to_sharded_dtensor", "sharded_param", "grad", "_local_tensor"} <= made and {
        "padded_sharded_param_size",
        "sharded_size",
        "contiguous_sharded_stride",
    } <= sizes


#: An attribute of a reduce-scatter's input: what takes its gradients.
_TAKES = "_symmplan_takes"


def has_copy_in() -> bool:
    """Whether FSDP2 copies gradients into a reduce-scatter's input by a function of its own."""
    return _copy_in() is not None


def watch_copy_in() -> None:
    """From now on gradients are given to what `take_copy_in` says, which says where they go."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    original = _copy_in()
    if original is None or hasattr(original, "symmplan"):
        return

    @functools.wraps(original)
    def copy_in(gradients: list[Any], target: Any, *args: Any, **kwargs: Any) -> None:
        take = getattr(target, _TAKES, None)
        if take is not None:
            delattr(target, _TAKES)
            target = take(gradients, target)
        if target is not None:
            original(gradients, target, *args, **kwargs)

    copy_in.symmplan = True  # type: ignore[attr-defined]
    module: Any = collectives
    module.foreach_reduce_scatter_copy_in = copy_in


def take_copy_in(target: Any, take: Callable[[list[Any], Any], Any]) -> None:
    """FSDP2 gives ``take`` the gradients that it would copy into this reduce-scatter's input.

    Args:
        target: The input.
        take: Given the gradients and the input, returns where FSDP2 copies them; None: nowhere.
    """
    setattr(target, _TAKES, take)


def copy_in(gradients: Sequence[Any], target: Any, ranks: int) -> None:
    """Arrange gradients in a reduce-scatter's input, as FSDP2 does."""
    found = _copy_in()
    assert found is not None
    found(list(gradients), target, ranks)


def _copy_in() -> Any:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    found = getattr(collectives, "foreach_reduce_scatter_copy_in", None)
    called = inspect.unwrap(collectives.foreach_reduce).__code__.co_names
    return found if "foreach_reduce_scatter_copy_in" in called else None
