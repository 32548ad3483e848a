"""The kinds of collectives that a program has, and how each is run while it is timed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, field, frozen

from symmplan.choose.choice import Choice
from symmplan.registry.catalogue import collective_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from symmplan.choose.clock import Act
    from symmplan.model import AlgorithmName

#: Parts of tensors begin at a multiple of so many bytes.
_ALIGN = 256


@frozen(kw_only=True)
class Case:
    """A kind of collective that is measured once: its collectives take about the same time.

    Each integration defines `sizes` and `acts` for its own collectives.

    Attributes:
        op: As in `Choice`.
        memory: Name of the memory backend.
        group: Name of the process group.
        ranks: How many ranks the group has.
        dtype: Element type.
        numels: Elements of each of its tensors that decide how large it is, as in `Choice`.
        algorithms: The algorithms that it has besides torch's own.
        copied_in: Whether its inputs must be copied into placements.
        copied_out: Whether its results must be copied out of them.
        alone: Whether nothing computes at the same time.
        beside: Floating-point operations of the matrix products beside it; None if not known.
        engine: Whether copy engines can run its own op.
        barriers: Whether the program's plan may have barriers for it; see `MEETING`. Only of a
            `lone_all_reduce` on devices is it known that there are none.
    """

    op: str
    memory: str
    group: str
    ranks: int
    dtype: str
    numels: tuple[int, ...]
    algorithms: tuple[AlgorithmName, ...] = field(default=(), eq=False)
    copied_in: bool = False
    copied_out: bool = False
    alone: bool = True
    beside: int | None = field(default=0, eq=False)
    engine: bool = field(default=False, eq=False)
    barriers: bool = field(default=True, eq=False)

    @property
    def key(self) -> list[Any]:
        """The facts that must be equal on all ranks; names of groups may differ."""
        return [
            *(self.op, self.memory, self.dtype, list(self.numels)),
            *(self.copied_in, self.copied_out, self.alone),
        ]

    @property
    def lone_all_reduce(self) -> bool:
        """Whether it is an all-reduce during which nothing computes."""
        return self.alone and collective_of(self.op) == "all-reduce"

    @property
    def signal_pad(self) -> bool:
        """Whether some algorithm of it uses the signal pad of its tensors."""
        return False

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        """How large it is, in bytes."""
        return sum(self.numels) * self.itemsize

    @property
    def unmeasured(self) -> Choice:
        """The choice before it is measured."""
        return Choice(
            op=self.op,
            nbytes=self.nbytes,
            dtype=self.dtype,
            group=self.group,
            ranks=self.ranks,
            seconds={},
            algorithm="ordinary",
            copied_in=self.copied_in,
            copied_out=self.copied_out,
            beside=self.beside or 0,
        )

    def part(self, largest: int) -> Self:
        """This case with tensors cut to ``largest`` bytes of inputs or results at most."""
        factor = largest / max(*self.sizes(), 1)
        if factor >= 1:
            return self
        unit = self.ranks * _ALIGN
        parts = [min(n, max(unit, int(n * factor) // unit * unit)) for n in self.numels]
        return evolve(self, numels=tuple(parts))

    def times(self, part: Case) -> float:
        """How many times larger the case is than a part of it."""
        return max(1.0, sum(self.numels) / max(sum(part.numels), 1))

    def sizes(self) -> tuple[int, int]:
        """Bytes of its inputs and of its results, as `acts` wants them."""
        raise NotImplementedError

    def acts(
        self,
        plain: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
        engines: Any | None,
    ) -> Mapping[str, Act]:
        """Functions that run it, by algorithm, torch's own first. Making them waits for no peer.

        Args:
            plain: Ordinary bytes, for inputs and for results.
            places: Symmetric ones; none if it only ever runs in torch's own way.
            engines: The group's communicator for copy engines, if there is any.
        """
        raise NotImplementedError


def aligned(numels: Sequence[int], itemsize: int) -> int:
    """Bytes of tensors that lie one after the other."""
    return sum(math.ceil(n * itemsize / _ALIGN) * _ALIGN for n in numels)


def cut(flat: torch.Tensor, numels: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Views of such tensors in some bytes."""
    pieces, begin = [], 0
    for numel in numels:
        pieces.append(flat[begin : begin + numel * dtype.itemsize].view(dtype))
        begin += aligned([numel], dtype.itemsize)
    return pieces
