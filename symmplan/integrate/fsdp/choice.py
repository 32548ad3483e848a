"""The way that each of FSDP2's collectives runs; see `symmplan.place.choice`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import frozen

from symmplan import _compat as compat
from symmplan import _compat_fsdp as fsdp2
from symmplan.capture.fsdp import Way
from symmplan.integrate.fsdp.ops import exchanges, gathers, scatters
from symmplan.memory.tell import leaders, tell
from symmplan.memory.torch_symm import SPLIT_WORDS, is_whole_words
from symmplan.place.choice import Choice, fastest
from symmplan.place.clock import clock_of, seconds_of, slowest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from symmplan.capture.fsdp import Call
    from symmplan.place.clock import Act, Clock
    from symmplan.place.engines import Engines
    from symmplan.place.options import Options

__all__ = ["Bench", "Choices"]

#: Smaller collectives than this, in bytes, gain nothing on devices.
_SMALL = 1 << 20
#: Smaller ones are repeated until they come to as many bytes.
_ENOUGH = 64 << 20


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
        options: How `symmplan.fsdp.apply` was asked to work.
        groups: ``{name: process group}`` of the calls.
    """

    def __init__(self, device: torch.device, options: Options, groups: Mapping[str, Any]) -> None:
        self._device = device
        self._groups = groups
        self._timeout = options.timeout
        self._choose = options.chosen(device)
        self._found: dict[_Case, Choice] = {}

    @property
    def all(self) -> tuple[Choice, ...]:
        """Every choice, in the order of the program."""
        return tuple(self._found.values())

    def way(self, call: Call) -> Way:
        """How ``call`` runs."""
        choice = self._found.get(_case(call))
        if choice is not None:
            return Way(choice.way, choice.reason)
        if self._choose == "copy engine":
            return Way("copy engine")
        if self._choose == "ordinary":
            return Way("ordinary", "choose='ordinary'")
        if self._splits_words(call):
            return Way("ordinary", SPLIT_WORDS)
        if self._choose == "measure":
            return Way("ordinary", f"less than {_SMALL} bytes gain nothing in symmetric memory")
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
        kernels = self._device.type == "cuda"
        for case, seconds in slowest(times, lambda case: case[3], groups, self._timeout).items():
            kind, nbytes, dtype, group = case
            self._found[case] = Choice(
                op=kind,
                nbytes=nbytes,
                dtype=dtype,
                group=group,
                ranks=groups[group].size(),
                seconds=seconds,
                way=fastest(seconds, kernels=kernels, beside=kernels),
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
        gather, scatter = fsdp2.comms(None)
        ways: list[tuple[str, str, torch.Tensor, Any]] = [("ordinary", "local", plain, group)]
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
