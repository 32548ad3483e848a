"""`symmplan.simulate`: plans for one rank of a program of many ranks, in one process."""

from __future__ import annotations

import inspect
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from symmplan.choose.tuning_table import read_table, ruled
from symmplan.coordination.own import in_own_work
from symmplan.coordination.world import SimulatedCall, World, current, enter, leave
from symmplan.device import kind_of
from symmplan.errors import OptionError, SimulationError, closest
from symmplan.memory import BACKENDS
from symmplan.memory.meeting.topology import simulated
from symmplan.model import PUSHES
from symmplan.place.algorithms import is_target
from symmplan.planner.uncollected import collected_apart
from symmplan.registry.declare import store
from symmplan.runtime.options import function, whole
from symmplan.simulation.beyond import expected
from symmplan.simulation.memory import Storages
from symmplan.simulation.report import Collective, Ordinary, SimulationReport
from symmplan.torch_private import fake_world
from symmplan.torch_private.c10d import group_by_name, group_name, ranks_of, unboxed_group
from symmplan.torch_private.ops import tree_leaves
from symmplan.torch_private.table import require

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from symmplan.model import AlgorithmName, Plan

__all__ = ["simulate"]

_COLLECTIVES = ("c10d", "_c10d_functional", "symm_mem", "symmplan")
_MEMORIES = ("auto", "nccl", "cuda", "nvshmem", "shm")
#: Seconds between two lines that say how far a simulation is.
_TELL = 2.0
_ITEM = "read values where the program is not simulated: return tensors, and log them outside"


@collected_apart()
def simulate(
    program: Callable[[], Any],
    *,
    ranks: int,
    rank: int = 0,
    memory: Literal["auto", "nccl", "cuda", "nvshmem", "shm"] = "auto",
    ranks_per_host: int | None = None,
    ranks_per_domain: int | None = None,
    choices: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> SimulationReport:
    """Plan what a program needs as one rank of a simulated world.

    ``program`` is an unchanged training script. It creates meshes of all ranks, builds and shards
    its model, calls `symmplan.fsdp.apply` or ``torch.compile(backend="symmplan")``, and runs one or
    more steps. It runs on fake tensors, in process groups without peers; the default group already
    exists. Nothing is computed, and no device is needed. The plans have the same offsets and
    fingerprints as on a real rank. If this torch has no CUDA, the program must use ``"cpu"`` for
    its meshes and tensors, which does not change the plan.

    Args:
        program: A function without arguments, called once.
        ranks: Number of ranks of the world.
        rank: The rank to plan for.
        memory: The memory backend to plan for, with its alignments, algorithms and rules; the
            program's own choice is ignored. ``"nccl"``, ``"cuda"``, ``"nvshmem"``, ``"shm"``, or
            ``"auto"``, which is what ``"auto"`` is on devices: ``"cuda"`` if the groups of the
            program can only be served in two levels, or its first compiled graph sums small tensors
            over all ranks and has no other collectives; otherwise ``"nccl"``.
        ranks_per_host: Number of ranks on each host, with consecutive numbers. Collectives then run
            as on several hosts. None for one host.
        ranks_per_domain: Number of ranks that NVLink joins, of whole hosts. None if it joins no
            hosts.
        choices: A tuning table, which ``symmplan bench comm -o`` writes. Without a row for a
            collective, rules choose. In shared memory every collective is symmetric. On devices
            gathers of at least 1 MiB run on copy engines if there are any, FSDP2's reductions of
            at least 1 MiB are pushes, and all other collectives are ordinary.
        progress: A function that is sometimes called with a line of text; None for none.

    Returns:
        A report of bytes, plans and collectives.

    Raises:
        SimulationError: The program reads values of tensors, or uses a device that does not exist;
            the program needs arguments; a mesh does not have all ranks; or the process has process
            groups.
        OptionError: A number of ranks is not an integer, ``rank`` is out of range, a domain is not
            a whole number of hosts, or there is no such table or memory backend.
        MissingSeamError: This torch lacks a name that simulations need.

    Collective: no.

    >>> import torch, symmplan
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.fsdp import fully_shard
    >>> def program():
    ...     model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024))
    ...     mesh = init_device_mesh("cpu", (4096,))
    ...     for layer in model:
    ...         fully_shard(layer, mesh=mesh)
    ...     fully_shard(model, mesh=mesh)
    ...     symmplan.fsdp.apply(model)
    ...     model(torch.randn(8, 1024)).sum().backward()
    >>> report = symmplan.simulate(program, ranks=4096, memory="shm")
    >>> report.plans[0].peak_bytes == report.peak_bytes > 0
    True
    """
    _check(program, ranks, rank, memory, progress)
    _check_hosts(ranks_per_host, ranks_per_domain)
    tell = _unheard if progress is None else progress
    path = None if choices is None else str(choices)
    if path is not None:
        read_table(path)
    _check_callable_alone(program)
    require("simulate")
    automatic = memory == "auto"
    memory = "nccl" if automatic else memory
    world = World(
        ranks,
        rank,
        memory,
        devices=BACKENDS[memory].devices,
        automatic=automatic,
        choices=path,
        ranks_per_host=ranks_per_host,
        ranks_per_domain=ranks_per_domain,
    )
    storages = Storages()
    world.seen, world.on_join = storages.seen, storages.begin
    world.hold, world.allocated = storages.hold, storages.allocated
    world.is_segment, world.lately = storages.segment, storages.lately
    world.note, world.noted = storages.note, storages.noted
    world.reads_values = fake_world.reads_values
    others: list[tuple[SimulatedCall, bool]] = []  # that nobody plans, and if in a placement
    ops, begin = 0, time.monotonic()
    told = forward = begin  # the second: the last time that no parameter had a gradient

    def seen(op: Any, args: Sequence[Any], results: Any) -> None:
        nonlocal ops, told, forward
        ops += 1
        if ops % 100 == 0 and time.monotonic() - told >= _TELL:
            told = time.monotonic()
            rate = ops / (told - begin)
            share = storages.with_gradients()
            forward = told if share == 0 else forward
            calls, left = len(world.calls), _left(share, told - forward)
            tell(f"{ops:,} ops, {rate:,.0f} a second; {calls:,} planned collectives{left}")
        storages.results(results)
        if op.namespace in _COLLECTIVES and not world.quiet:
            call = _call(op, args, results)
            placed = call is not None and in_own_work() and is_target(call.op)
            if call is not None and (placed or op.namespace != "symm_mem"):
                others.append((call, placed))

    def check_mesh(size: int) -> None:
        if size != ranks:
            raise SimulationError(
                f"the program makes a mesh of {size:,} ranks in a world of {ranks:,}",
                expected=f"dimensions whose product is {ranks:,}",
                got=f"{size:,}",
                fix=f"pass ranks={size} (--ranks {size}), or change the mesh",
                ranks=ranks,
            )

    enter(world)
    try:
        with (
            fake_world.fake_world(ranks, rank, check_mesh, devices=world.devices) as mode,
            storages.watched(),
            fake_world.WatchMode(seen, mode),
        ):
            tell(f"rank {rank:,} of {ranks:,}: running the program")
            kept = program()  # until all is counted
            tell(f"{ops:,} ops: planning")
            for planner in world.planners:
                planner.plans()
            # Sessions may lie in what others have planned.
            plans = [p for planner in world.planners for p in planner.plans() if p is not None]
            report = _report(world, others, plans, storages)
            del kept
            return report
    except Exception as error:
        found = _explained(error)
        if found is None:
            raise
        raise found from error
    finally:
        for planner in world.planners:
            planner.end()
        world.planners.clear()
        world.calls.clear()
        world.buffers.clear()
        leave()


def _unheard(_: str) -> None:
    """Do nothing: a simulation does not report progress here."""


def _left(share: float, passed: float) -> str:
    """How long a simulated step still takes, for people; empty before its backward.

    Args:
        share: How many of the parameters have their gradients, from 0 to 1.
        passed: Seconds since the first of them had none.
    """
    if not 0 < share < 1:
        return ""
    return f"; about {passed / share * (1 - share):.0f} s left of this step"


def _report(
    world: World,
    others: Sequence[tuple[SimulatedCall, bool]],
    plans: Sequence[Plan],
    storages: Storages,
) -> SimulationReport:
    for planner, known_by, storage in world.buffers:
        if planner.algorithm(known_by) != "ordinary":
            storage.kind = "placed"
    # A push has its gradients until it is over.
    pushed = (made for planner, at, made in world.held if planner.algorithm(at) in PUSHES)
    held = {storage for made in pushed for storage in made}
    kinds = Counter(_algorithms(world, others))
    ordinary = Ordinary(**storages.peak(held))
    cached, without = 0, storages.most_without()
    if world.devices:
        cached = storages.reserved(without=False, held=held) - ordinary.total
        without = storages.reserved(without=True)
    return SimulationReport(
        ranks=world.ranks,
        rank=world.rank,
        memory=world.memory,
        plans=tuple(plans),
        peak_bytes=sum(s.nbytes for s in world.segments if not s.released),
        lower_bound_bytes=sum(p.lower_bound_bytes for p in plans),
        ordinary_bytes=ordinary,
        cached_bytes=cached,
        beyond_bytes=expected(world, kinds),
        asleep_bytes=expected(world, kinds, asleep=True),
        device_bytes_without=without,
        collectives=tuple(
            Collective(call.op, n, call.nbytes, call.group, _size(call), algorithm)
            for (call, algorithm), n in kinds.items()
        ),
    )


def _algorithms(
    world: World, others: Sequence[tuple[SimulatedCall, bool]]
) -> Iterator[tuple[SimulatedCall, AlgorithmName]]:
    """How each collective runs: first those of plans, then the others."""
    table = None if world.choices is None else read_table(world.choices)
    for planner, known_by, call in world.calls:
        yield call, _in_levels(planner.algorithm(known_by), _levels(call, world))
    for call, placed in others:
        algorithm: AlgorithmName = "ordinary"
        levels = _levels(call, world)
        if placed:
            given = (call.op, _size(call), call.nbytes, world.memory)
            algorithm = ruled(table, *given, levels=levels)[0]
            algorithm = "symmetric" if algorithm == "ordinary" else algorithm
        yield call, _in_levels(algorithm, levels)


def _in_levels(algorithm: AlgorithmName, levels: bool) -> AlgorithmName:
    return "two-level" if levels and algorithm in ("symmetric", *PUSHES) else algorithm


def _levels(call: SimulatedCall, world: World) -> bool:
    """Whether a collective can run in two levels."""
    return simulated(group_by_name(call.group)).two_levels(world.memory)


def _size(call: SimulatedCall) -> int:
    """The number of ranks of a collective."""
    return len(ranks_of(group_by_name(call.group)))


def _call(op: Any, args: Sequence[Any], results: Any) -> SimulatedCall | None:
    """A collective that is not planned; None if the op is no collective."""
    group = ""
    for given in args[0]:
        if isinstance(given, dist.ProcessGroup):
            group = group_name(given)
        elif isinstance(given, torch.ScriptObject):
            found = unboxed_group(given)
            group = group if found is None else group_name(found)
        elif isinstance(given, str) and op.namespace != "c10d":
            group = given  # the last of them
    if not group:
        return None
    tensors = [t for t in tree_leaves([args, results]) if isinstance(t, torch.Tensor)]
    nbytes = max((t.numel() * t.element_size() for t in tensors), default=0)
    return SimulatedCall(store.original(op)._schema.name, nbytes, group)


def _check_callable_alone(program: Callable[..., Any]) -> None:
    try:
        inspect.signature(program).bind()
    except ValueError:  # it is not written in Python
        return
    except TypeError as error:
        raise SimulationError(
            "the program needs arguments",
            expected="a function without arguments",
            got=str(error),
            fix="pass lambda: train(...), with the arguments inside",
        ) from error


def _check(program: object, ranks: int, rank: int, memory: str, progress: object) -> None:
    if not callable(program):
        raise SimulationError(
            "the program is not a function",
            expected="a function without arguments",
            got=repr(program),
            fix="pass the function that trains; for a file run symmplan simulate FILE:FUNCTION",
        )
    if progress is not None:
        function("progress", progress, "pass print, or leave it out")
    whole("ranks", ranks)
    whole("rank", rank, least=0)
    if rank >= ranks:
        raise OptionError(
            f"rank {rank} is not in a world of {ranks} ranks",
            expected=f"0 to {ranks - 1}",
            got=rank,
            fix=f"pass rank={ranks - 1} (--rank) or less, or more ranks= (--ranks)",
            ranks=ranks,
        )
    if memory not in _MEMORIES:
        close = closest(memory, _MEMORIES)
        raise OptionError(
            f"memory {memory!r} cannot be simulated",
            expected=", ".join(map(repr, _MEMORIES)),
            got=repr(memory),
            fix=f"did you mean {close!r}?" if close else 'pass memory="auto"',
            memory=memory,
        )
    if current() is not None or dist.is_initialized():
        raise SimulationError(
            "this process has process groups already",
            expected="a process without process groups",
            got="a default process group",
            fix="call symmplan.simulate in another process, or after destroy_process_group()",
        )


def _check_hosts(ranks_per_host: int | None, ranks_per_domain: int | None) -> None:
    if ranks_per_host is not None:
        whole("ranks_per_host", ranks_per_host)
    if ranks_per_domain is None:
        return
    whole("ranks_per_domain", ranks_per_domain)
    if ranks_per_host is None or ranks_per_domain % ranks_per_host:
        raise OptionError(
            f"ranks_per_domain is {ranks_per_domain}",
            expected="a multiple of ranks_per_host",
            got=f"ranks_per_host={ranks_per_host}",
            fix="pass the number of ranks that NVLink joins, a multiple of ranks_per_host",
        )


def _explained(error: BaseException) -> SimulationError | None:
    """What a program did that cannot be simulated; None for what is its own error."""
    seen: BaseException | None = error
    while seen is not None:
        if fake_world.reads_values(seen) and fake_world.in_pipeline(seen):
            return SimulationError(
                "a pipeline stage asks its neighbours for the shapes that they send",
                expected="stages that know the shapes of their inputs and outputs",
                got="a stage without",
                fix="pass input_args= and output_args= to each PipelineStage",
            )
        if fake_world.reads_values(seen):
            return SimulationError(
                f"the program reads the value of a tensor ({seen}){_place(error)}",
                expected="a program whose calls do not depend on values",
                got=".item(), .tolist(), or a condition on a tensor",
                fix=_ITEM,
            )
        if fake_world.needs_bytes(seen):
            return SimulationError(
                f"code that is not torch's ops reads a tensor's bytes{_place(error)}",
                expected="ops that work on fake tensors, which have no bytes",
                got=str(seen).partition("\n")[0],
                fix="leave that call out, or make it an op with a fake implementation "
                "(torch.library.register_fake)",
            )
        if not kind_of(torch.device("cuda")).is_available() and _names_device(str(seen)):
            return SimulationError(
                f"the program uses a device that does not exist: {str(seen).splitlines()[0]}",
                expected='"cpu" for meshes and tensors where torch has no CUDA device',
                got="a CUDA device",
                fix='use "cpu" in the program; memory= selects the machine to plan for',
            )
        seen = seen.__cause__ or seen.__context__
    return None


def _place(error: BaseException) -> str:
    """Where the program is when it fails: its own innermost line, if there is one."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<", *ours)):
            return f", at {frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def _names_device(text: str) -> bool:
    words = (
        "not compiled with CUDA",
        "NVIDIA driver",
        "CUDA GPUs are available",
        "no CUDA-capable",
    )
    return any(word in text for word in words)
