"""Weights that say by themselves how FSDP2 gathers them, as float8's and NF4's do.

Each linear layer computes with what was gathered, so that wrong bytes are wrong numbers.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

aten = torch.ops.aten
_KEEP = {
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.copy_.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten.split.Tensor,
    aten.clone.default,
    aten.detach.default,
}


class _Weight(torch.Tensor):
    """A tensor around one of 32 bits, which all ops see; subclasses say how it is gathered."""

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
        return pytree.tree_map_only(torch.Tensor, cls, result) if func in _KEEP else result

    def __tensor_flatten__(self):
        return ["_plain"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["_plain"])


class Scaled(torch.Tensor):
    """What was gathered of a weight: bytes, a scale in each row, and one that nobody gathers."""

    @staticmethod
    def __new__(cls, data, scales, factor):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), dtype=factor.dtype, device=data.device
        )

    def __init__(self, data, scales, factor):
        self._data, self._scales, self._factor = data, scales, factor

    def whole(self):
        return (self._data.float() * self._scales).to(self._factor.dtype) * self._factor

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func in (aten.detach.default, aten.as_strided.default):
            self = args[0]  # as others do, whatever rows as_strided asks for
            rows = args[1][0] if func is aten.as_strided.default else self.shape[0]
            return cls(self._data.detach()[:rows], self._scales.detach()[:rows], self._factor)
        if func is aten.zeros_like.default:  # nothing of it is read, which may be freed
            return args[0]._factor.new_zeros(args[0].shape)
        args, kwargs = pytree.tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __tensor_flatten__(self):
        return ["_data", "_scales", "_factor"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Scaled(*inner.values())


class InBytes(_Weight):
    """Gathered as bytes and a scale in each row; the module computes with these where they lie."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        rows = -(-outer_size[0] // mesh.size())  # of a shard, padded
        plain = functional.pad(self._plain, (0, 0, 0, rows - self._plain.shape[0]))
        scales = plain.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
        factor = torch.tensor(1.0 + 2.0**-8 * (self._plain.numel() % 3))
        bytes_ = (plain / scales).round().to(torch.int8)
        return (bytes_, scales.expand(rows, plain.shape[1]).contiguous()), (factor,)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        data, scales = outputs
        factor = metadata[0].to(param_dtype)
        if out is None:
            return Scaled(data, scales, factor), (data, scales)
        assert out._data.untyped_storage()._cdata == data.untyped_storage()._cdata
        assert out._scales.untyped_storage()._cdata == scales.untyped_storage()._cdata
        out._factor = factor
        return None


class Hidden(InBytes):
    """The same; the gathered tensor does not show what it consists of."""

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        found = super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)
        return found if found is None else (_Opaque(*outputs, *metadata), found[1])


class _Opaque(Scaled):
    __tensor_flatten__ = property(doc="as if there were none")


class Packed(_Weight):
    """Gathered as half as many bytes and a row of scales of another type; unpacked behind."""

    def fsdp_pre_all_gather(self, mesh):
        scale = self._plain.abs().max().clamp(min=1e-6) / 7
        four = (self._plain / scale).round().to(torch.int8).view(-1, 2) + 8
        return (
            (four[:, 0] * 16 + four[:, 1]).to(torch.uint8).clone(),
            scale.to(torch.float64).expand(4).clone(),
        ), self._plain.shape[1]

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        packed, scales = outputs
        four = torch.stack([packed // 16, packed % 16], -1).to(torch.int8) - 8
        parts = four.view(scales.numel() // 4, -1)
        whole = (
            (parts.float() * scales.view(-1, 4)[:, :1].float()).view(-1, metadata).to(param_dtype)
        )
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


class Changing(InBytes):
    """What it makes of its shard has another type from the third gather on."""

    gathers = 0

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        type(self).gathers += 1
        given = mesh, outer_size, outer_stride, module, mp_policy
        (data, scales), metadata = super().fsdp_pre_all_gather(*given)
        return (data, scales.double() if self.gathers > 4 else scales), metadata


def weighted(linear: nn.Linear, kind: type[_Weight]) -> None:
    """Let the weight of ``linear`` be gathered in the way of ``kind``."""
    linear.weight = nn.Parameter(kind(linear.weight.detach()))
