"""Results of ops on fake tensors, remembered.

[Note: remembered results]
    torch caches the results of ops on fake tensors. A look-up takes 0.3 ms, and a simulated step
    has a hundred thousand of them. This module caches the results that torch found in its cache, by
    a key with the same contents, and makes them again in a tenth of the time. Results that torch
    does not cache, because they depend on more than sizes, are left to torch.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from attrs import define, field
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["DEVICE", "Results"]

#: Asks for a tensor's device, and makes none.
DEVICE = torch.ops.prim.device.default
_MODES = torch._C._TorchDispatchModeKey
#: Values that say all by themselves, with their type, which tells 1 from 1.0 and True.
_PLAIN = frozenset(
    (
        type(None),
        bool,
        int,
        float,
        str,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    )
)


#: Gives the result of a call again, from its arguments.
_Make: TypeAlias = "Callable[[Sequence[Any]], Any]"


@define(eq=False)
class Results:
    """What ops on tensors of ``mode`` gave; see [Note: remembered results]."""

    mode: FakeTensorMode
    _known: dict[tuple[Any, ...], _Make] = field(factory=dict)

    def of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op."""
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        active = torch._C._get_dispatch_mode
        if (
            active(_MODES.FAKE) is not self.mode
            or active(_MODES.PROXY) is not None
            or active(_MODES.FUNCTIONAL) is not None
        ):
            return func(*args, **kwargs)
        key = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), *kwargs]
        if not (self._describe(key, args) and self._describe(key, kwargs.values())):
            return func(*args, **kwargs)
        make = self._known.get(tuple(key))
        if make is not None:
            guard = torch._C._DisableTorchDispatch()
            try:
                return make(args)
            finally:
                del guard
        hits = FakeTensorMode.cache_hits
        result = func(*args, **kwargs)
        if FakeTensorMode.cache_hits == hits + 1:
            make = _remembered(result, args)
            if make is not None:
                self._known[tuple(key)] = make
        return result

    def _describe(self, key: list[Any], values: Iterable[Any]) -> bool:
        """Add to ``key`` what results depend on, if a key can say that."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self.mode or value.constant is not None:
                    return False
                key += (
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.dtype,
                    value.fake_device,
                    value.requires_grad,
                    value.untyped_storage().nbytes(),
                    torch._C._dispatch_keys(value).raw_repr(),
                )
            elif kind in _PLAIN:
                key += (kind, value)
            elif kind is list or kind is tuple or kind is torch.Size:
                key += (kind, len(value))
                if not self._describe(key, value):
                    return False
            else:
                return False
        return True


def _remembered(result: Any, args: Sequence[Any]) -> _Make | None:
    """What makes ``result`` again; None if that is not known."""
    if type(result) is tuple:
        many = [_remembered(one, args) for one in result]
        known = [make for make in many if make is not None]
        if len(known) < len(many):
            return None
        return lambda args: tuple(make(args) for make in known)
    if result is None:
        return lambda _: None
    for index, value in enumerate(args):
        if value is result:
            return itemgetter(index)
    if type(result) is not FakeTensor or result.requires_grad:
        return None
    if result.is_conj() or result.is_neg() or result.layout is not torch.strided:
        return None
    return _maker(result, args)


def _maker(result: FakeTensor, args: Sequence[Any]) -> _Make:
    """What makes a view of an argument, or a new tensor; it does not hold ``result``."""
    cdata = result.untyped_storage()._cdata
    whole = (
        index
        for index, value in enumerate(args)
        if type(value) is FakeTensor and value.untyped_storage()._cdata == cdata
    )
    argument, attributes = next(whole, None), dict(vars(result))
    shape, stride, offset = result.shape, result.stride(), int(result.storage_offset())
    dtype, device = result.dtype, result.fake_device
    subclass: Any = torch.Tensor._make_subclass

    def make(args: Sequence[Any]) -> Any:
        bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if argument is not None:
            bare.set_(args[argument].untyped_storage(), offset, shape, stride)
        made = subclass(
            FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(attributes)
        return made

    return make
