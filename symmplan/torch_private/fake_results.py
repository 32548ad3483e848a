"""Results of ops on fake tensors, remembered.

[Note: remembered results]
    torch caches the results of ops on fake tensors. A look-up takes 0.3 ms, and a simulated step
    has a hundred thousand of them. This module caches the results that torch found in its cache, by
    a key with the same contents, and makes them again in a tenth of the time. Results that torch
    does not cache, because they depend on more than sizes, are left to torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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


@frozen(eq=False)
class _Result:
    """A tensor that an op gives: an argument, a view of one, or a new one."""

    argument: int | None
    shape: torch.Size | None = None  # None for the argument itself
    stride: tuple[int, ...] = ()
    offset: int = 0  # in elements
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    attributes: Mapping[str, Any] = field(factory=dict)

    def make(self, args: Sequence[Any]) -> Any:
        """It, for a call with these arguments."""
        if self.shape is None:
            return None if self.argument is None else args[self.argument]
        bare = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if self.argument is not None:
            storage = args[self.argument].untyped_storage()
            bare.set_(storage, self.offset, self.shape, self.stride)
        make: Any = torch.Tensor._make_subclass
        made = make(
            FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self.attributes)
        return made


@define(eq=False)
class Results:
    """What ops on tensors of ``mode`` gave; see [Note: remembered results]."""

    mode: FakeTensorMode
    _known: dict[tuple[Any, ...], _Result | tuple[_Result, ...]] = field(factory=dict)

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
        known = self._known.get(tuple(key))
        if known is not None:
            guard = torch._C._DisableTorchDispatch()
            try:
                if isinstance(known, tuple):
                    return tuple(one.make(args) for one in known)
                return known.make(args)
            finally:
                del guard
        hits = FakeTensorMode.cache_hits
        result = func(*args, **kwargs)
        if FakeTensorMode.cache_hits == hits + 1:
            found = _remembered(result, args)
            if found is not None:
                self._known[tuple(key)] = found
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


def _remembered(result: Any, args: Sequence[Any]) -> _Result | tuple[_Result, ...] | None:
    """How to make ``result`` again; None if that is not known."""
    if type(result) is tuple:
        many = [_remembered(one, args) for one in result]
        known = tuple(one for one in many if isinstance(one, _Result))
        return known if len(known) == len(many) else None
    if result is None:
        return _Result(None)
    for index, value in enumerate(args):
        if value is result:
            return _Result(index)
    if type(result) is not FakeTensor or result.requires_grad:
        return None
    if result.is_conj() or result.is_neg() or result.layout is not torch.strided:
        return None
    storage = result.untyped_storage()._cdata
    whole = (
        index
        for index, value in enumerate(args)
        if type(value) is FakeTensor and value.untyped_storage()._cdata == storage
    )
    return _Result(
        next(whole, None),
        result.shape,
        result.stride(),
        int(result.storage_offset()),
        result.dtype,
        result.fake_device,
        dict(vars(result)),
    )
