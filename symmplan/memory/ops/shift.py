"""Each rank's tensor goes to the rank so many places further: parts of pipelined collectives.

``symmplan::shift`` is a collective in torch's own way, as its functional ones: ``wait_tensor`` of
the result ends it. It is what a graph calls until it is known how its collectives run; see
`symmplan.integrate.compile.pipelining`. ``symmplan::shift_out`` runs in placements: the sender
copies its tensor into the receiver's ``out``.

[Note: shifts on devices]
    On the CPU the copy is made by the rank that calls, between the handshake and the release. On a
    device both, and the copy between them, are queued on a stream of their own, and the copy is
    made by a copy engine, so what the program queues meanwhile runs beside it. ``wait_tensor`` of
    ``out`` lets the current stream wait. Until then neither tensor may be written or freed.
"""

# ruff: noqa: A002 (`input` is what torch calls it)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from symmplan.device import kind_of
from symmplan.memory.kernels import copy_bytes, plain
from symmplan.memory.meeting.calls import OpCall
from symmplan.memory.streams import beside
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["shift", "shift_out"]


def shift(input: torch.Tensor, distance: int, group_size: int, group_name: str) -> torch.Tensor:
    """The ``input`` of the rank ``distance`` places before, by the process group.

    Args:
        input: Of one shape on all ranks, with one dimension at least.
        distance: How many places further ``input`` goes, from 1 to ``group_size - 1``.
        group_size: Ranks in the group.
        group_name: Name of the group.

    Collective: yes.
    """
    sent, received = splits(input.shape[0], distance, group_size, group_name)
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    return exchange(input.contiguous(), received, sent, group_name)  # type: ignore[no-any-return]


def splits(
    rows: int, distance: int, group_size: int, group_name: str
) -> tuple[list[int], list[int]]:
    """How many rows an all-to-all that is a shift sends to each rank, and receives from each."""
    rank = c10d.group_by_name(group_name).rank()
    sent, received = [0] * group_size, [0] * group_size
    sent[(rank + distance) % group_size] = rows
    received[(rank - distance) % group_size] = rows
    return sent, received


def shift_out(
    input: torch.Tensor, distance: int, group_size: int, group_name: str, *, out: torch.Tensor
) -> Callable[..., Any]:
    """Shift into ``out``, which is symmetric; on devices see [Note: shifts on devices]."""
    call = OpCall("shift_out", out, "out", group_name)
    call.check_group_size(group_size)
    call.check_types(input, out)
    call.check_numel(out, input.numel(), "as large as 'input'")
    if not 0 < distance < call.size:
        call.fail(
            f"a shift by {distance} places",
            expected=f"1 to {call.size - 1}",
            got=distance,
            fix="pass how many ranks further the tensor goes",
        )
    nbytes = input.numel() * input.element_size()
    peer = call.peers[(call.rank + distance) % call.size]

    def body(input: torch.Tensor) -> None:
        copy_bytes(peer, call.offset, plain(input), nbytes)

    if kind_of(out.device).is_accelerator:
        return functools.partial(_beside, call, body, input, out)
    return call.running(
        body,
        str(input.dtype),
        input,
        (out.data_ptr() - 1, out, 0),
        out_offset=call.offset,
        nbytes=nbytes,
        extra=distance,
    )


def _beside(
    call: OpCall, body: Callable[[torch.Tensor], None], input: torch.Tensor, out: torch.Tensor
) -> Any:
    """Queue a shift on a stream of its own; returns a work to wait for."""
    meeting: Any = call.segment.meeting(call.group_name)

    def run() -> None:
        meeting.barrier_beside()
        body(input)
        meeting.barrier_beside()

    return beside(run, out.device, shift, input)
