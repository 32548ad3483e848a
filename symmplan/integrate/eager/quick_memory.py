"""The short way through `symmplan.empty` and `symmplan.out`.

See [Note: short ways] in `symmplan.integrate.eager.quick`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from symmplan import _compat as compat
from symmplan.capture.eager import signature
from symmplan.integrate.eager.direct import MISS
from symmplan.integrate.eager.quick import Quick
from symmplan.memory.own import OWN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.integrate.eager.schedule import Event

__all__ = ["quick_memory"]


def quick_memory(
    event: Event, run: Callable[[Sequence[Callable[[], None]]], None]
) -> tuple[Any, Quick | None]:
    """The same for `symmplan.empty` and `symmplan.out`: of the function, its arguments.

    ``run`` runs what is to be done besides, such as barriers.
    """
    lent = next(iter(event.lent.values()), None)
    writes, acts = event.call.kind == "out", (*event.ready, *event.after)
    claims, uses = event.marks(), compat.storage_use_count
    first = tuple(event.before)
    function, *recorded = event.call.args
    wanted, named = tuple(recorded), event.call.kwargs
    if any(isinstance(value, (tuple, dict)) for value in named.values()):  # there may be tensors
        return None, None
    place = None if lent is None else lent.tensor
    tensors = [(i, *w) for i, w in enumerate(wanted) if _is_tensor(w)]
    floats = [i for i, w in enumerate(wanted) if w is float]
    others = [(i, w) for i, w in enumerate(wanted) if not _is_tensor(w) and w is not float]

    def call(make: Any, args: Any, kwargs: Any) -> Any:
        if make is not function or len(args) != len(wanted) or kwargs != named:
            return MISS
        for i, shape, dtype in tensors:
            have = args[i]
            if not isinstance(have, torch.Tensor):
                return MISS
            if have.shape != shape or have.dtype is not dtype:
                return MISS
        for i in floats:
            if args[i].__class__ is not float:
                return MISS
        for i, want in others:
            value = signature(args[i]) if isinstance(args[i], (list, tuple)) else args[i]
            if value.__class__ is not want.__class__ or value != want:
                return MISS
        for storage, own in claims:
            if uses(storage) > own:
                return MISS
        if first:
            run(first)
        if place is None:
            result: torch.Tensor = make(*args, **kwargs)
        else:
            if writes:
                OWN.depth += 1
                try:
                    make(*args, **kwargs, out=place)
                finally:
                    OWN.depth -= 1
            result = place.detach()
        if acts:
            run(acts)
        return result

    parts = (event.call.kind, event.stream, id(function), repr(wanted), repr(named), claims)
    key = (*parts, tuple(map(id, (*first, *acts))))
    return (*key, id(place)), Quick(event.call.kind, event.stream, call)


def _is_tensor(wanted: Any) -> bool:
    """Whether a signature is a tensor's."""
    return wanted.__class__ is tuple and len(wanted) == 2 and isinstance(wanted[1], torch.dtype)
