"""FSDP2 in a simulated world: it is recorded and planned, and runs on nothing.

See [Note: the simulated world] in `symmplan.coordination.world`. Buffers are fake tensors, each
with a storage of its own whose end is seen as a loan's is, also once there is a plan: what matters
is which collectives a program asks for, and when it drops their buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from symmplan.coordination.world import SimulatedCall, World, at_end
from symmplan.integrate.fsdp.runtime import Runtime
from symmplan.integrate.fsdp.slots import Slot
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from symmplan.capture.fsdp_recording import Key
    from symmplan.integrate.fsdp.slots import Where
    from symmplan.model import AlgorithmName, Plan
    from symmplan.runtime.options import Options

__all__ = ["SimulatedRuntime"]


class SimulatedRuntime(Runtime):
    """All FSDP modules of one model, as `Runtime`.

    Args:
        options: As for `Runtime`.
        modules: As for `Runtime`.
        live: As for `Runtime`.
        world: In which they are.
    """

    def __init__(self, options: Options, modules: int, live: int | None, world: World) -> None:
        super().__init__(options, modules, live)
        self._world = world
        world.join(self)

    def open(
        self, key: Key, dtype: torch.dtype, device: torch.device, plain: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, Slot]:
        """The buffer for the program's next collective, of ordinary memory."""
        if self._arrived != key:
            self.arrive(key, device)
        self._arrived = None
        buffer = plain()
        # What is kept of it must not keep it.
        slot = Slot(key, torch.empty(0, dtype=dtype, device=device), scheduled=self._follow(key))
        if self._log is not None:
            slot.log, slot.index = self._log, self._log.begin(key, key.numel * dtype.itemsize)
        at_end(buffer, slot.drop)
        self._world.buffer(self, key, buffer)
        return buffer.view(-1), slot

    def run(
        self,
        slot: Slot | None,
        buffer: torch.Tensor,
        group: dist.ProcessGroup,
        in_place: Callable[[Where], Callable[[], Any] | None],  # noqa: ARG002
        plain: Callable[[torch.Tensor], Any],
        *,
        result: bool,  # noqa: ARG002
    ) -> Any:
        """Run a collective as torch does."""
        if slot is None:
            return plain(buffer)
        name = c10d.group_name(group)
        self.memory.groups.setdefault(name, group)
        slot.run(name)
        gathers = slot.key.kind == "all_gather"
        if slot.log is not None and gathers:
            self._last[slot.key.site] = (slot.log, slot.index)
        self._was_backward = slot.key.backward or not gathers
        self._reduced = self._reduced or not gathers
        known = slot.scheduled is not None and slot.scheduled.call.group == name
        self._strange = self._strange or (self.schedule is not None and not known)
        nbytes = buffer.numel() * buffer.element_size()
        self._world.calls.append((self, slot.key, SimulatedCall(slot.key.kind, nbytes, name)))
        self._world.quiet = True
        try:
            return plain(buffer)
        finally:
            self._world.quiet = False

    def _simulated_plans_(self) -> tuple[Plan, ...]:
        """The plan, if a collective ran."""
        if self.schedule is None and self._log is not None and self._log.ran:
            self.freeze()
        for direct in self.planning.directs:
            if direct.layout is not None:
                key = direct.layout.key(direct.site, backward=False)
                for parameter in direct.parameters:
                    for output in parameter.all_gather_outputs:
                        self._world.buffer(self, key, output)
        return () if self.planning.plan is None else (self.planning.plan,)

    def _simulated_algorithm_(self, call: Any) -> AlgorithmName:
        """How a collective with this key runs."""
        collectives = () if self.schedule is None else self.schedule.collectives
        scheduled = next((s for s in collectives if s.call.key == call), None)
        return (
            "ordinary" if scheduled is None or scheduled.place is None else scheduled.algorithm.name
        )

    def _simulated_end_(self) -> None:
        """Give the segments back."""
        self.release()
