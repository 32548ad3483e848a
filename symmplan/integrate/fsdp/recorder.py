"""What is recorded of FSDP2 while a program runs: the stretch since the last moment of planning.

[Note: when the plan is frozen]
    FSDP2 does not say where a step ends, and all ranks must freeze at the same moment. So the
    moment comes from the sequence of collectives: it is the first collective outside a backward
    pass after a backward pass that reduced gradients. A program that reduces no gradients is frozen
    after `PATIENCE` collectives for each FSDP module, at the next collective outside a backward
    pass. The same rule divides later steps. If a step has used collectives that the plan does not
    know, the program is planned again at such a moment. See also [Note: planned for once].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmplan.capture.fsdp_recording import Key, Recording

if TYPE_CHECKING:
    from collections.abc import Iterable

    from symmplan.integrate.fsdp.zero_copy import ZeroCopyUnshard

__all__ = ["PATIENCE", "StepEnds", "StepRecorder"]

#: After how many collectives per module a program that reduces no gradients is planned.
PATIENCE = 8

#: More collectives than this without an end of the step are no longer recorded.
_LONGEST = 1 << 17


class StepEnds:
    """Where a program may be planned. See [Note: when the plan is frozen].

    Attributes:
        backward: Whether the last collective was one of a backward pass.
    """

    def __init__(self) -> None:
        self.backward = False
        self._reduced = False
        self._seen: set[Key] = set()

    @property
    def trained(self) -> bool:
        """Whether a backward pass that reduced gradients has ended just now."""
        return self._reduced and self.backward

    def begin(self) -> None:
        """No gradients were reduced yet."""
        self._reduced = False

    def before(self, key: Key) -> bool:
        """Whether a new round of the program begins with this collective, which it comes to."""
        if key.of_backward:
            return False
        if self.backward or key in self._seen:
            self._seen = {key}
            return True
        self._seen.add(key)
        return False

    def ran(self, key: Key) -> None:
        """The collective ran."""
        self.backward = key.of_backward
        self._reduced = self._reduced or key.kind == "reduce_scatter"


class StepRecorder:
    """Writes a recording, stretch after stretch.

    Attributes:
        log: The stretch; None while nothing is recorded.
    """

    def __init__(self) -> None:
        self.log: Recording | None = Recording()
        # The recording of each module's last all-gather, and its index there.
        self._last: dict[str, tuple[Recording, int]] = {}
        # Where those are recorded that were put off.
        self._early: dict[Key, tuple[Recording, int]] = {}

    def begin(
        self, key: Key, nbytes: int, group: str = "", *, outside: bool
    ) -> tuple[Recording | None, int]:
        """FSDP2 asks for a buffer; returns where that is recorded.

        Args:
            key: The collective.
            nbytes: Size of the buffer in bytes.
            group: Over which an all-gather runs at once, where the parameters live. Its beginning
                may have been recorded when it was put off.
            outside: Whether that is in no training pass.
        """
        log = self.log
        early, index = self._early.pop(key, (None, 0)) if group else (None, 0)
        if log is None:
            return None, 0
        if early is not log:
            if key.kind == "all_gather" and key.site in self._last:
                self.released(key.site)  # FSDP2 has forgotten a gather that it did not wait for
            if len(log.collectives) >= _LONGEST:
                self.log = None
            index = log.begin(key, nbytes, outside=outside)
        if group:
            log.run(index, group)
            self._last[key.site] = log, index
        return log, index

    def ran(self, site: str, log: Recording, index: int) -> None:
        """A module's all-gather ran, which was recorded there."""
        self._last[site] = log, index

    def put_off(self, key: Key, *, outside: bool) -> None:
        """An all-gather was asked for, and waits."""
        if self.log is not None:
            self._early[key] = self.log, self.log.begin(key, key.nbytes, outside=outside)

    def last(self, site: str) -> tuple[Recording | None, int]:
        """The recording of a module's last all-gather, None if it was released, and its index."""
        return self._last.get(site, (None, 0))

    def released(self, site: str, *, after_forward: bool = False) -> None:
        """A module is done with what was gathered last."""
        log, index = self._last.pop(site, (None, 0))
        if log is not None:
            log.release(index, after_forward=after_forward)

    def release_all(self) -> None:
        """All modules lose what was gathered in this stretch, if a new plan is made of it."""
        for log, index in self._last.values():
            if log is self.log:
                log.release(index)

    def rest(self) -> None:
        """Record nothing until a stretch begins."""
        self.log = None
        self._last.clear()
        self._early.clear()

    def begin_stretch(
        self, there: Iterable[ZeroCopyUnshard], unshards: Iterable[ZeroCopyUnshard]
    ) -> None:
        """Record what comes, in case that it must be planned.

        Args:
            there: What is unsharded, which is a part of it.
            unshards: All; what was put off, and waits, is a part of it, too.
        """
        log = self.log = Recording()
        early, self._early = self._early, {}
        for unshard in there:
            key = unshard.key(backward=False)
            last, index = self.last(key.site)
            outside = last is not None and index in last.outside
            self.ran(key.site, log, log.carry(key, unshard.group, outside=outside))
        for unshard in unshards:
            if unshard.asked is not None and unshard.asked.key in early:
                last, index = early[unshard.asked.key]
                self.put_off(unshard.asked.key, outside=index in last.outside)
