"""The way that each collective runs: measured once, the same on all ranks.

Symmetric memory is not always faster: without NVLink multicast a symmetric reduce-scatter is slower
than the ordinary one, and small all-gathers gain nothing. And what a collective costs is not its
own time: its kernels take multiprocessors from the program's, copy engines do not. So at freeze
each kind, size and group of collective is timed in every way there is, on real bytes.

[Note: what is timed]
    On a device: the span from the begin of the first to the end of the last of two things that run
    side by side, on two streams. One is the collective, several times if it is small. The other is
    as many matrix products as take as long as torch's own way takes alone. A way that is slower by
    itself and a way that slows the products down both make the span longer, each by as much as it
    costs a program that is half communication. All ranks begin together, after an all-reduce, and
    the host is ahead of the device. On the CPU: the collective alone.

The slowest rank counts, the ways take turns, and the median of some turns is taken. Ways that are
about as fast are told apart by what else they cost: multiprocessors, then symmetric bytes on a
device.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import field, frozen

from symmplan import _compat as compat
from symmplan.capture.fsdp import Way
from symmplan.errors import AgreementError, PeerTimeoutError
from symmplan.integrate.fsdp_agree import leaders, tell
from symmplan.integrate.fsdp_ops import exchanges, gathers, scatters
from symmplan.memory.own import own_work

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from symmplan.capture.fsdp import Call
    from symmplan.integrate.fsdp_engines import Engines

__all__ = ["Choice", "Choices"]

#: The first of these that takes at most 1 / `_ALIKE` of the fastest's time is chosen.
_WAYS = {"cuda": ("copy engine", "default", "symmetric"), "cpu": ("symmetric", "default")}
#: Smaller collectives than this, in bytes, gain nothing on devices.
_SMALL = 1 << 20
_ALIKE = 0.97
_WARM_UP = 2
_REPETITIONS = 7
#: Rows of the square matrices whose products run beside a collective.
_ROWS = 4096
#: A collective of fewer bytes is repeated until it comes to as many, but not more often than that.
_ENOUGH, _OFTEN = 64 << 20, 16


@frozen
class Choice:
    """What was measured of one kind and size of collective.

    Attributes:
        kind: ``"all_gather"`` or ``"reduce_scatter"``.
        nbytes: Size in bytes of the all-gather's output or the reduce-scatter's input.
        dtype: Element type.
        group: Name of the process group.
        ranks: How many ranks it has.
        seconds: ``{way: time of the slowest rank}``; beside matrix products on devices.
        way: The way that was chosen: ``"default"``, ``"symmetric"`` or ``"copy engine"``.
    """

    kind: str
    nbytes: int
    dtype: str
    group: str
    ranks: int
    seconds: Mapping[str, float] = field(hash=False)
    way: str

    @property
    def placed(self) -> bool:
        """Whether it runs in symmetric memory."""
        return self.way != "default"

    @property
    def reason(self) -> str:
        """Why it stays in ordinary memory, empty if it does not."""
        if self.placed:
            return ""
        best = min((t, way) for way, t in self.seconds.items() if way != "default")
        return (
            f"torch's own way was faster: {self.seconds['default'] * 1e6:.0f} us against "
            f"{best[0] * 1e6:.0f} us in symmetric memory"
        )


_Case = tuple[str, int, str, str]


@frozen(eq=False)
class Bench:
    """What a kind and size of collective can be timed in.

    Attributes:
        call: The collective.
        placed: The bytes of its placement.
        received: Those of its all-to-all's output; None if there is none.
    """

    call: Call
    placed: torch.Tensor
    received: torch.Tensor | None = None


class Choices:
    """What was measured so far.

    Args:
        device: Where buffers lie.
        timeout: Seconds that ranks wait for each other.
        choose: As for `symmplan.fsdp.apply`.
    """

    def __init__(self, device: torch.device, timeout: float, choose: str) -> None:
        self._device = device
        self._timeout = timeout
        self._choose = choose
        self._found: dict[_Case, Choice] = {}

    @property
    def all(self) -> tuple[Choice, ...]:
        """Every choice, in the order of the program."""
        return tuple(self._found.values())

    def way(self, call: Call) -> Way:
        """How ``call`` runs."""
        choice = self._found.get(_case(call))
        if choice is not None:
            return Way(choice.way, choice.reason)  # type: ignore[arg-type]
        if self._choose == "copy engine":
            return Way("copy engine")
        if self._choose == "placed" or self._device.type == "cpu":
            return Way("symmetric")
        if not self.worth(call):
            return Way("default", f"less than {_SMALL} bytes gain nothing in symmetric memory")
        # The one that needs most bytes: a segment cannot grow later, and on devices not shrink.
        return Way("copy engine" if compat.has_copy_engine_policy() else "symmetric")

    def worth(self, call: Call) -> bool:
        """Whether ``call`` is large enough to be measured."""
        return self._device.type == "cpu" or call.nbytes >= _SMALL

    def measured(self, call: Call) -> bool:
        """Whether such a collective was measured."""
        return _case(call) in self._found

    def measure(
        self,
        memory: str,
        benches: Sequence[Bench],
        groups: Mapping[str, Any],
        engines: Mapping[str, Engines],
    ) -> None:
        """Time every kind and size of collective, each once.

        Args:
            memory: Name of the memory backend.
            benches: The collectives, in the order of the program, and bytes that nobody uses once
                all ranks have come here.
            groups: ``{name: process group}``.
            engines: ``{name: communicators}`` of the groups that have them.

        Raises:
            AgreementError: Ranks measured different collectives.
            PeerTimeoutError: A rank did not come, or its part of a collective did not.

        Collective: yes, over those groups.
        """
        cases: dict[_Case, Bench] = {}
        for bench in benches:
            cases.setdefault(_case(bench.call), bench)
        # What may fail on one rank alone comes before anything that waits on devices.
        plain = torch.zeros(
            max(b.call.nbytes for b in cases.values()), dtype=torch.uint8, device=self._device
        )
        acts = {
            case: self._acts(bench, plain, groups[case[3]], memory, engines.get(case[3]))
            for case, bench in cases.items()
        }
        clock = DeviceClock(self._device, self._timeout) if self._device.type == "cuda" else None
        # No rank may write into its peers before all have saved what they hold.
        everyone = dict.fromkeys(leaders(groups).values(), 0)
        tell("measuring", everyone, groups, self._timeout)
        times = []
        for case, bench in cases.items():
            bench.placed.zero_()
            times.append(self._time(case, acts[case], groups[case[3]], clock))
        self._agree(list(cases), times, groups)

    def _agree(
        self,
        cases: Sequence[_Case],
        times: Sequence[Mapping[str, float]],
        groups: Mapping[str, Any],
    ) -> None:
        """Let the slowest rank count, over all ranks that make one plan together."""
        leader = leaders(groups)
        mine = {
            name: [dict(t) for c, t in zip(cases, times, strict=True) if leader[c[3]] == name]
            for name in dict.fromkeys(leader[c[3]] for c in cases)
        }
        told = tell("choice", mine, groups, self._timeout)
        slowest = {
            name: iter(_slowest(rows, mine[name], name, groups[name]))
            for name, rows in told.items()
        }
        for case in cases:
            kind, nbytes, dtype, group = case
            seconds = next(slowest[leader[group]])
            enough = min(seconds.values()) / _ALIKE
            ways = _WAYS.get(self._device.type, _WAYS["cuda"])
            way = next(w for w in ways if seconds.get(w, float("inf")) <= enough)
            self._found[case] = Choice(
                kind, nbytes, dtype, group, groups[group].size(), seconds, way
            )

    def _acts(
        self, bench: Bench, scratch: torch.Tensor, group: Any, memory: str, engines: Engines | None
    ) -> dict[str, Callable[[], Any]]:
        """What runs the collective in each way; nothing is written before it is called."""
        placed = bench.placed
        plain = scratch[: bench.call.nbytes].view(placed.dtype)
        count = placed.numel() // group.size()
        mine = slice(group.rank() * count, (group.rank() + 1) * count)
        gather, scatter = compat.fsdp_comms(None)
        ways: list[tuple[str, str, torch.Tensor, Any]] = [
            ("default", "", plain, group),
            ("symmetric", memory, placed, group),
        ]
        acts: dict[str, Callable[[], Any] | None] = {}
        if bench.call.key.kind == "all_gather":
            if engines is not None:
                ways.append(("copy engine", memory, placed, engines.gather))
            for way, backend, tensor, over in ways:
                acts[way] = gathers(backend, gather, tensor, tensor[mine], over, async_op=False)
        else:
            output = plain.new_zeros(count)
            op = _op(placed)
            for way, backend, tensor, over in ways:
                acts[way] = scatters(backend, scatter, output, tensor, over, op, async_op=False)
            if engines is not None and bench.received is not None:
                acts["copy engine"] = exchanges(
                    output, placed, bench.received, engines.exchange, op
                )
        return {way: act for way, act in acts.items() if act is not None}

    def _time(
        self,
        case: _Case,
        acts: Mapping[str, Callable[[], Any]],
        group: Any,
        clock: DeviceClock | None,
    ) -> dict[str, float]:
        """Seconds of each way, the median of some runs. See [Note: what is timed]."""
        # By the size, not by the time it takes: equal on all ranks.
        times = 1 if clock is None else min(_OFTEN, -(-_ENOUGH // max(1, case[1])))
        products = 0
        if clock is not None:
            own = acts["default"]
            alone = min(clock.span(own, times, 0, group) for _ in range(_WARM_UP + 1))
            products = min(256, max(1, round(alone / clock.product())))
        runs: dict[str, list[float]] = {way: [] for way in acts}
        for repetition in range(_WARM_UP + _REPETITIONS):
            for way, act in acts.items():
                if clock is None:
                    seconds = _on_host(act)
                else:
                    seconds = clock.span(act, times, products, group)
                if repetition >= _WARM_UP:
                    runs[way].append(seconds)
        return {way: statistics.median(seconds) / times for way, seconds in runs.items()}


class DeviceClock:
    """Times collectives beside matrix products. See [Note: what is timed].

    Args:
        device: A CUDA device.
        timeout: Seconds that a span may take before the peers count as lost.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        self._timeout = timeout
        self._products = torch.cuda.current_stream(device)
        self._side = torch.cuda.Stream(device)
        self._token = torch.zeros(1, device=device)
        # The program's own random numbers must not change, and zeros take less power.
        generator = torch.Generator(device).manual_seed(0)
        shape = (_ROWS, _ROWS)
        self._a, self._b, self._out = (
            torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
            for _ in range(3)
        )

    def product(self) -> float:
        """Seconds of one matrix product."""
        return min(self._timed(lambda: self._multiply(8)) / 8 for _ in range(_WARM_UP + 1))

    def span(self, act: Callable[[], Any], times: int, products: int, group: Any) -> float:
        """Seconds until both are done: ``act`` so many times, and so many products.

        Collective: yes, over ``group``; ``times`` must be the same on all ranks.
        """

        def both() -> None:
            self._side.wait_stream(self._products)
            with torch.cuda.stream(self._side):
                for _ in range(times):
                    act()
            self._multiply(products)
            self._products.wait_stream(self._side)

        with own_work:
            dist.all_reduce(self._token, group=group)
        # While these run the host queues what is timed.
        self._multiply(2 + times)
        return self._timed(both)

    def _multiply(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._a, self._b, out=self._out)

    def _timed(self, work: Callable[[], None]) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(self._products)
        work()
        after.record(self._products)
        # A host that waits in CUDA for a peer that failed would wait until NCCL ends the process.
        deadline = time.monotonic() + self._timeout
        while not after.query():
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"a collective that was measured did not end in {self._timeout:g} s",
                    fix="see why a peer failed, or raise timeout=",
                    timeout=self._timeout,
                )
            time.sleep(1e-5)
        return float(before.elapsed_time(after)) / 1e3


def _on_host(act: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def _op(source: torch.Tensor) -> Any:
    """What FSDP2 uses for that type where it may choose; NCCL's kernels depend on it."""
    average = source.is_cuda and source.dtype in (torch.float32, torch.bfloat16)
    return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM


def _case(call: Call) -> _Case:
    return call.key.kind, call.nbytes, call.key.dtype, call.group


def _slowest(
    said: Sequence[Any], mine: Sequence[Mapping[str, float]], name: str, group: Any
) -> list[dict[str, float]]:
    rows: list[list[dict[str, float]]] = []
    for rank, answer in enumerate(said):
        try:
            row = [{way: float(a[way]) for way in m} for a, m in zip(answer, mine, strict=True)]
        except (ValueError, TypeError, KeyError):
            raise AgreementError(
                f"rank {rank} measured other collectives",
                expected=f"{len(mine)} kinds and sizes",
                got=repr(answer)[:200],
                fix="run the same program with the same shapes on every rank of the group",
                group=name,
                rank=group.rank(),
                ranks=(group.rank(), rank),
            ) from None
        rows.append(row)
    return [{way: max(r[i][way] for r in rows) for way in m} for i, m in enumerate(mine)]
