"""The way that each collective runs: measured once, the same on all ranks.

Symmetric memory is not always faster: without NVLink multicast a symmetric reduce-scatter is slower
than the ordinary one, and small all-gathers gain nothing. And what a collective costs is not its
own time: its kernels take multiprocessors from the program's, copy engines do not. So at freeze
each kind, size and group of collective is timed in every way there is, on real bytes; on a device
beside matrix products. See [Note: what is timed] in `symmplan.place.clock`.

Ways that are about as fast are told apart by what else they cost: multiprocessors, then symmetric
bytes on a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import field, frozen

from symmplan import _compat as compat
from symmplan.capture.fsdp import Way
from symmplan.integrate.fsdp.ops import exchanges, gathers, scatters
from symmplan.memory.tell import leaders, tell
from symmplan.memory.torch_symm import SPLIT_WORDS, is_whole_words
from symmplan.place.clock import ALIKE, clock_of, seconds_of, slowest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from symmplan.capture.fsdp import Call
    from symmplan.integrate.fsdp.engines import Engines
    from symmplan.place.clock import Act, Clock

__all__ = ["Choice", "Choices"]

#: The first of these that takes at most 1 / `ALIKE` of the fastest's time is chosen.
_WAYS = {"cuda": ("copy engine", "default", "symmetric"), "cpu": ("symmetric", "default")}
#: Smaller collectives than this, in bytes, gain nothing on devices.
_SMALL = 1 << 20
#: Smaller ones are repeated until they come to as many bytes.
_ENOUGH = 64 << 20


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
        others = [seconds for way, seconds in self.seconds.items() if way != "default"]
        if not others:
            return SPLIT_WORDS
        return (
            f"torch's own way was faster: {self.seconds['default'] * 1e6:.0f} us against "
            f"{min(others) * 1e6:.0f} us in symmetric memory"
        )


_Case = tuple[str, int, str, str]


@frozen(eq=False)
class Bench:
    """What a kind and size of collective can be timed in.

    Attributes:
        call: The collective.
        placed: Symmetric bytes for its buffer.
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
        groups: ``{name: process group}`` of the calls.
    """

    def __init__(
        self, device: torch.device, timeout: float, choose: str, groups: Mapping[str, Any]
    ) -> None:
        self._device = device
        self._groups = groups
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
        if self._splits_words(call):
            return Way("default", SPLIT_WORDS)
        if self._choose == "measure":
            return Way("default", f"less than {_SMALL} bytes gain nothing in symmetric memory")
        return Way("symmetric")

    def _splits_words(self, call: Call) -> bool:
        part = call.nbytes // self._groups[call.group].size()
        return (
            self._device.type == "cuda"
            and call.key.kind == "all_gather"
            and not is_whole_words(part)
        )

    def unmeasured(self, calls: Iterable[Call]) -> list[Call]:
        """One call of each kind and size that may gain and was not measured yet."""
        found: dict[_Case, Call] = {}
        for call in calls:
            small = self._device.type == "cuda" and call.nbytes < _SMALL
            ways = compat.has_copy_engine_policy() or not self._splits_words(call)
            if ways and not small:
                found.setdefault(_case(call), call)
        return [call for case, call in found.items() if case not in self._found]

    def measure(
        self,
        memory: str,
        benches: Sequence[Bench],
        groups: Mapping[str, Any],
        engines: Mapping[str, Engines],
    ) -> None:
        """Time collectives that were not measured yet.

        Args:
            memory: Name of the memory backend.
            benches: One of each kind and size, in the order of the program.
            groups: ``{name: process group}``.
            engines: ``{name: communicators}`` of the groups that have them.

        Raises:
            AgreementError: Ranks measured different collectives.
            PeerTimeoutError: A rank did not come, or its part of a collective did not.

        Collective: yes, over those groups.
        """
        cases = {_case(bench.call): bench for bench in benches}
        # What may fail on one rank alone comes before anything that waits on devices.
        plain = torch.zeros(
            max(b.call.nbytes for b in cases.values()), dtype=torch.uint8, device=self._device
        )
        acts = {
            case: self._acts(bench, plain, groups[case[3]], memory, engines.get(case[3]))
            for case, bench in cases.items()
        }
        # All have come so far.
        everyone = dict.fromkeys(leaders(groups).values(), 0)
        tell("measuring", everyone, groups, self._timeout)
        clock = clock_of(self._device, self._timeout)
        times = {}
        for case, bench in cases.items():
            bench.placed.zero_()
            times[case] = self._time(case, acts[case], groups[case[3]], clock)
        ways = _WAYS.get(self._device.type, _WAYS["cuda"])
        for case, seconds in slowest(times, lambda case: case[3], groups, self._timeout).items():
            kind, nbytes, dtype, group = case
            enough = min(seconds.values()) / ALIKE
            way = next(w for w in ways if seconds.get(w, float("inf")) <= enough)
            self._found[case] = Choice(
                kind, nbytes, dtype, group, groups[group].size(), seconds, way
            )

    def _time(
        self, case: _Case, acts: Mapping[str, Act], group: Any, clock: Clock
    ) -> dict[str, float]:
        """Seconds of each way."""
        # FSDP2 does not say how much a step computes meanwhile.
        beside = None if self._device.type == "cuda" else 0.0
        return seconds_of(clock, acts, group, case[1], beside=beside, enough=_ENOUGH)

    def _acts(
        self, bench: Bench, scratch: torch.Tensor, group: Any, memory: str, engines: Engines | None
    ) -> dict[str, Act]:
        """What runs the collective in each way; nothing is written before it is called."""
        placed = bench.placed
        plain = scratch[: bench.call.nbytes].view(placed.dtype)
        count = placed.numel() // group.size()
        mine = slice(group.rank() * count, (group.rank() + 1) * count)
        gather, scatter = compat.fsdp_comms(None)
        ways: list[tuple[str, str, torch.Tensor, Any]] = [("default", "", plain, group)]
        if not self._splits_words(bench.call):
            ways.append(("symmetric", memory, placed, group))
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
        return {way: _then(act) for way, act in acts.items() if act is not None}


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


def _case(call: Call) -> _Case:
    return call.key.kind, call.nbytes, call.key.dtype, call.group
