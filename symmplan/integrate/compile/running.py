"""How the compiled parts of a graph run: with the segments, the books kept of what crosses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan.memory.lend import lend
from symmplan.memory.own import own_work
from symmplan.place.watching import Watching

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from symmplan.integrate.compile.emit import SegmentInput
    from symmplan.integrate.compile.records import Rewritten
    from symmplan.integrate.compile.unit import Unit

__all__ = ["bytes_of", "noted", "with_segments"]


def bytes_of(segment: torch.Tensor, wanted: SegmentInput) -> torch.Tensor:
    """What a rewritten graph takes of a segment."""
    begin = wanted.lane or 0
    part = segment[begin : begin + wanted.numel * wanted.dtype.itemsize]
    if wanted.lane is not None:
        part = lend(part, _nothing)
    return part.view(wanted.dtype)


def _nothing() -> None:
    """The segment outlives the program that runs in it."""


def noted(
    compiled: Callable[[list[Any]], Any], unit: Unit, part: str
) -> Callable[[list[Any]], Any]:
    """A part that follows no plan, but may be the backward of one that does."""
    if part != "backward" or unit.zone is None:
        return compiled

    def run(args: list[Any]) -> Any:
        unit.passed(part)
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def with_segments(
    compiled: Callable[[list[Any]], Any], unit: Unit, rewritten: Rewritten
) -> Callable[[list[Any]], Any]:
    """Pass the segments after the graph's own inputs, and see that all is where it has to be."""
    residents, part = unit.residents, rewritten.part
    timeout = unit.settings.timeout

    def watch(args: list[Any]) -> Any:
        with Watching(timeout):
            return run(args)

    def run(args: list[Any]) -> Any:
        unit.enter(rewritten, args)
        try:
            copies = residents.enter(part, args)
            with own_work:
                results = compiled(args)
            if copies:
                results = residents.leave(copies, results)
            return unit.hand_over(rewritten, results)
        finally:
            unit.leave(rewritten)

    chosen = watch if unit.watches else run
    chosen._boxed_call = True  # type: ignore[attr-defined]
    return chosen
