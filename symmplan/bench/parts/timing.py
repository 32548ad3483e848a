"""Time sides in turn, on each rank and over all of them."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, TypeVar

from symmplan.launcher.ranks import mark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

__all__ = [
    "alternate",
    "device_of",
    "in_turns",
    "least_free",
    "marked",
    "median_ms",
    "meet",
    "slowest",
    "tell",
    "timed",
]


def device_of(settings: Mapping[str, Any], rank: int) -> torch.device:
    """This rank's device."""
    import torch

    return torch.device("cuda", rank) if settings["device"] == "cuda" else torch.device("cpu")


def least_free(device: torch.device, needs: int = 0) -> int | None:
    """The least bytes that are left on a rank's device, free or cached; None on the CPU.

    Args:
        device: This rank's.
        needs: Bytes that this rank needs besides; if they are not there, the result is below 0.

    Collective: yes.
    """
    import torch
    import torch.distributed as dist

    from symmplan.memory.device_memory import device_memory

    there = device_memory(device)
    if there is None:
        return None
    left = torch.tensor(there.free + there.reserved - there.allocated - needs, device=device)
    dist.all_reduce(left, op=dist.ReduceOp.MIN)
    return int(left.item())


def meet() -> None:
    """A barrier over all ranks, which tells NCCL the device instead of letting it guess.

    Collective: yes.
    """
    import torch
    import torch.distributed as dist

    cuda = dist.get_backend() == "nccl"
    dist.barrier(device_ids=[torch.cuda.current_device()] if cuda else None)


T = TypeVar("T")


def marked(items: Sequence[T], name: Callable[[T], str]) -> Iterator[T]:
    """The items one by one; the command says which it is, how much is done and what is left."""
    for i, item in enumerate(items):
        mark(name(item), i / len(items))
        yield item


def in_turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """In which order sides run in each of ``rounds`` rounds: each is the first in turn.

    >>> in_turns(["a", "b"], 3)
    [['a', 'b'], ['b', 'a'], ['a', 'b']]
    """
    turns = [i % len(names) for i in range(rounds)]
    return [[*names[turn:], *names[:turn]] for turn in turns]


def timed(act: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds until all that ``act`` started on ``device`` has ended, and what it returned."""
    import torch

    wait = torch.cuda.synchronize if device.type == "cuda" else None
    if wait is not None:
        wait(device)
    begin = time.perf_counter()
    result = act()
    if wait is not None:
        wait(device)
    return time.perf_counter() - begin, result


def alternate(
    sides: Mapping[str, Callable[[int], Any]],
    rounds: int,
    device: torch.device,
    *,
    warm_up: int = 0,
    before: Callable[[], Any] = meet,
    judge: Callable[[dict[str, Any]], Any] = id,
    prepare: Callable[[str, int], Any] | None = None,
) -> dict[str, list[float]]:
    """Run all sides in each round, so that other load hits them alike.

    Args:
        sides: Each is called with the number of the round.
        rounds: How many are timed.
        device: On which they run.
        warm_up: Rounds before these.
        before: What ranks do before each side: they meet.
        judge: Is given what the sides of a round returned.
        prepare: Called before that with a side's name and the round, and not timed.

    Returns:
        Seconds of each timed round, by side.

    Collective: as the sides and ``before`` are.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn, order in enumerate(in_turns(list(sides), warm_up + rounds)):
        results = {}
        for name in order:
            if prepare is not None:
                prepare(name, turn)
            before()
            taken, results[name] = timed(lambda side=sides[name]: side(turn), device)  # type: ignore[misc] # noqa: B023
            if turn >= warm_up:
                seconds[name].append(taken)
        judge(results)
    tell(seconds)
    return seconds


def tell(seconds: Mapping[str, Sequence[float]]) -> None:
    """Let the command say this rank's medians now: a later time-out does not lose them."""
    medians = (f"{side} {ms} ms" for side, ms in median_ms(seconds).items())
    mark(f"measured on this rank: {', '.join(medians)}")


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Seconds of each round by side: a round is over when its slowest rank is."""
    return {
        side: [max(times) for times in zip(*(found[side] for found in ranks), strict=True)]
        for side in ranks[0]
    }


def median_ms(seconds: Mapping[str, Sequence[float]], digits: int = 3) -> dict[str, float]:
    """The median of each side, in milliseconds."""
    return {side: round(statistics.median(times) * 1e3, digits) for side, times in seconds.items()}
