"""Checks for authors of ops and of planners: declarations, strategies, oracles, a conformance kit.

Drawing random problems needs Hypothesis, which the extra ``test`` installs. Everything else does
without.

>>> from symmplan.planner import plan
>>> from symmplan.testing import check_packer
>>> check_packer(lambda p: {n: x.offset for n, x in plan(p).placements.items()}, examples=5)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symmplan.testing.conformance import Packer as Packer
    from symmplan.testing.conformance import check_offsets as check_offsets
    from symmplan.testing.conformance import check_packer as check_packer
    from symmplan.testing.conformance import interval_lists as interval_lists
    from symmplan.testing.conformance import interval_problems as interval_problems
    from symmplan.testing.conformance import problems as problems
    from symmplan.testing.declaration import Contradiction as Contradiction
    from symmplan.testing.declaration import DeclarationReport as DeclarationReport
    from symmplan.testing.declaration import Fact as Fact
    from symmplan.testing.declaration import check_declaration as check_declaration
    from symmplan.testing.oracles import conflicts as conflicts
    from symmplan.testing.oracles import happens_before as happens_before
    from symmplan.testing.oracles import heaviest_set as heaviest_set
    from symmplan.testing.oracles import linear_extensions as linear_extensions
    from symmplan.testing.oracles import lowest_peak as lowest_peak

_MODULES = {
    "conformance": (
        *("Packer", "check_offsets", "check_packer"),
        *("interval_lists", "interval_problems", "problems"),
    ),
    "declaration": ("Contradiction", "DeclarationReport", "Fact", "check_declaration"),
    "oracles": (
        *("conflicts", "happens_before", "heaviest_set"),
        *("linear_extensions", "lowest_peak"),
    ),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_WHERE)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'symmplan.testing' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"symmplan.testing.{_WHERE[name]}")
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ModuleNotFoundError(
            f"symmplan.testing.{name} needs hypothesis: python -m pip install 'symmplan[test]'",
            name=error.name,
        ) from error
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
