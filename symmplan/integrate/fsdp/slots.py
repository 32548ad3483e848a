"""What `symmplan.integrate.fsdp.serve` keeps of each buffer."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from attrs import define

from symmplan.coordination.own import own_work
from symmplan.device import kind_of
from symmplan.integrate.fsdp.push import sent_as
from symmplan.runtime.observe import launching

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.capture.fsdp_recording import Key, Recording
    from symmplan.integrate.fsdp.schedule import ScheduledCollective
    from symmplan.place.expected import Expected
    from symmplan.runtime.leases import Lease

__all__ = ["Slot"]


@define(eq=False)
class Slot:
    """The buffer that was handed out for a collective, until that collective runs.

    Attributes:
        key: Which collective.
        base: The buffer's bytes under another storage. Collectives get this one: their threads
            may hold it longer than FSDP2 does, which must not look as if FSDP2 did.
        plain: Makes the buffer in ordinary memory.
        held: Whether anybody holds the buffer.
        scheduled: What the plan has of it, None while recording or if the plan has none.
        lease: Set if the buffer lies in its placement.
        index: Its index in ``log``.
        log: The recording it is in.
        served: How many buffers FSDP2 asked for with it: 2 for a reduce-scatter's output.
        expected: How it is to run, where that is being checked.
        pushed: Whether its bytes go straight to the peers.
        take_shared: Takes the bytes of a shared slot for the buffer, if they are not in use.
        send: Pushes the gradients where the buffer has no bytes, until FSDP2 has given them.
        hold: Told of gradients, bytes of an element, and the buffer with which they are dropped.
        flat: An ordinary buffer for the gradients' copy-in, if they are to be pushed and are not,
            because the plan has no room for them.
        pushing: The gradients that are being pushed. FSDP2 drops the buffer when its stream waits
            for the end of the reduction, so their memory is free then.
        output: For the sums, where that is allocated before FSDP2 asks for it.
    """

    key: Key
    base: torch.Tensor
    plain: Callable[[], torch.Tensor]
    held: bool = True
    scheduled: ScheduledCollective | None = None
    lease: Lease | None = None
    index: int = 0
    log: Recording | None = None
    served: int = 1
    expected: Expected | None = None
    pushed: bool = False
    take_shared: Callable[[], Lease | None] | None = None
    send: Callable[..., tuple[torch.Tensor, ...]] | None = None
    hold: Callable[..., None] | None = None
    flat: torch.Tensor | None = None
    pushing: tuple[torch.Tensor, ...] = ()
    output: torch.Tensor | None = None

    def accept(
        self, gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> torch.Tensor | None:
        """The gradients that FSDP2 would copy into the buffer go to the peers, if they are to.

        Returns:
            Where FSDP2 copies them; None if they were pushed.
        """
        travels = sent_as(gradients, buffer.dtype)
        if self.log is not None:
            self.log.send(self.index, str(travels).removeprefix("torch."))
        if self.hold is not None:
            self.hold(gradients, travels.itemsize, buffer)
        send, self.send = self.send, None
        if send is None:
            return buffer
        assert self.scheduled is not None
        assert self.scheduled.place is not None
        # All ranks push in the type that they agreed on, whatever autograd made on one of them.
        call = self.scheduled.call
        planned = getattr(torch, call.sent or call.key.dtype)
        fits = torch.promote_types(travels, planned) == planned
        if not fits and kind_of(buffer.device).is_accelerator:  # nobody can tell the peers
            self.pushed, self.flat = False, self.plain()
            return self.flat
        with own_work, launching(self.expected):
            shared = None if self.take_shared is None else self._took
            self.pushing = send(
                gradients, travels=planned, take=shared, site=self.key.site, fits=fits
            )
        return None

    def _took(self) -> bool:
        """The bytes of a shared slot are this buffer's, until they are summed; if they can be."""
        assert self.take_shared is not None
        self.lease = self.take_shared()
        return self.lease is not None

    def watch(self, buffer: torch.Tensor) -> None:
        """The slot is dropped with this tensor, and lives as long: it keeps what is being pushed.

        The tensor has no bytes that others may keep.
        """
        weakref.finalize(buffer, self.drop).atexit = False

    def drop(self) -> None:
        """Note that the buffer's last tensor is gone; later calls do nothing. In any thread."""
        if not self.held:
            return
        self.held = False
        self.send = self.flat = None
        self.pushing = ()
        if self.lease is not None:
            self.lease.drop()
        if self.log is not None:
            self.log.drop(self.index)

    def ran(self, work: Any, *, done: bool) -> None:
        """It was issued on the current stream.

        Args:
            work: What an asynchronous collective returned, or None.
            done: Nothing touches the bytes after the collective.
        """
        if self.lease is not None:
            self.lease.issued(work, done=done)
            if self.pushed:  # others may have the bytes before FSDP2 drops a buffer that has none
                self.lease.drop()
