"""The ranks of `symmplan.testing.check_declaration`: run an op, be late, note what it touches."""

from __future__ import annotations

import datetime as dt
import importlib
import os
import random
import time
import traceback
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from symmplan.memory.race_log import Extent
    from symmplan.model import OpSpec

__all__ = ["Call", "Job", "Noted", "run_rank"]

#: Seconds without any progress of the others, after which a late rank goes on: they wait for it.
_QUIET = 0.1
_LONGEST = 2.0
_POLL = 0.001
#: Process groups of the process that a rank was forked from.
_FORGOTTEN: list[object] = []
#: Accesses of peers' bytes in one call that are put off.
_PUT_OFF = 6
#: Calls in which every rank dawdles at random.
_RANDOM_CALLS = 4


@frozen
class Job:
    """What the ranks are asked to do.

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
    """An access.

    Attributes:
        time: When it was about to be made, in seconds of the machine's monotonic clock.
        owner: Whose bytes.
        tensor: Of which argument or result.
        low: First byte of that.
        high: One behind the last.
        write: Whether they are written.
        mutable: Whether the schema says that the tensor is written.
        op: In which op.
        line: Where.
    """

    time: float
    owner: int
    tensor: str
    low: int
    high: int
    write: bool
    mutable: bool
    op: str
    line: str


@define
class Call:
    """One call of one rank.

    Attributes:
        began: When, in seconds.
        ended: When.
        accesses: What it touched meanwhile.
    """

    began: float = 0.0
    ended: float = 0.0
    accesses: list[Noted] = field(factory=list)


@frozen
class _Delay:
    """Which rank is late in a call, and whether at its start; None if all dawdle at random."""

    late: int | None
    start: bool = False


@define(eq=False)
class _Rank:
    """A rank that runs calls."""

    job: Job
    rank: int
    progress: Any  # of each rank its steps, then the calls that it has ended
    number: int = 0
    delay: _Delay = _Delay(None)
    call: Call | None = None
    put_off: int = 0
    places: list[tuple[int, int, str, bool]] = field(factory=list)
    dice: random.Random = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.dice = random.Random(self.rank)  # noqa: S311

    def step(self) -> None:
        """Something happened here."""
        self.progress[self.rank] += 1

    def listen(self, _segment: str, owner: int, extent: Extent, op: str, write: bool) -> None:
        """An access is about to be made."""
        from symmplan.memory.races import source_line

        if self.call is None:
            return
        self.step()
        if owner != self.rank:
            self.wait(at_start=False)
        low, high, name, mutable = next(
            (p for p in self.places if p[0] <= extent.low < p[1]), (0, 0, "?", True)
        )
        self.call.accesses.append(
            Noted(
                time.monotonic(),
                owner,
                name,
                extent.low - low,
                min(extent.high, high) - low,
                write,
                mutable,
                op,
                source_line(),
            )
        )

    def wait(self, *, at_start: bool) -> None:
        """Be late, if it is this rank's turn."""
        if self.delay.late is None:
            time.sleep(self.dice.choice((0.0, 0.0, 0.002, 0.02)))
            return
        if self.delay.late != self.rank or self.delay.start != at_start:
            return
        if self.put_off >= _PUT_OFF:
            return
        self.put_off += 1
        began = moved = time.monotonic()
        before: list[int] = []
        while time.monotonic() - began < _LONGEST and time.monotonic() - moved < _QUIET:
            now = self.progress[:]
            others = [r for r in range(self.job.ranks) if r != self.rank]
            if all(now[self.job.ranks + r] > self.number for r in others):
                return
            if now != before:
                before, moved = now, time.monotonic()
            time.sleep(_POLL)


def run_rank(job: Job, rank: int, port: int, progress: Any, results: Any) -> None:
    """One rank's life; sends ``("calls", [Call, ...])`` or ``("error", text)``.

    Then it waits until its parent ends it.
    """
    answer: tuple[str, Any]
    parent = os.getppid()
    try:
        answer = ("calls", _work(job, rank, port, progress))
    except BaseException as error:  # noqa: BLE001 (whatever it is, the parent says it)
        text = "".join(traceback.format_exception_only(error)).strip()
        where = traceback.extract_tb(error.__traceback__)
        outside = [f for f in where if "/torch/" not in f.filename]
        line = f" at {outside[-1].filename}:{outside[-1].lineno}" if outside else ""
        answer = ("error", text + line)
    results.send(answer)
    results.close()
    while os.getppid() == parent:  # peers that wait for a rank that ended would say that it is lost
        time.sleep(0.2)
    os._exit(0)  # what the parent's modules would do at exit is the parent's


def _work(job: Job, rank: int, port: int, progress: Any) -> list[Call]:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    from symmplan._compat_c10d import forget_groups
    from symmplan.place.watching import Watching

    torch.set_num_threads(1)
    if job.setup is not None:
        importlib.import_module(job.setup)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if dist.is_initialized():  # forked from a rank of another group, whose threads are not here
        _FORGOTTEN.append(forget_groups())
    timeout = dt.timedelta(seconds=job.timeout)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group(
        "gloo",
        store=PrefixStore("declaration", store),
        rank=rank,
        world_size=job.ranks,
        timeout=timeout,
    )
    runner = _Rank(job, rank, progress)
    delays = [
        _Delay(late, start)
        for _ in range(job.rounds)
        for start in (True, False)
        for late in range(job.ranks)
    ]
    delays += [_Delay(None)] * _RANDOM_CALLS
    calls, watching = [], Watching(job.timeout)
    with torch.no_grad():
        placed = _Placed(runner, _arguments(job, rank, 0))
        for number, delay in enumerate(delays):
            values = _arguments(job, rank, number)
            runner.number, runner.delay, runner.put_off = number, delay, 0
            with watching:
                calls.append(placed.run(values))
    return calls


def _arguments(job: Job, rank: int, number: int) -> dict[str, Any]:
    """The arguments of a call, by name, without the group."""
    import torch

    from symmplan.place.ways import overload_named
    from symmplan.registry import requirements

    op, spec = overload_named(job.op), requirements(job.op)
    assert spec is not None
    given = job.inputs(rank, job.ranks, number) if callable(job.inputs) else job.inputs
    names = [a.name for a in op._schema.arguments if a.name != spec.group]
    if isinstance(given, torch.Tensor):
        given = (given,)
    values = dict(given) if hasattr(given, "keys") else dict(zip(names, given, strict=False))
    if callable(job.inputs):
        return values
    dice = torch.Generator().manual_seed(1000 * number + rank)

    def fresh(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(fresh, value))
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            return torch.randn(value.shape, generator=dice, dtype=torch.float32).to(value.dtype)
        return value

    return {name: fresh(value) for name, value in values.items()}


class _Placed:
    """The op with its tensors in placements: all of them, also those that are not declared."""

    def __init__(self, runner: _Rank, values: dict[str, Any]) -> None:
        import torch.distributed as dist

        from symmplan import _compat as compat
        from symmplan.memory import realize
        from symmplan.place.ways import overload_named
        from symmplan.planner import plan
        from symmplan.registry import requirements

        spec = requirements(runner.job.op)
        assert spec is not None
        self._runner = runner
        self._spec: OpSpec = spec
        self._op = overload_named(spec.op)
        self._variant = overload_named(spec.out) if spec.out and self._returns() else None
        self._group = compat.world_name()
        tensors = {**_tensors(values), **self._results(values)}
        mutable = {a.name: bool(a.alias_info and a.alias_info.is_write) for a in self._arguments}
        sizes = {n: t.numel() * t.element_size() for n, t in tensors.items()}
        self._arena = realize(
            plan(_problem(self._group, spec, sizes)),
            memory="shm",
            timeout=runner.job.timeout,
            groups={self._group: dist.group.WORLD},
            debug=True,
        )
        placements = self._arena.plan.placements
        runner.places = [
            (p.offset, p.end, n, n.startswith("return") or mutable.get(n.partition(".")[0], False))
            for n, p in placements.items()
        ]
        self._places = {
            n: self._arena.tensor(n, t.dtype, t.shape) if n in placements else t
            for n, t in tensors.items()
        }
        assert self._arena.races is not None
        self._arena.races.listener = runner.listen

    @property
    def _arguments(self) -> list[Any]:
        return list(self._op._schema.arguments)

    def _returns(self) -> bool:
        return any(r.where.startswith("return") for r in self._spec.requirements)

    def _results(self, values: dict[str, Any]) -> dict[str, torch.Tensor]:
        """What the results look like, where the op has a variant that writes them in place."""
        if self._variant is None:
            return {}
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as mode:

            def fake(value: Any) -> Any:
                if isinstance(value, (list, tuple)):
                    return type(value)(map(fake, value))
                return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

            result = self._op(**{n: fake(v) for n, v in self._called(values).items()})
            several = result if isinstance(result, (list, tuple)) else [result]
        names = ["return"] if len(several) == 1 else [f"return.{i}" for i in range(len(several))]
        like = zip(names, several, strict=True)
        return {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in like}

    def _called(self, values: dict[str, Any]) -> dict[str, Any]:
        import torch.distributed as dist

        group = next(a for a in self._arguments if a.name == self._spec.group)
        value = self._group if str(group.type).startswith(("str", "Optional[str")) else None
        return {**values, self._spec.group: dist.group.WORLD if value is None else value}

    def run(self, values: dict[str, Any]) -> Call:
        """One call, from all ranks' readiness to all ranks' end."""
        runner = self._runner
        (segment,) = self._arena.segments.values()
        given = _tensors(values)
        for name, tensor in given.items():
            self._places[name].copy_(tensor)
        called = self._called(_put(values, self._places))
        act: Callable[[], Any]
        if self._variant is None:
            act = _bound(self._op, called)
        else:
            outs = iter(t for n, t in self._places.items() if n.startswith("return"))
            names = [a.name for a in self._variant._schema.arguments]
            act = _bound(
                self._variant, {n: called[n] if n in called else next(outs) for n in names}
            )
        segment.barrier()
        call = Call()
        runner.wait(at_start=True)
        call.began = time.monotonic()
        runner.call = call
        runner.step()
        result = act()
        if self._spec.asynchronous:
            for tensor in result if isinstance(result, (list, tuple)) else [result]:
                torch_wait(tensor)
        runner.call = None
        call.ended = time.monotonic()
        runner.progress[runner.job.ranks + runner.rank] = runner.number + 1
        runner.step()
        segment.barrier()
        return call


def torch_wait(tensor: Any) -> None:
    """The end of an asynchronous op."""
    import torch

    torch.ops._c10d_functional.wait_tensor(tensor)


def _bound(op: Any, values: dict[str, Any]) -> Callable[[], Any]:
    arguments = op._schema.arguments
    args = [values[a.name] for a in arguments if not a.kwarg_only and a.name in values]
    kwargs = {a.name: values[a.name] for a in arguments if a.kwarg_only and a.name in values}
    return lambda: op(*args, **kwargs)


def _tensors(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among arguments, by name; those of lists as ``"name.0"``, ..."""
    import torch

    found = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, (list, tuple)):
            found.update(
                (f"{name}.{i}", x) for i, x in enumerate(value) if isinstance(x, torch.Tensor)
            )
    return found


def _put(values: dict[str, Any], places: dict[str, torch.Tensor]) -> dict[str, Any]:
    def placed(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [placed(f"{name}.{i}", x) for i, x in enumerate(value)]
        return places.get(name, value)

    return {name: placed(name, value) for name, value in values.items()}


def _problem(group: str, spec: OpSpec, sizes: dict[str, int]) -> Any:
    """One call, with all its tensors at the same time."""
    from symmplan.model import Access, Buffer, Operation, Problem

    align = max(r.align for r in spec.requirements)
    pads = any(r.signal_pad for r in spec.requirements)
    return Problem(
        buffers=[Buffer(n, s, group, align=align, signal_pad=pads) for n, s in sizes.items() if s],
        operations=[Operation("call", group=group, handshake=True, release=True, op=spec.op)],
        accesses=[Access("call", n, write=True, remote=True) for n, s in sizes.items() if s],
    )
