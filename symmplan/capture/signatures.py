"""Signatures of calls, which must be equal when a call comes again, and stand-ins for the rest."""

from __future__ import annotations

from typing import Any

import torch
from attrs import field, frozen

#: What is compared as it is; asked first, because most arguments are of these.
_PLAIN = frozenset({bool, int, str, type(None), torch.dtype, torch.device, type(torch.mul)})


@frozen
class CallValue:
    """Stands for a value that each call has anew."""

    text: str  # what it is as Python code, of ``args`` and ``kwargs``, if it is given
    like: Any = field(default=None, eq=False)  # its `signature`, where that is known


def signature(value: Any) -> Any:
    """What must be equal when the same call comes again.

    For a tensor these are its shape and type. Floats are left out, because they do not affect
    placements.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        return float
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(signature, value))
    if isinstance(value, dict):
        return {k: signature(v) for k, v in value.items()}
    # Boxes are made anew for every call.
    return None if isinstance(value, torch.ScriptObject) else value


def stand_in(value: Any, text: str = "args") -> Any:
    """A `CallValue` where `signature` says less than all of a value, or of what is in a list."""
    if isinstance(value, (list, tuple)):
        return [stand_in(x, f"{text}[{i}]") for i, x in enumerate(value)]
    anew = isinstance(value, (torch.Tensor, float, torch.ScriptObject))
    return CallValue(text, signature(value)) if anew else value
