"""FSDP2's collectives as what `symmplan.choose.chooser` chooses algorithms for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import frozen

from symmplan.choose.cases import Case, cut
from symmplan.choose.choice import MEETING
from symmplan.choose.clock import at_once
from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.world import on_device
from symmplan.device import kind_of
from symmplan.integrate.fsdp.ops import exchanges, gathers, scatters
from symmplan.memory import BACKENDS
from symmplan.memory.backends.torch_symm import SPLIT_WORDS, is_whole_words
from symmplan.model import PUSHES
from symmplan.planner.budget import Demotable, together
from symmplan.torch_private import fsdp2, nccl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from symmplan.capture.fsdp import Planned
    from symmplan.capture.fsdp_recording import Call
    from symmplan.choose.chooser import Chosen
    from symmplan.choose.clock import Act
    from symmplan.model import AlgorithmName

__all__ = ["CallCase", "case_of", "demotables_of", "smallest_of", "why_not_measured"]

#: Smaller collectives than this, in bytes, gain nothing on devices.
_SMALL = 1 << 20


@frozen(kw_only=True)
class CallCase(Case):
    """A collective of FSDP2's; its tensor is the gather's output or the reduction's input."""

    def sizes(self) -> tuple[int, int]:
        """Bytes of its input, and of its output or an all-to-all's."""
        gathers = self.op == "all_gather"
        return self.nbytes // self.ranks if gathers else self.nbytes, self.nbytes

    def acts(
        self,
        plain: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
        engines: Any | None,
    ) -> dict[str, Act]:
        """What runs it by each algorithm."""
        if self.op == "all_gather":
            acts = self._gathers(self._whole(plain[1]), self._whole(places[1]), engines)
        else:
            acts = self._reductions(
                [self._whole(flat) for flat in plain],
                [self._whole(flat) for flat in places],
                engines,
            )
        return {algorithm: at_once(act) for algorithm, act in acts.items() if act is not None}

    def _whole(self, flat: torch.Tensor) -> torch.Tensor:
        """A tensor as large as its own."""
        return cut(flat, self.numels, getattr(torch, self.dtype))[0].zero_()

    @property
    def _group(self) -> Any:
        return resolve_groups([self.group])[self.group].process_group

    def _gathers(
        self, plain: torch.Tensor, placed: torch.Tensor, engines: Any | None
    ) -> dict[str, Callable[[], Any] | None]:
        group = self._group
        algorithms: dict[str, tuple[str, torch.Tensor, Any]] = {"ordinary": ("local", plain, group)}
        within = _within(self.algorithms)
        if within in self.algorithms:
            algorithms[within] = self.memory, placed, group
        if engines is not None:
            algorithms["copy engine"] = self.memory, placed, engines
        gather, _ = fsdp2.comms(None)
        count = placed.numel() // self.ranks
        mine = slice(group.rank() * count, (group.rank() + 1) * count)
        return {
            algorithm: gathers(memory, gather, tensor, tensor[mine], over, async_op=False)
            for algorithm, (memory, tensor, over) in algorithms.items()
        }

    def _reductions(
        self,
        ordinary: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
        engines: Any | None,
    ) -> dict[str, Callable[[], Any] | None]:
        _, scatter = fsdp2.comms(None)
        plain, output = ordinary
        placed, received = places
        output = output[: plain.numel() // self.ranks]
        op, group = _op(placed), self._group
        acts: dict[str, Callable[[], Any] | None] = {}
        for algorithm, memory, tensor, source in (
            ("ordinary", "local", plain, placed),
            (_within(self.algorithms), self.memory, placed, plain),
        ):
            act = scatters(memory, scatter, output, tensor, group, op, async_op=False)
            acts[algorithm] = _copied_in(tensor, source, act)
        if engines is not None and "push" in self.algorithms:
            acts["push"] = exchanges(output, placed, received, engines, op)
        return acts


def case_of(
    call: Call, memory: str, device: torch.device, ranks: int, *, levels: bool = False
) -> CallCase:
    """What a collective is to the measurement.

    Args:
        call: The collective.
        memory: Name of the memory backend.
        device: Where its buffer lies.
        ranks: How many ranks its group has.
        levels: Whether that is served in two levels.
    """
    gathers = call.key.kind == "all_gather"
    algorithms: tuple[AlgorithmName, ...] = ("symmetric",)
    if levels:
        algorithms = ("two-level",)
    elif gathers and on_device(device) and not is_whole_words(call.nbytes // ranks):
        algorithms = ("copy engine",)
    elif gathers:
        algorithms = ("symmetric", "copy engine")
    elif _pushes(call, memory):
        algorithms = ("symmetric", *PUSHES)
    # FSDP2 does not say how much a step computes meanwhile.
    computes = kind_of(device).is_accelerator
    return CallCase(
        op=call.key.kind,
        memory=memory,
        group=call.group,
        ranks=ranks,
        dtype=call.key.dtype,
        numels=(call.key.numel,),
        algorithms=algorithms,
        alone=not computes,
        beside=None if computes else 0,
    )


def _within(algorithms: Sequence[AlgorithmName]) -> AlgorithmName:
    """The algorithm that runs the memory backend's own op."""
    return "two-level" if "two-level" in algorithms else "symmetric"


def _pushes(call: Call, memory: str) -> bool:
    """Whether a reduction can be made of pushes: FSDP2 divides others before it reduces."""
    backend = BACKENDS[memory]
    return (
        call.key.dtype in ("float32", "bfloat16")
        and (backend.devices or backend.collectives)
        and fsdp2.has_copy_in()
    )


def smallest_of(case: Case) -> AlgorithmName:
    """The algorithm with which a collective takes the fewest symmetric bytes.

    Of those that take as few, that whose communicators and windows measuring takes, too.
    """
    if "shared push" in case.algorithms:
        return "shared push"
    return "copy engine" if "copy engine" in case.algorithms else case.algorithms[0]


def why_not_measured(case: Case, device: torch.device) -> str:
    """Why a collective is ordinary and need not be measured; empty if it must be."""
    if _within(case.algorithms) not in case.algorithms and not nccl.has_copy_engine_policy():
        return SPLIT_WORDS
    if kind_of(device).is_accelerator and case.nbytes < _SMALL:
        return f"less than {_SMALL} bytes gain nothing in symmetric memory"
    return ""


def demotables_of(planned: Iterable[Planned], chosen: Chosen[Call]) -> list[Demotable]:
    """What the collectives of a plan have in it, those of one kind and size together."""
    placed = [(p, p.buffer) for p in planned if p.buffer is not None]
    largest: dict[str, int] = {}  # who makes a slot as large as it is
    for p, buffer in placed:
        largest[buffer] = max(p.call.nbytes, largest.get(buffer, 0))
    demotables = []
    for p, buffer in placed:
        call, algorithm, choice = p.call, p.algorithm.name, chosen.of.get(p.call)
        less: dict[AlgorithmName, float] = {"ordinary": 0.0}
        known: dict[AlgorithmName, float] = {}
        seconds = {} if choice is None else dict(choice.seconds)
        if algorithm == "shared push" and "push" in seconds:
            seconds[algorithm] = seconds["push"] + MEETING
        if algorithm == "push":  # of two slots
            share = call.nbytes / (2 * call.pushed_bytes)
            less = {"symmetric": share, "shared push": 0.0, "ordinary": 0.0}
            known = {"shared push": MEETING}
        demotables.append(
            Demotable(
                key=chosen.cases[call],
                what=f"{call.key.kind} of {call.nbytes:,} bytes",
                algorithm=algorithm,
                calls=1,
                nbytes=call.nbytes,
                buffers=frozenset({buffer} if call.nbytes >= largest[buffer] else ()),
                less=less,
                known=known,
                seconds=seconds,
            )
        )
    return together(demotables)


def _copied_in(
    target: torch.Tensor, source: torch.Tensor, act: Callable[[], Any] | None
) -> Callable[[], Any] | None:
    """FSDP2 arranges gradients in one tensor before it reduces that."""
    if act is None:
        return None

    def run() -> Any:
        target.copy_(source)
        return act()

    return run


def _op(source: torch.Tensor) -> Any:
    """What FSDP2 uses for that type of device and number; NCCL's kernels depend on it."""
    average = source.is_cuda and source.dtype in (torch.float32, torch.bfloat16)
    return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
