"""What ranks tell each other of a one-sided call, so that none touches the wrong bytes.

A note is seven words of 8 bytes; all ranks of a call must write the same.
"""

from __future__ import annotations

import struct
import zlib

__all__ = ["OPS", "REFUSED", "describe", "note"]

#: The ops, in an order that never changes.
OPS = (
    "barrier_",
    "all_gather_out",
    "reduce_scatter_out",
    "all_reduce_out",
    "all_to_all_single_out",
    "broadcast_out",
)
_FORMAT = struct.Struct("<7q")
_REFUSED_CODE = -1

#: Written by a rank whose own call is wrong.
REFUSED = _FORMAT.pack(_REFUSED_CODE, 0, 0, 0, 0, 0, 0)


def note(
    op: str,
    kind: str,
    *,
    out_offset: int = -1,
    in_offset: int = -1,
    nbytes: int = 0,
    extra: int = 0,
) -> bytes:
    """A call's note.

    Args:
        op: One of `OPS`.
        kind: Element type and reduction.
        out_offset: Offset in bytes of ``out`` in its segment; -1 where it may differ.
        in_offset: The same of ``input``.
        nbytes: Size in bytes that must be equal on all ranks.
        extra: Anything else that must be equal.
    """
    return _FORMAT.pack(
        OPS.index(op), zlib.crc32(kind.encode()), out_offset, in_offset, nbytes, extra, 0
    )


def describe(text: bytes) -> str:
    """A note, for people."""
    code, kind, out_offset, in_offset, nbytes, extra, _ = _FORMAT.unpack(text[: _FORMAT.size])
    if code == _REFUSED_CODE:
        return "a call with wrong arguments, which raised there"
    if not 0 <= code < len(OPS):
        return "another kind of call"
    parts = [f"type {kind:08x}", f"{nbytes} bytes"]
    parts += [f"out at {out_offset}"] if out_offset >= 0 else []
    parts += [f"input at {in_offset}"] if in_offset >= 0 else []
    parts += [f"extra {extra}"] if extra else []
    return f"symmplan::{OPS[code]}({', '.join(parts)})"
