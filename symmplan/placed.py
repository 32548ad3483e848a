"""Tensors in placements, for code that makes or reads them: `empty`, `out` and `handle`.

`empty` and `out` make a tensor where the declared op that gets it wants it, so that it needs no
copy. `handle` gives an op of your own the same tensor in its peers' memory.

>>> import torch
>>> import symmplan
>>> symmplan.placed.out(torch.add, torch.ones(2), 1.0)  # outside a session just the call
tensor([2., 2.])
"""

from __future__ import annotations

from symmplan.integrate.eager.context import empty, out
from symmplan.memory import PlacedTensor, handle

__all__ = ["PlacedTensor", "empty", "handle", "out"]
