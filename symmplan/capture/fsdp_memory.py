"""How much ordinary memory a recorded step of FSDP2 needs besides what its plan replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from symmplan.model import PUSHES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from symmplan.capture.fsdp_recording import Call, Recording
    from symmplan.model import AlgorithmName

#: More than anybody needs.
_ANY = 1 << 60


class Needed(NamedTuple):
    """Bytes of tensors that later steps have at the same time.

    Attributes:
        need: The most without FSDP2's buffers.
        peak: The most with them.
        slack: For each look at the memory, by how many bytes ``need`` is more than what tensors had
            then, and than what they had at most since the look before; both with FSDP2's buffers.
    """

    need: int
    peak: int
    slack: tuple[int, ...]


def needed(recording: Recording, unsharded: Mapping[str, int]) -> Needed:
    """The most bytes of tensors that later steps have together, without and with FSDP2's buffers.

    All that the plan replaces was there between two moments at which somebody looked that was there
    at both; where FSDP2 alone allocated, all that was there at any. What a step leaves behind for
    later ones, such as the state of an optimizer, they have from the beginning on.

    Args:
        recording: The step; its ``moments`` say what was allocated.
        unsharded: ``{site: bytes}`` of the unsharded parameters that the plan may place.

    Returns:
        Zeros if no moment was recorded.
    """
    if not recording.moments:
        return Needed(0, 0, ())
    peak = earlier = 0
    last = len(recording.moments) - 1
    left = max(0, recording.moments[-1].allocated - recording.moments[0].allocated)
    had: list[int] = []
    for number, (_, allocated, most, *_) in enumerate(recording.moments):
        more = left if number < last else 0
        peak = max(peak, most + more)
        had += (allocated + more, most + more if most > max(allocated, earlier) else -_ANY)
        earlier = allocated
    there = _replaced(recording, recording.collectives, unsharded, lambda _: "symmetric")
    need = max(0, *(a - b for a, b in zip(had, there, strict=True)))
    return Needed(need, peak, tuple(need - nbytes for nbytes in had))


def needed_more(
    recording: Recording,
    collectives: Sequence[Call],
    unsharded: Mapping[str, int],
    algorithm_of: Callable[[Call], AlgorithmName],
    slack: Sequence[int],
) -> int:
    """How many bytes more than ``Needed.need`` later steps need for what a plan leaves ordinary.

    Of what is not placed FSDP2 has its own buffers; gradients that are pushed are there until their
    reduction is over.

    Args:
        recording: The step.
        collectives: Its collectives, as they are planned.
        unsharded: As for `needed`.
        algorithm_of: How a collective runs.
        slack: As `Needed` has it, on all ranks the least of theirs; empty if these did not look at
            the same moments, and then nothing is known.
    """
    if not slack:
        return 0
    there = _replaced(recording, collectives, unsharded, algorithm_of)
    return max(0, *(-a - b for a, b in zip(slack, there, strict=True)))


def _replaced(
    recording: Recording,
    collectives: Sequence[Call],
    unsharded: Mapping[str, int],
    algorithm_of: Callable[[Call], AlgorithmName],
) -> Iterator[int]:
    """Bytes of FSDP2's that a plan replaces, at each look and when most were there before it."""
    live: dict[tuple[int, str], int] = {}
    filled = {at: index for index, at in recording.filled.items()}
    done = before = 0
    for count, _, _, own, _ in recording.moments:
        most = before
        for at, (what, index) in enumerate([*recording.events[done:count], ("", 0)], done):
            if at in filled:
                gather = filled.pop(at)
                call = collectives[gather]
                if algorithm_of(call) != "ordinary":
                    placed = unsharded.get(call.key.site, 0)
                    live[gather, "parameters"] = min(placed, call.nbytes)  # without padding
            if what in ("", "tenant"):
                continue
            call = collectives[index]
            algorithm = algorithm_of(call)
            if what == "begin" and algorithm != "ordinary":
                live[index, "flat"] = call.nbytes
            elif what == "run" and algorithm in PUSHES:
                live[index, "flat"] = call.nbytes - call.pushed_bytes
            elif what == "drop":
                live.pop((index, "flat"), None)
            elif what == "release":
                live.pop((index, "parameters"), None)
            most = max(most, sum(live.values()))
        done, after = count, sum(live.values())
        yield after
        yield max(most, after) if own else min(before, after)
        before = after
