"""A world that is not there: fake process groups, meshes and tensors."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch._subclasses import fake_tensor
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, _redistribute, debug
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from symmplan.torch_private.fake_results import DEVICE, Results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Watch", "fake_world", "in_pipeline", "needs_bytes", "reads_values"]

#: What is raised where a program asks for the value of a fake tensor.
_READS = tuple(
    getattr(fake_tensor, name)
    for name in ("DataDependentOutputException", "DynamicOutputShapeException")
    if hasattr(fake_tensor, name)
)
#: Methods of meshes that read their ranks from tensors, which have values.
_OF_MESHES = (
    "__getitem__",
    "__repr__",
    "_compute_coordinate_on_dim",
    "_compute_coordinates_from_mesh",
    "_concatenate",
    "_create_flatten_mesh",
    "_create_sub_mesh",
    "_create_unflatten_mesh",
    "_flatten",
    "_get_all_submeshes",
    "_get_mesh_tensor_from_full_mesh",
    "_init_process_groups",
    "_setup_world_group_and_device",
    "_unflatten",
    "get_all_groups",
)


def reads_values(error: BaseException) -> bool:
    """Whether a program asked for a value that a fake tensor does not have."""
    return isinstance(error, _READS)


def needs_bytes(error: BaseException) -> bool:
    """Whether code asked where the bytes of a fake tensor lie."""
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "data is not allocated yet" in text or "Cannot access data pointer" in text
    )


def in_pipeline(error: BaseException) -> bool:
    """Whether a pipeline's stage asked, to know what its neighbours send."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename).parent.name == "pipelining" for frame in frames[-12:])


#: Not empty while DTensor asks what an op makes, of whole tensors that nobody has.
_asked: list[None] = []


def _asking(propagate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(propagate)
    def asking(*args: Any, **kwargs: Any) -> Any:
        _asked.append(None)
        try:
            return propagate(*args, **kwargs)
        finally:
            _asked.pop()

    return asking


class Watch(TorchDispatchMode):
    """Tells of every op that runs on tensors without parts of their own.

    Args:
        seen: Called with the op, its arguments and its results.
        mode: That of the program's tensors.
    """

    def __init__(
        self, seen: Callable[[Any, Sequence[Any], Any], None], mode: fake_tensor.FakeTensorMode
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen
        self._results = Results(mode)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo compiles below it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and tell of it; a DTensor's runs on its parts."""
        for kind in types:
            if issubclass(kind, DTensor):
                return NotImplemented
        result = self._results.of(func, args, kwargs or {})
        if func is not DEVICE and not _asked:
            self._seen(func, (args, kwargs or {}), result)
        return result


class _Chunks:
    """Parts of a tensor as FSDP2 cuts it, each made when asked for: it keeps one of hundreds."""

    def __init__(self, tensor: torch.Tensor, count: int, *, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._each = max(1, -(-tensor.size(dim) // count))

    def __getitem__(self, index: int) -> torch.Tensor:
        begin = index * self._each
        have = self._tensor.size(self._dim) - begin
        if have <= 0 and index > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(self._each, have))


@contextlib.contextmanager
def fake_world(
    ranks: int, rank: int, check_mesh: Callable[[int], None]
) -> Iterator[fake_tensor.FakeTensorMode]:
    """This process is a rank of a world of fake process groups; new tensors are fake.

    Args:
        ranks: How many ranks there are.
        rank: This one.
        check_mesh: Called with the size of each mesh that is to have all ranks; may raise.

    Yields:
        The mode of its tensors.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers "fake"

    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0}
    kept = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(value) for name, value in names.items()})
    _forget()
    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=ranks)
    begin, end = dist.init_process_group, dist.destroy_process_group
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with contextlib.ExitStack() as stack:
            for owner in (dist, c10d):
                stack.enter_context(_replaced(owner, "init_process_group", _nothing))
                stack.enter_context(_replaced(owner, "destroy_process_group", _nothing))
            for name in _OF_MESHES:
                if name in device_mesh.DeviceMesh.__dict__:
                    method = device_mesh.DeviceMesh.__dict__[name]
                    stack.enter_context(_replaced(device_mesh.DeviceMesh, name, _real(method)))
            if hasattr(_fsdp_param, "_chunk_with_empty"):
                stack.enter_context(_replaced(_fsdp_param, "_chunk_with_empty", _Chunks))
            if hasattr(PipelineStage, "_warmup_backward_result"):
                stack.enter_context(_replaced(PipelineStage, "_warmup_backward_result", _vote))
            init = _init_of_meshes(device_mesh.DeviceMesh.__init__, check_mesh)
            stack.enter_context(_replaced(device_mesh.DeviceMesh, "__init__", init))
            wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
            if wrapper is not None:
                compiles = _compiles(wrapper.__call__)
                stack.enter_context(_replaced(wrapper, "__call__", compiles))
            swap = functools.partial(_swap, torch.utils.swap_tensors, mode)
            stack.enter_context(_replaced(torch.utils, "swap_tensors", swap))
            asks = "_propagate_tensor_meta_non_cached"
            if hasattr(ShardingPropagator, asks):
                asking = _asking(getattr(ShardingPropagator, asks))
                stack.enter_context(_replaced(ShardingPropagator, asks, asking))
            stack.enter_context(mode)
            yield mode
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        dist.init_process_group, dist.destroy_process_group = begin, end
        dist.destroy_process_group()
        _forget()


def _compiles(call: Callable[..., Any]) -> Callable[..., Any]:
    """Inductor with all that it does to a graph, but for kernels, which need bytes."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor import compile_fx as inductor

        ops = functools.partial(inductor.compile_fx, inner_compile=_ops_of)
        with _replaced(inductor, "compile_fx", ops):
            return call(*args, **kwargs)

    return run


def _ops_of(gm: Any, _inputs: Any, **_kwargs: Any) -> Any:
    """A graph's ops one by one, in place of Inductor's code."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    gm.recompile()
    return make_boxed_func(gm)


def _swap(
    swap: Callable[..., None],
    mode: fake_tensor.FakeTensorMode,
    first: torch.Tensor,
    second: torch.Tensor,
) -> None:
    """Let a module convert its parameters: weak references forbid it, and the mode has some."""
    memo: Any = mode.fake_tensor_converter.meta_converter.tensor_memo
    for tensor in (first, second):
        keys = [getattr(ref, "key", None) for ref in weakref.getweakrefs(tensor)]
        for key in keys:
            if memo.get(key) is tensor:
                del memo[key]
    swap(first, second)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """The world is there from the beginning to the end."""


def _forget() -> None:
    """What torch remembers of one world, code and sizes of shards, does not fit another."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    forget = getattr(debug, "_clear_sharding_prop_cache", None)
    if forget is not None:
        forget()
    for value in vars(_redistribute).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def _vote(self: Any, received_result: Any = None) -> Any:  # noqa: ARG001
    """A pipeline stage's word on whether it knows what it receives: here all say what this says."""
    known = int(self._user_meta.inputs is not None)
    return SimpleNamespace(item=lambda: known)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _real(method: Any) -> Any:
    """A method that works on real tensors."""
    if isinstance(method, staticmethod):
        return staticmethod(_real(method.__func__))
    if isinstance(method, property):
        return property(_real(method.fget))

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with fake_tensor.unset_fake_temporarily():
            return method(*args, **kwargs)

    return run


def _init_of_meshes(
    init: Callable[..., None], check_mesh: Callable[[int], None]
) -> Callable[..., None]:
    @functools.wraps(init)
    def run(self: Any, device_type: str, mesh: Any = None, **kwargs: Any) -> None:
        with fake_tensor.unset_fake_temporarily():
            given = kwargs.get("_rank_map")
            if isinstance(given, fake_tensor.FakeTensor):  # init_device_mesh's: all ranks in order
                check_mesh(given.numel())
                kwargs["_rank_map"] = torch.arange(given.numel(), dtype=torch.int)
            if isinstance(mesh, fake_tensor.FakeTensor):
                if mesh.constant is None:
                    raise fake_tensor.DataDependentOutputException(torch.ops.aten.item.default)
                mesh = mesh.constant
            init(self, device_type, mesh, **kwargs)

    return run
