"""The way that each collective runs: measured once, the same on all ranks.

Symmetric memory is not always faster: without NVLink multicast a symmetric reduce-scatter is slower
than the ordinary one, and small all-gathers gain nothing. And what a collective costs is not its
own time: its kernels take multiprocessors from the program's, copy engines do not. So at freeze
each kind, size and group of collective is timed in every way there is, on real bytes. On a device
the time is that of the collective *and* matrix products of about its length on another stream,
from the first's begin to the last's end. The slowest rank counts. Ways that are about as fast are
told apart by what else they cost: multiprocessors, then symmetric bytes on a device.
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
from symmplan.errors import AgreementError
from symmplan.integrate.fsdp_agree import leaders, tell
from symmplan.integrate.fsdp_ops import exchanges, gathers, scatters

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
            benches: The collectives, in the order of the program, and bytes that nobody uses.
            groups: ``{name: process group}``.
            engines: ``{name: communicators}`` of the groups that have them.

        Collective: yes, over those groups.
        """
        cases: dict[_Case, Bench] = {}
        for bench in benches:
            cases.setdefault(_case(bench.call), bench)
        times = []
        for case, bench in cases.items():
            group = groups[case[3]]
            acts = self._acts(bench, group, memory, engines.get(case[3]))
            times.append(self._time(case, acts))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
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
        self, bench: Bench, group: Any, memory: str, engines: Engines | None
    ) -> dict[str, Callable[[], Any]]:
        """What runs the collective in each way."""
        placed = bench.placed
        placed.zero_()
        plain = torch.zeros_like(placed)
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
            total = dist.ReduceOp.SUM
            for way, backend, tensor, over in ways:
                acts[way] = scatters(backend, scatter, output, tensor, over, total, async_op=False)
            if engines is not None and bench.received is not None:
                acts["copy engine"] = exchanges(
                    output, placed, bench.received, engines.exchange, total
                )
        return {way: act for way, act in acts.items() if act is not None}

    def _time(self, case: _Case, acts: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        """Seconds of each way, the median of some runs."""
        del case
        once = self._on_device(acts) if self._device.type == "cuda" else _on_host
        runs: dict[str, list[float]] = {way: [] for way in acts}
        for repetition in range(_WARM_UP + _REPETITIONS):
            for way, act in acts.items():
                seconds = once(act)
                if repetition >= _WARM_UP:
                    runs[way].append(seconds)
        return {way: statistics.median(seconds) for way, seconds in runs.items()}

    def _on_device(
        self, acts: Mapping[str, Callable[[], Any]]
    ) -> Callable[[Callable[[], Any]], float]:
        """What times a collective beside matrix products that take about as long."""
        products = torch.cuda.current_stream(self._device)
        side = torch.cuda.Stream(self._device)
        a, b = (
            torch.zeros(_ROWS, _ROWS, dtype=torch.bfloat16, device=self._device) for _ in range(2)
        )
        out = torch.empty_like(a)

        def once(act: Callable[[], Any], count: int) -> float:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(products)
            side.wait_stream(products)
            with torch.cuda.stream(side):
                act()
            for _ in range(count):
                torch.mm(a, b, out=out)
            products.wait_stream(side)
            after.record(products)
            after.synchronize()
            return float(before.elapsed_time(after)) / 1e3

        def nothing() -> None: ...

        for _ in range(_WARM_UP):
            once(acts["default"], 1)
        alone = once(acts["default"], 0)
        product = once(nothing, 8) / 8
        count = min(256, max(1, round(1.5 * alone / product)))
        return lambda act: once(act, count)


def _on_host(act: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


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
