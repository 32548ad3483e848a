"""The ranks of `symmplan.testing.check_declaration`: run an op, be late, note what it touches."""

from __future__ import annotations

import importlib
import mmap
import random
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from symmplan.memory import realize
from symmplan.memory.races import source_line
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.place.algorithms import overload_named
from symmplan.planner import plan
from symmplan.registry import requirements
from symmplan.runtime.watching import Watching
from symmplan.torch_private import c10d
from symmplan.torch_private.ops import FakeTensorMode, tree_leaves, tree_map_only

if TYPE_CHECKING:
    from symmplan.memory.race_log import Extent

__all__ = ["Job", "Noted", "RankCall", "run_rank"]

#: Seconds without any progress of the others, after which a late rank goes on: they wait for it.
_QUIET = 0.1
_LONGEST = 2.0
_POLL = 0.001
#: Accesses of peers' bytes in one call that are put off.
_PUT_OFF = 6
#: Calls in which every rank dawdles at random.
_RANDOM_CALLS = 4

#: Which rank is late in a call, and whether at its start; None if all dawdle at random.
_Delay = tuple[int, bool] | None


@frozen
class Job:
    """The job of the ranks.

    Attributes:
        op: Qualified name of the op, with overload.
        inputs: Its arguments without the group, or what makes them.
        ranks: How many ranks there are.
        rounds: How often each rank is late in each way.
        setup: Module that defines the op; None if it is defined.
        timeout: Seconds that ranks wait for each other.
    """

    op: str
    inputs: Any
    ranks: int
    rounds: int
    setup: str | None
    timeout: float


@frozen
class Noted:
    """An access, as `symmplan.testing.Contradiction` tells it.

    Attributes:
        time: When it was about to be made, in seconds of the machine's monotonic clock.
        owner: Whose bytes.
        mutable: Whether the schema says that the tensor is written.
        declared: Whether it is declared symmetric.
    """

    time: float
    owner: int
    tensor: str
    low: int
    high: int
    write: bool
    mutable: bool
    declared: bool
    op: str
    line: str


@define
class RankCall:
    """One call of one rank: when it began and ended, in seconds, and what it touched meanwhile."""

    began: float = 0.0
    ended: float = 0.0
    accesses: list[Noted] = field(factory=list)


def run_rank(rank: int, ranks: int, job: Job, progress: str) -> list[RankCall]:
    """The accesses of this rank, call by call.

    Args:
        rank: This one.
        ranks: How many there are.
        job: Their job.
        progress: A file that they share: 8 bytes for the steps of each, then for its ended calls.

    Collective: yes.
    """
    if job.setup is not None:
        importlib.import_module(job.setup)
    with open(progress, "r+b") as file:  # noqa: PTH123
        shared = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    delays: list[_Delay] = [
        (late, at_start)
        for _ in range(job.rounds)
        for at_start in (True, False)
        for late in range(ranks)
    ]
    calls, watching = [], Watching(job.timeout)
    with torch.no_grad():
        placed = _LateRank(job, rank, shared)
        for number, delay in enumerate([*delays, *[None] * _RANDOM_CALLS]):
            values = placed.arguments(number)
            with watching:
                calls.append(placed.run(values, number, delay))
    return calls


class _LateRank:
    """A rank that runs an op with its tensors in placements: also those that are not declared."""

    def __init__(self, job: Job, rank: int, progress: memoryview) -> None:
        spec = requirements(job.op)
        assert spec is not None
        self.job, self.rank, self.spec = job, rank, spec
        self.progress = progress  # of each rank its steps, then the calls that it has ended
        self.op: Any = overload_named(spec.op)
        returns = any(r.of_result for r in spec.requirements)
        self.variant: Any = overload_named(spec.out) if spec.out and returns else None
        self.dice = random.Random(rank)  # noqa: S311
        self.number, self.put_off = 0, 0
        self.delay: _Delay = None
        self.call: RankCall | None = None
        values = self.arguments(0)
        self.results = self._results(values)
        self.tensors = {**_tensors(values), **self.results}
        self._place(values)

    def _place(self, values: dict[str, Any]) -> None:
        """Put the tensors where every rank has them: as of one call, all at the same time."""
        group, spec = c10d.world_name(), self.spec
        sizes = {n: t.nbytes for n, t in self.tensors.items() if t.nbytes}
        align = max(r.align for r in spec.requirements)
        pads = any(r.signal_pad for r in spec.requirements)
        problem = Problem(
            buffers=[Buffer(n, s, group, align=align, signal_pad=pads) for n, s in sizes.items()],
            operations=[Operation("call", group=group, handshake=True, release=True, op=spec.op)],
            accesses=[Access("call", n, write=True, remote=True) for n in sizes],
        )
        groups = {group: dist.group.WORLD}
        self.arena = realize(
            plan(problem), memory="shm", timeout=self.job.timeout, groups=groups, debug=True
        )
        assert self.arena.races is not None
        self.arena.races.listener = self.listen
        for name in sizes:
            like = self.tensors[name]
            self.tensors[name] = self.arena.tensor(name, like.dtype, like.shape)
        arguments = self.op._schema.arguments
        written = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
        declared = {r.head for r in spec.requirements}
        about = dict.fromkeys(self.results, (True, "return" in declared))
        for head, value in values.items():
            facts = head in written, head in declared
            about |= dict.fromkeys(_tensors({head: value}), facts)
        self.ranges = [
            (p.offset, p.end, n, *about[n]) for n, p in self.arena.plan.placements.items()
        ]

    def arguments(self, number: int) -> dict[str, Any]:
        """The arguments of a call, by name, with the group."""
        made, given = callable(self.job.inputs), self.job.inputs
        if made:
            given = given(self.rank, self.job.ranks, number)
        schema = {a.name: a for a in self.op._schema.arguments}
        group = None if self.spec.group is None else schema.pop(self.spec.group)
        if isinstance(given, torch.Tensor):
            given = (given,)
        values = dict(given) if hasattr(given, "keys") else dict(zip(schema, given, strict=False))
        dice = torch.Generator().manual_seed(1000 * number + self.rank)

        def fresh(value: torch.Tensor) -> torch.Tensor:
            if made or not value.dtype.is_floating_point:
                return value
            return torch.randn(value.shape, generator=dice, dtype=torch.float32).to(value.dtype)

        values = tree_map_only(torch.Tensor, fresh, values)
        if group is None:
            return dict(values)
        by_name = str(group.type).startswith(("str", "Optional[str"))
        return {**values, group.name: c10d.world_name() if by_name else dist.group.WORLD}

    def _results(self, values: dict[str, Any]) -> dict[str, torch.Tensor]:
        """What the results look like, where the op has a variant that writes them in place."""
        if self.variant is None:
            return {}
        with FakeTensorMode() as mode:
            result = self.op(**tree_map_only(torch.Tensor, mode.from_tensor, values))
        several = tree_leaves(result)
        names = ["return"] if len(several) == 1 else [f"return.{i}" for i in range(len(several))]
        like = zip(names, several, strict=True)
        return {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in like}

    def run(self, values: dict[str, Any], number: int, delay: _Delay) -> RankCall:
        """One call, from all ranks' readiness to all ranks' end."""
        self.number, self.delay, self.put_off = number, delay, 0
        (segment,) = self.arena.segments.values()
        for name, tensor in _tensors(values).items():
            self.tensors[name].copy_(tensor)
        op, values = self.op, _put(values, self.tensors)
        if self.variant is not None:
            op = self.variant
            outs = iter(self.tensors[n] for n in self.results)
            names = [a.name for a in op._schema.arguments]
            values = {n: values[n] if n in values else next(outs) for n in names}
        segment.barrier()
        call = RankCall()
        self.wait(at_start=True)
        call.began = time.monotonic()
        self.call = call
        self.step()
        result = op(**values)
        if self.spec.asynchronous:
            for tensor in tree_leaves(result):
                torch.ops._c10d_functional.wait_tensor(tensor)
        self.call = None
        call.ended = time.monotonic()
        self.progress[self.job.ranks + self.rank] = number + 1
        self.step()
        segment.barrier()
        return call

    def step(self) -> None:
        """Something happened here."""
        self.progress[self.rank] += 1

    def listen(self, _segment: str, owner: int, extent: Extent, op: str, write: bool) -> None:
        """An access is about to be made."""
        if self.call is None:
            return
        self.step()
        if owner != self.rank:
            self.wait(at_start=False)
        low, high, name, mutable, declared = next(
            (r for r in self.ranges if r[0] <= extent.low < r[1]), (0, 0, "?", True, False)
        )
        first, last = extent.low - low, min(extent.high, high) - low
        where = source_line()
        self.call.accesses.append(
            Noted(time.monotonic(), owner, name, first, last, write, mutable, declared, op, where)
        )

    def wait(self, *, at_start: bool) -> None:
        """Be late, if it is this rank's turn."""
        if self.delay is None:
            time.sleep(self.dice.choice((0.0, 0.0, 0.002, 0.02)))
            return
        if self.delay != (self.rank, at_start) or self.put_off >= _PUT_OFF:
            return
        self.put_off += 1
        began = moved = time.monotonic()
        before: list[int] = []
        while time.monotonic() - began < _LONGEST and time.monotonic() - moved < _QUIET:
            now = self.progress.tolist()
            others = [r for r in range(self.job.ranks) if r != self.rank]
            if all(now[self.job.ranks + r] > self.number for r in others):
                return
            if now != before:
                before, moved = now, time.monotonic()
            time.sleep(_POLL)


def _tensors(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among arguments, by name; those of lists as ``"name.0"``, ..."""
    found = {}
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            found.update(_tensors({f"{name}.{i}": x for i, x in enumerate(value)}))
        elif isinstance(value, torch.Tensor):
            found[name] = value
    return found


def _put(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Arguments with these tensors, named as `_tensors` does, in the place of theirs."""

    def placed(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [placed(f"{name}.{i}", x) for i, x in enumerate(value)]
        return tensors.get(name, value)

    return {name: placed(name, value) for name, value in values.items()}
