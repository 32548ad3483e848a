"""Work that makes objects by the hundred thousand, none of them in cycles, without the collector.

Python looks for cycles among all objects of a process, those of torch too, whenever their number
has grown enough.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the collection of cycles; whoever paused it first turns it on again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
