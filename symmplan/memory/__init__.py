"""Plan -> bytes: agree with the peers, allocate, rendezvous, and move data one-sidedly."""

from __future__ import annotations

from symmplan.coordination.agreement import agree as agree
from symmplan.errors import NotSymmetricError as NotSymmetricError
from symmplan.memory import ops as ops  # registers torch.ops.symmplan.*
from symmplan.memory.arena import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
from symmplan.memory.arena import Arena as Arena
from symmplan.memory.arena import realize as realize
from symmplan.memory.backends import BACKENDS as BACKENDS
from symmplan.memory.backends import Backend as Backend
from symmplan.memory.backends import resolve_backend as resolve_backend
from symmplan.memory.health import Health as Health
from symmplan.memory.placed_tensor import PlacedTensor as PlacedTensor
from symmplan.memory.placed_tensor import handle as handle
from symmplan.memory.segment import Rendezvous as Rendezvous
from symmplan.memory.segment import Segment as Segment
from symmplan.memory.segment import locate as locate

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
