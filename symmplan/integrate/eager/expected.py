"""What is expected of a call's arguments, said once and compared often.

See [Note: short ways] in `symmplan.integrate.eager.quick`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from symmplan import _compat as compat
from symmplan.integrate.eager.schedule import bound_values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.capture.c10d import Functional
    from symmplan.integrate.eager.schedule import Event, Stage

__all__ = ["Arguments", "arguments_of", "fitting"]


@define(eq=False)
class Arguments:
    """What is expected of a call's arguments, by their places; an address of 0 is any."""

    count: int
    tensors: list[tuple[int, Any, Any, int]] = field(factory=list)
    lists: list[tuple[int, tuple[tuple[Any, Any, int], ...]]] = field(factory=list)
    groups: list[tuple[int, Any]] = field(factory=list)
    values: list[tuple[int, Any]] = field(factory=list)
    stages: list[tuple[int, Stage]] = field(factory=list)

    def key(self) -> Any:
        """What is equal for calls that may share a short way."""
        return (
            self.count,
            tuple(self.tensors),
            tuple(self.lists),
            tuple((i, id(group)) for i, group in self.groups),
            tuple((i, v.__class__, tuple(v) if isinstance(v, list) else v) for i, v in self.values),
            tuple((i, id(s.view), s.copy_in, tuple(map(id, s.ready))) for i, s in self.stages),
        )


def arguments_of(event: Event, args: Sequence[Any], form: Functional | None) -> Arguments | None:
    """What to expect of calls like this one; None if that cannot be said in short."""
    values = bound_values(event, *((args, {}) if form is None else (form.args, form.kwargs)))
    addresses: dict[int, int] = {}
    for bound in event.binds:
        addresses[id(_at(values[bound.head], bound.index))] = bound.address
    stages = {id(_at(values[s.head], s.index)): s for s in event.stages}
    found = Arguments(len(args))
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            found.tensors.append((i, value.shape, value.dtype, addresses.pop(id(value), 0)))
            stage = stages.pop(id(value), None)
            if stage is not None:
                found.stages.append((i, stage))
        elif isinstance(value, list) and value and all(isinstance(x, torch.Tensor) for x in value):
            wants = tuple((x.shape, x.dtype, addresses.pop(id(x), 0)) for x in value)
            found.lists.append((i, wants))
            for x in value if form is not None else ():  # its front copies
                stages.pop(id(x), None)
        elif isinstance(value, torch.ScriptObject):
            group = compat.unboxed_if_group(value)
            if group is not None:
                found.groups.append((i, group))
        elif value is None or isinstance(value, (bool, int, str, torch.dtype, torch.device)):
            found.values.append((i, value))
        elif isinstance(value, list) and all(isinstance(x, (bool, int)) for x in value):
            found.values.append((i, list(value)))
        elif not isinstance(value, float):
            return None
    return None if addresses or stages else found


def fitting(expected: Arguments, claims: tuple[tuple[int, int], ...]) -> Callable[[Any], bool]:
    """Compares arguments, and sees that the bytes to be written are nobody's."""
    simple = _fitting_simple(expected, claims)
    if simple is not None:
        return simple
    count, tensors, lists = expected.count, tuple(expected.tensors), tuple(expected.lists)
    groups, values = tuple(expected.groups), tuple(expected.values)
    unboxed, uses = compat.unboxed_group, compat.storage_use_count

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
            for i, group in groups:
                if unboxed(args[i]) is not group:
                    return False
        except (AttributeError, TypeError):  # no tensor, no list
            return False
        for i, value in values:
            if args[i].__class__ is not value.__class__ or args[i] != value:
                return False
        for storage, own in claims:  # noqa: SIM110 (a generator costs as much as all this)
            if uses(storage) > own:
                return False
        return True

    return fits


def _fitting_simple(
    expected: Arguments, claims: tuple[tuple[int, int], ...]
) -> Callable[[Any], bool] | None:
    """`fitting` where a tensor is followed by plain values, as in functional collectives."""
    rest = tuple(value for _, value in expected.values)
    if [i for i, _ in expected.values] != list(range(1, expected.count)):
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


def _at(value: Any, index: tuple[int, ...]) -> Any:
    for i in index:
        value = value[i]
    return value
