"""All-to-alls of a recorded iteration whose parts are not all of one size.

[Note: two iterations]
    Such parts may be others in each iteration, as those of experts are, or the same, as those of an
    optimizer's matrices are. So a second iteration is recorded: a call whose sizes were the same in
    both, on all ranks, gets a placement. What only the rank knows stays its own affair: its sizes,
    and what it does with its rows. See [Note: unequal parts] in `symmplan.capture.eager_problem`.

[Note: both ends]
    NCCL sends between buffers that are registered with it in another way than between others, and
    each rank looks at its own buffer only: if one end is registered and the other is not, neither
    comes to an end. So in NCCL's memory all-to-alls have placements for what is sent and received,
    on all ranks, or none: parts are equal, and stay so.
    Source: addP2pToPlan in src/enqueue.cc of NCCL 2.28.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from symmplan.capture.graphs import UnequalParts
from symmplan.integrate.eager.faults import public
from symmplan.registry import bind_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import fx

    from symmplan.capture.eager import Recorded, Recorder

__all__ = ["DIFFER", "UNEVEN", "Sizes", "agreed", "sizes_of"]

UNEVEN = "its parts are not all of one size on all ranks, and other iterations have others"
#: Why a call is left out whose parts are the same in each iteration.
DIFFER = (
    "its parts are not all of one size, and the ranks do not use the planned tensors alike, or use "
    "them on several streams"
)
_NOT_WHOLE = (
    "its parts are not all of one size, and on some rank its result is not a whole tensor that the "
    "iteration makes and drops"
)


_BOTH_ENDS = (
    "its parts are not all of one size, and NCCL would need what is sent in its memory, too"
)


@frozen
class Sizes:
    """How large an all-to-all is on one rank.

    Attributes:
        said: The call, as it is on all ranks if all its parts are of one size; empty otherwise.
        splits: Rows from each rank and to each.
        nbytes: Bytes of its result.
        since: How many declared calls came before the program asked for memory for the result; None
            if the call itself makes that.
        until: How many declared calls came before the program had dropped the result; None if that
            is not a whole tensor that the iteration made and dropped.
        repeated: Whether the last iteration had the same parts; None if there was none.
    """

    said: str
    splits: list[int]
    nbytes: int
    since: int | None
    until: int | None
    repeated: bool | None = None


def sizes_of(
    calls: Sequence[Recorded], recorder: Recorder, before: Sequence[Sizes] | None
) -> list[Sizes]:
    """The sizes of a recording's all-to-alls.

    Args:
        calls: They.
        recorder: The recording.
        before: What this was of the last iteration; None if there was none.
    """
    found = [_sizes(call, recorder) for call in calls]
    if before is None:
        return found
    parts = [(sizes.splits, sizes.nbytes) for sizes in before]
    return [
        evolve(sizes, repeated=(sizes.splits, sizes.nbytes) == last)
        for sizes, last in zip_longest(found, parts)
        if sizes is not None
    ]


def _sizes(call: Recorded, recorder: Recorder) -> Sizes:
    assert call.form is not None
    bound = bind_arguments(call.form.op, call.node.args, call.node.kwargs)
    made: fx.Node = bound.get("out", call.node)
    splits = [*bound["output_split_sizes"], *bound["input_split_sizes"]]
    said = repr(public((call.args, call.kwargs))) if len({*splits}) < 2 else ""
    whole, at = made.meta["val"], recorder.timeline.at
    storage, since, until = recorder.made.get((made, ())), None, None
    if storage is not None and storage.dropped and not whole.storage_offset():
        moments = [at[c.node.name] for c in recorder.calls if c.kind == "op"]
        until = bisect_left(moments, storage.dropped)
        if storage.origin not in (call.node, recorder.filled.get(call.node)):
            since = bisect_left(moments, at[storage.origin.name])
    return Sizes(said, splits, whole.untyped_storage().nbytes(), since, until)


def agreed(
    calls: Sequence[Recorded],
    told: Sequence[Sequence[Mapping[str, Any]]],
    *,
    first: bool,
    registered: bool,
) -> tuple[dict[fx.Node, str], dict[fx.Node, UnequalParts]]:
    """Which all-to-alls are left out, and why; and what those of unequal parts have in common.

    Args:
        calls: They.
        told: `sizes_of` of each rank, as plain data.
        first: Whether sizes may be others in the next iteration.
        registered: Whether placements are registered with NCCL. See [Note: both ends].
    """
    refused: dict[fx.Node, str] = {}
    unequal: dict[fx.Node, UnequalParts] = {}
    for call, *notes in zip(calls, *told, strict=True):
        of_ranks = [Sizes(**note) for note in notes]
        ends = [sizes.until for sizes in of_ranks if sizes.until is not None]
        even = bool(of_ranks[0].said) and len({sizes.said for sizes in of_ranks}) == 1
        same = all(sizes.repeated is not False for sizes in of_ranks)
        if even and same:
            continue
        if registered:
            refused[call.node] = UNEVEN if even else _BOTH_ENDS
        elif not even and len(ends) < len(of_ranks):
            refused[call.node] = _NOT_WHOLE
        elif even or first or not same:
            refused[call.node] = UNEVEN
        else:
            most = max(sizes.nbytes for sizes in of_ranks)
            asked = [sizes.since for sizes in of_ranks if sizes.since is not None]
            unequal[call.node] = UnequalParts(most, min(asked, default=None), max(ends))
    return refused, unequal
