"""Compare two runs of the same program, number by number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["Difference", "relative"]


@define
class Difference:
    """The largest differences seen so far, relative to the largest value of a tensor.

    Attributes:
        loss: Of any loss.
        tensor: Of any gradient or parameter.
        worst: Name of that gradient or parameter.
        bitwise: Whether everything compared was equal, bit for bit.
        compared: How many numbers were compared.
    """

    loss: float = 0.0
    tensor: float = 0.0
    worst: str = ""
    bitwise: bool = True
    compared: int = 0

    def losses(self, left: float, right: float) -> None:
        """Take in the losses of one step."""
        self.compared += 1
        self.bitwise = self.bitwise and left == right
        difference = abs(left - right) / max(abs(left), 1e-30)
        # NaN compares as false with everything, and would be forgotten by max().
        self.loss = max(self.loss, difference if math.isfinite(difference) else math.inf)

    def tensors(self, left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
        """Take in tensors by name."""
        if left.keys() != right.keys():
            self.tensor, self.bitwise = math.inf, False
            self.worst = ", ".join(sorted(left.keys() ^ right.keys()))
            return
        for name, one in left.items():
            self.compared += one.numel()
            difference = relative(one, right[name])
            self.bitwise = self.bitwise and one.equal(right[name])
            if difference > self.tensor:
                self.tensor, self.worst = difference, name

    def within(self, *, sums: float) -> bool:
        """Whether something was compared and nothing differed by more than ``sums``."""
        return self.compared > 0 and self.loss <= sums and self.tensor <= sums


def relative(left: Tensor, right: Tensor) -> float:
    """The largest difference of two tensors, over the largest value of ``left``.

    Infinite if the shapes differ or a number is not finite.
    """
    if left.shape != right.shape:
        return math.inf
    if not left.numel():
        return 0.0
    one, two = left.double(), right.double()
    difference = (one - two).abs().max().item() / max(one.abs().max().item(), 1e-30)
    return difference if math.isfinite(difference) else math.inf
