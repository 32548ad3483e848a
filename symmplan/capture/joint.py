"""Several captured graphs that run one after the other, as one problem."""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmplan.model import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["join"]


def join(problems: Iterable[Problem]) -> Problem:
    """One problem of several that run in the given order on the same stream.

    Their operations must have different names (see the ``prefix`` of `capture_fx`), and so must
    their buffers, but for those that are equal: they cross from one to the other.

    Raises:
        ProblemError: A name appears in two of them and stands for different things.

    Collective: no.
    """
    parts = list(problems)
    return Problem(
        buffers=tuple(dict.fromkeys(b for p in parts for b in p.buffers)),
        operations=tuple(o for p in parts for o in p.operations),
        accesses=tuple(a for p in parts for a in p.accesses),
        edges=tuple(e for p in parts for e in p.edges),
        together=tuple(t for p in parts for t in p.together),
        apart=tuple(a for p in parts for a in p.apart),
        shared_groups=tuple(dict.fromkeys(g for p in parts for g in p.shared_groups)),
        unplanned=tuple(u for p in parts for u in p.unplanned),
    )
