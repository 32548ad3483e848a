"""`symmplan.fsdp.apply`: FSDP2's collectives in planned symmetric memory."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, get_args

from symmplan.errors import ReleasedError, RunError
from symmplan.integrate.fsdp.comms import PlannedAllGather, PlannedReduceScatter
from symmplan.integrate.fsdp.layout import NO_SEAM
from symmplan.integrate.fsdp.serve import Runtime
from symmplan.integrate.fsdp.sharded_modules import sharded_modules
from symmplan.integrate.fsdp.sleep import sleep, wake
from symmplan.integrate.fsdp.zero_copy import ZeroCopyUnshard
from symmplan.memory import DEFAULT_TIMEOUT
from symmplan.memory.beyond import beyond_segments
from symmplan.model import AlgorithmName
from symmplan.runtime.executor import executor
from symmplan.runtime.handles import OfOneProcess
from symmplan.runtime.observe import Checked, check
from symmplan.runtime.options import Options, known, whole
from symmplan.runtime.stats import Stats
from symmplan.torch_private import autograd, fsdp2, fsdp2_hooks, fsdp2_in_place
from symmplan.torch_private.compilers import outside_graphs
from symmplan.torch_private.table import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from typing_extensions import Self

    from symmplan.capture.fsdp_recording import Key
    from symmplan.choose.choice import Choice, Choose
    from symmplan.memory.backends import MemoryName
    from symmplan.model import Plan

__all__ = ["Handle", "apply"]


class Handle(OfOneProcess):
    """What `apply` returns: the plan and counters of a model, and a way to undo it.

    It is a context manager: leaving the block calls `remove`.
    """

    def __init__(
        self,
        runtime: Runtime,
        plain: list[tuple[Any, Any, Any, Any]],
        unwrap: list[Callable[[], None]],
    ) -> None:
        self._runtime = runtime
        # Of each parameter group: its module, itself, and what it used before.
        self._plain = plain
        self._unwrap = unwrap
        self._count = len(plain)
        self._checked = Checked()

    def __repr__(self) -> str:
        state = "planned" if self.planned else "recording"
        state = state if self._plain else "removed"
        return f"<symmplan.fsdp.Handle: {self._count} modules, {state}>"

    @outside_graphs
    def __enter__(self) -> Self:
        self._must_be_applied("__enter__")
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    @property
    def planned(self) -> bool:
        """Whether the first step has been planned, so that there is a `plan`."""
        return self._runtime.planning.plan is not None

    @property
    def plan(self) -> Plan:
        """The last plan, also after `remove`.

        Raises:
            RunError: There is none yet: see `planned`.
        """
        plan = self._runtime.planning.plan
        if plan is None:
            raise RunError(
                "handle.plan was asked for before there is a plan",
                expected="a plan, made from a recorded step over more than one rank",
                got=repr(self),
                fix="run a step, then handle.freeze(); handle.planned says whether there is a plan",
            )
        return plan

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The measured times of each kind of collective, and its algorithm."""
        return self._runtime.planning.fitting.choices

    @property
    @outside_graphs
    def stats(self) -> Stats:
        """The counters of the model's collectives since `apply`."""
        counts = dict[str, Any](self._runtime.counts)
        plan = self._runtime.planning.plan
        reasons = sorted(self._runtime.reasons.items(), key=lambda item: (-item[1], item[0]))
        schedule = self._runtime.schedule
        placed = 0 if schedule is None else sum(s.place is not None for s in schedule.collectives)
        return Stats(
            modules=self._count,
            plans=int(plan is not None),
            placed=placed,
            bound=placed,
            unplanned=0 if schedule is None else len(schedule.collectives) - placed,
            rendezvous=self._runtime.memory.rendezvous,
            reasons=tuple(reasons),
            flat=tuple(self._runtime.planning.flat.items()),
            disengaged=self._checked.missed,
            segment_bytes=self._runtime.memory.segment_bytes,
            lower_bound_bytes=0 if plan is None else plan.lower_bound_bytes,
            unshared_bytes=0 if plan is None else plan.unshared_bytes,
            **counts,
            **beyond_segments(),
        )

    @property
    def algorithms(self) -> dict[AlgorithmName, int]:
        """How many collectives of the plan run by each algorithm; all are 0 before the plan."""
        schedule = self._runtime.schedule
        counted = Counter(() if schedule is None else (s.runs_by for s in schedule.collectives))
        return {name: counted[name] for name in get_args(AlgorithmName)}

    def metrics(self) -> dict[str, int]:
        """Numbers of `stats` and `algorithms` by name, for a logger.

        The names are those of `Stats.metrics`, and ``"symmplan/algorithms/push"`` and so on.

        Collective: no. It waits for nothing, not even for a device.
        """
        metrics = self.stats.metrics()
        for name, count in self.algorithms.items():
            metrics[f"symmplan/algorithms/{name.replace('-', '_').replace(' ', '_')}"] = count
        return metrics

    @outside_graphs
    def freeze(self) -> None:
        """Plan what was recorded so far, without waiting for the end of the first step.

        Raises:
            CaptureError: No FSDP collective has run yet.
            AgreementError: Ranks recorded different programs; raised on all of them.
            ReleasedError: The handle was removed.

        Collective: yes, over all groups of the model.
        """
        self._must_be_applied("freeze")
        self._runtime.freeze()

    @outside_graphs
    def check(self, step: Callable[[], Any]) -> Checked:
        """Run a step under torch's profiler, and compare what ran with the plan.

        Args:
            step: A step of the program, forward and backward. It takes part in the training as
                any other.

        Returns:
            The planned and the observed algorithm of each collective. ``stats.disengaged`` lists
            those that did not run as planned.

        Raises:
            RunError: There is no plan yet, or another check is going on.
            ReleasedError: The handle was removed.

        Collective: as ``step``.
        """
        self._must_be_applied("check")
        self._checked = check(step, self._runtime.memory.device if self.planned else None)
        return self._checked

    @property
    def asleep(self) -> bool:
        """Whether `sleep` has given the segments back, and nothing has taken them since."""
        return self._runtime.asleep

    @outside_graphs
    def sleep(self) -> None:
        """Give the segments back to the driver until `wake`, or until the next step.

        Call it between steps, on all ranks. Parameters, gradients and the optimizer's state stay
        where they are. Windows of NCCL and mappings of peers' memory go with the segments. What
        CUDA and communicators set up with the first of them stays, and communicators for copy
        engines do. So do segments of NCCL on several hosts, which torch cannot free.
        Without a plan, and while asleep, it does nothing.

        Raises:
            RunError: On some rank the segments are in use: by a graph that is still alive, a
                backward pass, a compiled graph, an eager session in the midst of an iteration, or a
                captured CUDA graph, which has addresses.
                Raised on all ranks that gather or reduce together, and nothing has changed.
            ReleasedError: The handle was removed.

        Collective: yes, over all groups of the model.
        """
        self._must_be_applied("sleep")
        sleep(self._runtime)

    @outside_graphs
    def wake(self) -> None:
        """Obtain the memory of the same plan again, as the next step would. Idempotent.

        Nothing is recorded, measured or planned, and there is one rendezvous for each segment and
        group. If a rank cannot have the memory, FSDP2's own collectives run from then on, and
        ``stats.reasons`` says why.

        Raises:
            RunError: A CUDA graph is being captured.
            ReleasedError: The handle was removed.

        Collective: yes, over all groups of the model, if it was asleep.
        """
        self._must_be_applied("wake")
        wake(self._runtime)

    @outside_graphs
    def remove(self) -> None:
        """Restore FSDP2's own collectives, and release the segments. Idempotent.

        Call it between steps, on all ranks. On devices the segments are kept for the next `apply`
        in this process: torch 2.11 frees them without telling NCCL.

        Raises:
            RunError: A backward pass is running, or a later one would read parameters in the
                segments. Nothing has changed then, and the step can be finished. While an exception
                is being handled the error is not raised, because the exception has ended the step.
                A backward pass of that step would raise an error.

        Collective: no, unless a gather that the program has begun still waits for room, which runs
        now. But if one rank alone removes its handle, the others' next collective ends in a
        timeout.
        """
        if self._plain and sys.exc_info()[0] is None:
            _check_removable(self._runtime)
        for module, group, gather, scatter in self._plain:
            fsdp2.set_comms(module, group, gather, scatter)
        self._plain.clear()
        while self._unwrap:
            self._unwrap.pop()()
        self._runtime.release()

    def _must_be_applied(self, method: str) -> None:
        if not self._plain:
            raise ReleasedError(
                f"handle.{method}() was called after handle.remove()",
                expected="a handle that is still applied to its model",
                got=repr(self),
                fix="call it before remove(), or symmplan.fsdp.apply(model) again",
            )


def apply(
    model: nn.Module,
    memory: MemoryName = "auto",
    *,
    choose: Choose = "auto",
    capacity: int | str | None = None,
    unsharded_modules: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    debug: bool = False,
) -> Handle:
    """Put the all-gathers and reduce-scatters of FSDP2 into planned symmetric memory.

    Call it after ``fully_shard``. The first step runs unchanged and is recorded. It ends with the
    first forward pass after a backward pass that reduced gradients. Then all ranks agree on a plan
    and register its memory once, and every later step follows the plan. Sharded gradients stay in
    ordinary memory.

    Args:
        model: A module with modules inside to which ``fully_shard`` was applied.
        memory: Name of a memory backend: ``"auto"``, ``"nccl"``, ``"cuda"``, ``"shm"``, ... On
            devices ``"auto"`` is ``"nccl"``, or ``"cuda"`` if the groups are on several hosts and
            only two levels serve them.
        choose: How the algorithms of collectives are chosen. ``"measure"``: each collective runs by
            the algorithm that was fastest in a short measurement at its real size, when the plan is
            made; see `Choice`. ``"placed"``, also called ``"symmetric"``: all run in symmetric
            memory, over the model's own groups. ``"copy engine"``: gathers run without kernels if
            the backend has copy engines. ``"push"``: so do reductions: gradients go straight to the
            rank that sums them. ``"shared push"``: the same into bytes that released parameters
            had. ``"ordinary"``: all run as FSDP2 runs them. ``"auto"``: measured on devices, placed
            elsewhere. The path of a ``.json`` file: as measured elsewhere, see `symmplan.simulate`.
        capacity: Most bytes that the segments may take on any rank, as a number or as text such as
            ``"40GiB"``. None for what the program has without symmplan, less a tenth: the memory
            that is free when the plan is made, and the memory that the plan replaces. All ranks use
            the smallest value of any rank. Collectives with the smallest gain per byte are demoted,
            and ``handle.plan.summary()`` lists them.
        unsharded_modules: How many modules may hold unsharded parameters at the same time, the
            root included. None for as many as in the first step; then all gathers run. A smaller
            number needs fewer bytes and delays prefetches. A larger number acts as
            ``reshard_after_forward=False`` for the last modules of a forward pass, as many as fit:
            backward does not gather them again, it sees what forward wrote to their unsharded
            parameters, and a forward pass without a backward leaves them unsharded.
            ``plan.summary()`` says how many there are. ``plan.trades()`` says what one less saves
            and one more costs. A number that is too small for the program is raised to what the
            program needs.
        timeout: Seconds that ranks wait for each other before they raise.
        debug: Whether races are looked for: from now until ``handle.remove()`` all ops of this
            thread are watched, and `RaceError` is raised where nothing orders two accesses of the
            same bytes. In shared memory only, and slow.

    Raises:
        CaptureError: The model has no FSDP2 module, or has custom collectives already.
        OptionError: An option has a wrong value; the message names it.
        BackendError: ``memory`` serves no tensors on the model's devices.
        MissingSeamError: This torch lacks a name that planned steps need.

    Collective: no. The end of the recorded step is.

    Notes:
        If a rank cannot get or share memory, all ranks run FSDP2's own collectives. One warning
        says why, and ``handle.stats.reasons`` counts it.
    """
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    known("debug mode", debug, (True, False))  # nothing of FSDP2's is poisoned
    options = Options(
        memory=memory,
        choose=choose,
        capacity=capacity,
        timeout=timeout,
        debug=debug,
    )
    if unsharded_modules is not None:
        whole("unsharded_modules", unsharded_modules)
    require("fsdp")
    found = sharded_modules(model)
    for mesh in {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}:
        options.check_device(torch.device(mesh.device_type))
    runtime = Runtime(options, len(found), unsharded_modules)
    plans, algorithm = functools.partial(_plans, runtime), functools.partial(_algorithm, runtime)
    runtime.executor = executor(plans, runtime.release, algorithm)
    for site, module, group, gather, scatter in found:
        if fsdp2_in_place.can_be_replaced(group):
            runtime.planning.unshards.append(ZeroCopyUnshard(runtime, site, group))
        else:
            runtime.planning.flat[site] = NO_SEAM
        planned = (
            PlannedAllGather(runtime, site, gather),
            PlannedReduceScatter(runtime, site, scatter, group),
        )
        fsdp2.set_comms(module, group, *planned)
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    unwrap = [fsdp2_hooks.wrap_once(module) for module in modules]
    return Handle(runtime, [(module, *of) for _, module, *of in found], unwrap)


def _check_removable(runtime: Runtime) -> None:
    """Raise if parameters cannot leave their placements now.

    Raises:
        RunError: A backward pass is running or still to come.
    """
    running = autograd.in_backward()
    sites = [unshard.site for unshard in runtime.planning.unshards if unshard.awaits_backward]
    if not running and not sites:
        return
    raise RunError(
        "handle.remove() was called "
        + (
            "inside a backward pass"
            if running
            else f"between a forward pass and its backward pass, which reads {sites[0]!r}"
        ),
        expected="a call between steps",
        got="a backward pass that is running" if running else "a graph that is still alive",
        fix="call it after backward(), or drop the results of the forward pass first",
        module=sites[0] if sites else None,
    )


def _plans(runtime: Runtime) -> list[Plan | None]:
    """The plan, if a collective ran."""
    if runtime.schedule is None and runtime.recorded:
        runtime.freeze()
    for unshard in runtime.planning.unshards:
        if unshard.layout is not None:
            key = unshard.layout.key(unshard.site, backward=False)
            for parameter in unshard.parameters:
                for output in parameter.all_gather_outputs:
                    runtime.executor.buffer(key, output)
    return [runtime.planning.plan]


def _algorithm(runtime: Runtime, key: Key) -> AlgorithmName:
    """How a collective with this key runs."""
    collectives = () if runtime.schedule is None else runtime.schedule.collectives
    scheduled = next((s for s in collectives if s.call.key == key), None)
    return "ordinary" if scheduled is None else scheduled.runs_by
