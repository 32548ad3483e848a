"""Symmetric memory for ops that run while an eager session records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field

from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.own import own_work
from symmplan.memory import realize
from symmplan.memory.meeting.topology import survey
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.planner import plan as plan_problem
from symmplan.registry.catalogue import runs_on_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from symmplan.memory import Arena
    from symmplan.model import OpSpec


@define(eq=False)
class ScratchMemory:
    """See [Note: scratch] in `symmplan.capture.apart`.

    Each kind of call gets an arena, kept until the recording ends.

    Attributes:
        memory: Name of the memory backend; None if ops run on ordinary memory.
    """

    _device: torch.device
    _timeout: float
    memory: str | None = field(init=False, default=None)
    _arenas: dict[Any, Arena] = field(init=False, factory=dict)
    _running: list[tuple[Arena, str]] = field(init=False, factory=list)

    def serves(self, spec: OpSpec) -> bool:
        """Whether the op may need symmetric memory to run at all."""
        return not runs_on_groups(spec.op) and any(not r.of_result for r in spec.requirements)

    @own_work
    def copies(self, group: str, spec: OpSpec, tensors: Sequence[Any]) -> list[Any]:
        """Symmetric copies of ``tensors``; every rank's are complete.

        Themselves where the group cannot be served.

        Collective: yes, over ``group``.
        """
        named = {n: g.process_group for n, g in resolve_groups([group]).items()}
        memory = self.memory
        if memory is None:
            return list(tensors)
        if survey(named, self._device, self._timeout)[group].why_not(memory):
            return list(tensors)
        sizes = tuple(x.numel() * x.element_size() for x in tensors)
        if not any(sizes):
            return [x.clone() for x in tensors]
        key = group, spec.op, sizes
        arena = self._arenas.get(key)
        if arena is None:
            arena = self._arenas[key] = realize(
                plan_problem(_problem(group, spec, sizes)),
                memory=memory,
                device=self._device,
                timeout=self._timeout,
                user="recording",
            )
        found = []
        for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            copy = arena.tensor(f"x{i}", tensor.dtype, tensor.shape) if size else tensor.clone()
            found.append(copy.copy_(tensor))
        self._running.append((arena, group))
        self._meet(arena, group)
        return found

    @own_work
    def over(self) -> None:
        """The op has ended; returns when it has on all ranks.

        Collective: yes, over the group of the last `copies`.
        """
        if self._running:
            self._meet(*self._running.pop())

    def _meet(self, arena: Arena, group: str) -> None:
        next(iter(arena.segments.values())).barrier(group)

    def release(self) -> None:
        """Give everything back. The caller sees to it that no peer is in an op any more."""
        for arena in self._arenas.values():
            arena.release()
        self._arenas.clear()
        self._running.clear()


def _problem(group: str, spec: OpSpec, sizes: Sequence[int]) -> Problem:
    """One call, with all its tensors at the same time."""
    align = max(r.align for r in spec.requirements)
    pads = any(r.signal_pad for r in spec.requirements)
    names = [(f"x{i}", size) for i, size in enumerate(sizes) if size]
    return Problem(
        buffers=[Buffer(n, size, group, align=align, signal_pad=pads) for n, size in names],
        operations=[Operation("call", group=group, handshake=True, release=True, op=spec.op)],
        accesses=[Access("call", n, write=True, remote=True) for n, _ in names],
    )
