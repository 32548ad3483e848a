"""The addresses of storages, for all tensors on them: of the program, of hooks, of autograd.

[Note: storages without bytes]
    FSDP2 frees the storage of a resharded parameter, so that who reads it gets an error. The bytes
    of a parameter in a placement then belong to other modules, and stay readable. Torch has no call
    that takes a storage's address away and gives it back. But its object of a storage has the
    address, and marks by which each read or write of the storage raises. Both are written in the
    object, at the places where `_found` sees them. If it does not find them in this torch,
    parameters do not live in placements.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import TYPE_CHECKING, Any

import torch

from symmplan.torch_private import dispatch
from symmplan.torch_private.table.ops import ADDRESSES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Addresses", "can_be_taken"]

#: How much of torch's object of a storage is looked at, in bytes; no torch has a smaller one.
_LOOKED_AT = 80


class Addresses:
    """The addresses of storages in the same bytes, of which none is ever resized.

    Args:
        tensors: One on each storage.
        offsets: Where each storage begins in these bytes, in bytes.
        reason: Why there is no address while it is taken; builds of torch for devices say it.
        places: Where torch's object has it; see `_found`.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        offsets: Sequence[int],
        reason: str,
        places: tuple[int, int] | None = None,
    ) -> None:
        address, marks = places or _found()
        self._owners = [tensor.untyped_storage() for tensor in tensors]
        explain: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
        self._words, self._marks = [], []
        for owner, offset in zip(self._owners, offsets, strict=True):
            storage = owner._cdata
            self._words.append((ctypes.c_size_t.from_address(storage + address), offset))
            self._marks.append(ctypes.c_bool.from_address(storage + marks))  # any
            self._marks.append(ctypes.c_bool.from_address(storage + marks + 2))  # reads
            if explain is not None:
                explain(storage, reason)
        self.forbid(reads=False)

    def take(self) -> None:
        """Reads and writes of tensors on the storages are errors from now on."""
        for mark in self._marks:
            mark.value = True
        for word, _ in self._words:
            word.value = 0

    def give(self, begin: int) -> None:
        """The bytes are those at the address ``begin`` from now on."""
        for word, offset in self._words:
            word.value = begin + offset
        for mark in self._marks:
            mark.value = False

    def forbid(self, *, reads: bool) -> None:
        """Whether reads and writes of tensors on the storages are errors."""
        for mark in self._marks:
            mark.value = reads


def can_be_taken() -> bool:
    """Whether this torch's storages can lose their addresses and get them back."""
    return not ADDRESSES.missing() and _found() != (0, 0)


@functools.cache
def _found() -> tuple[int, int]:
    """Where torch's object of a storage has its address and three marks, in bytes; or zeros.

    The marks are bytes: whether any other is set, whether writes raise, and whether reads raise.
    """
    with dispatch.no_modes():  # a simulated program has fake tensors
        tensor = torch.arange(7, device="cpu")
        head = (ctypes.c_uint8 * _LOOKED_AT).from_address(tensor.untyped_storage()._cdata)
        before, begin = bytes(head), tensor.data_ptr()
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        marks = [i for i, byte in enumerate(bytes(head)) if byte != before[i]]
        words = [word for (word,) in struct.iter_unpack("@N", before)]
        if begin not in words or len(marks) != 2 or marks[1] != marks[0] + 1:
            return 0, 0
        places = words.index(begin) * struct.calcsize("@N"), marks[0]
        return places if _are_right(places) else (0, 0)


def _are_right(places: tuple[int, int]) -> bool:
    tensor, other = torch.arange(7, device="cpu"), torch.arange(7, 14, device="cpu")
    begin = tensor.data_ptr()
    addresses = Addresses([tensor], [0], "", places)
    addresses.forbid(reads=True)
    forbidden = _raises(tensor.data_ptr) and _raises(tensor.sum)
    addresses.give(other.data_ptr())
    moved = forbidden and torch.equal(tensor, other)
    addresses.give(begin)
    return moved


def _raises(read: Callable[[], Any]) -> bool:
    try:
        read()
    except RuntimeError:
        return True
    return False
