"""What is expected of a call's arguments, said once and compared often.

See [Note: short ways] in `symmplan.integrate.eager.calls`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from symmplan import _compat as compat
from symmplan.capture.eager import signature

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmplan.integrate.eager.schedule import Event

__all__ = ["WORDS", "Expected", "expected_of", "fitting", "is_tensor", "is_tensors"]

#: Values that are compared as they are.
WORDS = (bool, int, str, torch.dtype, torch.device)


@define(eq=False)
class Expected:
    """What is expected of a call's arguments, by their places; an address of 0 is any."""

    count: int
    tensors: list[tuple[int, Any, Any, int]] = field(factory=list)
    lists: list[tuple[int, tuple[tuple[Any, Any, int], ...]]] = field(factory=list)
    words: list[tuple[int, Any]] = field(factory=list)
    others: list[tuple[int, Any]] = field(factory=list)

    def key(self) -> Any:
        """What is equal for calls that may share a short way."""
        words = tuple((i, w.__class__, w) for i, w in self.words)
        return self.count, tuple(self.tensors), tuple(self.lists), words, tuple(self.others)


def is_tensor(want: Any) -> bool:
    """Whether a signature is a tensor's."""
    return want.__class__ is tuple and len(want) == 2 and isinstance(want[1], torch.dtype)


def is_tensors(want: Any) -> bool:
    """Whether a signature is that of a list of tensors."""
    return want.__class__ is tuple and bool(want) and all(map(is_tensor, want))


def expected_of(event: Event) -> Expected:
    """What to expect of a call's arguments, none of them given by name."""
    args = event.call.args
    addresses = {(b.head, b.index): b.address for b in event.binds}
    found = Expected(len(args))
    for i, (name, want) in enumerate(zip(event.names, args, strict=False)):
        if is_tensor(want):
            found.tensors.append((i, *want, addresses.get((name, ()), 0)))
        elif is_tensors(want):
            items = ((*x, addresses.get((name, (j,)), 0)) for j, x in enumerate(want))
            found.lists.append((i, tuple(items)))
        elif isinstance(want, WORDS):
            found.words.append((i, want))
        elif want is not float:
            found.others.append((i, want))
    return found


def fitting(expected: Expected, claims: tuple[tuple[int, int], ...]) -> Callable[[Any], bool]:
    """Compares arguments, and sees that the bytes to be written are nobody's."""
    simple = _fitting_simple(expected, claims)
    if simple is not None:
        return simple
    count, tensors, lists = expected.count, tuple(expected.tensors), tuple(expected.lists)
    words, others, uses = tuple(expected.words), tuple(expected.others), compat.storage_use_count

    def fits(args: Any) -> bool:
        if len(args) != count:
            return False
        try:
            for i, shape, dtype, address in tensors:
                tensor = args[i]
                if tensor.shape != shape or tensor.dtype is not dtype:
                    return False
                if address and tensor.data_ptr() != address:
                    return False
            for i, wants in lists:
                if len(args[i]) != len(wants):
                    return False
                for tensor, (shape, dtype, address) in zip(args[i], wants, strict=True):
                    if tensor.shape != shape or tensor.dtype is not dtype:
                        return False
                    if address and tensor.data_ptr() != address:
                        return False
        except (AttributeError, TypeError):  # no tensor, no list
            return False
        for i, word in words:
            if args[i].__class__ is not word.__class__ or args[i] != word:
                return False
        for i, want in others:
            if signature(args[i]) != want:
                return False
        for storage, own in claims:  # noqa: SIM110 (a generator costs as much as all this)
            if uses(storage) > own:
                return False
        return True

    return fits


def _fitting_simple(
    expected: Expected, claims: tuple[tuple[int, int], ...]
) -> Callable[[Any], bool] | None:
    """`fitting` where a tensor is followed by plain values, as in functional collectives."""
    rest = tuple(word for _, word in expected.words)
    if [i for i, _ in expected.words] != list(range(1, expected.count)):
        return None
    if len(expected.tensors) != 1 or not all(isinstance(x, (int, str)) for x in rest):
        return None
    _, shape, dtype, address = expected.tensors[0]
    uses = compat.storage_use_count

    def fits(args: Any) -> bool:
        tensor = args[0]
        if args[1:] != rest or tensor.shape != shape or tensor.dtype is not dtype:
            return False
        if address and tensor.data_ptr() != address:
            return False
        for storage, own in claims:  # noqa: SIM110 (a generator costs as much as all this)
            if uses(storage) > own:
                return False
        return True

    return fits
