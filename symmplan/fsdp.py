"""FSDP2 in planned symmetric memory: `apply` it after ``fully_shard``.

>>> import symmplan
>>> symmplan.fsdp.apply.__name__
'apply'
"""

from __future__ import annotations

from symmplan.choose.choice import Choice
from symmplan.integrate.fsdp.apply import Handle, apply
from symmplan.runtime.stats import Stats

__all__ = ["Choice", "Handle", "Stats", "apply"]
