"""`torch.compile(model, backend="symmplan")`: compiled graphs in planned symmetric memory.

For each graph that Dynamo hands over, AOTAutograd makes a forward and a backward. Both are
captured, planned and rewritten when they are compiled, and share one set of segments. Nothing is
allocated before the program first runs. Then the ranks agree on the plan and rendezvous once. All
graphs of a backend take turns in the same segments.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from symmplan.coordination.world import Planner, current
from symmplan.errors import BackendError
from symmplan.integrate.compile import ops
from symmplan.integrate.compile.compiled_graph import CompiledGraph
from symmplan.integrate.compile.crossing import reasons
from symmplan.integrate.compile.options import CompileOptions
from symmplan.integrate.compile.parts import copy_of
from symmplan.integrate.compile.plans import structure_of
from symmplan.integrate.compile.pool import Pool
from symmplan.memory import DEFAULT_TIMEOUT
from symmplan.memory.beyond import beyond_segments
from symmplan.report.format import count
from symmplan.report.log import LOG
from symmplan.report.text import reasons_line
from symmplan.runtime.handles import OfOneProcess
from symmplan.runtime.observe import Checked, check
from symmplan.runtime.prepare import Preparation
from symmplan.runtime.stats import Stats
from symmplan.torch_private.compilers import outside_graphs
from symmplan.torch_private.table import require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import fx

    from symmplan.choose.choice import Choice, Choose
    from symmplan.integrate.compile.parts import Record
    from symmplan.memory.backends import MemoryName
    from symmplan.model import Plan
    from symmplan.place.algorithms import Collectives


class CompileBackend(OfOneProcess):
    """A Dynamo backend that puts declared tensors into planned symmetric memory.

    Made by `symmplan.backend`; see there.

    Attributes:
        settings: How it was asked to work.
    """

    def __init__(self, settings: CompileOptions) -> None:
        self.settings = settings
        ops.load()  # before Dynamo traces
        self.__name__ = "symmplan"
        self._graphs = 0
        self._device: torch.device | None = None
        self._checked = Checked()
        self._told = False
        self._sleeps = 0
        self._records: list[Record] = []
        self._pool = _pool(settings)
        # It tells of no calls: what a graph runs is seen.
        self._planner = Planner(lambda: self.plans, self.release, lambda _: "symmetric")

    def __repr__(self) -> str:
        memory = f"memory={self.settings.memory!r}"
        graphs, plans = count(self._graphs, "graph"), count(len(self.plans), "plan")
        return f"<symmplan.backend: {memory}, {graphs}, {plans}>"

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans made so far, of graphs with declared tensors, then of pinned inputs."""
        return (*self._plans, *self._kept)

    @property
    def _plans(self) -> tuple[Plan, ...]:
        plans = (plan for record in self._records for plan in record.plans.values())
        return tuple({id(plan): plan for plan in plans}.values())

    @property
    def _kept(self) -> tuple[Plan, ...]:
        return tuple(plan for record in self._records for plan in record.kept.values())

    @property
    def compile_seconds(self) -> float:
        """Seconds spent so far on capturing, planning, verifying and rewriting."""
        return sum(record.seconds for record in self._records)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The measured times of each kind of collective, and its algorithm."""
        return tuple(dict.fromkeys(c for record in self._records for c in record.choices))

    @property
    def stats(self) -> Stats:
        """The counters of all graphs of this backend."""
        records, plans, kept = self._records, self._plans, self._kept
        how = [how for record in records for *_, how, _ in record.sites]
        counts: dict[str, Any] = sum((record.counts for record in records), Counter())
        # Plans of one structure take turns in one set of segments.
        alike: dict[Any, list[Plan]] = {}
        for plan in plans:
            alike.setdefault(structure_of(plan), []).append(plan)
        segments = [
            s for same in alike.values() for s in zip(*(p.segments for p in same), strict=True)
        ]
        buffers = [b for p in plans for b in p.problem.buffers if not b.persistent]
        return Stats(
            graphs=self._graphs,
            plans=len(plans),
            reasons=tuple(sum((r.reasons for r in records), Counter()).most_common()),
            rendezvous=self._pool.rendezvous,
            placed=sum(h is not None for h in how),
            staged=how.count("stage"),
            bound=how.count("bind"),
            kept=sum(p.lease.held for part in self._pool.pinned for p in part.places.values()),
            missed=self._pool.missed,
            unplanned=sum(len(p.unplanned) for p in plans),
            evacuated=sum(self._pool.copies.values()),
            barriers=sum(len(p.barriers) for p in self.plans),
            segment_bytes=sum(p.peak_bytes for p in kept)
            + sum(max(s.nbytes for s in same) for same in segments if not self.asleep),
            sleeps=self._sleeps,
            lower_bound_bytes=sum(p.lower_bound_bytes for p in kept)
            + sum(max(p.lower_bound_bytes for p in same) for same in alike.values()),
            unshared_bytes=sum(p.unshared_bytes for p in kept) + sum(b.nbytes for b in buffers),
            disengaged=self._checked.missed,
            **counts,
            **beyond_segments(),
        )

    def check(self, step: Callable[[], Any]) -> Checked:
        """Run a step under torch's profiler, and compare what ran with the plan.

        Ops that are launched by a CUDA graph are not seen.

        Args:
            step: A function that runs compiled code, which must have run before. The check covers
                nothing else.

        Returns:
            The planned and the observed algorithm of each collective. ``stats.disengaged`` lists
            those that did not run as planned.

        Raises:
            RunError: No graph has been compiled, or another check is going on.

        Collective: as ``step``.
        """
        self._checked = check(step, self._device)
        return self._checked

    def staged(self) -> tuple[tuple[str, str, str, str], ...]:
        """Every staged tensor: ``(operation, op, argument or result, reason)``.

        The list includes every pinned input that was not in its placement when it was last used.
        """
        sites = (site for record in self._records for site in record.sites)
        staged = ((name, op, where, why) for name, op, where, how, why in sites if how == "stage")
        return (*staged, *self._pool.away.values())

    def evacuated(self) -> tuple[tuple[int, str], ...]:
        """``(count, text)``: copies of tensors that a forward saved, why, and what avoids them."""
        return reasons(self._pool.copies)

    @property
    def asleep(self) -> bool:
        """Whether `sleep` has given segments back that no graph has needed since."""
        return self._pool.asleep

    @outside_graphs
    def sleep(self) -> None:
        """Give all segments back to the driver until `wake`, or until graphs run again.

        Call it between steps, on all ranks. Graphs stay compiled, and inputs that ``bind`` has
        pinned stay where they are. Without segments it does nothing.

        Raises:
            RunError: On some rank a graph runs, tensors that a forward saved wait for their
                backward, or a captured CUDA graph has addresses. Raised on all of them, and nothing
                has changed.

        Collective: yes, over the groups of all graphs.
        """
        self._sleeps += self._pool.sleep()

    @outside_graphs
    def wake(self) -> None:
        """Obtain the segments of the same plans again, as the next runs would. Idempotent.

        If a rank cannot have them, graphs run as torch compiled them without a plan.

        Collective: yes, over the groups of all graphs, if it was asleep.
        """
        self._pool.wake_all()

    def release(self) -> None:
        """Give all segments back. The compiled graphs cannot run any more.

        Inputs that lie in symmetric memory move back to ordinary memory. An input that shares its
        storage with other tensors stays there, and keeps its segment, until these tensors are gone.

        Collective: no. But if one rank alone releases, the others' next collective ends in a
        timeout.
        """
        self._pool.release()
        self._pool = _pool(self.settings)

    def _idle(self) -> None:
        """A graph without placements ran again: say so once, if no graph has any."""
        said = self._told or self._pool.preparation.refusal is not None
        if said or any(how for record in self._records for *_, how, _ in record.sites):
            return
        self._told = True
        left = [tensor for plan in self.plans for tensor in plan.unplanned]
        graphs = count(self._graphs, "compiled graph")
        if left and self.settings.choose != "ordinary":
            LOG.warning(
                "nothing is in symmetric memory: all %s of %s were left out: %s",
                *(count(len(left), "declared tensor"), graphs, reasons_line(left)),
            )
        elif not left:
            LOG.warning(
                "nothing is in symmetric memory: no declared op is called in %s (`symmplan ops` "
                "lists those that are, symmplan.symm_args declares others)",
                graphs,
            )

    def __call__(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: dict[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Compile one graph that Dynamo traced.

        Raises:
            BackendError: There are options of ``torch.compile``, or a mode that Inductor has not.
            MissingSeamError: This torch lacks a name that compiled graphs need.
        """
        require("graphs")
        if options:
            raise BackendError(
                f"torch.compile(options={options!r}) does not reach symmplan",
                expected="no options",
                got=", ".join(sorted(options)),
                fix="pass backend=symmplan.backend(inner=..., memory=..., timeout=...)",
            )
        world = current()
        if world is not None:
            world.join(self._planner)
        self._graphs += 1
        self._device = _device_of(module)
        graph = CompiledGraph(self.settings, self._device, self._pool, self._idle)
        self._records.append(graph.record)
        if self.settings.inner == "eager":
            _refuse_mode(mode, ("default",))
            return _compile_eager(module, example_inputs, graph)
        require("inductor")
        from symmplan.integrate.compile.inductor import compile_inductor
        from symmplan.torch_private.inductor import modes

        _refuse_mode(mode, tuple(modes()))
        return compile_inductor(module, example_inputs, graph, modes()[mode or "default"])


def backend(
    inner: Literal["inductor", "eager"] = "inductor",
    memory: MemoryName = "auto",
    timeout: float = DEFAULT_TIMEOUT,
    *,
    choose: Choose = "auto",
    capacity: int | str | None = None,
    bind: bool = False,
    debug: bool | Literal["poison"] = False,
    collectives: Collectives = "auto",
    default_group: Any = None,
) -> CompileBackend:
    """A Dynamo backend that puts declared tensors into planned symmetric memory.

    Dynamic sizes are planned for the bound that ``torch._dynamo.mark_dynamic(x, dim, max=...)``
    declares, others for the next power of two. A larger size is compiled and planned again: all
    ranks agree on the new plan and replace their segments. The logger ``symmplan`` warns, and
    ``stats.replans`` counts it.

    A rank may get a smaller batch than its peers and compile a graph alone. The graph runs if its
    declared tensors are those of a graph that all ranks have agreed on. Otherwise, or if a size on
    one rank outgrows the plan, all ranks raise an `AgreementError`.

    Args:
        inner: ``"inductor"``, or ``"eager"`` to run the rewritten graphs op by op, for debugging.
        memory: ``"auto"``, ``"nccl"``, ``"cuda"``, ``"nvshmem"``, ``"shm"`` or ``"local"``.
        timeout: Seconds that ranks wait for each other before they raise.
        choose: How the algorithms of collectives are chosen. ``"placed"``, also called
            ``"symmetric"``: every declared tensor is in symmetric memory. ``"measure"``: each kind
            and size of collective is timed by each algorithm when it is first compiled, and stays
            ordinary if symmetric memory is not clearly faster. ``"copy engine"``: copy engines run
            all-gathers, without kernels, over communicators of their own (``memory="nccl"``).
            ``"ordinary"``: only ops that need symmetric memory are planned. ``"auto"``: measured on
            devices, placed elsewhere. The path of a ``.json`` file: as measured elsewhere, see
            `symmplan.simulate`.
        capacity: Most bytes that the segments may take on any rank, as a number or as text such as
            ``"40GiB"``. All ranks use the smallest value of any rank. None for what is free when a
            graph of some groups is first compiled, less a tenth. If the plan needs more, inputs
            that ``bind`` would pin stay ordinary first, then the collectives with the smallest gain
            per byte are demoted. ``Plan.summary`` lists them.
        bind: Pin inputs: move parameters, buffers and inputs marked with
            ``torch._dynamo.mark_static_address`` into symmetric memory when a graph first passes
            them to a declared op, so that no run copies them. The tensor objects stay the same,
            with gradients, hooks and optimizer state, and may be updated in place. If a peer may
            still read them after its op, the graph ends with a barrier. All graphs of the backend
            share one placement for a tensor. Its bytes count in ``stats.segment_bytes``, and
            `CompileBackend.release` moves them back. A tensor cannot move if it shares its storage,
            if torch does not own its memory, or if the tensor was replaced. Each run copies such
            tensors in, ``stats.missed`` counts them and `CompileBackend.staged` names them. Off by
            default, because code that keeps the address of a tensor (a CUDA graph captured by hand,
            another process) would use the old memory. Do not use it for parameters whose storage is
            resized, as FSDP2 does.
        debug: Overwrite every placement when its buffer is no longer live (floats with NaN), so
            that a wrong live range shows in the results. In shared memory also find races: each
            access of placement bytes, by any rank and also inside declared ops, is compared with
            the other ranks' last accesses. If nothing orders two accesses, a `RaceError` names
            both. Graphs in shared memory then run op by op, also with ``inner="inductor"``. This is
            slow. ``"poison"`` only overwrites, and runs the code that Inductor compiled.
        collectives: ``"process group"`` runs the process group's own collectives on the placements,
            as on devices. ``"auto"`` runs the memory backend's collectives if it has any, as
            ``"shm"`` does.
        default_group: The process group, or its name, of declared ops that name none; the world if
            None.

    Returns:
        A backend for ``torch.compile(model, backend=...)``, with ``.plans`` and ``.stats``.

    Raises:
        OptionError: An option has a wrong value; the message names it.
        BackendError: ``memory`` serves no device of this process. When a graph is compiled:
            ``memory`` serves no rank.

    Collective: no. The first run of a compiled graph is, over every group in it. Compiling is, if
    collectives are measured, and for the first graph of each group.

    Notes:
        If a rank cannot get or share memory when a graph first runs, all ranks compile the graph
        again without a plan and run that. One warning says why, ``stats.reasons`` counts it, and
        later graphs have no plan.

        An error while a graph is compiled arrives inside ``torch._dynamo.exc``'s
        ``BackendCompilerFailed``, as with every backend. Its text contains symmplan's, and its
        ``inner_exception`` is symmplan's error. An error in a run arrives as it is.
    """
    return CompileBackend(
        CompileOptions(
            inner=inner,
            memory=memory,
            timeout=timeout,
            choose=choose,
            capacity=capacity,
            bind=bind,
            debug=debug,
            collectives=collectives,
            default_group=default_group,
        )
    )


def _pool(settings: CompileOptions) -> Pool:
    return Pool(Preparation(settings, "symmplan.backend", "compiled graphs"))


def _compile_eager(
    module: fx.GraphModule, example_inputs: Sequence[Any], graph: CompiledGraph
) -> Callable[..., Any]:
    """Split and rewrite one Dynamo graph; nothing is fused, every op is called as it stands."""
    from symmplan.integrate.compile.refresh import refresh_values
    from symmplan.runtime.watching import run_by_nodes
    from symmplan.torch_private import compilers

    def compiler(name: Any) -> Callable[..., Any]:
        def compile_part(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            mode = compilers.fake_mode_of(inputs)
            plain = copy_of(gm)
            if graph.declares(gm):
                # Custom ops are to be captured as themselves.
                compilers.decompose(gm, mode)
                refresh_values(gm, inputs, mode)
            part = graph.rewrite(gm, name, mode)
            gm.recompile()
            run = run_by_nodes(gm) if graph.watches else compilers.boxed(gm)
            return graph.runner(run, name, part, lambda: compilers.boxed(plain))

        return compile_part

    return compilers.compile_parts(module, example_inputs, compiler)


def _refuse_mode(mode: str | None, known: tuple[str, ...]) -> None:
    if mode is not None and mode not in known:
        raise BackendError(
            f"unknown mode {mode!r}",
            expected=" or ".join(map(repr, known)),
            got=repr(mode),
            fix="leave torch.compile's mode out",
        )


def _device_of(module: fx.GraphModule) -> torch.device:
    """Where the graph computes: the first device that is not the CPU; meta tensors are sizes."""
    import torch

    from symmplan.capture.graphs import tensor_leaves

    for node in module.graph.nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        for _, fake in tensor_leaves(value):
            if fake.device.type not in ("cpu", "meta"):
                return fake.device  # type: ignore[no-any-return]
    return torch.device("cpu")


def default_backend() -> CompileBackend:
    """The backend behind ``torch.compile(model, backend="symmplan")``, one in each process.

    Its ``.stats`` and ``.plans`` show what was planned; ``.release()`` frees its segments.

    Collective: no.
    """
    return symmplan


#: The backend behind the name ``"symmplan"`` in ``torch.compile``.
symmplan = backend()
