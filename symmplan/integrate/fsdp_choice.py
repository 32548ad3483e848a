"""Symmetric memory or torch's own way, for each collective: measured once, the same on all ranks.

Symmetric memory is not always faster: without NVLink multicast a symmetric reduce-scatter is slower
than the ordinary one, and small all-gathers gain nothing. So at freeze each kind, size and group of
collective is timed both ways on real bytes, the slowest rank counts, and what loses clearly stays
out of the plan, with the two times as the reason.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import frozen

from symmplan import _compat
from symmplan.errors import AgreementError
from symmplan.integrate.fsdp_agree import leaders, tell
from symmplan.integrate.fsdp_ops import gathers, scatters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from symmplan.capture.fsdp import Call

__all__ = ["Choice", "Choices"]

#: Symmetric memory stays unless torch's own way takes at most this part of its time.
_CLEARLY = 0.95
_WARM_UP = 2
_REPETITIONS = 5


@frozen
class Choice:
    """What was measured of one kind and size of collective.

    Attributes:
        kind: ``"all_gather"`` or ``"reduce_scatter"``.
        nbytes: Size in bytes of the all-gather's output or the reduce-scatter's input.
        dtype: Element type.
        group: Name of the process group.
        ranks: How many ranks it has.
        plain_seconds: Time of torch's own way, of the slowest rank.
        placed_seconds: Time in symmetric memory, of the slowest rank.
        placed: Whether symmetric memory was chosen.
    """

    kind: str
    nbytes: int
    dtype: str
    group: str
    ranks: int
    plain_seconds: float
    placed_seconds: float
    placed: bool

    @property
    def reason(self) -> str | None:
        """Why it stays out of the plan, None if it does not."""
        if self.placed:
            return None
        return (
            f"torch's own way was faster: {self.plain_seconds * 1e6:.0f} us against "
            f"{self.placed_seconds * 1e6:.0f} us in symmetric memory"
        )


_Case = tuple[str, int, str, str]


class Choices:
    """What was measured so far.

    Args:
        device: Where buffers lie.
        timeout: Seconds that ranks wait for each other.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        self._device = device
        self._timeout = timeout
        self._found: dict[_Case, Choice] = {}

    @property
    def all(self) -> tuple[Choice, ...]:
        """Every choice, in the order of the program."""
        return tuple(self._found.values())

    def reason(self, call: Call) -> str | None:
        """Why ``call`` stays out of the plan; None if it does not."""
        choice = self._found.get(_case(call))
        return None if choice is None else choice.reason

    def measure(
        self,
        memory: str,
        placed: Sequence[tuple[Call, torch.Tensor]],
        groups: Mapping[str, Any],
    ) -> None:
        """Time every kind and size of collective, each once.

        Args:
            memory: Name of the memory backend.
            placed: The collectives, in the order of the program, and the bytes of their placements,
                which nobody uses yet.
            groups: ``{name: process group}``.

        Collective: yes, over those groups.
        """
        cases: dict[_Case, torch.Tensor] = {}
        for call, tensor in placed:
            cases.setdefault(_case(call), tensor)
        times = [self._time(case, groups[case[3]], memory, cases[case]) for case in cases]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._agree(list(cases), times, groups)

    def _agree(
        self,
        cases: Sequence[_Case],
        times: Sequence[tuple[float, float]],
        groups: Mapping[str, Any],
    ) -> None:
        """Let the slowest rank count, over all ranks that make one plan together."""
        leader = leaders(groups)
        mine = {
            name: [t for c, t in zip(cases, times, strict=True) if leader[c[3]] == name]
            for name in dict.fromkeys(leader[c[3]] for c in cases)
        }
        told = tell("choice", mine, groups, self._timeout)
        slowest = {
            name: iter(_slowest(rows, len(mine[name]), name, groups[name]))
            for name, rows in told.items()
        }
        for case in cases:
            kind, nbytes, dtype, group = case
            plain, placed = next(slowest[leader[group]])
            self._found[case] = Choice(
                kind,
                nbytes,
                dtype,
                group,
                groups[group].size(),
                plain,
                placed,
                plain > placed * _CLEARLY,
            )

    def _time(
        self, case: _Case, group: Any, memory: str, placed: torch.Tensor
    ) -> tuple[float, float]:
        """Seconds of torch's own way and of symmetric memory, each the median of some runs."""
        kind, _, name, _ = case
        placed = placed.view(getattr(torch, name.removeprefix("torch.")))
        placed.zero_()
        plain = torch.zeros_like(placed)
        count = placed.numel() // group.size()
        mine = slice(group.rank() * count, (group.rank() + 1) * count)
        gather, scatter = _compat.fsdp_comms(None)
        acts: list[Callable[[], Any]] = []
        for backend, tensor in (("", plain), (memory, placed)):
            if kind == "all_gather":
                acts.append(gathers(backend, gather, tensor, tensor[mine], group, async_op=False))
            else:
                act = scatters(
                    backend,
                    scatter,
                    plain.new_zeros(count),
                    tensor,
                    group,
                    dist.ReduceOp.SUM,
                    async_op=False,
                )
                assert act is not None
                acts.append(act)
        runs: tuple[list[float], list[float]] = ([], [])
        for repetition in range(_WARM_UP + _REPETITIONS):
            for act, seconds in zip(acts, runs, strict=True):
                duration = self._once(act)
                if repetition >= _WARM_UP:
                    seconds.append(duration)
        return statistics.median(runs[0]), statistics.median(runs[1])

    def _once(self, act: Callable[[], Any]) -> float:
        if self._device.type != "cuda":
            begin = time.perf_counter()
            act()
            return time.perf_counter() - begin
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        act()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3


def _case(call: Call) -> _Case:
    return call.key.kind, call.nbytes, call.key.dtype, call.group


def _slowest(said: Sequence[Any], count: int, name: str, group: Any) -> list[tuple[float, float]]:
    rows = []
    for rank, answer in enumerate(said):
        try:
            row = [(float(a), float(b)) for a, b in answer]
        except (ValueError, TypeError):
            row = []
        if len(row) != count:
            raise AgreementError(
                f"rank {rank} measured other collectives",
                expected=f"{count} kinds and sizes",
                got=len(row),
                fix="run the same program with the same shapes on every rank of the group",
                group=name,
                rank=group.rank(),
                ranks=(group.rank(), rank),
            )
        rows.append(row)
    return [(max(r[i][0] for r in rows), max(r[i][1] for r in rows)) for i in range(count)]
