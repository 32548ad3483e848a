"""A simulated world: fake process groups, meshes and tensors."""

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

from symmplan.torch_private.table import require
from symmplan.torch_private.table import simulated as rows

require("simulate")

from torch._C._distributed_c10d import HashStore
from torch._subclasses import fake_tensor
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor, _redistribute, debug
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from symmplan.torch_private.fake_results import DEVICE, Results

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from typing_extensions import Self

__all__ = [
    "WatchMode",
    "current_stream",
    "fake_world",
    "followed_memory",
    "in_pipeline",
    "needs_bytes",
    "reads_values",
]

#: What is raised where a program asks for the value of a fake tensor.
_READS = tuple(
    getattr(fake_tensor, name)
    for name in ("DataDependentOutputException", "DynamicOutputShapeException")
    if hasattr(fake_tensor, name)
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


class WatchMode(TorchDispatchMode):
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
        self._patch = contextlib.ExitStack()
        # How often DTensor asks now what an op makes, of whole tensors that nobody has.
        self._asked = 0

    def __enter__(self) -> Self:
        if not rows.FAKE_SHARDING.missing():
            asks: Any = ShardingPropagator._propagate_tensor_meta_non_cached
            patch = rows.FAKE_SHARDING.replaced(
                _propagate_tensor_meta_non_cached=self._asking(asks)
            )
            self._patch.enter_context(patch)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patch.close()

    def _asking(self, propagate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(propagate)
        def asking(*args: Any, **kwargs: Any) -> Any:
            self._asked += 1
            try:
                return propagate(*args, **kwargs)
            finally:
                self._asked -= 1

        return asking

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
        if func is not DEVICE and not self._asked:
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


class _FusedNorm(torch.autograd.Function):
    """The tensors of an RMS norm as CUDA has it: one kernel, which keeps a number for each row.

    Source: ``_fused_rms_norm`` of ATen, of which the CPU has no kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=wide))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        (gradient,) = gradients
        # A tensor of its size that has gradients, too.
        return x * gradient, None if weight is None else torch.empty_like(weight)


def _in_transform() -> bool:
    """Whether the program is inside ``torch.func.grad``, ``vmap`` or the like."""
    interpreter = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)
    return interpreter() is not None


def _as_on_devices(norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.nn.functional.rms_norm`, which the CPU computes in several wide tensors."""

    @functools.wraps(norm)
    def run(x: torch.Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        sharded = isinstance(x, DTensor) or isinstance(weight, DTensor)
        mixed = weight is not None and weight.dtype != x.dtype  # not fused on devices, either
        if sharded or mixed or torch.compiler.is_compiling() or _in_transform():
            return norm(x, shape, weight, eps)
        return _FusedNorm.apply(x, weight)  # type: ignore[no-untyped-call]

    return run


def current_stream(device: torch.device) -> Hashable:
    """The current stream of a simulated program, which is FSDP2's own in its collectives."""
    stream: Hashable = torch.get_device_module(device).current_stream()
    return stream


@contextlib.contextmanager
def fake_world(
    ranks: int, rank: int, check_mesh: Callable[[int], None], *, devices: bool
) -> Iterator[fake_tensor.FakeTensorMode]:
    """This process is a rank of a world of fake process groups; new tensors are fake.

    Args:
        ranks: How many ranks there are.
        rank: This one.
        check_mesh: Called with the size of each mesh that is to have all ranks; may raise.
        devices: Whether ops have the tensors that they have on CUDA devices.

    Yields:
        The mode of its tensors.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers "fake"

    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0}
    kept = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(value) for name, value in names.items()})
    _forget()
    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=ranks)
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with contextlib.ExitStack() as stack:
            for patch in _patches(mode, check_mesh):
                stack.enter_context(patch)
            if devices:
                norm = _as_on_devices(torch.nn.functional.rms_norm)
                stack.enter_context(rows.FAKE_NORMS.replaced(rms_norm=norm))
            stack.enter_context(mode)
            yield mode
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        dist.destroy_process_group()
        _forget()


def followed_memory(
    resized: Callable[[Any, int], None],
    built: Callable[[torch.nn.Module], None],
    backward_done: Callable[[], None],
) -> AbstractContextManager[None]:
    """While inside, storages that change their size, new modules and backward passes are told.

    Args:
        resized: Called with a storage and its new size in bytes.
        built: Called with a module before it has anything.
        backward_done: Called behind each backward pass.
    """
    resize: Any = torch.UntypedStorage.resize_
    init, backward = torch.nn.Module.__init__, torch.autograd.backward

    def resize_(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        resized(storage, size)
        return result

    @functools.wraps(init)
    def init_(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        built(module)
        init(module, *args, **kwargs)

    @functools.wraps(backward)
    def backward_(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        backward_done()

    return rows.FAKE_MEMORY.replaced(resize_=resize_, __init__=init_, backward=backward_)


def _patches(
    mode: fake_tensor.FakeTensorMode, check_mesh: Callable[[int], None]
) -> Iterator[AbstractContextManager[None]]:
    """What of torch has to be otherwise for a process to be one rank of many."""
    swap = functools.partial(_swap, torch.utils.swap_tensors, mode)
    yield rows.FAKE_WORLD.replaced(
        init_process_group=_nothing,
        destroy_process_group=_nothing,
        swap_tensors=swap,
        __init__=_init_of_meshes(device_mesh.DeviceMesh.__init__, check_mesh),
    )
    methods = vars(device_mesh.DeviceMesh)
    names = (target.rpartition(".")[2] for target in rows.FAKE_MESHES.targets)
    yield rows.FAKE_MESHES.replaced(**{n: _real(methods[n]) for n in names if n in methods})
    yield rows.FAKE_CHUNKS.replaced(_chunk_with_empty=_Chunks)
    yield rows.FAKE_PIPELINES.replaced(_warmup_backward_result=_vote)
    if not rows.FAKE_INDUCTOR.missing():
        call = torch._TorchCompileInductorWrapper.__call__
        yield rows.FAKE_INDUCTOR.replaced(__call__=_compiles(call))


def _compiles(call: Callable[..., Any]) -> Callable[..., Any]:
    """Inductor with all that it does to a graph, but for kernels, which need bytes."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor import compile_fx as inductor

        ops = functools.partial(inductor.compile_fx, inner_compile=_ops_of)
        with rows.FAKE_INDUCTOR.replaced(compile_fx=ops):
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
