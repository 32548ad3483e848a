"""Plan -> bytes: agree with the peers, allocate, rendezvous, and move data one-sidedly."""

from __future__ import annotations

from symmplan.coordination.agreement import agree
from symmplan.errors import NotSymmetricError
from symmplan.memory.arena import DEFAULT_TIMEOUT, Arena, realize
from symmplan.memory.backends import BACKENDS, Backend
from symmplan.memory.backends.resolve import resolve_backend
from symmplan.memory.health import Health
from symmplan.memory.ops import library as library  # registers torch.ops.symmplan.*
from symmplan.memory.placed_tensor import PlacedTensor, handle
from symmplan.memory.segment import Rendezvous, Segment, locate

__all__ = [
    "BACKENDS",
    "DEFAULT_TIMEOUT",
    "Arena",
    "Backend",
    "Health",
    "NotSymmetricError",
    "PlacedTensor",
    "Rendezvous",
    "Segment",
    "agree",
    "handle",
    "locate",
    "realize",
    "resolve_backend",
]
