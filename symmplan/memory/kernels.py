"""Move and reduce bytes between mapped memories: what the one-sided collectives are made of.

[Note: summing]
    Sources are combined in the order of ranks, on every rank alike, so results are bitwise equal
    on all ranks, and equal from run to run. Types narrower than float32 are combined in float32
    and rounded once at the end, which is closer to the exact result than rounding at each step.

[Note: chunks]
    With more than two sources, or where the result goes to several places, the work is cut into
    chunks that stay in the second-level cache between its steps; memory is then read and written
    once.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from typing import TYPE_CHECKING

import torch

from symmplan.memory.races import touch, touch_bytes
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["REDUCTIONS", "as_bytes", "copies", "copy_bytes", "plain", "reduce_into", "scratch_of"]
__all__ += ["select_rows", "word_of"]

_CHUNK = 256 * 1024  # bytes
_DEVICE_CHUNK = 64 << 20  # where each chunk costs launches, and no cache holds it
#: Below this many bytes a bare memmove beats torch's dispatch; above, torch may use its threads.
_SMALL = 64 * 1024

#: Element types of a size that divides that of a row.
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.int8))

#: Reduction -> how two tensors are combined. Torch's names, and c10d's where they differ.
REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
#: For booleans, as NCCL does.
_BOOLEAN = {
    torch.add: torch.logical_or,
    torch.maximum: torch.logical_or,
    torch.minimum: torch.logical_and,
    torch.mul: torch.logical_and,
}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, one-dimensional."""
    # Not view(-1): the stride of a dimension of size one or zero may be anything.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with its elements in memory as they read: contiguous, nothing lazy."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def copy_bytes(target: torch.Tensor, start: int, source: torch.Tensor, nbytes: int) -> None:
    """Copy contiguous ``source`` of ``nbytes`` to byte ``start`` of the bytes ``target``."""
    if PROCESS.detectors:
        touch_bytes(source.data_ptr(), nbytes, write=False)
        touch_bytes(target.data_ptr() + start, nbytes, write=True)
    if nbytes <= _SMALL and target.is_cpu and source.is_cpu:
        ctypes.memmove(target.data_ptr() + start, source.data_ptr(), nbytes)
    else:
        target[start : start + nbytes].copy_(as_bytes(source))


def copies(
    pieces: Iterable[tuple[torch.Tensor, int, torch.Tensor, int]],
) -> Callable[[], None]:
    """A function that makes several copies of `copy_bytes`, which may be called again and again.

    Args:
        pieces: The arguments of each; the tensors stay where they are.
    """
    small, large = [], []
    keeps = list(pieces)
    for target, start, source, nbytes in keeps:
        if nbytes <= _SMALL and target.is_cpu and source.is_cpu:
            small.append((target.data_ptr() + start, source.data_ptr(), nbytes))
        else:
            large.append((target[start : start + nbytes], as_bytes(source)))

    def run() -> None:
        if PROCESS.detectors:
            for target, start, source, nbytes in keeps:
                copy_bytes(target, start, source, nbytes)
            return
        for there, here, nbytes in small:
            ctypes.memmove(there, here, nbytes)
        for part, source in large:
            part.copy_(source)

    return run


def select_rows(
    target: torch.Tensor, start: int, source: torch.Tensor, numbers: torch.Tensor
) -> None:
    """Copy some rows of ``source``, by their numbers, to byte ``start`` of the bytes ``target``."""
    shape = (len(numbers), *source.shape[1:])
    nbytes = math.prod(shape) * source.element_size()
    if PROCESS.detectors:
        touch(source, write=False)
        touch_bytes(target.data_ptr() + start, nbytes, write=True)
    there = target[start : start + nbytes].view(source.dtype).view(shape)
    torch.index_select(source, 0, numbers, out=there)


def word_of(nbytes: int, addresses: int) -> torch.dtype:
    """The widest type in which rows of so many bytes can be copied between these addresses."""
    aligned = nbytes | addresses
    return next(kind for size, kind in _WORDS if not aligned % size)


def reduce_into(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    reduction: str,
    ranks: int = 0,
) -> None:
    """Combine ``sources`` elementwise and write the result to every one of ``targets``.

    All are flat and of one length, sources of one type; only targets may be wider or narrower. A
    target may be a source, not overlap one otherwise. See [Note: summing].

    Args:
        targets: Where the result goes.
        sources: What is combined.
        reduction: How.
        ranks: Of how many ranks it is an average, if sources are sums of several.
    """
    if PROCESS.detectors:
        for source in sources:
            touch(source, write=False)
        for target in targets:
            touch(target, write=True)
    combine = REDUCTIONS[reduction]
    dtype = sources[0].dtype
    if dtype == torch.bool:
        combine = _BOOLEAN.get(combine, combine)
    average = (ranks or len(sources)) if reduction == "avg" else 0
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    # Two half-precision numbers are added in float32 and rounded once by torch itself.
    wide = narrow and (
        len(sources) > 2 or bool(average) or dtype.itemsize < 2 or targets[0].dtype != dtype
    )
    if len(sources) == 1:
        for target in targets:
            if target.data_ptr() != sources[0].data_ptr():
                target.copy_(sources[0])
        return
    if len(sources) == 2 and len(targets) == 1 and not wide and not average:
        combine(sources[0], sources[1], out=targets[0])
        return
    count = sources[0].numel()
    if not count:
        return
    chunk = _CHUNK if sources[0].is_cpu else _DEVICE_CHUNK
    scratch = scratch_of(
        min(max(1, chunk // dtype.itemsize), count),
        torch.float32 if wide else dtype,
        sources[0].device,
    )
    step = scratch.numel()
    for begin in range(0, count, step):
        end = min(begin + step, count)
        _reduce_chunk(
            [t[begin:end] for t in targets],
            [s[begin:end] for s in sources],
            combine,
            average,
            scratch[: end - begin],
            wide=wide,
        )


def scratch_of(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room for so many elements, or for fewer where memory is short: peers wait for this rank."""
    while numel > 1:
        with contextlib.suppress(RuntimeError):
            return torch.empty(numel, dtype=dtype, device=device)
        numel = -(-numel // 16)
    return torch.empty(numel, dtype=dtype, device=device)


def _reduce_chunk(
    targets: list[torch.Tensor],
    sources: list[torch.Tensor],
    combine: Callable[..., torch.Tensor],
    average: int,
    total: torch.Tensor,
    *,
    wide: bool,
) -> None:
    result = total if wide or average else targets[0]
    if wide:
        total.copy_(sources[0])
        for source in sources[1:]:
            # Types of one byte do not promote: convert first.
            combine(total, source if source.dtype.itemsize > 1 else source.float(), out=total)
    else:
        left = sources[0]
        for source in sources[1:-1]:
            left = combine(left, source, out=total)
        # All sources are read before the first target, which may be one of them, is written.
        combine(left, sources[-1], out=result)
    if average:
        exact = total.dtype.is_floating_point or total.dtype.is_complex
        total.div_(average, rounding_mode=None if exact else "trunc")
    for target in targets:
        if target is not result:
            target.copy_(result)
