"""Products beside their collective, whole or in parts: how both are timed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen

from symmplan.choose.cases import Case, aligned, cut
from symmplan.memory import BACKENDS
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from symmplan.choose.clock import Act

_C10D: Any = torch.ops._c10d_functional
_wait = _C10D.wait_tensor
#: Parts of fewer rows say nothing of larger ones.
_LEAST_ROWS = 64
#: Nor do products that are narrower.
_LEAST_COLUMNS = 512


def numels_of(rows: int, columns: int, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Elements of a part of the left side, and of the right sides."""
    return rows * columns, *(columns * width for width in widths)


@frozen(kw_only=True)
class PipelineCase(Case):
    """An all-gather and the products of its result, or products and their reduce-scatter.

    ``numels`` are the elements of a part of the left side, and of the right sides. What it is
    timed on is smaller where that is too large: fewer rows, and fewer columns of that side that
    does not decide how long products take for each byte that is sent. All products write into one
    result, and take their right sides from the same bytes.

    Attributes:
        rows: Rows of a part.
        columns: Columns of the left side.
        widths: Columns of each product.
        gathers: Whether it is the former.
    """

    rows: int
    columns: int
    widths: tuple[int, ...]
    gathers: bool

    def is_alike(self, other: PipelineCase) -> bool:
        """Whether another one has the same collective, with products of any inner size.

        One rank alone may have other products, of a smaller batch, and the same collectives.
        """
        inner: dict[str, Any] = {"columns": 0} if not self.gathers else {"widths": ()}
        return evolve(self, numels=(), **inner) == evolve(other, numels=(), **inner)

    def part(self, largest: int) -> Self:
        """A smaller one that takes at most so many bytes each way, if one row and column do.

        It keeps rows and columns that say something of larger products as long as that is possible.
        """
        found = self
        for rows, columns in ((_LEAST_ROWS, _LEAST_COLUMNS), (1, 1)):
            while max(found.sizes()) > largest:
                right = found.columns * max(found.widths) * found.itemsize
                fewer, narrower = found.rows * 3 // 4 >= rows, found._narrowest // 2 >= columns
                if narrower and (right > largest // 2 or not fewer):
                    found = found._narrowed
                elif fewer:
                    found = found._with(found.rows * 3 // 4, found.columns, found.widths)
                else:
                    break
        return found

    @property
    def _narrowest(self) -> int:
        """How many columns there are of what is sent."""
        return self.columns if self.gathers else min(self.widths)

    @property
    def _narrowed(self) -> Self:
        """This case with half as many columns of what is sent."""
        if self.gathers:
            return self._with(self.rows, self.columns // 2, self.widths)
        return self._with(self.rows, self.columns, tuple(n // 2 for n in self.widths))

    def _with(self, rows: int, columns: int, widths: tuple[int, ...]) -> Self:
        numels = numels_of(rows, columns, widths)
        return evolve(self, rows=rows, columns=columns, widths=widths, numels=numels)

    def times(self, part: Case) -> float:
        """How many times more a rank computes than of a part of it."""
        assert isinstance(part, PipelineCase)
        return self._products / part._products

    @property
    def _products(self) -> float:
        """How many products of numbers a part of it is."""
        return self.rows * self.columns * sum(self.widths)

    def sizes(self) -> tuple[int, int]:
        """Bytes of what is given and of what is made; both are symmetric as well."""
        given, made = self._numels()
        return aligned(given, self.itemsize), aligned(made, self.itemsize)

    def _numels(self) -> tuple[list[int], list[int]]:
        left, width = self.rows * self.columns, max(self.widths)
        right, out = self.columns * width, self.rows * width * self.ranks
        if self.gathers:
            return [left, right], [left * self.ranks, out]
        return [left * self.ranks, right], [out, out]

    def acts(
        self,
        plain: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
        engines: Any | None,
    ) -> Mapping[str, Act]:
        """What runs it whole, as torch would, and in parts."""
        numels, dtype = self._numels(), getattr(torch, self.dtype)
        given, made = (cut(flat, n, dtype) for flat, n in zip(plain, numels, strict=True))
        there = [cut(flat, n, dtype) for flat, n in zip(places, numels, strict=False)]
        for tensor in given:
            tensor.fill_(1)
        left, right = given[0].view(-1, self.columns), given[1]
        rights = [right[: self.columns * n].view(self.columns, n) for n in self.widths]
        every = self.rows * self.ranks
        outs = [made[-1][: every * n].view(every, n) for n in self.widths]
        acts = self._gather_acts if self.gathers else self._scatter_acts
        return acts(left, rights, outs, there, engines)

    def _gather_acts(
        self,
        left: torch.Tensor,
        rights: list[torch.Tensor],
        outs: list[torch.Tensor],
        there: list[list[torch.Tensor]],
        engines: Any | None,
    ) -> Mapping[str, Act]:
        parts = [torch.chunk(out, self.ranks) for out in outs]

        def ordinary(beside: Callable[[], None]) -> None:
            whole = _wait(_C10D.all_gather_into_tensor(left, self.ranks, self.group))
            for right, out in zip(rights, outs, strict=True):
                torch.mm(whole, right, out=out)
            beside()

        def multiply(part: int, rows: torch.Tensor) -> None:
            for right, out in zip(rights, parts, strict=True):
                torch.mm(rows, right, out=out[part])

        def start() -> torch.Tensor:
            if engines is None or not there:
                return _C10D.all_gather_into_tensor(left, self.ranks, self.group)  # type: ignore[no-any-return]
            (own, *_), (whole, *_) = there
            own.view_as(left).copy_(left)
            over = c10d.group_name(engines)
            _C10D.all_gather_into_tensor_out(own.view_as(left), self.ranks, over, out=whole)
            return whole.view(-1, self.columns)

        def pipelined(beside: Callable[[], None]) -> None:
            whole = start()
            multiply(0, left)
            rows = torch.chunk(_wait(whole).view(-1, self.columns), self.ranks)
            for part in range(1, self.ranks):
                multiply(part, rows[part])
            beside()

        return {"ordinary": ordinary, "pipelined": pipelined}

    def _scatter_acts(
        self,
        left: torch.Tensor,
        rights: list[torch.Tensor],
        outs: list[torch.Tensor],
        there: list[list[torch.Tensor]],
        engines: Any | None,
    ) -> Mapping[str, Act]:
        width = self.widths[-1]
        # What is sent lies where the products' results do, and what comes behind it.
        made = there[-1] if there else []
        slots = [torch.chunk(tensor.view(-1, width), self.ranks) for tensor in made]
        lefts = torch.chunk(left, self.ranks)
        own = [torch.chunk(out, self.ranks) for out in outs]
        pushes = bool(slots) and (engines is not None or not BACKENDS[self.memory].engines)

        def ordinary(beside: Callable[[], None]) -> None:
            for right, out in zip(rights, outs, strict=True):
                torch.mm(left, right, out=out)
            _wait(_C10D.reduce_scatter_tensor(outs[-1], "sum", self.ranks, self.group))
            beside()

        def multiply(part: int, into: torch.Tensor) -> None:
            for right, out in zip(rights, own, strict=True):
                last = right is rights[-1]
                torch.mm(lefts[part], right, out=into if last else out[part])

        def shift(distance: int) -> torch.Tensor:
            part = slots[0][distance] if pushes else own[-1][distance]
            multiply(distance, part)
            ops: Any = torch.ops.symmplan
            if not pushes:
                return ops.shift(part, distance, self.ranks, self.group)  # type: ignore[no-any-return]
            out = slots[1][distance]
            if engines is None:
                ops.shift_out(part, distance, self.ranks, self.group, out=out)
            else:  # memory for a measurement has no views of peers: as many bytes, by copy engines
                over = c10d.group_name(engines)
                ops.all_to_all_single_into(part, [], [], over, out=out)
            return out

        def pipelined(beside: Callable[[], None]) -> None:
            sent = [shift(distance) for distance in range(1, self.ranks)]
            total = own[-1][0]
            multiply(0, total)
            for part in sent:
                total.add_(_wait(part))
            beside()

        return {"ordinary": ordinary, "pipelined": pipelined}
