"""What NCCL can do with each collective in symmetric memory, and how symmplan runs it on a group.

[Note: NCCL falls back silently]
    NCCL decides how to run a collective whose tensors lie in symmetric memory: in a symmetric
    kernel if it has one for the type, the reduction and the size; on copy engines if the
    communicator asks for them; otherwise in a ring or tree. It does not report which. So this file
    lists what NCCL has kernels for, for the choice before a program runs and for the reason that is
    given afterwards.

Sources: NCCL's user guide on window registration and copy-engine collectives, ``sym_kernels.cc``,
release notes; seen in profiles of 2.28.9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import asdict, field, frozen

from symmplan.capture.c10d import FUNCTIONAL
from symmplan.memory import BACKENDS
from symmplan.place.algorithms import ONE_HOST, Lowerings
from symmplan.registry.catalogue import collective_of
from symmplan.registry.rows import COLLECTIVES, SYMM_MEM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from symmplan.memory.meeting.topology import Topology
    from symmplan.model import AlgorithmName
    from symmplan.registry.rows import CatalogueRow


@frozen(kw_only=True)
class Abilities:
    """NCCL's features for one collective in symmetric memory.

    Attributes:
        kernels: The first version with symmetric kernels for it; empty if there is none.
        engines: The first version in which copy engines can run it; empty if there is none.
        sides: Which side must be symmetric, for people.
        dtypes: Element types that its symmetric kernels take; empty for all.
        reductions: ``{reduction: first version}`` of its symmetric kernels; empty if it reduces
            nothing.
    """

    kernels: tuple[int, ...] = ()
    engines: tuple[int, ...] = ()
    sides: str = ""
    dtypes: tuple[str, ...] = ()
    reductions: Mapping[str, tuple[int, ...]] = field(factory=dict, hash=False)

    def why_not(self, nccl: tuple[int, ...], dtype: str = "", reduction: str = "") -> str:
        """Why no symmetric kernel runs it; empty if one does, as far as is known.

        Args:
            nccl: NCCL's version.
            dtype: Element type, ``"float32"``; any if empty.
            reduction: ``"sum"`` and so on; any if empty.
        """
        if not self.kernels:
            return "NCCL has no symmetric kernel for it"
        if nccl < self.kernels:
            return f"operation: NCCL has symmetric kernels for it from {dotted(self.kernels)} on"
        if dtype and self.dtypes and dtype not in self.dtypes:
            return f"dtype: NCCL's symmetric kernels do not reduce {dtype}"
        since = self.reductions.get(reduction, ())
        if reduction and self.reductions and not since:
            return f"operation: NCCL's symmetric kernels have no {reduction}"
        if reduction and nccl < since:
            return f"operation: NCCL's symmetric kernels have {reduction} from {dotted(since)} on"
        return ""


_FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_SUMS = {"sum": (2, 27), "avg": (2, 30)}

#: By the words of the catalogue.
NCCL: Mapping[str, Abilities] = {
    "all-gather": Abilities(
        kernels=(2, 27), engines=(2, 28), sides="both; from 2.29 on the result alone"
    ),
    "reduce-scatter": Abilities(
        kernels=(2, 27),
        sides="both; from 2.29 on the input alone",
        dtypes=_FLOATS,
        reductions=_SUMS,
    ),
    "all-reduce": Abilities(kernels=(2, 27), sides="both", dtypes=_FLOATS, reductions=_SUMS),
    "all-to-all": Abilities(engines=(2, 28), sides="both"),
    "broadcast": Abilities(),
}


def dotted(version: tuple[int, ...]) -> str:
    """A version, for people."""
    return ".".join(map(str, version))


def algorithms_of(collective: str, memory: str) -> tuple[AlgorithmName, ...]:
    """The algorithms that symmplan has for a collective, torch's own first.

    Args:
        collective: In the words of the catalogue.
        memory: Name of the memory backend.
    """
    lowerings = Lowerings(memory)
    rows = [r for op, r in lowerings.table.items() if collective_of(op) == collective]
    apart = [r for op, r in lowerings.over_hosts.items() if collective_of(op) == collective]
    kind, algorithms = BACKENDS[memory], ["ordinary"]
    algorithms += ["symmetric"] if rows else []
    if kind.engines and any(r.engine for r in rows):
        algorithms.append("copy engine")
    if collective == "reduce-scatter" and (kind.devices or kind.collectives):
        algorithms.append("push")
    if kind.levels and any(row.two_levels for row in apart):
        algorithms.append("two-level")
    return tuple(algorithms)  # type: ignore[arg-type]


@frozen
class Support:
    """How a collective runs on a group.

    Attributes:
        collective: In the words of the catalogue.
        algorithms: The algorithms that can run, torch's own first. On devices they are measured
            against each other; elsewhere the second is taken.
        why: Why the others are not.
    """

    collective: str
    algorithms: tuple[AlgorithmName, ...]
    why: str


def verdicts(topology: Topology, memory: str) -> list[Support]:
    """How each collective runs on a group.

    Args:
        topology: What the group is.
        memory: Name of the memory backend.
    """
    found = []
    apart, levels = topology.why_ordinary(memory), topology.two_levels(memory)
    for collective, abilities in NCCL.items():
        if apart or topology.ranks == 1:
            found.append(Support(collective, ("ordinary",), apart or "there is one rank"))
            continue
        algorithms, why = list(algorithms_of(collective, memory)), []
        if levels:
            algorithms = [name for name in algorithms if name in ("ordinary", "two-level")]
            why = [ONE_HOST] if len(algorithms) == 1 else []
            if collective == "all-to-all":
                why.append("rows of symmplan.expert_parallel have one")
        elif "two-level" in algorithms:
            algorithms.remove("two-level")
        if memory == "nccl" and (reason := abilities.why_not(topology.nccl)):
            algorithms.remove("symmetric")
            why.append(reason)
        if BACKENDS[memory].devices and "copy engine" not in algorithms:
            why.append("copy engines cannot run it")
        elif "copy engine" in algorithms and not topology.copy_engines:
            algorithms.remove("copy engine")
            why.append("NCCL cannot be asked for copy engines")
        if "push" in algorithms:
            why.append("pushes are FSDP2's")
        found.append(Support(collective, tuple(algorithms), "; ".join(why)))
    return found


def by_collective() -> list[dict[str, Any]]:
    """For each collective the ops that run it, and what becomes of them, as plain data.

    It lists the whole catalogue, including ops that this torch does not have.
    """
    rows = (*COLLECTIVES, *SYMM_MEM)
    return [
        {
            "collective": name,
            "nccl": asdict(NCCL.get(name, Abilities())),
            "algorithms": {memory: algorithms_of(name, memory) for memory in ("nccl", "shm")},
            "ops": [_served(row) for row in rows if row.collective == name],
        }
        for name in dict.fromkeys(row.collective for row in rows)
    ]


def _served(row: CatalogueRow) -> dict[str, Any]:
    return {
        "op": row.op,
        "symmetric": list(row.where),
        "nccl": _run_as(row, "nccl"),
        "shm": _run_as(row, "shm"),
        "note": row.note,
    }


def _run_as(row: CatalogueRow, memory: str) -> str:
    """The op that runs in place of another on a memory backend, for people."""
    if row.op in FUNCTIONAL:
        return f"as {FUNCTIONAL[row.op]}"
    if row.namespace == "_c10d_functional_autograd":
        return f"as _c10d_functional::{row.name}"
    if not row.where:
        return "left as it is"
    if row.namespace == "symm_mem":
        devices = BACKENDS[memory].devices
        return "itself, on placements" if devices else "left as it is: it needs device memory"
    found = Lowerings(memory).table.get(f"{row.op}.default")
    if found is None:
        return "left as it is"
    called = "itself" if found.target == row.op else found.target
    return f"{called}, on {' and '.join(found.needs)}" + ", for each tensor" * found.each
