"""A weight that FSDP2 gathers as bytes and a scale, through the extensions that float8 uses."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _pytree as pytree

_aten = torch.ops.aten
#: Ops that keep the weight a `_Quantized`; all others give its plain tensor.
_KEEP = {
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.copy_.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.split.Tensor,
    _aten.clone.default,
    _aten.detach.default,
}


class _Quantized(torch.Tensor):
    """A float32 shard that is gathered as one byte per element, and one scale per rank."""

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    def __init__(self, tensor):
        self._plain = tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda t: t._plain, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func not in _KEEP:
            return result
        return pytree.tree_map_only(torch.Tensor, cls, result)

    def __tensor_flatten__(self):
        return ["_plain"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return _Quantized(inner["_plain"])

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        scale = self._plain.abs().max().clamp(min=1e-6) / 127
        quantized = (self._plain / scale).round().to(torch.int8)
        return (quantized, scale.reshape(1)), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        quantized, scales = outputs
        parts = quantized.chunk(scales.numel())
        whole = torch.cat([p.float() * s for p, s in zip(parts, scales, strict=True)])
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
            return None
        return whole, (quantized, scales)


def quantized(linear: nn.Linear) -> None:
    """Make the weight of ``linear`` one that is gathered in bytes."""
    linear.weight = nn.Parameter(_Quantized(linear.weight.detach()))
