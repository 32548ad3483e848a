"""Which modules have bytes for their unsharded parameters, according to FSDP2's calls.

All ranks make the same calls and so come to the same answer. Therefore it may decide whether a
prefetch begins. The bytes that are really held on one rank may differ; see [Note: somebody is in
the bytes] in `zero_copy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from symmplan.integrate.fsdp.zero_copy import ZeroCopyUnshard

__all__ = ["Occupancy"]


class Occupancy:
    """The modules of a model that are unsharded in placements, or about to be."""

    def __init__(self) -> None:
        self._modules: dict[str, ZeroCopyUnshard] = {}

    def __iter__(self) -> Iterator[ZeroCopyUnshard]:
        return (module for module in self._modules.values() if module.has_bytes)

    def begin(self, module: ZeroCopyUnshard) -> None:
        """A module's gather begins."""
        self._modules[module.site] = module

    def end(self, site: str) -> bool:
        """FSDP2 has released a module; whether it had bytes."""
        return self._modules.pop(site, None) is not None

    def crowded(self, module: ZeroCopyUnshard) -> bool:
        """Whether others are to have some of the bytes where a module's parameters live."""
        mine = module.storage
        assert mine is not None
        others = [other.storage for other in self if other is not module]
        return any(storage is not None and storage.overlaps(mine) for storage in others)
