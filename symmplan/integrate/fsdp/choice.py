"""The algorithm by which each of FSDP2's collectives runs; see `symmplan.runtime.choice`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import evolve

from symmplan.capture.fsdp import Algorithm
from symmplan.coordination.world import on_device
from symmplan.integrate.fsdp.ops import exchanges, gathers, scatters
from symmplan.memory import BACKENDS
from symmplan.memory.torch_symm import SPLIT_WORDS, is_whole_words
from symmplan.planner.budget import Demotable
from symmplan.runtime.cases import often_of, runs_ordinary
from symmplan.runtime.choice import DEMOTED, Choice
from symmplan.runtime.trials import Concurrent, Trial, choices_of, measure, room_for
from symmplan.runtime.tuning_table import ruled
from symmplan.torch_private import fsdp2, nccl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from symmplan.capture.fsdp import Planned
    from symmplan.capture.fsdp_recording import Call
    from symmplan.integrate.fsdp.memory import Memory
    from symmplan.model import AlgorithmName, Problem
    from symmplan.runtime.cases import Case
    from symmplan.runtime.clock import Act
    from symmplan.runtime.engines import Engines
    from symmplan.runtime.options import Options

__all__ = ["Choices"]

#: Smaller collectives than this, in bytes, gain nothing on devices.
_SMALL = 1 << 20
#: Smaller ones are repeated until they come to as many bytes.
_ENOUGH = 64 << 20
#: What the parts of ranks are a multiple of where only a part is measured, in bytes.
_ALIGN = 512


class Choices:
    """How the collectives of a model run.

    Args:
        where: What the plans lie in, with the groups of the calls.
        memory: Name of the memory backend.
        options: How `symmplan.fsdp.apply` was asked to work.

    Attributes:
        all: What was measured of the calls seen so far, in the order of the program.
        concurrent: ``{kind and size of a collective: (another group's, how many of it for each)}``
            of what is also measured beside that; see [Note: concurrent collectives] in
            `symmplan.runtime.concurrent`.
        beside: ``{name: process group}`` of those others, whose ranks all come to measure.
    """

    def __init__(self, where: Memory, memory: str, options: Options) -> None:
        device = self._device = where.device
        self._where = where
        self._memory = memory
        self._timeout = options.timeout
        self._choose = options.chosen(device)
        self._table = options.table
        self.all: tuple[Choice, ...] = ()
        self.concurrent: Mapping[Any, tuple[Case, float]] = {}
        self.beside: Mapping[str, Any] = {}

    @property
    def _groups(self) -> Mapping[str, Any]:
        return self._where.groups

    def kind(self, call: Call) -> tuple[Any, ...]:
        """What takes about the same time alone has the same."""
        return call.key.kind, self._memory, call.nbytes, call.key.dtype, call.group

    def _key(self, call: Call) -> tuple[Any, ...]:
        """What takes about the same time in this program has the same."""
        kind = self.kind(call)
        return *kind, self.concurrent[kind][0] if kind in self.concurrent else None

    def _choice(self, call: Call) -> Choice | None:
        if self._choose != "measure":
            return None
        return choices_of(self._groups[call.group]).get(self._key(call))

    def algorithm(self, call: Call, gave: Mapping[Any, AlgorithmName]) -> Algorithm:
        """How ``call`` runs, where those of some keys must take other algorithms."""
        if self._where.preparation.refusal is not None:
            return Algorithm("ordinary", self._where.preparation.reason)
        if self._key(call) in gave:
            algorithm = gave[self._key(call)]
            return Algorithm(algorithm, DEMOTED if algorithm == "ordinary" else "")
        if call.group in self._where.unreached:
            return Algorithm("ordinary", self._where.unreached[call.group])
        if self._choose == "table":
            return self._by_table(call)
        choice = self._choice(call)
        if choice is not None:
            self.all = tuple(dict.fromkeys((*self.all, choice)))
            return Algorithm(choice.algorithm, choice.reason)
        if self._choose == "push" and self._pushes(call):
            return Algorithm("push")
        if self._choose in ("copy engine", "push"):
            return Algorithm("copy engine")
        if self._choose == "ordinary":
            return Algorithm("ordinary", "choose='ordinary'")
        if self._splits_words(call):
            return Algorithm("ordinary", SPLIT_WORDS)
        if self._choose == "measure":
            return Algorithm(
                "ordinary", f"less than {_SMALL} bytes gain nothing in symmetric memory"
            )
        return Algorithm("symmetric")

    def _by_table(self, call: Call) -> Algorithm:
        algorithm = ruled(
            self._table,
            call.key.kind,
            self._groups[call.group].size(),
            call.nbytes,
            self._memory,
            pushes=self._pushes(call),
        )
        splits = algorithm[0] == "symmetric" and self._splits_words(call)
        return Algorithm("ordinary", SPLIT_WORDS) if splits else Algorithm(*algorithm)

    def demotables(self, planned: Iterable[Planned]) -> list[Demotable]:
        """What the collectives of a plan have in it, those of one kind and size together."""
        alike: dict[Any, list[Planned]] = {}
        largest: dict[str, int] = {}  # who makes a slot as large as it is
        for p in planned:
            if p.buffer is not None:
                alike.setdefault(self._key(p.call), []).append(p)
                largest[p.buffer] = max(p.call.nbytes, largest.get(p.buffer, 0))
        demotables = []
        for key, found in alike.items():
            call, algorithm, choice = (
                found[0].call,
                found[0].algorithm.name,
                self._choice(found[0].call),
            )
            less: dict[AlgorithmName, float] = {"ordinary": 0.0}
            if call.key.kind == "reduce_scatter" and algorithm in ("copy engine", "push"):
                less = {"symmetric": 0.5, "ordinary": 0.0}
            demotables.append(
                Demotable(
                    key=key,
                    what=f"{call.key.kind} of {call.nbytes:,} bytes",
                    algorithm=algorithm,
                    calls=len(found),
                    nbytes=call.nbytes,
                    buffers=frozenset(
                        b
                        for p in found
                        for b in (p.buffer, p.received)
                        if b and call.nbytes >= largest.get(b, 0)
                    ),
                    less=less,
                    seconds={} if choice is None else choice.seconds,
                )
            )
        return demotables

    def _pushes(self, call: Call) -> bool:
        """Whether a reduction can be made of pushes: FSDP2 divides others before it reduces."""
        return (
            call.key.kind == "reduce_scatter"
            and call.key.dtype in ("torch.float32", "torch.bfloat16")
            and (BACKENDS[self._memory].devices or BACKENDS[self._memory].collectives)
            and fsdp2.has_copy_in()
        )

    def _splits_words(self, call: Call) -> bool:
        part = call.nbytes // self._groups[call.group].size()
        return (
            on_device(self._device) and call.key.kind == "all_gather" and not is_whole_words(part)
        )

    def unmeasured(self, calls: Iterable[Call]) -> list[Call]:
        """One call of each kind and size that may gain and was not measured yet."""
        found: dict[Any, Call] = {}
        for call in calls:
            small = self._device.type == "cuda" and call.nbytes < _SMALL
            algorithms = nccl.has_copy_engine_policy() or not self._splits_words(call)
            if algorithms and not small and call.group in self._where.reached:
                found.setdefault(self._key(call), call)
        return [c for key, c in found.items() if key not in choices_of(self._groups[c.group])]

    @property
    def _room(self) -> int:
        """How large a tensor may be while collectives are measured, in bytes."""
        # Its own bytes, symmetric ones, those that an all-to-all receives, its results; what its
        # concurrent collective takes and gives.
        return room_for(6 if self.concurrent else 4, self._device)

    def part(self, call: Call) -> Call:
        """What is measured of it. See [Note: how much memory measuring takes]."""
        unit = self._groups[call.group].size() * _ALIGN
        nbytes = min(call.nbytes, max(unit, self._room // unit * unit))
        itemsize = getattr(torch, call.key.dtype.removeprefix("torch.")).itemsize
        return evolve(call, nbytes=nbytes, key=evolve(call.key, numel=nbytes // itemsize))

    def measure(self, problem: Problem, planned: Sequence[tuple[Call, Planned]]) -> None:
        """Time collectives that were not measured yet.

        Args:
            problem: The symmetric bytes that this takes.
            planned: One collective of each kind and size, in the order of the program, and the
                `part` of it that is measured, with its buffers there.

        Raises:
            AgreementError: Ranks measured different collectives.
            PeerTimeoutError: A rank did not come, or its part of a collective did not.

        Collective: yes, over all groups.
        """
        scratch = torch.zeros(
            max(p.call.nbytes for _, p in planned), dtype=torch.uint8, device=self._device
        )
        alone = [(call, self._trial(call, p, scratch)) for call, p in planned]
        new = [t for c, t in alone if t.key not in choices_of(self._groups[c.group])]
        measure(
            [*new, *self._with_concurrent(alone)],
            problem,
            {**self._where.reached, **self.beside},
            memory=self._memory,
            device=self._device,
            timeout=self._timeout,
            enough=_ENOUGH,
        )

    def _trial(self, call: Call, planned: Planned, scratch: torch.Tensor) -> Trial:
        """The collective alone."""
        kind = self.kind(call)
        choice = Choice(
            op=call.key.kind,
            nbytes=call.nbytes,
            dtype=call.key.dtype,
            group=call.group,
            ranks=self._groups[call.group].size(),
            seconds={},
            algorithm="ordinary",
        )
        # FSDP2 does not say how much a step computes meanwhile.
        beside = None if self._device.type == "cuda" else 0.0
        acts = functools.partial(self._acts, planned, scratch)
        nbytes = planned.call.nbytes
        scale = call.nbytes / nbytes
        return Trial((*kind, None), list(kind[:-1]), choice, nbytes, beside, scale, acts)

    def _with_concurrent(self, trials: Sequence[tuple[Call, Trial]]) -> list[Trial]:
        """The same beside what else runs meanwhile, where that is so."""
        runs: dict[Case, tuple[Act, float]] = {}
        found = []
        for call, trial in trials:
            if self.kind(call) not in self.concurrent:
                continue
            case, often = self.concurrent[self.kind(call)]
            ranks = self.beside[case.group].size()
            if case not in runs:
                runs[case] = runs_ordinary(case, ranks, self._room, self._device)
            act, scale = runs[case]
            choice = Choice(
                case.op,
                case.nbytes,
                case.dtype,
                case.group,
                ranks,
                seconds={},
                algorithm="ordinary",
            )
            concurrent = Concurrent(
                case.group,
                functools.partial(_always, choice),
                often_of(often * scale / trial.scale),
                functools.partial(_always, {"ordinary": act}),
            )
            same = [*trial.same, case.key]
            found.append(
                evolve(
                    trial, key=self._key(call), same=same, concurrent=concurrent, alone=trial.key
                )
            )
        return found

    def _acts(
        self,
        planned: Planned,
        scratch: torch.Tensor,
        there: Mapping[str, torch.Tensor],
        engines: Engines | None,
    ) -> dict[str, Act]:
        """What runs the collective by each algorithm; nothing is written before it is called."""
        call = planned.call
        dtype = getattr(torch, call.key.dtype.removeprefix("torch."))
        assert planned.buffer is not None
        placed = there[planned.buffer].zero_().view(dtype)
        group = self._groups[call.group]
        plain = scratch[: call.nbytes].view(dtype)
        count = placed.numel() // group.size()
        mine = slice(group.rank() * count, (group.rank() + 1) * count)
        gather, scatter = fsdp2.comms(None)
        algorithms: list[tuple[str, str, torch.Tensor, Any]] = [("ordinary", "local", plain, group)]
        if not self._splits_words(call):
            algorithms.append(("symmetric", self._memory, placed, group))
        acts: dict[str, Callable[[], Any] | None] = {}
        if call.key.kind == "all_gather":
            if engines is not None:
                algorithms.append(("copy engine", self._memory, placed, engines.gather))
            for algorithm, memory, tensor, over in algorithms:
                acts[algorithm] = gathers(
                    memory, gather, tensor, tensor[mine], over, async_op=False
                )
        else:
            output = plain.new_zeros(count)
            op = _op(placed)
            for algorithm, memory, tensor, over in algorithms:
                act = scatters(memory, scatter, output, tensor, over, op, async_op=False)
                acts[algorithm] = _copied_in(tensor, placed if tensor is plain else plain, act)
            if engines is not None and planned.received is not None:
                received = there[planned.received].view(dtype)
                act = exchanges(output, placed, received, engines.exchange, op)
                acts["copy engine"] = _copied_in(placed, plain, act)
                if self._pushes(call):  # they are such an all-to-all of what need not be copied
                    acts["push"] = act
        return {algorithm: _then(act) for algorithm, act in acts.items() if act is not None}


def _always(value: Any, *_: object) -> Any:
    """What does not depend on what there is or was chosen."""
    return value


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


def _then(act: Callable[[], Any]) -> Act:
    """A collective that is waited for at once, on its stream."""

    def run(beside: Callable[[], None]) -> None:
        act()
        beside()

    return run


def _op(source: torch.Tensor) -> Any:
    """What FSDP2 uses for that type where it may choose; NCCL's kernels depend on it."""
    average = source.is_cuda and source.dtype in (torch.float32, torch.bfloat16)
    return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
