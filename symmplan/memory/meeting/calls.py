"""One call of a one-sided op: its checks, and what ranks tell each other of it.

A call is described by a *note*, seven words of 8 bytes. On entry the ranks compare their notes, so
that none touches the wrong bytes of another.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any, NoReturn

from symmplan.coordination.groups import listed
from symmplan.errors import RunError
from symmplan.memory.kernels import REDUCTIONS, copy_bytes
from symmplan.memory.segment import locate, located
from symmplan.process import PROCESS
from symmplan.torch_private import autograd

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from symmplan.memory.segment import Segment

__all__ = ["OPS", "REFUSED", "TWO_LEVELS", "OpCall", "describe", "in_two_levels", "is_refused"]
__all__ += ["note", "parts_of"]

#: The ops, in an order that never changes.
OPS = (
    "barrier_",
    "all_gather_out",
    "reduce_scatter_out",
    "all_reduce_out",
    "all_to_all_single_out",
    "broadcast_out",
    "all_gather_parts_",
)
#: Those that run over several hosts, too, see `symmplan.memory.ops.two_levels`; and what starts
#: them on a stream of its own, see `symmplan.memory.ops.started`.
TWO_LEVELS: Mapping[str, str] = {
    "symmplan::all_gather_out": "symmplan::all_gather_start",
    "symmplan::all_gather_parts_": "",
    "symmplan::reduce_scatter_out": "symmplan::reduce_scatter_start",
    "symmplan::all_reduce_out": "symmplan::all_reduce_start",
}
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
    """A call's note: the op, one of `OPS`, and what must be equal on all ranks.

    ``kind`` is the element type and reduction; offsets, in bytes in their segments, are -1 where
    they may differ.
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


def is_refused(text: bytes) -> bool:
    """Whether a rank wrote the note whose own call is wrong."""
    code: int = _FORMAT.unpack(text[: _FORMAT.size])[0]
    return code == _REFUSED_CODE


class OpCall:
    """One call of an op: which rendezvous it runs on, and how it fails.

    Ranks meet on the segment of ``tensor``, which is the argument ``where``.
    """

    def __init__(self, op: str, tensor: torch.Tensor, where: str, group_name: str) -> None:
        self.op = op
        self.group_name = group_name
        self.segment, self.offset = locate(tensor) or located(
            tensor,
            repr(where),
            by=f"symmplan::{op}: ",
            fix="let the plan place it, or keep its arena until nothing uses it any more",
            group=group_name,
            op=f"symmplan::{op}",
            buffer=where,
        )
        self.rendezvous = self.segment.meeting(group_name)
        self.rank = self.rendezvous.group.rank
        self.size = self.rendezvous.group.size
        #: How ranks meet that are on several hosts; ``peers`` are those of this one then.
        self.levels = self.rendezvous.levels
        if self.levels is not None and f"symmplan::{op}" not in TWO_LEVELS:
            self.fail(
                f"it runs within one host, and group {group_name!r} is on several",
                expected="a group within one host",
                got=f"rank {listed(self.levels.near)} of {self.size} on this host",
                fix="let the plan leave it in ordinary memory",
            )
        self.peers = self.rendezvous.peers if self.levels is None else self.levels.near_peers
        self.check_inside(tensor, where, self.offset)

    def running(
        self,
        body: Callable[[Any], RunError | None],
        kind: str,
        given: torch.Tensor | None = None,
        beside: tuple[int, torch.Tensor, int] | None = None,
        free: Callable[[], Sequence[int]] = tuple,
        site: str = "",
        **words: int,
    ) -> Callable[..., None]:
        """What makes the call, as often as wanted: handshake, run the body, release.

        If the body fails, the arena cannot be used again.

        Args:
            body: Is given the call's tensor that may be any. What it returns is raised on the way
                out, if all ranks find the same.
            kind: As for `note`.
            given: That tensor, if there is one; or one like it, and the function that is returned
                is called with those that are meant.
            beside: What `apart` wants to know of it.
            free: Gives what `Rendezvous.enter` takes by that name.
            site: As for `Rendezvous.enter`.
            words: As for `note`.
        """
        name, text = f"symmplan::{self.op}", note(self.op, kind, **words)

        def run(tensor: torch.Tensor | None = given) -> None:
            rendezvous = self.segment.meeting(self.group_name)
            if tensor is not None and beside is not None:
                self.apart(tensor, *beside)
            with autograd.shown(name):
                rendezvous.enter(text, free(), site)
                ops = PROCESS.thread.ops
                ops.append(name)
                try:
                    wrong = body(tensor)
                except BaseException as error:
                    self.segment.health.break_(error)
                    raise
                finally:
                    ops.pop()
            rendezvous.leave()
            if wrong is not None:
                raise wrong

        return run

    def fail(self, what: str, *, expected: object = None, got: object = None, fix: str) -> NoReturn:
        """Raise, and let the peers' matching call raise too instead of waiting."""
        self.rendezvous.refuse(REFUSED)
        raise RunError(
            f"symmplan::{self.op}: {what}",
            expected=expected,
            got=got,
            fix=fix,
            group=self.group_name,
            rank=self.rank,
            op=f"symmplan::{self.op}",
            segment=self.segment.spec.name,
        )

    @property
    def others(self) -> list[torch.Tensor]:
        """The segment on the other ranks; no two ranks begin with the same one."""
        return [self.peers[(self.rank + shift) % self.size] for shift in range(1, self.size)]

    def push(self, start: int, source: torch.Tensor, nbytes: int) -> None:
        """Copy ``source`` to byte ``start`` of the others."""
        for other in self.others:
            copy_bytes(other, start, source, nbytes)

    def check_inside(
        self, tensor: torch.Tensor, where: str, offset: int, segment: Segment | None = None
    ) -> None:
        """A symmetric tensor is contiguous and ends inside its segment."""
        segment = segment or self.segment
        if not tensor.is_contiguous():
            self.fail(
                f"{where!r} of shape {tuple(tensor.shape)} is not contiguous",
                expected="a contiguous tensor",
                got=f"strides {tuple(tensor.stride())}",
                fix="give symmetric tensors contiguous",
            )
        end = offset + tensor.numel() * tensor.element_size()
        if end > segment.nbytes:
            self.fail(
                f"{where!r} leaves segment {segment.spec.name!r}",
                expected=f"bytes up to {segment.nbytes}",
                got=f"[{offset}, {end})",
                fix="give a tensor that lies in one segment",
            )

    def check_group_size(self, group_size: int) -> None:
        """The op was told the right number of ranks."""
        if group_size != self.size:
            self.fail(
                "group_size is wrong",
                expected=f"{self.size} ranks in group {self.group_name!r}",
                got=group_size,
                fix="pass the size of the group",
            )

    def check_types(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Both tensors are of one type, on one device."""
        if left.device != right.device:
            self.fail(
                "'input' and 'out' lie on different devices",
                expected=left.device,
                got=right.device,
                fix="move one to the device of the other",
            )
        if left.dtype != right.dtype:
            self.fail(
                "'input' and 'out' differ in type",
                expected=left.dtype,
                got=right.dtype,
                fix="give both the same type",
            )

    def check_numel(self, out: torch.Tensor, wanted: int, because: str) -> None:
        """The output holds as many elements as the call makes."""
        if out.numel() != wanted:
            self.fail(
                f"'out' has the wrong size ({because})",
                expected=f"{wanted} elements",
                got=f"{out.numel()} elements, shape {tuple(out.shape)}",
                fix="give an 'out' of the right size",
            )

    def check_reduction(self, reduce_op: str, dtype: torch.dtype) -> str:
        """The reduction's name in lower case, if it is defined for ``dtype``."""
        name = reduce_op.lower()
        if name not in REDUCTIONS:
            self.fail(
                f"unknown reduction {reduce_op!r}",
                expected=f"one of {', '.join(REDUCTIONS)}",
                got=repr(reduce_op),
                fix="choose one of these",
            )
        inexact = dtype.is_floating_point or dtype.is_complex
        if (name in {"band", "bor", "bxor"} and inexact) or (
            dtype.is_complex and name in {"max", "min"}
        ):
            self.fail(
                f"reduction {name!r} is not defined for {dtype}",
                fix="choose another reduction or convert the tensor",
            )
        return name

    def apart(self, tensor: torch.Tensor, start: int, other: torch.Tensor, allowed: int) -> None:
        """``tensor`` begins ``allowed`` bytes after ``start``, or shares no byte with ``other``.

        One rank's exact part of the other tensor is harmless; anything else that overlaps is not.
        """
        begin, low = tensor.data_ptr(), other.data_ptr()
        if not begin or not low:  # empty
            return
        high = low + other.numel() * other.element_size()
        if begin >= high or (begin == start + allowed and tensor.is_contiguous()):
            return
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (last + 1) * tensor.element_size()
        if low < end:
            self.fail(
                "'input' and 'out' overlap",
                expected="none in common, or one exactly this rank's part of the other",
                got=f"bytes [{begin - low}, {end - low}) of [0, {high - low})",
                fix="give tensors that do not overlap",
            )


def in_two_levels(tensor: torch.Tensor, group: str) -> bool:
    """Whether a tensor lies in a segment that ``group`` meets in two levels."""
    found = locate(tensor)
    return found is not None and found[0].meeting(group).levels is not None


def parts_of(
    peers: Sequence[torch.Tensor], offset: int, low: int, high: int, like: torch.Tensor
) -> list[torch.Tensor]:
    """Bytes ``[low, high)`` of what begins at ``offset`` of each peer's segment, as ``like``."""
    return [peer[offset + low : offset + high].view(like.dtype) for peer in peers]
