"""One-sided collectives on segments, as torch ops in the library ``symmplan``.

Each op handshakes on entry: it touches no symmetric byte before all ranks have arrived and their
calls have been compared. Each op releases on exit: it returns only when the accesses of all ranks
have ended. So a buffer may be used right before and right after a call. This includes the rank's
own bytes, which a peer may just have written one-sidedly or be about to read. The ops write ``out``
and return nothing. Shapes are those of c10d: concatenation along dimension 0. The ops have no
autograd formula, because they run below autograd.

| op | must be symmetric | who moves the bytes |
| --- | --- | --- |
| ``all_gather_out`` | ``out`` | every rank pushes its ``input`` |
| ``all_gather_parts_`` | ``whole`` | every rank pushes its parts, which are in place |
| ``reduce_scatter_out`` | ``input`` | every rank pulls its part of all inputs |
| ``all_reduce_out`` | ``input``, ``out`` (may be the same) | all pull; large, in place: push too |
| ``all_to_all_single_out`` | ``out`` | every rank pushes |
| ``broadcast_out`` | ``out`` | the source pushes |
| ``barrier_`` | ``segment`` | nobody |

Over a group on several hosts the first four run in two levels: `symmplan.memory.ops.two_levels`.

Symmetric tensors are contiguous and lie at the same offset on all ranks. ``group_size`` and
``group_name`` are those of the group; ``what`` is anything else that must be equal on all ranks.
All ops are collective. They raise `RunError` if an argument does not fit or ranks make different
calls, and `PeerTimeoutError` or `PeerLostError` if peers do not come.

Reductions: sum, avg, max, min, product, band, bor, bxor. Every rank gets the same bits; see
[Note: summing] in `symmplan.memory.kernels`.

``all_to_all_single_into`` is different: it is a collective of the process group in a form that
writes a given tensor, which torch does not have. Like torch's functional collectives it returns at
once, and ``wait_tensor`` of ``out`` ends it. Until then neither ``input`` nor ``out`` may be
written or freed. Source: torch/csrc/distributed/c10d/Functional.cpp.
"""

# ruff: noqa: A002 (`input` is what torch calls it)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from symmplan.errors import RunError
from symmplan.memory.kernels import as_bytes, copies, copy_bytes, plain, reduce_into
from symmplan.memory.meeting.calls import OpCall, parts_of
from symmplan.memory.ops.two_levels import gather_parts, reduce_parts, reduce_shares
from symmplan.memory.segment import locate
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "ONE_SHOT_BYTES",
    "Run",
    "all_gather_out",
    "all_gather_parts_",
    "all_reduce_out",
    "all_to_all_single_into",
    "all_to_all_single_out",
    "barrier_",
    "broadcast_out",
    "reduce_scatter_out",
]

#: Up to this many bytes an all-reduce lets every rank read all inputs; above, each reduces a part.
ONE_SHOT_BYTES = 16 * 1024

#: What a rank tells its peers in place of sizes.
_DECLINED = -1

#: What makes a call, and returns a work if that is not over then. If one of its tensors may be any,
#: it takes others like that.
Run: TypeAlias = "Callable[..., Any]"


def all_gather_out(
    input: torch.Tensor, group_size: int, group_name: str, *, out: torch.Tensor, what: str = ""
) -> Run:
    """Every rank's ``input``, concatenated along dimension 0, into every rank's ``out``.

    ``input`` may be any tensor; if it is the right part of ``out`` itself, a copy is saved.
    """
    call = OpCall("all_gather_out", out, "out", group_name)
    call.check_group_size(group_size)
    call.check_types(input, out)
    call.check_numel(out, input.numel() * call.size, f"{call.size} ranks x {input.numel()}")
    nbytes = input.numel() * input.element_size()
    mine = call.rank * nbytes

    def body(input: torch.Tensor) -> None:
        source = plain(input)
        levels = call.levels
        if levels is not None:
            own = levels.near_peers[levels.place]
            if source.data_ptr() != out.data_ptr() + mine:
                copy_bytes(own, call.offset + mine, source, nbytes)
            gather_parts(call, levels, [(call.offset, nbytes)])
            return
        call.push(call.offset + mine, source, nbytes)
        if source.data_ptr() != out.data_ptr() + mine:
            copy_bytes(call.peers[call.rank], call.offset + mine, source, nbytes)

    beside = out.data_ptr(), out, mine
    kind = f"{out.dtype} {what}"
    return call.running(body, kind, input, beside, site=what, out_offset=call.offset, nbytes=nbytes)


def all_gather_parts_(
    whole: torch.Tensor,
    offsets: Sequence[int],
    nbytes: Sequence[int],
    group_size: int,
    group_name: str,
    what: str = "",
) -> Run:
    """Several all-gathers inside one placement with one handshake; every input is in place.

    Args:
        whole: Symmetric, uint8.
        offsets: Where each gather's output begins in ``whole``, in bytes.
        nbytes: Bytes of each rank's part of it; rank r's begins ``r * nbytes`` after its offset.
        group_size: Ranks in the group.
        group_name: Name of the group.
        what: Anything else that must be equal on all ranks.
    """
    call = OpCall("all_gather_parts_", whole, "whole", group_name)
    call.check_group_size(group_size)
    pieces = list(zip(offsets, nbytes, strict=True))
    end = max((o + n * call.size for o, n in pieces), default=0)
    if whole.dtype != torch.uint8 or min((*offsets, *nbytes), default=0) < 0 or end > whole.numel():
        call.fail(
            "the parts do not lie inside 'whole'",
            expected=f"at most {whole.numel()} bytes of torch.uint8",
            got=f"parts that end at byte {end} of {whole.dtype}",
            fix="give the offsets and sizes in bytes",
        )

    begins = [(offset + call.rank * count, count) for offset, count in pieces]
    others = call.others if call.levels is None else []
    pushes = copies(
        (other, call.offset + begin, whole[begin : begin + count], count)
        for begin, count in begins
        for other in others
    )

    def body(_: object) -> None:
        if call.levels is not None:
            gather_parts(call, call.levels, [(call.offset + o, n) for o, n in pieces])
            return
        pushes()

    kind = f"parts {pieces} {what}"
    return call.running(body, kind, site=what, out_offset=call.offset, nbytes=sum(nbytes))


def reduce_scatter_out(
    input: torch.Tensor,
    reduce_op: str,
    group_size: int,
    group_name: str,
    *,
    out: torch.Tensor,
    what: str = "",
) -> Run:
    """This rank's part, along dimension 0, of the reduction of all ranks' inputs.

    ``out`` may be any tensor of the right size, also this rank's part of ``input``.
    """
    call = OpCall("reduce_scatter_out", input, "input", group_name)
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
    begin = call.rank * nbytes
    levels = call.levels
    parts = [] if levels else parts_of(call.peers, call.offset, begin, begin + nbytes, input)

    def body(out: torch.Tensor) -> None:
        plain = torch.contiguous_format
        target = out if out.is_contiguous() else torch.empty_like(out, memory_format=plain)
        if levels is None:
            reduce_into([target.view(-1)], parts, reduction)
        else:
            reduce_parts(call, levels, input, target.view(-1), reduction)
        if target is not out:
            out.copy_(target)

    kind, beside = f"{input.dtype} {reduction} {what}", (input.data_ptr(), input, begin)
    return call.running(body, kind, out, beside, site=what, in_offset=call.offset, nbytes=nbytes)


def all_reduce_out(
    input: torch.Tensor, reduce_op: str, group_name: str, *, out: torch.Tensor
) -> Run:
    """The reduction of all ranks' inputs, the same bits on every rank.

    ``out`` may lie in another segment of the group; it may be ``input`` itself, and must not
    overlap it otherwise.
    """
    call = OpCall("all_reduce_out", input, "input", group_name)
    call.check_types(input, out)
    call.check_numel(out, input.numel(), "as large as 'input'")
    reduction = call.check_reduction(reduce_op, input.dtype)
    found = (call.segment, call.offset) if out is input else locate(out)
    if found is None:
        call.fail(
            f"'out' of shape {tuple(out.shape)} lies in no live segment",
            expected="a symmetric tensor",
            got="ordinary memory",
            fix="let the plan place both, or reduce in place",
        )
    out_segment, out_offset = found
    call.check_inside(out, "out", out_offset, out_segment)
    call.apart(input, out.data_ptr(), out, 0)
    nbytes = input.numel() * input.element_size()
    met = out_segment.meeting(group_name)
    running = functools.partial(
        call.running,
        kind=f"{input.dtype} {reduction}",
        in_offset=call.offset,
        out_offset=out_offset,
        nbytes=nbytes,
    )
    if call.levels is not None and met.levels is not None:
        more = call.levels, input, nbytes, met.levels.near_peers, out_offset, reduction
        return running(lambda _: reduce_shares(call, *more))
    low, high, targets = 0, nbytes, [out.view(-1)]
    # Where a rank's input is its output, peers must have read it before it is overwritten.
    if nbytes > ONE_SHOT_BYTES or out.data_ptr() == input.data_ptr():
        # Each rank reads and overwrites its own share everywhere, so sharing bytes is no problem.
        # Shares are whole cache lines, which ranks never share.
        share = -(-nbytes // (call.size * 64)) * 64
        low, high = min(call.rank * share, nbytes), min((call.rank + 1) * share, nbytes)
        targets = parts_of(met.peers, out_offset, low, high, input)
    sources = parts_of(call.peers, call.offset, low, high, input)
    return running(lambda _: reduce_into(targets, sources, reduction))


def all_to_all_single_out(
    input: torch.Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    group_name: str,
    *,
    out: torch.Tensor,
    declines: Callable[[], bool] = bool,
    declined: RunError | None = None,
) -> Run:
    """Rows of ``input`` go to the ranks that ``input_split_sizes`` says.

    Args:
        input: Any tensor.
        output_split_sizes: Rows of ``out`` from each rank; empty for equal parts.
        input_split_sizes: Rows of ``input`` for each rank; empty for equal parts.
        group_name: Name of the group.
        out: Symmetric; sizes may differ from rank to rank.
        declines: Whether this rank cannot make the call that comes.
        declined: What all ranks raise then, when they have met; nothing was moved.
    """
    call = OpCall("all_to_all_single_out", out, "out", group_name)
    call.check_types(input, out)
    equal = not input_split_sizes and not output_split_sizes and input.numel() == out.numel()
    elements = equal and input.shape[1:] != out.shape[1:]  # then rows are elements
    count = torch.Tensor.numel if elements else _rows
    sends = _splits(call, count(input), input_split_sizes, "input")
    receives = _splits(call, count(out), output_split_sizes, "out")
    row = input.element_size() if elements else _row_nbytes(input) or _row_nbytes(out)
    if input.numel() and out.numel() and not elements and row != _row_nbytes(out):
        call.fail(
            "rows of 'input' and 'out' differ",
            expected=f"{row} bytes",
            got=f"{_row_nbytes(out)} bytes",
            fix="give both the same shape after dimension 0",
        )

    def body(input: torch.Tensor) -> RunError | None:
        tables = call.rendezvous.free_words()
        if any(_DECLINED in table for table in tables):
            return declined
        flat = as_bytes(plain(input))
        expected = [table[: call.size] for table in tables]
        sent = [table[call.size : 2 * call.size] for table in tables]
        pairs = ((s, r) for s in range(call.size) for r in range(call.size))
        # Every rank sees all tables, so every rank finds the same fault and none has moved a byte.
        for sender, receiver in pairs:
            if sent[sender][receiver] != expected[receiver][sender]:
                return RunError(
                    f"symmplan::{call.op}: ranks {sender} and {receiver} disagree on the number "
                    "of rows between them",
                    expected=f"{expected[receiver][sender]} rows (rank {receiver})",
                    got=f"{sent[sender][receiver]} rows (rank {sender})",
                    fix="make output_split_sizes match input_split_sizes of the other ranks",
                    group=group_name,
                    rank=call.rank,
                    op=f"symmplan::{call.op}",
                    ranks=(sender, receiver),
                )
        begin = 0
        for peer, count in enumerate(sends):
            end = begin + count * row
            start = call.offset + sum(expected[peer][: call.rank]) * row
            copy_bytes(call.peers[peer], start, flat[begin:end], end - begin)
            begin = end
        return None

    def free() -> Sequence[int]:
        return [_DECLINED] if declines() else [*receives, *sends]

    beside = out.data_ptr() - 1, out, 0
    return call.running(body, str(input.dtype), input, beside, free, out_offset=call.offset)


def broadcast_out(input: torch.Tensor, src: int, group_name: str, *, out: torch.Tensor) -> Run:
    """The ``input`` of rank ``src`` of the group into every rank's ``out``.

    ``input`` is only read on the source, where it may be ``out`` itself.
    """
    call = OpCall("broadcast_out", out, "out", group_name)
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

    def body(input: torch.Tensor) -> None:
        if call.rank == src:
            source = plain(input)
            call.push(call.offset, source, nbytes)
            if source.data_ptr() != out.data_ptr():
                copy_bytes(call.peers[src], call.offset, source, nbytes)

    beside, kind = (out.data_ptr(), out, 0) if call.rank == src else None, str(out.dtype)
    offset = call.offset
    return call.running(body, kind, input, beside, out_offset=offset, nbytes=nbytes, extra=src)


def barrier_(segment: torch.Tensor, group_name: str) -> Run:
    """Wait for every rank of the group; ``segment`` is any tensor in the segment to meet on."""
    found = locate(segment)
    met = found[0] if found else OpCall("barrier_", segment, "segment", group_name).segment
    return functools.partial(met.barrier, group_name)


def all_to_all_single_into(
    input: torch.Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    group_name: str,
    *,
    out: torch.Tensor,
    others: bool = False,
) -> Run:
    """Parts of ``input`` to every rank; those of every rank into ``out``, in their order.

    Both are contiguous. Split sizes are rows, or empty for equal parts. With ``others`` ranks may
    make the process group's own call with other sizes at the same time, where sizes are given.
    """
    group = c10d.group_by_name(group_name)
    equal = len({*output_split_sizes, *input_split_sizes}) < 2 and input.numel() == out.numel()
    sizes: dict[str, Any] = {}
    if others or not equal:
        sizes = {"received": output_split_sizes, "sent": input_split_sizes}

    def start(given: torch.Tensor = input) -> Any:
        return c10d.start_all_to_all(out, given, group, **sizes)

    return start


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _row_nbytes(tensor: torch.Tensor) -> int:
    rows = _rows(tensor)
    return tensor.numel() // rows * tensor.element_size() if rows else 0


def _splits(call: OpCall, rows: int, sizes: Sequence[int], where: str) -> list[int]:
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
