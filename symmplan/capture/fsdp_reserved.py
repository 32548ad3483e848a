"""What torch's allocator has of a device for a recorded step of FSDP2.

[Note: bytes of the allocator]
    The allocator has more of the driver than tensors have of it, and what fragments take of that
    depends on which buffers come and go: FSDP2's own are the largest, and activations use their
    blocks while they are free. So what a plan may take is not the difference between the tensors of
    a step with FSDP2's buffers and without, but that between what the allocator needs for them.
    While a step is recorded it notes what it allocates and frees. That is replayed with
    `symmplan.device.allocator`, with all of FSDP2's buffers and without those that a plan replaces.
    Their difference is what such a plan may take, if the program is to have no more than before.

    Which allocations are FSDP2's own is known by their number: the device was looked at before and
    after FSDP2 alone allocated. In the recorded step FSDP2 has its buffers, and what the step
    leaves behind, such as the state of an optimizer, comes to lie in blocks between them. So a
    second step is replayed in what is left of the first. From one step to the next fragments may
    differ, so a device may have some more than is foreseen.

    Before segments are obtained the allocator gives back what is free as a whole: FSDP2's buffers
    among it. Where an optimizer needs the most at once, in buffers of its own, these had been in
    the same blocks. Then it may need less if it keeps them: where replays say so, and the driver
    has enough for the plan beside them, nothing is given back.

    On a device that is nearly full the allocator gives back its cache to go on, whatever the
    program does. There replays in as many bytes as there are, and in fewer, say whether later steps
    fit, and how often the allocator retries.

[Note: blocks of gradients]
    FSDP2 allocates sharded gradients on the stream that reduces, and torch's allocator keeps blocks
    of streams apart: what gradients had is idle in forward. On the program's stream their blocks
    are for activations then. But a part of such a block may be in use when the allocator gives back
    its cache. So gradients that are pushed move there where replays say that the allocator needs no
    more of the device with them, and retries no more often.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import define, field

from symmplan.device import Allocation
from symmplan.device.allocator import CachingAllocator
from symmplan.model import PUSHES

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from symmplan.capture.fsdp_recording import Recording
    from symmplan.device import HeldBlock
    from symmplan.device.allocator import CachedBlock
    from symmplan.model import AlgorithmName

__all__ = ["Reserved"]

#: How many steps after the second are replayed in so many bytes: fragments differ from one to the
#: next.
_STEPS = 3
#: Into how many parts bytes are divided that something else may take. Devices of up to twice as
#: many bytes less are tried.
_TRIED = 4


@define(eq=False)
class Reserved:
    """What torch's allocator has for a recorded step. See [Note: bytes of the allocator].

    Args:
        recording: The step.
        held: What the allocator had at the first look at its memory.
        allocations: What it did from then on.
        unsharded: ``{site: bytes}`` of the unsharded parameters that a plan may place.
        free: Bytes that a plan may take while the allocator keeps its cache.
        had: The `most` of steps that the program made before.

    Attributes:
        complete: Whether the buffer of each collective was found among the allocations. Those that
            a process group allocates are not there.
        keeps: Whether the allocator keeps its cache when segments are obtained.
        most: Bytes that the allocator needs with all of FSDP2's buffers. It gives nothing back
            until the device is full, so these are no fewer than for earlier steps.
        replaced: By how many bytes the allocator needs less without FSDP2's buffers.
    """

    _recording: Recording
    _held: Sequence[HeldBlock]
    _allocations: Sequence[Allocation]
    _unsharded: Mapping[str, int]
    _free: int = 0
    _had: int = 0
    _flat: dict[int, int] = field(factory=dict, init=False)
    _parameters: dict[int, int] = field(factory=dict, init=False)
    _gradients: dict[int, list[int]] = field(factory=dict, init=False)
    _sums: dict[int, tuple[int, Hashable]] = field(factory=dict, init=False)
    _numbers: dict[int, Hashable] = field(factory=dict, init=False)
    _first: list[tuple[Allocation, bool]] = field(factory=list, init=False)
    _second: list[tuple[Allocation, bool]] = field(factory=list, init=False)
    _ordinary: list[AlgorithmName] = field(init=False)
    complete: bool = field(default=True, init=False)
    keeps: bool = field(default=False, init=False)
    most: int = field(init=False)
    replaced: int = field(init=False)
    _without: int = field(init=False)
    _known: dict[tuple[AlgorithmName, ...], int] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        before = {part.block: -1 - i for i, part in enumerate(self._held) if not part.free}
        self._numbers = {number: block for block, number in before.items()}
        self._first, self._second = _two_steps(self._allocations, before)
        size = {change.number: change.nbytes for change in self._allocations if change.nbytes}
        self._assign(size, {change.number: change.stream for change in self._allocations})
        self._find_gradients(self._first, size)
        calls = len(self._recording.collectives)
        self._ordinary = ["ordinary"] * calls
        most = self.most = max(self._had, self._replayed(self._ordinary))
        placed: list[AlgorithmName] = ["symmetric"] * calls
        given_back = self._without = self._replayed(placed)
        self.keeps = True
        kept = self._replayed(placed)
        self.keeps = kept < given_back and most - kept <= self._free
        if self.keeps:
            self._without = kept
        self.replaced = most - self._without

    def _assign(self, size: Mapping[int, int], streams: Mapping[int, Hashable]) -> None:
        """By their numbers, which allocations are buffers and parameters of which collective.

        And which are sharded gradients: the last that a reduction allocates on another stream.
        """
        for new, begun, filled, then in self._own(size):
            for index in begun:
                nbytes = self._recording.collectives[index].nbytes
                number = next((n for n, there in new.items() if there == nbytes), None)
                if number is None:
                    self.complete = False
                else:
                    self._flat[number] = index
                    del new[number]
                    if self._recording.collectives[index].key.kind == "reduce_scatter":
                        sums = [n for n in then if streams[n] != streams[number]]
                        self._sums.update((n, (index, streams[number])) for n in sums[-1:])
            for index in filled:
                site = self._recording.collectives[index].key.site
                left = self._unsharded.get(site, 0)
                for number, nbytes in sorted(new.items(), key=lambda item: -item[1]):
                    if nbytes <= left:
                        self._parameters[number] = index
                        left -= nbytes

    def _find_gradients(
        self, events: Sequence[tuple[Allocation, bool]], size: Mapping[int, int]
    ) -> None:
        """By a buffer of gradients, those that FSDP2 frees when it has copied them there.

        They were there before the buffer. What is left of it may be padding.
        """
        filling: dict[int, int] = {}  # number of a buffer: bytes of gradients that are not freed
        for change, begins in events:
            number = change.number
            if begins and number in self._flat:
                call = self._recording.collectives[self._flat[number]]
                if call.key.kind == "reduce_scatter":
                    filling[number] = call.pushed_bytes
            elif number > 0 and not begins:
                filling.pop(number, None)
                for buffer, left in filling.items():
                    if number < buffer and size[number] <= left:
                        filling[buffer] -= size[number]
                        self._gradients.setdefault(buffer, []).append(number)
                        break

    def _own(
        self, size: Mapping[int, int]
    ) -> Iterator[tuple[dict[int, int], list[int], list[int], list[int]]]:
        """What FSDP2 alone allocated.

        Yields:
            ``{number of an allocation: bytes}``, the collectives of which it allocated the buffer
            meanwhile, and the gathers of which it allocated parameters; and the numbers of what was
            allocated then, until the next look.
        """
        recording = self._recording
        filled: dict[int, list[int]] = {}
        for index, at in recording.filled.items():
            filled.setdefault(at, []).append(index)
        first = done = before = 0
        for number, look in enumerate(recording.moments):
            if number == 0:
                first = before = look.allocations
            if look.own:
                new = range(before - first + 1, look.allocations - first + 1)
                begun = [i for what, i in recording.events[done : look.events] if what == "begin"]
                found = {n: size[n] for n in new if n in size}
                following = recording.moments[number + 1 : number + 2]
                end = following[0].allocations if following else look.allocations
                then = [n for n in range(new.stop, end - first + 1) if n in size]
                yield found, begun, [] if begun else filled.pop(look.events, []), then
            done, before = look.events, look.allocations

    def more(self, algorithms: Sequence[AlgorithmName]) -> int:
        """How many bytes more the allocator needs with some of FSDP2's buffers than without any.

        Args:
            algorithms: How each collective of the step runs. What FSDP2 has for those that are not
                ordinary lies in placements; gradients that are pushed stay until that is over.
        """
        key = tuple(algorithms)
        if key not in self._known:
            self._known[key] = self._replayed(key)
        return self._known[key] - self._without

    def goes_on(
        self, algorithms: Sequence[AlgorithmName], limit: int, left: int, *, plan: int
    ) -> tuple[bool, bool]:
        """Whether the program fills its device, and whether it goes on as well with a plan.

        It fills it if the allocator has to give back its cache to go on. With a plan it goes on as
        well if that is no more often, and if the program needs no larger device than without. How
        blocks lie next to each other differs with each byte, so devices of several sizes are tried.

        Args:
            algorithms: As for `more`.
            limit: Bytes that the driver has for the allocator and for the plan.
            left: How many of these something else may take.
            plan: Those that the plan takes after the first step.
        """
        plain = planned = 0.0
        least = limit - 2 * left
        if not (self.retries(self._ordinary, least) or self.retries(algorithms, least, plan=plan)):
            return False, True
        for number in range(2 * _TRIED + 1):
            tried = limit - number * left // _TRIED
            without = self.retries(self._ordinary, tried)
            within = self.retries(algorithms, tried, plan=plan)
            if number and without == math.inf:
                break
            if within == math.inf:
                return plain + without > 0, False
            if number <= _TRIED:
                plain, planned = plain + without, planned + within
        return plain > 0, planned <= plain

    def gradients_move(
        self, algorithms: Sequence[AlgorithmName], limit: int, left: int, *, plan: int
    ) -> bool:
        """Whether gradients that are pushed are to be allocated on the program's stream.

        See [Note: blocks of gradients]. Arguments are as for `goes_on`.
        """
        pushed = {i for i, name in enumerate(algorithms) if name in PUSHES}
        freed = {change.number for change, begins in self._second if not begins}
        if not any(n in freed and index in pushed for n, (index, _) in self._sums.items()):
            return False
        if self._replayed(algorithms, moved=True) > self._replayed(algorithms):
            return False
        for number in range(2 * _TRIED, -1, -1):
            tried = limit - number * left // _TRIED
            moved = self.retries(algorithms, tried, plan=plan, moved=True)
            if moved == 0:
                break
            if moved > self.retries(algorithms, tried, plan=plan):
                return False
        return moved < math.inf

    def retries(
        self,
        algorithms: Sequence[AlgorithmName],
        limit: int,
        *,
        plan: int = 0,
        moved: bool = False,
    ) -> float:
        """How often the allocator gives back its cache to go on, in some steps after the second.

        Args:
            algorithms: As for `more`; in the first step all are ordinary.
            limit: Bytes that the driver has for it and for the plan.
            plan: Those that the plan takes after the first step.
            moved: Whether the gradients of later steps that are pushed are on the program's stream.

        Returns:
            Infinity if the steps do not fit.
        """
        allocator = CachingAllocator(limit)
        try:
            blocks = self._recorded(allocator, algorithms)
            if allocator.reserved > limit - plan:
                allocator.empty()
            if allocator.reserved > limit - plan:
                return math.inf
            allocator.limit = limit - plan
            self._replay(allocator, blocks, self._second, algorithms, moved=moved)
            before = allocator.retries
            for _ in range(_STEPS):
                self._replay(allocator, blocks, self._second, algorithms, moved=moved)
        except MemoryError:
            return math.inf
        return allocator.retries - before

    def _replayed(self, algorithms: Sequence[AlgorithmName], *, moved: bool = False) -> int:
        """Bytes that the allocator has in a second step that runs so; the first is ordinary."""
        allocator = CachingAllocator()
        blocks = self._recorded(allocator, algorithms)
        self._replay(allocator, blocks, self._second, algorithms, moved=moved)
        return allocator.reserved

    def _recorded(
        self, allocator: CachingAllocator, algorithms: Sequence[AlgorithmName]
    ) -> dict[int, CachedBlock]:
        """``{number: block}`` of what there is after the recorded step.

        If later ones run otherwise, the allocator has given back its cache for their segments,
        unless it `keeps` that.
        """
        used = allocator.hold(self._held)
        blocks = {number: used[block] for number, block in self._numbers.items()}
        self._replay(allocator, blocks, self._first, self._ordinary)
        if not self.keeps and [*algorithms] != self._ordinary:
            allocator.empty()
        return blocks

    def _replay(
        self,
        allocator: CachingAllocator,
        blocks: dict[int, CachedBlock],
        events: Sequence[tuple[Allocation, bool]],
        algorithms: Sequence[AlgorithmName],
        *,
        moved: bool = False,
    ) -> None:
        pushed = {n for n, index in self._flat.items() if algorithms[index] in PUSHES}
        kept = {gradient for n in pushed for gradient in self._gradients.get(n, ())}
        for change, begins in events:
            number, nbytes = change.number, change.nbytes
            if not begins:
                over = [] if number in kept else [number]
                if number in pushed:
                    over += self._gradients.get(number, ())
                for freed in over:
                    if freed in blocks:
                        allocator.drop(blocks.pop(freed))
                continue
            if number in self._parameters:
                ordinary = algorithms[self._parameters[number]] == "ordinary"
                nbytes = nbytes if ordinary else 0
            elif number in self._flat:
                index = self._flat[number]
                nbytes = nbytes if algorithms[index] == "ordinary" else 0
            stream = change.stream
            if moved and number in self._sums:
                index, programs = self._sums[number]
                stream = programs if algorithms[index] in PUSHES else stream
            if nbytes:
                blocks[number] = allocator.take(nbytes, stream)


def _two_steps(
    allocations: Sequence[Allocation], before: Mapping[Hashable, int]
) -> tuple[list[tuple[Allocation, bool]], list[tuple[Allocation, bool]]]:
    """Each allocation when its block is allocated (True) and freed, in two steps.

    The second makes nothing that the first leaves behind. What was there ``before`` has these
    numbers.
    """
    there = {block: Allocation(number, block, 0, 0) for block, number in before.items()}
    live: dict[Hashable, Allocation] = {}
    events: list[tuple[Allocation, bool]] = []
    for change in allocations:
        if change.block in live:
            events.append((live.pop(change.block), False))
        elif change.block in there:
            events.append((there.pop(change.block), False))
        if change.nbytes:
            live[change.block] = change
            events.append((change, True))
    stay = {change.number for change in live.values()}
    step = [(change, begins) for change, begins in events if change.number not in stay]
    return events, step
