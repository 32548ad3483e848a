"""Where collectives in symmetric memory may run."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["off_default_stream"]


@contextlib.contextmanager
def off_default_stream(device: torch.device) -> Iterator[None]:
    """Run what is inside on another stream if the current one is the default, in its order.

    The copy engines of NCCL 2.28 do not run on CUDA's default stream ("invalid argument"), and any
    communicator may have been asked for them. See cudaMemcpyBatchAsync in CUDA's runtime API.
    """
    if device.type != "cuda":
        yield
        return
    current = torch.cuda.current_stream(device)
    if current != torch.cuda.default_stream(device):
        yield
        return
    side = _side(device)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        current.wait_stream(side)


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
