"""The simulated world: one process stands for all ranks, and memory is only counted.

[Note: the simulated world]
    `symmplan.simulate` runs a program as one rank of a world without peers, on fake tensors. The
    integrations do there what they do anywhere, with four exceptions that ask `current`: in an
    exchange every other rank says what this one says (`symmplan.coordination.exchange`), segments
    have no bytes (`symmplan.memory.backends.local`), algorithms are ruled or looked up instead of
    measured, and nothing runs in placements (`symmplan.runtime.executor`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from attrs import define, field

from symmplan.device import kind_of
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from symmplan.device import Allocation, HeldBlock
    from symmplan.model import AlgorithmName, Plan

__all__ = ["Planner", "SimulatedCall", "World", "address_of", "current"]


@define(frozen=True)
class SimulatedCall:
    """A collective that the program made, and whose plan decides how it runs."""

    op: str  # its name
    nbytes: int  # of its largest tensor on one rank, in bytes
    group: str  # name of the process group


@define(frozen=True, eq=False)
class Planner:
    """A planner of a simulated world: an FSDP2 model, a compile backend, a session, experts.

    Attributes:
        plans: Returns its plans. A recording without a plan is planned now.
        end: Frees what it holds, when the world ends.
        algorithm: The algorithm of a call that it knows.
    """

    plans: Callable[[], Sequence[Plan | None]]
    end: Callable[[], None]
    algorithm: Callable[[Any], AlgorithmName]


@define(eq=False)
class World:
    """The simulated world.

    Attributes:
        ranks: How many ranks it has.
        rank: The one that is simulated.
        memory: Name of the memory backend for which is planned.
        devices: Whether that is a device's memory.
        automatic: Whether it is still chosen as ``"auto"`` is on devices, when groups are known.
        choices: Path of a tuning table, None for rules alone.
        ranks_per_host: How many of them are on each host, one behind the other; None if all are.
        ranks_per_domain: How many NVLink joins, those of whole hosts; None if no hosts are joined.
        planners: All that plan, in the order in which they were made.
        calls: ``(planner, the planner's key of it, the collective)`` of each that ran.
        buffers: ``(planner, the planner's key of it, result of `seen`)`` of tensors that lie in
            placements if the plan says so.
        held: The same with the result of `hold`: ordinary bytes that a planned collective has
            besides.
        quiet: Whether the call that runs now is in `calls` already.
        segments: All `symmplan.memory.segment.Segment` that were made.
        seen: Gives what is known of a tensor's storage.
        hold: The same of gradients that a plan keeps, with the bytes of an element, until nothing
            refers to a tensor's storage any more.
        is_segment: Told of a tensor that lies in a segment.
        allocated: Bytes of tensors that lie in no segment, now and the most so far, and the most
            that torch's allocator had of a device for them; and how often it allocated.
        note: As `symmplan.device.Device.note_allocations`, of these.
        noted: As `symmplan.device.Device.noted_allocations`.
        lately: The most since who asks has asked before.
        on_join: Called when a new planner joins.
        reads_values: Whether an error says that a tensor has no value.
    """

    ranks: int
    rank: int
    memory: str
    devices: bool
    automatic: bool = False
    choices: str | None = None
    ranks_per_host: int | None = None
    ranks_per_domain: int | None = None
    planners: list[Planner] = field(factory=list)
    calls: list[tuple[Planner, Any, SimulatedCall]] = field(factory=list)
    quiet: bool = False
    buffers: list[tuple[Planner, Any, Any]] = field(factory=list)
    held: list[tuple[Planner, Any, Any]] = field(factory=list)
    segments: list[Any] = field(factory=list)
    seen: Callable[[torch.Tensor], Any] = id
    hold: Callable[[Sequence[torch.Tensor], int, torch.Tensor], Any] = lambda *_: None
    is_segment: Callable[[torch.Tensor], Any] = id
    allocated: Callable[[], tuple[int, int, int, int]] = lambda: (0, 0, 0, 0)
    note: Callable[[], tuple[int, list[HeldBlock]] | None] = lambda: None
    noted: Callable[[int], list[Allocation]] = lambda _: []
    lately: Callable[[Any], int] = lambda _: 0
    on_join: Callable[[], Any] = int
    reads_values: Callable[[BaseException], bool] = bool

    def join(self, planner: Planner) -> None:
        """``planner`` begins to plan."""
        if planner not in self.planners:
            self.planners.append(planner)
            if not self.calls:
                self.on_join()

    def buffer(self, planner: Planner | None, known_by: Any, tensor: torch.Tensor) -> None:
        """``tensor`` lies in a placement if the plan says so; in a segment if nobody plans it."""
        if planner is None:
            self.is_segment(tensor)
        else:
            self.buffers.append((planner, known_by, self.seen(tensor)))


def current() -> World | None:
    """The simulated world, None outside `symmplan.simulate`."""
    world: World | None = PROCESS.world
    return world


def on_device(device: torch.device) -> bool:
    """Whether what is planned for ``device`` runs on one."""
    world = current()
    return kind_of(device).is_accelerator if world is None else world.devices


def enter(world: World) -> None:
    """Begin to simulate."""
    PROCESS.world = world


def leave() -> None:
    """End it."""
    PROCESS.world = None


def address_of(tensor: torch.Tensor) -> int:
    """Where a tensor's bytes begin; 0 in a simulated world, where it has none."""
    return tensor.data_ptr() if current() is None else 0


def at_end(tensor: torch.Tensor, act: Callable[[], None]) -> None:
    """Call ``act`` when nothing refers to the storage of ``tensor`` any more."""
    weakref.finalize(tensor.untyped_storage(), act).atexit = False
