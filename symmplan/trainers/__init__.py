"""Adapters that apply symmplan inside other people's trainers.

`SymmplanCallback` is for Hugging Face's ``Trainer`` and the trainers of TRL;
`symmplan.trainers.torchtitan` has torchtitan's trainer. The extras ``trainers`` and ``torchtitan``
install what they need, in the versions that are tested. `symmplan.trainers.versions` refuses
others when an adapter is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan.trainers.metrics import watched

if TYPE_CHECKING:
    from symmplan.trainers.hugging_face import SymmplanCallback as SymmplanCallback

__all__ = ["SymmplanCallback", "watched"]


def __getattr__(name: str) -> Any:
    if name != "SymmplanCallback":
        raise AttributeError(f"module 'symmplan.trainers' has no attribute {name!r}")
    from symmplan.trainers.hugging_face import SymmplanCallback

    return SymmplanCallback
