"""Declarations that installed packages publish.

A package that has ops of its own, or knows what somebody else's need, names a module or a function
in its entry points::

    [project.entry-points."symmplan.ops"]
    mylib = "mylib.declarations"        # or "mylib.declarations:declare"

The module is imported, or the function called without arguments, before the first look-up.
"""

from __future__ import annotations

import importlib.metadata
import warnings

GROUP = "symmplan.ops"


def load() -> None:
    """Load what is published.

    A package that fails is named in a warning and passed over: it may be somebody's broken install,
    and its ops are then simply not declared.
    """
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=_order):
        _load_one(point)


def _order(point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    return point.name, point.value


def _load_one(point: importlib.metadata.EntryPoint) -> None:
    try:
        target = point.load()
        if point.attr:
            target()
    except Exception as error:  # noqa: BLE001  (whatever a stranger's module raises)
        warnings.warn(
            f"symmplan: the declarations that {point.name!r} publishes ({point.value}) are left "
            f"out: {type(error).__name__}: {error}",
            stacklevel=2,
        )
