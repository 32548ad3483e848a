"""Work that makes objects by the hundred thousand, and Python's collector of cycles.

Python looks for cycles among all objects of a process, those of torch too, whenever their number
has grown enough. Work that makes no cycles goes on without that. What other work leaves in cycles
is looked for among what it has made.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["collected_apart", "uncollected"]


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


@contextmanager
def collected_apart() -> Iterator[None]:
    """Look for cycles among new objects only, the last time when the work is over.

    Where the program has frozen objects itself, these are all that is passed by.
    """
    frozen = gc.get_freeze_count() > 0
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not frozen:
            gc.unfreeze()
