"""What a program with FSDP2 has of its device before it is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from symmplan.capture.fsdp_memory import needed, needed_more
from symmplan.capture.fsdp_recording import Look
from symmplan.capture.fsdp_reserved import Reserved
from symmplan.coordination.all_gather import all_agree, least
from symmplan.memory.device_memory import Allocations, device_memory, most_lately
from symmplan.memory.room import LEFT, SMALL, Usage, beside_cache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    import torch

    from symmplan.capture.fsdp_recording import Call, Recording
    from symmplan.model import AlgorithmName

__all__ = ["ProgramUsage"]


class ProgramUsage:
    """What a program has of its device, as long as nothing is planned.

    Args:
        timeout: Seconds that ranks wait for each other.

    Attributes:
        looks: Whether `look` still writes anything down.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._allocations = Allocations()
        self._reserved: Reserved | None = None
        self.begin()

    def begin(self, device: torch.device | None = None, segments: int = 0) -> None:
        """Nothing is known, and the device is looked at from now on. Collective: no.

        Args:
            device: Which, where the program had a plan.
            segments: Bytes of that.
        """
        self.end()
        self.looks = True
        there = None if device is None else device_memory(device)
        # The program may have emptied the cache since its last recording.
        now = 0 if there is None else there.reserved + segments
        self._had = 0 if self._reserved is None else min(now, self._reserved.most)
        self._usage: Usage | None = None
        # The recording by which that is known, and what torch's allocator has for it.
        self._looked: Recording | None = None
        self._reserved = None
        self._most = self._retries = 0
        self._retried = False

    def look(self, recording: Recording, device: torch.device, *, own: bool = False) -> None:
        """Write down what the device has now, until the program is planned. Collective: no.

        Args:
            recording: What is being recorded.
            device: The device.
            own: As in `Look`.
        """
        if self._usage is not None:
            return
        there = device_memory(device)
        self.looks = there is not None
        if there is not None:
            most = most_lately(there, self._most, self)
            if not recording.moments:
                most, self._retries = there.allocated, there.retries
                self._allocations.begin(device)
            self._most = max(self._most, there.most_allocated)
            now = len(recording.events), there.allocated, most, own, there.allocations
            recording.moments.append(Look(*now))

    def had(self, recording: Recording, unsharded: Mapping[str, int], device: torch.device) -> None:
        """Remember what a program that is not planned yet had of its device. Collective: no.

        Args:
            recording: Its step.
            unsharded: ``{site: bytes}`` of the parameters that a plan may place.
            device: The device.
        """
        there = device_memory(device)
        if there is None or self._usage is not None:
            return
        last = recording.moments[-1] if recording.moments else None
        if last is None or last[:2] != (len(recording.events), there.allocated):
            self.look(recording, device)
        self._looked, self.looks = recording, False
        need, peak, slack = needed(recording, unsharded)
        most = there.most_reserved + max(0, peak - self._most)
        self._usage = Usage(need, most, slack)
        # Once may have been for what an earlier program left in the cache.
        self._retried = there.retries > self._retries + 1
        held, allocations = self._allocations.end()
        if allocations:
            free = beside_cache(there)
            reserved = Reserved(recording, held, allocations, unsharded, free, self._had)
            self._reserved = reserved if reserved.complete else None

    def agreed(self, groups: Mapping[str, Any], others: int) -> Usage | None:
        """What the program had; None where that is not known.

        Args:
            groups: ``{name: process group}``.
            others: Bytes of other segments that were made since.

        Collective: yes, over those groups, where it is known.
        """
        usage, looked = self._usage, self._looked
        if usage is None or looked is None:
            return usage
        if not all_agree("history", self._reserved is not None, groups, self._timeout):
            self._reserved = None
        looks = [look.events for look in looked.moments]
        seen = [looked.events, looks, sorted(looked.filled.items())]
        if not all_agree("looks", repr(seen), groups, self._timeout):
            usage = evolve(usage, slack=())
        less = None if self._reserved is None else self._reserved.replaced - others
        return evolve(usage, most=usage.most - others, less=less)

    @property
    def keeps_cache(self) -> bool:
        """Whether torch's allocator keeps its cache here for a plan's segments."""
        return self._reserved is not None and self._reserved.keeps

    def needed_besides(
        self,
        nbytes: int,
        beyond: int,
        collectives: Sequence[Call],
        unsharded: Mapping[str, int],
        algorithms: Sequence[AlgorithmName],
        slack: Sequence[int],
        groups: Mapping[str, Any],
    ) -> int:
        """How many bytes more than at least the program needs besides the segments of a plan.

        Args:
            nbytes: Bytes of the plan.
            beyond: Bytes of its communicators and windows, if they count.
            collectives: Those of the step whose memory was looked at, as they are planned.
            unsharded: ``{site: bytes}`` of the parameters that a plan may place.
            algorithms: As for `Reserved.more`.
            slack: As `needed_more` takes it.
            groups: ``{name: process group}``.

        Returns:
            0 where nobody looked. The same on all ranks.

        Collective: yes, over those groups, where torch's allocator noted what it did.
        """
        if self._looked is None:
            return 0

        of = dict(zip(collectives, algorithms, strict=True))
        tensors = needed_more(self._looked, collectives, unsharded, of.__getitem__, slack)
        if self._reserved is None:
            return tensors
        # Fragments may have room for tensors in a replay, and not in the program.
        more = max(tensors, self._reserved.more(algorithms))
        more += beyond if nbytes > SMALL else 0
        return -least("bytes besides", [-more], groups, self._timeout)[0]

    def filled(
        self,
        nbytes: int,
        algorithms: Sequence[AlgorithmName],
        device: torch.device,
        groups: Mapping[str, Any],
        *,
        fits: bool,
    ) -> tuple[bool, bool]:
        """Whether the program fills its device, and whether it goes on as well with a plan.

        `Reserved.goes_on` says it where it is known what torch's allocator does.

        Args:
            nbytes: Bytes of the plan, and what it takes beyond its segments.
            algorithms: As for `Reserved.more`.
            device: The device.
            groups: ``{name: process group}``.
            fits: Whether tensors and the plan fit. Elsewhere that decides, and whether the
                allocator retried more than once in the recorded step.

        Returns:
            Whether the program fills its device on any rank, and goes on as well on all.

        Collective: yes, over those groups.
        """
        reserved, there, full = self._reserved, device_memory(device), self._retried
        if reserved is not None and there is not None:
            most = there.free + there.reserved
            full, fits = reserved.goes_on(algorithms, most, LEFT, plan=nbytes)
        said = int(not full), int(fits)
        empty, all_fit = least("full devices", said, groups, self._timeout)
        return not empty, all_fit > 0

    def gradients_move(
        self, nbytes: int, algorithms: Sequence[AlgorithmName], device: torch.device
    ) -> bool:
        """Whether this rank's gradients are to be allocated on the program's stream.

        See [Note: blocks of gradients] in `symmplan.capture.fsdp_reserved`.

        Args:
            nbytes: Bytes of the plan, which has its segments.
            algorithms: As for `Reserved.more`.
            device: The device.

        Collective: no.
        """
        there = device_memory(device)
        if self._reserved is None or there is None:
            return False
        most = there.free + there.reserved + nbytes
        return self._reserved.gradients_move(algorithms, most, LEFT, plan=nbytes)

    def end(self) -> None:
        """Nobody plans the program. Collective: no."""
        self._allocations.end()
