"""Every seam between symmplan and torch, one row each: see `SEAMS`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmplan.torch_private.seams import Seam
from symmplan.torch_private.table import compilers, fsdp2, groups, ops, simulated

if TYPE_CHECKING:
    from symmplan.torch_private.seams import Serves

__all__ = ["SEAMS", "require"]

#: All of them, as `symmplan doctor` lists them.
SEAMS: tuple[Seam, ...] = tuple(
    row
    for part in (ops, compilers, groups, fsdp2, simulated)
    for row in vars(part).values()
    if isinstance(row, Seam)
)


def require(serves: Serves) -> None:
    """Do nothing if this torch has all names on which correctness depends.

    See [Note: seams] in `symmplan.torch_private.seams`.

    Args:
        serves: What starts.

    Raises:
        MissingSeamError: Names the first seam that is not there.
    """
    for seam in SEAMS:
        if seam.carries == "correctness" and serves in seam.serves:
            seam.require()
