"""Let peers come out of collectives that this rank will never make.

[Note: who waits on a device]
    A rank may have started planned collectives that the one that departs never comes to. Its device
    waits for them, and NCCL cannot always be told to stop (its symmetric kernels listen to an abort
    only from 2.29.7 on). So nobody is left waiting: every rank says how many planned calls it has
    made, and those that made fewer make the collectives that the others have started, on the same
    placements and with whatever lies there. The bytes of their own placements are put back. Whoever
    waited has been told before, and raises before it can use a result.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch

from symmplan.capture.graphs import at_path
from symmplan.integrate.eager.faults import ends_within
from symmplan.integrate.eager.tape import starter
from symmplan.memory.own import own_work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.integrate.eager.schedule import Event
    from symmplan.memory.groups import Group

__all__ = ["catch_up"]

_POLL = 0.02
#: Seconds that the device has to end what was made up for.
_REST = 5.0


def _missing(event: Event, device: torch.device) -> Callable[[], None] | None:
    """What peers need of a call; None if it is nothing or cannot be made up for."""
    row = event.row
    if row is None or row.one_sided:
        return None
    values = event.recorded
    values["group_name"] = event.group or values.get("group_name")
    start = starter(row.target, values, device)
    if start is None:
        return None
    places = {(s.head, s.index): place for s, place in event.arguments.items()}

    def at(head: str, path: tuple[int, ...]) -> Any:
        """The placement of an argument; its shape and type if it has none."""
        return places.get((head, path), at_path(values[head], path))

    pairs = []
    for path in [(i,) for i in range(len(values["inputs"]))] if row.each else [()]:
        head = "inputs" if row.each else "input"
        if row.out == "return":
            like = event.shapes[path]
            out = event.results.get(path, (like.shape, like.dtype))
        else:
            out = at(row.out, path)
        pairs.append((out, out if row.inplace or row.out == head else at(head, path)))

    def make() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        for out, source in pairs:
            there = _real(out, device)
            saved = there.clone()
            work = start(there, there if source is out else _real(source, device))
            if work is not None:
                work.wait()
            there.copy_(saved)

    return make


def _real(tensor: Any, device: torch.device) -> torch.Tensor:
    """A placement, or ordinary memory where there is none: peers use such, too."""
    if isinstance(tensor, torch.Tensor):
        return tensor
    shape, dtype = tensor
    return torch.zeros(shape, dtype=dtype, device=device)


@own_work
def catch_up(
    group: Group,
    key: str,
    made: int,
    events: Sequence[Event],
    device: torch.device,
    patience: float,
) -> None:
    """Say how many calls this rank has made, and make those that others are waiting in.

    Args:
        group: The ranks.
        key: Where in the group's store; the same on all ranks, and new.
        made: How many planned calls this rank has made, in all iterations.
        events: The planned calls of an iteration.
        device: Where the tensors lie.
        patience: Seconds that the others have to say so.

    Never raises.

    Collective: yes; who waits too long goes on.
    """
    if group.size == 1:
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return  # what is captured does not run
    with contextlib.suppress(Exception):  # there is another error to tell of
        if not any(_missing(event, device) for event in events):
            return
        group.store.set(f"{key}/{group.rank}", str(made))
        keys = [f"{key}/{rank}" for rank in range(group.size)]
        deadline = time.monotonic() + patience
        while not group.store.check(keys):
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL)
        last = max(made, *(int(bytes(group.store.get(k))) for k in keys))
        calls = [events[i % len(events)] for i in range(made, last)]
        acts = [_missing(event, device) for event in calls if event.call.kind == "op"]
        if None in acts:
            return
        with torch.inference_mode():
            for act in acts:
                assert act is not None
                act()
        if acts and device.type == "cuda":
            # Whoever aborts a communicator in which kernels still run may crash its peers.
            ends_within(_REST, torch.cuda.synchronize, device)
