"""One-sided collectives on segments, as torch ops in the library ``symmplan``.

Each handshakes on entry (no peer's byte is touched before all ranks arrived, and what they are
about to do is compared) and releases on exit (it returns only when all ranks' accesses ended), so
a buffer may be reused at once before and after. They write ``out`` and return nothing; shapes are
those of c10d: concatenation along dimension 0. There is no autograd formula: they run below it.

| op | must be symmetric | who moves the bytes |
| --- | --- | --- |
| ``all_gather_out`` | ``out`` | every rank pushes its ``input`` |
| ``reduce_scatter_out`` | ``input`` | every rank pulls its part of all inputs |
| ``all_reduce_out`` | ``input``, ``out`` (may be the same) | small: all pull; large: pull, push |
| ``all_to_all_single_out`` | ``out`` | every rank pushes |
| ``broadcast_out`` | ``out`` | the source pushes |
| ``barrier_`` | ``segment`` | nobody |

Reductions: sum, avg, max, min, product, band, bor, bxor. Every rank gets the same bits; see
[Note: summing] in `symmplan.memory.kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from symmplan.errors import RunError
from symmplan.memory.calls import REFUSED, note
from symmplan.memory.kernels import REDUCTIONS, as_bytes, copy_bytes, reduce_into
from symmplan.memory.segment import NotSymmetricError, locate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.memory.segment import Rendezvous, Segment

__all__ = ["ONE_SHOT_BYTES"]

#: Up to this many bytes an all-reduce lets every rank read all inputs; above, each reduces a part.
ONE_SHOT_BYTES = 16 * 1024

_LIBRARY = torch.library.Library("symmplan", "FRAGMENT")


class _Call:
    """One call of an op: which rendezvous it runs on, and how it fails.

    Args:
        op: Its name.
        tensor: The tensor whose segment the ranks meet on.
        where: The argument that ``tensor`` is.
        group_name: Torch's or the plan's name of the group.
    """

    def __init__(self, op: str, tensor: torch.Tensor, where: str, group_name: str) -> None:
        self.op = op
        self.group_name = group_name
        found = locate(tensor)
        if found is None:
            raise NotSymmetricError(
                f"symmplan::{op}: {where!r} of shape {tuple(tensor.shape)} lies in no live segment",
                expected=f"{where!r} in symmetric memory",
                got=f"ordinary memory at {tensor.data_ptr():#x}",
                fix="let the plan place it, or keep its arena until nothing uses it any more",
                group=group_name,
                op=f"symmplan::{op}",
                buffer=where,
            )
        self.segment: Segment = found[0]
        self.offset: int = found[1]
        self.rendezvous: Rendezvous = self.segment.meeting(group_name)
        self.rank = self.rendezvous.group.rank
        self.size = self.rendezvous.group.size
        self.peers = self.rendezvous.peers
        self.check_inside(tensor, where, self.offset)

    def running(self, kind: str, free: Sequence[int] = (), **words: int) -> _Running:
        """Handshake, run the body, release. If the body fails, nobody may use the arena again."""
        return _Running(self, note(self.op, kind, **words), free)

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

    def parts(self, offset: int, low: int, high: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Bytes ``[low, high)`` of the tensor at ``offset`` on every rank, typed as ``like``."""
        return [peer[offset + low : offset + high].view(like.dtype) for peer in self.peers]

    def check_inside(self, tensor: torch.Tensor, where: str, offset: int) -> None:
        if not tensor.is_contiguous():
            self.fail(
                f"{where!r} of shape {tuple(tensor.shape)} is not contiguous",
                expected="a contiguous tensor",
                got=f"strides {tuple(tensor.stride())}",
                fix="give symmetric tensors contiguous",
            )
        end = offset + tensor.numel() * tensor.element_size()
        if end > self.segment.nbytes:
            self.fail(
                f"{where!r} leaves segment {self.segment.spec.name!r}",
                expected=f"bytes up to {self.segment.nbytes}",
                got=f"[{offset}, {end})",
                fix="give a tensor that lies in one segment",
            )

    def check_group_size(self, group_size: int) -> None:
        if group_size != self.size:
            self.fail(
                "group_size is wrong",
                expected=f"{self.size} ranks in group {self.group_name!r}",
                got=group_size,
                fix="pass the size of the group",
            )

    def check_types(self, left: torch.Tensor, right: torch.Tensor) -> None:
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
        if out.numel() != wanted:
            self.fail(
                f"'out' has the wrong size ({because})",
                expected=f"{wanted} elements",
                got=f"{out.numel()} elements, shape {tuple(out.shape)}",
                fix="give an 'out' of the right size",
            )

    def check_reduction(self, reduce_op: str, dtype: torch.dtype) -> str:
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

    def apart(self, input: torch.Tensor, start: int, out: torch.Tensor, allowed: int) -> None:
        """Check that ``input`` is the bytes ``allowed`` after ``start``, or does not touch them."""
        begin = input.data_ptr()
        if not begin or not out.data_ptr():  # empty
            return
        end = begin + input.numel() * input.element_size()
        low, high = out.data_ptr(), out.data_ptr() + out.numel() * out.element_size()
        if begin < high and low < end and begin != start + allowed:
            self.fail(
                "'input' and 'out' overlap",
                expected="none in common, or one exactly this rank's part of the other",
                got=f"input [{begin - low:+d}, {end - low:+d}) against out [0, {high - low})",
                fix="give tensors that do not overlap",
            )


class _Running:
    """What `_Call.running` gives; a class because a generator would cost more than a barrier."""

    def __init__(self, call: _Call, text: bytes, free: Sequence[int]) -> None:
        self._call = call
        self._text = text
        self._free = free

    def __enter__(self) -> None:
        self._call.rendezvous.enter(self._text, self._free)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._call.segment.health.break_(error)
        else:
            self._call.rendezvous.leave()


def all_gather_out(
    input: torch.Tensor, group_size: int, group_name: str, *, out: torch.Tensor
) -> None:
    """Every rank's ``input``, concatenated along dimension 0, into every rank's ``out``.

    Args:
        input: Any tensor; the right part of ``out`` itself saves a copy.
        group_size: Ranks in the group.
        group_name: Name of the group.
        out: Symmetric, contiguous, ``group_size`` times as large, at the same offset on all ranks.

    Raises:
        RunError: An argument does not fit, or ranks make different calls.
        PeerTimeoutError, PeerLostError: Peers did not come.

    Collective: yes.
    """
    call = _Call("all_gather_out", out, "out", group_name)
    call.check_group_size(group_size)
    call.check_types(input, out)
    call.check_numel(out, input.numel() * call.size, f"{call.size} ranks x {input.numel()}")
    nbytes = input.numel() * input.element_size()
    mine = call.rank * nbytes
    source = _plain(input)
    call.apart(source, out.data_ptr(), out, mine)
    with call.running(str(out.dtype), out_offset=call.offset, nbytes=nbytes):
        start = call.offset + mine
        for shift in range(1, call.size):
            copy_bytes(call.peers[(call.rank + shift) % call.size], start, source, nbytes)
        if source.data_ptr() != out.data_ptr() + mine:
            copy_bytes(call.peers[call.rank], start, source, nbytes)


def reduce_scatter_out(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: str, *, out: torch.Tensor
) -> None:
    """This rank's part, along dimension 0, of the reduction of all ranks' inputs.

    Args:
        input: Symmetric, contiguous, at the same offset on all ranks.
        reduce_op: See the module.
        group_size: Ranks in the group.
        group_name: Name of the group.
        out: Any tensor of a ``group_size``-th of the size; may be this rank's part of ``input``.

    Raises:
        RunError: An argument does not fit, or ranks make different calls.
        PeerTimeoutError, PeerLostError: Peers did not come.

    Collective: yes.
    """
    call = _Call("reduce_scatter_out", input, "input", group_name)
    call.check_group_size(group_size)
    call.check_types(input, out)
    if input.numel() % call.size:
        call.fail(
            f"'input' of shape {tuple(input.shape)} does not divide by {call.size} ranks",
            expected=f"a multiple of {call.size} elements",
            got=input.numel(),
            fix="pad the input",
        )
    count = input.numel() // call.size
    call.check_numel(out, count, f"{input.numel()} / {call.size} ranks")
    reduction = call.check_reduction(reduce_op, input.dtype)
    nbytes = count * input.element_size()
    call.apart(out, input.data_ptr(), input, call.rank * nbytes)
    target = out if out.is_contiguous() else torch.empty_like(out, memory_format=_CONTIGUOUS)
    with call.running(f"{input.dtype} {reduction}", in_offset=call.offset, nbytes=nbytes):
        begin = call.rank * nbytes
        parts = call.parts(call.offset, begin, begin + nbytes, input)
        reduce_into([target.view(-1)], parts, reduction)
    if target is not out:
        out.copy_(target)


def all_reduce_out(
    input: torch.Tensor, reduce_op: str, group_name: str, *, out: torch.Tensor
) -> None:
    """The reduction of all ranks' inputs, the same bits on every rank.

    Args:
        input: Symmetric, contiguous, at the same offset on all ranks.
        reduce_op: See the module.
        group_name: Name of the group.
        out: The same; may be ``input`` itself, must not overlap it otherwise.

    Raises:
        RunError: An argument does not fit, or ranks make different calls.
        PeerTimeoutError, PeerLostError: Peers did not come.

    Collective: yes.
    """
    call = _Call("all_reduce_out", input, "input", group_name)
    call.check_types(input, out)
    call.check_numel(out, input.numel(), "as large as 'input'")
    reduction = call.check_reduction(reduce_op, input.dtype)
    found = locate(out)
    if found is None or found[0] is not call.segment:
        call.fail(
            f"'out' of shape {tuple(out.shape)} does not lie in the segment of 'input'",
            expected=f"a tensor in segment {call.segment.spec.name!r}",
            got="another segment" if found else "ordinary memory",
            fix="let the plan place both, or reduce in place",
        )
    out_offset = found[1]
    call.check_inside(out, "out", out_offset)
    call.apart(input, out.data_ptr(), out, 0)
    nbytes = input.numel() * input.element_size()
    running = call.running(
        f"{input.dtype} {reduction}",
        in_offset=call.offset,
        out_offset=out_offset,
        nbytes=nbytes,
    )
    if nbytes <= ONE_SHOT_BYTES:
        # Where a rank's input is its output, peers must have read it before it is overwritten.
        in_place = out_offset == call.offset
        result = torch.empty_like(out) if in_place else out
        with running:
            reduce_into([result.view(-1)], call.parts(call.offset, 0, nbytes, input), reduction)
        if in_place:
            out.copy_(result)
        return
    # Each rank reads and overwrites its own share everywhere, so sharing bytes is no problem.
    low, high = _share(nbytes, call.rank, call.size)
    with running:
        sources = call.parts(call.offset, low, high, input)
        reduce_into(call.parts(out_offset, low, high, input), sources, reduction)


def all_to_all_single_out(
    input: torch.Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    group_name: str,
    *,
    out: torch.Tensor,
) -> None:
    """Rows of ``input`` go to the ranks that ``input_split_sizes`` says.

    Args:
        input: Any tensor.
        output_split_sizes: Rows of ``out`` from each rank; empty for equal parts.
        input_split_sizes: Rows of ``input`` for each rank; empty for equal parts.
        group_name: Name of the group.
        out: Symmetric, contiguous, at the same offset on all ranks; sizes may differ.

    Raises:
        RunError: An argument does not fit, or ranks make calls that do not fit each other.
        PeerTimeoutError, PeerLostError: Peers did not come.

    Collective: yes.
    """
    call = _Call("all_to_all_single_out", out, "out", group_name)
    call.check_types(input, out)
    sends = _splits(call, input, input_split_sizes, "input")
    receives = _splits(call, out, output_split_sizes, "out")
    source = _plain(input)
    call.apart(source, out.data_ptr() - 1, out, 0)
    row = _row_nbytes(input) or _row_nbytes(out)
    rows_out = _row_nbytes(out)
    if input.numel() and out.numel() and row != rows_out:
        call.fail(
            "rows of 'input' and 'out' differ",
            expected=f"{row} bytes",
            got=f"{rows_out} bytes",
            fix="give both the same shape after dimension 0",
        )
    flat = as_bytes(source)
    with call.running(str(input.dtype), [*receives, *sends], out_offset=call.offset):
        tables = call.rendezvous.free_words()
        expected = [table[: call.size] for table in tables]
        sent = [table[call.size : 2 * call.size] for table in tables]
        wrong = _misfit(expected, sent)
        if wrong is None:
            begin = 0
            for peer, count in enumerate(sends):
                end = begin + count * row
                start = call.offset + sum(expected[peer][: call.rank]) * row
                copy_bytes(call.peers[peer], start, flat[begin:end], end - begin)
                begin = end
    # Every rank sees all tables, so every rank finds the same fault and none has moved a byte.
    if wrong is not None:
        sender, receiver = wrong
        raise RunError(
            f"symmplan::{call.op}: ranks {sender} and {receiver} disagree on how many rows the "
            "one sends to the other",
            expected=f"{expected[receiver][sender]} rows (rank {receiver})",
            got=f"{sent[sender][receiver]} rows (rank {sender})",
            fix="let output_split_sizes match input_split_sizes of the other ranks",
            group=group_name,
            rank=call.rank,
            op=f"symmplan::{call.op}",
            ranks=wrong,
        )


def broadcast_out(input: torch.Tensor, src: int, group_name: str, *, out: torch.Tensor) -> None:
    """The ``input`` of rank ``src`` of the group into every rank's ``out``.

    Args:
        input: Any tensor; only read on the source, where it may be ``out`` itself.
        src: Rank inside the group.
        group_name: Name of the group.
        out: Symmetric, contiguous, as large, at the same offset on all ranks.

    Raises:
        RunError: An argument does not fit, or ranks make different calls.
        PeerTimeoutError, PeerLostError: Peers did not come.

    Collective: yes.
    """
    call = _Call("broadcast_out", out, "out", group_name)
    call.check_types(input, out)
    call.check_numel(out, input.numel(), "as large as 'input'")
    if not 0 <= src < call.size:
        call.fail(
            "there is no such source rank",
            expected=f"0 to {call.size - 1}",
            got=src,
            fix="pass a rank inside the group",
        )
    nbytes = out.numel() * out.element_size()
    source = _plain(input)
    if call.rank == src:
        call.apart(source, out.data_ptr(), out, 0)
    with call.running(str(out.dtype), out_offset=call.offset, nbytes=nbytes, extra=src):
        if call.rank == src:
            for shift in range(1, call.size):
                peer = call.peers[(call.rank + shift) % call.size]
                copy_bytes(peer, call.offset, source, nbytes)
            if source.data_ptr() != out.data_ptr():
                copy_bytes(call.peers[src], call.offset, source, nbytes)


def barrier_(segment: torch.Tensor, group_name: str) -> None:
    """Wait for every rank of the group.

    Args:
        segment: Any tensor in the segment to meet on.
        group_name: Name of the group.

    Raises:
        RunError: It lies in no segment, or the segment did not meet that group.
        PeerTimeoutError, PeerLostError: Peers did not come.

    Collective: yes.
    """
    found = locate(segment)
    if found is None:
        _Call("barrier_", segment, "segment", group_name)
        return
    found[0].barrier(group_name)


_CONTIGUOUS = torch.contiguous_format


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with its elements in memory as they read: contiguous, nothing lazy."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def _share(nbytes: int, rank: int, size: int) -> tuple[int, int]:
    """The bytes that ``rank`` reduces: whole cache lines, so that ranks never share one."""
    share = -(-nbytes // (size * 64)) * 64
    return min(rank * share, nbytes), min((rank + 1) * share, nbytes)


def _row_nbytes(tensor: torch.Tensor) -> int:
    rows = tensor.shape[0] if tensor.dim() else 1
    return tensor.numel() // rows * tensor.element_size() if rows else 0


def _splits(call: _Call, tensor: torch.Tensor, sizes: Sequence[int], where: str) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % call.size:
            call.fail(
                f"{rows} rows of {where!r} do not divide by {call.size} ranks",
                fix="pass split sizes",
            )
        return [rows // call.size] * call.size
    if len(sizes) != call.size or sum(sizes) != rows or min(sizes) < 0:
        call.fail(
            f"split sizes of {where!r} do not fit",
            expected=f"{call.size} sizes that add up to {rows} rows",
            got=list(sizes),
            fix="pass one size for each rank",
        )
    return [int(size) for size in sizes]


def _misfit(expected: list[list[int]], sent: list[list[int]]) -> tuple[int, int] | None:
    """The first pair (sender, receiver) that disagrees."""
    ranks = range(len(sent))
    return next(((s, r) for s in ranks for r in ranks if sent[s][r] != expected[r][s]), None)


def _register(schema: str, implementation: Callable[..., None]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    # No formula and no warning about it: whoever differentiates does so above these ops.
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"symmplan::{name}", _fake, lib=_LIBRARY)


def _fake(*args: object, **kwargs: object) -> None:
    """They change ``out`` in place and return nothing: no shape to compute."""


for _schema, _implementation in (
    (
        "all_gather_out(Tensor input, int group_size, str group_name, *, Tensor(a!) out) -> ()",
        all_gather_out,
    ),
    (
        "reduce_scatter_out(Tensor input, str reduce_op, int group_size, str group_name, *, "
        "Tensor(a!) out) -> ()",
        reduce_scatter_out,
    ),
    (
        "all_reduce_out(Tensor input, str reduce_op, str group_name, *, Tensor(a!) out) -> ()",
        all_reduce_out,
    ),
    (
        "all_to_all_single_out(Tensor input, SymInt[] output_split_sizes, "
        "SymInt[] input_split_sizes, str group_name, *, Tensor(a!) out) -> ()",
        all_to_all_single_out,
    ),
    (
        "broadcast_out(Tensor input, int src, str group_name, *, Tensor(a!) out) -> ()",
        broadcast_out,
    ),
    ("barrier_(Tensor(a!) segment, str group_name) -> ()", barrier_),
):
    _register(_schema, _implementation)
