"""Compares plans with runs: a step under torch's profiler, each collective with its kernels.

[Note: how an algorithm shows]
    NCCL's symmetric kernels are called ``ncclSymk...``, its others ``ncclDevKernel_...``; copy
    engines show as ``Memcpy PtoP``, and so do pushes, which are such copies. The collectives of
    shared memory show as ``symmplan::...``, those of torch as ``c10d::...``. During a check the
    host marks the time in which it launches a planned collective. The kernels that it launches
    during that time belong to that collective.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, field, frozen

from symmplan.coordination.groups import resolve_groups
from symmplan.device import device_of
from symmplan.errors import RunError
from symmplan.memory import BACKENDS, locate
from symmplan.memory.meeting.topology import Topology, known
from symmplan.memory.ops.two_levels import SHOWN
from symmplan.model import PUSHES, AlgorithmName
from symmplan.place.collectives import NCCL
from symmplan.process import PROCESS
from symmplan.registry.catalogue import collective_of
from symmplan.runtime.options import function
from symmplan.torch_private.ops import TorchDispatchMode, tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from symmplan.place.expected import Expected


#: The first kind one of whose words is in a kernel's name.
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("symmetric kernels", ("ncclsymk", "ncclsymdev", "two_shot_all_reduce", "lamport_all_reduce")),
    ("NCCL kernels", ("nccl",)),
    ("copy engines", ("memcpy ptop",)),
    ("local copies", ("memcpy",)),
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("GEMM", ("gemm", "nvjet", "cutlass", "xmma", "cublas")),
    ("copies out", ("split_with_sizes",)),
    ("gradient copies in", ("chunk_cat",)),
    ("shard copies in", ("multi_tensor", "foreach")),
    ("sums", ("reduce_kernel",)),
)
#: Calls of the CUDA runtime or driver; ops have correlation numbers too, but others.
_LAUNCH = re.compile(r"cu(da)?[A-Z]")
_MARK = "symmplan planned "
#: On the host: collectives of process groups, and symmplan's own.
_TORCHS = ("c10d::", "_c10d_functional::", "gloo:", "nccl:")
_OWN = "symmplan::"


# ---- profiles -----------------------------------------------------------------------------------


@frozen
class DeviceEvent:
    """A kernel or copy on a device.

    Attributes:
        name: As the profiler has it.
        begin: Nanoseconds.
        end: Nanoseconds.
        launched: When the host launched it, in nanoseconds; None if that is not known.
    """

    name: str
    begin: int
    end: int
    launched: int | None = None


@frozen
class Profile:
    """What ran.

    Attributes:
        events: On the device.
        host: ``(name, begin, end)`` of what the host did, in nanoseconds.
    """

    events: tuple[DeviceEvent, ...]
    host: tuple[tuple[str, int, int], ...]


def kind_of(name: str) -> str:
    """The kind of a kernel or copy with this name."""
    lower = name.lower()
    for kind, words in _KINDS:
        if any(word in lower for word in words):
            return kind
    return "other"


def profiled(act: Callable[[], Any], device: torch.device, *, host: bool = True) -> Profile:
    """Run something once under torch's profiler.

    Args:
        act: What to run.
        device: What to look at, and wait for.
        host: Whether to look at the host.

    Collective: as ``act``.
    """
    kinds, there = torch.profiler.ProfilerActivity, device_of(device)
    activities = [getattr(kinds, name) for name in there.activities] + [kinds.CPU] * host
    with torch.profiler.profile(activities=activities) as seen:
        act()
        there.synchronize()
    kineto: Any = seen.profiler
    on_device, launches, done = [], {}, []
    for event in kineto.kineto_results.events():
        name, begin = event.name(), event.start_ns()
        end = begin + event.duration_ns()
        if not there.ran(event):
            if _LAUNCH.match(name):
                launches[event.correlation_id()] = begin
            else:
                done.append((name, begin, end))
        elif not name.startswith(("Memset", "FSDP::", _MARK)) and not _annotates(event):
            on_device.append((name, begin, end, event.correlation_id()))
    # CUPTI tells nothing of batched copies but their numbers, which grow with time: such a copy was
    # launched right after the call with the next smaller number.
    numbers = sorted(launches)
    events = []
    for name, begin, end, number in on_device:
        at = bisect_right(numbers, number)
        events.append(DeviceEvent(name, begin, end, launches[numbers[at - 1]] if at else None))
    return Profile(tuple(events), tuple(done))


def _annotates(event: Any) -> bool:
    """Whether an event is the device's part of a ``record_function``, no kernel."""
    asked = getattr(event, "is_user_annotation", None)
    return bool(asked is not None and asked())


# ---- what is looked for, and what is seen -------------------------------------------------------


@frozen
class Seen:
    """A planned collective, and what ran.

    Attributes:
        planned: How it was planned.
        algorithm: How it ran; empty if nothing was seen of it.
        kernels: ``{name: how often}`` of its kernels and copies between devices; in shared memory,
            of its ops.
        reason: Why it did not run as planned, as far as that is known; empty if it did.
    """

    planned: Expected
    algorithm: AlgorithmName | None
    kernels: Mapping[str, int] = field(factory=dict, hash=False)
    reason: str = ""

    @property
    def engaged(self) -> bool:
        """Whether it ran as planned."""
        return self.algorithm == self.planned.algorithm


@frozen(repr=False)
class Checked:
    """The planned and the observed algorithms of a step's collectives, on this rank.

    Attributes:
        calls: In the order of the step.
    """

    calls: tuple[Seen, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether each ran as planned."""
        return all(seen.engaged for seen in self.calls)

    @property
    def missed(self) -> tuple[tuple[str, str], ...]:
        """``(collective, reason)`` of those that did not."""
        return tuple(
            (f"{s.planned.name} ({s.planned.op})", s.reason) for s in self.calls if s.reason
        )

    def __repr__(self) -> str:
        missed = sum(not seen.engaged for seen in self.calls)
        return f"<Checked: {len(self.calls):,} collectives, {missed:,} not as planned>"

    def __str__(self) -> str:
        """A table, planned and observed side by side, and the reasons below it."""
        rows = Counter(
            (
                collective_of(s.planned.op) or s.planned.op,
                f"{s.planned.nbytes} bytes",
                s.planned.dtype,
                s.planned.algorithm,
                s.algorithm or "not seen",
                ", ".join(sorted(s.kernels)) or "-",
            )
            for s in self.calls
        )
        lines = ["calls  collective  planned -> observed: kernels"]
        for (what, size, dtype, planned, ran, kernels), count in rows.items():
            lines.append(f"{count:5}  {what}, {size} of {dtype}: {planned} -> {ran}: {kernels}")
        return "\n".join([*lines, *(f"{name}: {reason}" for name, reason in self.missed)])


# ---- the check ----------------------------------------------------------------------------------


_NOTHING = contextlib.nullcontext()


def checking() -> bool:
    """Whether a step is being checked."""
    return PROCESS.launched is not None


def launching(
    expected: Expected | None, reason: str = ""
) -> contextlib.AbstractContextManager[Any]:
    """Mark launches inside as those of a planned collective. Costs nothing outside a check.

    Args:
        expected: The collective, a new object for each call, and the same one for all parts of a
            call; None if it was not planned.
        reason: Why it will not run as planned, if that is known.
    """
    launched = PROCESS.launched
    if launched is None or expected is None:
        return _NOTHING
    number = next((i for i, (e, _) in enumerate(launched) if e is expected), len(launched))
    if number == len(launched):
        launched.append((expected, reason))
    elif reason:
        launched[number] = (expected, reason)
    return torch.profiler.record_function(f"{_MARK}{number}")


def launching_from(calls: Sequence[Expected]) -> contextlib.AbstractContextManager[Any]:
    """Mark the ops inside as these calls, in this order, for code that cannot mark them.

    Other ops of the same name differ: their tensors do not lie in segments.
    """
    return _Calls(calls) if checking() else _NOTHING


class _Calls(TorchDispatchMode):
    """See `launching_from`."""

    def __init__(self, calls: Sequence[Expected]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = [evolved for c in calls for evolved in [evolve(c)] * c.launches]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        at = next((i for i, e in enumerate(self._left) if e.target == name), None)
        if at is None or not any(map(_is_placed, tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        with launching(self._left.pop(at)):
            return func(*args, **kwargs)


def _is_placed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and locate(value) is not None


def check(step: Callable[[], Any], device: torch.device | None) -> Checked:
    """Run a step once, and compare what was planned with what ran.

    Args:
        step: What to run.
        device: Where the program's tensors lie; None if nothing was planned yet.

    Raises:
        OptionError: ``step`` is no function.
        RunError: Nothing was planned yet, or another check is going on.

    Collective: as ``step``.
    """
    function("step", step, "pass the function itself, without calling it")
    expected = "a step that follows a plan, and no check inside another"
    if device is None:
        what = "check was called before there is a plan"
        fix = "run steps until there is a plan first"
        raise RunError(what, expected=expected, got="no plan", fix=fix)
    if checking():
        what, fix = "two checks at a time", "check one step after the other"
        raise RunError(what, expected=expected, got="a running check", fix=fix)
    launched: list[tuple[Expected, str]] = []
    PROCESS.launched = launched
    try:
        profile = profiled(step, device)
    finally:
        PROCESS.launched = None
    marks: dict[int, list[tuple[int, int]]] = {}
    for name, begin, end in profile.host:
        if name.startswith(_MARK):
            marks.setdefault(int(name.removeprefix(_MARK)), []).append((begin, end))
    groups = resolve_groups(planned.group for planned, _ in launched)
    of = known({n: g.process_group for n, g in groups.items()}, device)
    return Checked(
        tuple(
            _seen(planned, profile, marks.get(i, ()), of.get(planned.group), reason)
            for i, (planned, reason) in enumerate(launched)
        )
    )


def _seen(
    expected: Expected,
    profile: Profile,
    marks: Sequence[tuple[int, int]],
    topology: Topology | None,
    known_reason: str,
) -> Seen:
    def inside(moment: int | None) -> bool:
        return moment is not None and any(begin <= moment <= end for begin, end in marks)

    kernels = [e.name for e in profile.events if inside(e.launched)]
    of_kind = {name: kind_of(name) for name in kernels}
    moving = ("symmetric kernels", "NCCL kernels", "copy engines")
    shown = [_short(name) for name in kernels if of_kind[name] in moving]
    kinds = set(of_kind.values())
    ops = [name for name, begin, _ in profile.host if inside(begin)]
    if not BACKENDS[expected.memory].devices:
        shown = [name for name in ops if name.startswith((_OWN, *_TORCHS))]
    algorithm = _algorithm(expected, kinds, ops)
    reason = ""
    if algorithm != expected.algorithm:
        reason = known_reason or _why(expected, algorithm, topology or Topology(ranks=1))
    return Seen(expected, algorithm, dict(Counter(shown)), reason)


def _algorithm(expected: Expected, kinds: set[str], ops: Collection[str]) -> AlgorithmName | None:
    """See [Note: how an algorithm shows]."""
    if SHOWN in ops:
        return "two-level"
    if BACKENDS[expected.memory].devices:
        if expected.algorithm in PUSHES and "copy engines" in kinds:
            return expected.algorithm  # the ranks meet in a kernel of NCCL
        if "NCCL kernels" in kinds:
            return "ordinary"
        if "symmetric kernels" in kinds:
            return "symmetric"
        return "copy engine" if "copy engines" in kinds else None
    own = {name for name in ops if name.startswith(_OWN)}
    if own:  # shared memory has one way for what a device has several
        if expected.algorithm == "two-level":
            return "symmetric"
        pushed = f"{_OWN}push" in own
        return expected.algorithm if pushed is (expected.algorithm in PUSHES) else "symmetric"
    # Its own collectives always show; past the dispatcher those of a process group may not.
    seen = expected.algorithm != "ordinary" or any(name.startswith(_TORCHS) for name in ops)
    return "ordinary" if seen else None


def _why(expected: Expected, algorithm: AlgorithmName | None, topology: Topology) -> str:
    """Why a collective did not run as planned, as far as is known."""
    if algorithm is None:
        return "nothing was seen of it: a CUDA graph or another thread may have launched it"
    memory = expected.memory
    apart = topology.why_ordinary(memory)
    if apart:
        return f"topology: {apart}"
    if memory != "nccl":
        return f"operation: the process group does not know that memory={memory!r} is symmetric"
    abilities = NCCL.get(collective_of(expected.op))
    if expected.algorithm == "copy engine":
        if not topology.copy_engines:
            return "topology: NCCL cannot be asked for copy engines"
        return f"size: NCCL did not give {expected.nbytes} bytes to copy engines"
    why = (
        ""
        if abilities is None
        else abilities.why_not(topology.nccl, expected.dtype, expected.reduction)
    )
    return why or f"size or alignment: NCCL chose another kernel for {expected.nbytes} bytes"


def _short(name: str) -> str:
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[(<]", name)[0].strip()
