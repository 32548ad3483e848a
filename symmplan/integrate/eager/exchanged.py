"""All-to-alls of a recorded iteration whose parts are not all of one size.

[Note: two iterations]
    Such parts may be others in each iteration, as those of experts are, or the same, as those of an
    optimizer's matrices are. So a second iteration is recorded: a call whose sizes were the same in
    both, on all ranks, gets a placement. What only the rank knows stays its own affair: its sizes,
    and what it does with its rows. See [Note: unequal parts] in `symmplan.capture.eager_problem`.
    In NCCL's memory what is sent gets a placement, too; see [Note: both ends] in
    `symmplan.place.algorithms`.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from symmplan.capture.apart import storage_key
from symmplan.capture.eager_problem import declared_calls, on_all_ranks
from symmplan.capture.graphs import LiveRange, UnequalParts
from symmplan.integrate.eager.faults import public
from symmplan.registry import bind_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from torch import fx

    from symmplan.capture.eager import Recorder
    from symmplan.capture.recorded import Recorded, Storage

__all__ = ["DIFFER", "UNEVEN", "Sizes", "agreed", "sizes_of"]

UNEVEN = "its parts are not all of one size on all ranks, and other iterations have others"
#: Why a call is left out whose parts are the same in each iteration.
DIFFER = (
    "its parts are not all of one size, and the ranks do not use the planned tensors alike, or use "
    "them on several streams"
)
#: See [Note: both ends] in `symmplan.place.algorithms`.
_NOT_ALIKE = (
    "its parts are not all of one size, and the ranks do not pass its tensors to the same other "
    "collectives, of which NCCL would need the same memory on all ranks"
)
_NOT_WHOLE = (
    "its parts are not all of one size, and on some rank its result is not a whole tensor that the "
    "iteration makes and drops"
)


def _live_range(told: LiveRange | Mapping[str, Any]) -> LiveRange:
    return told if isinstance(told, LiveRange) else LiveRange(**told)


@frozen
class Sizes:
    """How large an all-to-all is on one rank.

    Attributes:
        said: The call, as it is on all ranks if all its parts are of one size; empty otherwise.
        splits: Rows from each rank and to each.
        received: Of its result.
        sent: Of its input.
        used: Which declared calls use its tensors, by their numbers.
        repeated: Whether the last iteration had the same parts; None if there was none.
    """

    said: str
    splits: list[int]
    received: LiveRange = field(converter=_live_range)
    sent: LiveRange = field(converter=_live_range)
    used: list[int]
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
    moments = [recorder.timeline.at[node.name] for node in on_all_ranks(recorder)]
    declared = declared_calls(recorder)
    by_call = {*recorder.filled.values(), *(call.node for call in declared)}
    in_use = functools.partial(_in_use, recorder, moments, by_call)
    users: dict[Storage, list[int]] = {}
    for i, call in enumerate(declared):
        for storage in call.storages:
            users.setdefault(storage, []).append(i)
    found = [_sizes(call, recorder, in_use, users) for call in calls]
    ranges = [live for sizes in found for live in (sizes.received, sizes.sent)]
    ends = sorted({at for live in ranges for at in (live.asked, live.dropped)})
    numbers = {at: number for number, at in enumerate(ends)}
    found = [
        evolve(s, received=_numbered(s.received, numbers), sent=_numbered(s.sent, numbers))
        for s in found
    ]
    if before is None:
        return found
    parts = [(sizes.splits, sizes.received.nbytes) for sizes in before]
    return [
        evolve(sizes, repeated=(sizes.splits, sizes.received.nbytes) == last)
        for sizes, last in zip_longest(found, parts)
        if sizes is not None
    ]


def _numbered(live: LiveRange, numbers: Mapping[int, int]) -> LiveRange:
    return evolve(live, asked=numbers[live.asked], dropped=numbers[live.dropped])


def _sizes(
    call: Recorded,
    recorder: Recorder,
    in_use: Callable[..., LiveRange],
    users: Mapping[Storage, Sequence[int]],
) -> Sizes:
    assert call.form is not None
    bound = bind_arguments(call.form.op, call.node.args, call.node.kwargs)
    made: fx.Node = bound.get("out", call.node)
    splits = [*bound["output_split_sizes"], *bound["input_split_sizes"]]
    said = repr(public((call.args, call.kwargs))) if len({*splits}) < 2 else ""
    received = in_use(made, recorder.made.get((made, ())))
    given: fx.Node = bound["input"]
    key = storage_key(given.meta["val"])
    found = (s for s in call.storages if s.meta._cdata == key and s.made)
    sent = in_use(given, next(found, None), told=True)
    used = sorted({i for storage in call.storages for i in users[storage]})
    return Sizes(said, splits, received, sent, used)


def _in_use(
    recorder: Recorder,
    moments: Sequence[int],
    by_call: AbstractSet[fx.Node],
    node: fx.Node,
    storage: Storage | None,
    *,
    told: bool = False,
) -> LiveRange:
    """Of a tensor of a call; ``told`` if it must be in a placement if what makes it is told to.

    Moments stand for their numbers.
    """
    tensor, at = node.meta["val"], recorder.timeline.at
    unknown = LiveRange(tensor.untyped_storage().nbytes(), since=None, until=None)
    if storage is None or not storage.dropped or tensor.storage_offset():
        return unknown
    if told and storage.origin not in by_call | recorder.writes.keys():
        return unknown
    until, made = bisect_left(moments, storage.dropped), at[storage.origin.name]
    since = None if storage.origin in by_call else bisect_left(moments, made)
    return evolve(unknown, since=since, until=until, asked=made, dropped=storage.dropped)


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
        registered: Whether what is sent gets a placement, too.
    """
    refused: dict[fx.Node, str] = {}
    unequal: dict[fx.Node, UnequalParts] = {}
    for call, *notes in zip(calls, *told, strict=True):
        of_ranks = [Sizes(**note) for note in notes]
        received = _of_all([sizes.received for sizes in of_ranks])
        even = bool(of_ranks[0].said) and len({sizes.said for sizes in of_ranks}) == 1
        same = all(sizes.repeated is not False for sizes in of_ranks)
        if even and same:
            continue
        if not even and received.until is None:
            refused[call.node] = _NOT_WHOLE
        elif even or first or not same:
            refused[call.node] = UNEVEN
        elif registered and any(sizes.used != of_ranks[0].used for sizes in of_ranks):
            refused[call.node] = _NOT_ALIKE
        else:
            sent = _of_all([sizes.sent for sizes in of_ranks]) if registered else None
            unequal[call.node] = UnequalParts(received, sent)
    return refused, unequal


def _of_all(ranges: Sequence[LiveRange]) -> LiveRange:
    """The live range of a tensor on all ranks."""
    asked = [live.since for live in ranges if live.since is not None]
    ends = [live.until for live in ranges if live.until is not None]
    most = max(live.nbytes for live in ranges)
    until = max(ends) if len(ends) == len(ranges) else None
    return LiveRange(
        most,
        min(asked, default=None),
        until,
        asked=min(live.asked for live in ranges),
        dropped=max(live.dropped for live in ranges),
    )
