"""``symmplan doctor --group``: what the ranks that a launcher started are to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import asdict

from symmplan.bench.parts.launched import launched_group
from symmplan.report.format import size, table
from symmplan.report.progress import ProgressLine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from symmplan.model import AlgorithmName
    from symmplan.place.collectives import Support

__all__ = ["examine", "render"]

_TIMEOUT = 60.0
#: The algorithms that are tried.
_TRIED: tuple[AlgorithmName, ...] = ("symmetric", "copy engine", "two-level")
#: Bytes of each rank's part.
_NBYTES = 1 << 20


def examine() -> dict[str, Any] | None:
    """What the group is, how each collective can run on it, and how a small one of each did.

    Returns:
        Plain data on rank 0; None on the others.

    Raises:
        CommandError: No launcher started this process.

    Collective: yes, over all processes that were launched.
    """
    with launched_group("symmplan doctor --group") as device:
        return _examined(device)


def _examined(device: torch.device) -> dict[str, Any] | None:
    import torch.distributed as dist

    from symmplan.coordination.all_gather import all_gather_json
    from symmplan.coordination.groups import resolve_groups
    from symmplan.memory import resolve_backend
    from symmplan.memory.beyond import beyond_segments
    from symmplan.memory.meeting.topology import survey
    from symmplan.place.collectives import verdicts

    groups = resolve_groups(["default"])
    world = {"default": dist.group.WORLD}
    topology = survey(world, device, _TIMEOUT)["default"]
    memory = resolve_backend("auto", device, groups).name
    found = verdicts(topology, memory)
    ran = _tried(found, device)
    mine = [ran, dict(beyond_segments()["beyond_segments"])]
    said = all_gather_json("doctor", {"default": mine}, world, _TIMEOUT)["default"]
    if dist.get_rank():
        return None
    rows = [
        _row(verdict, [ran.get(verdict.collective, {}) for ran, _ in said]) for verdict in found
    ]
    causes = dict.fromkeys(cause for _, beyond in said for cause in beyond)
    return {
        "ok": not any(row["failed"] for row in rows),
        "memory": memory,
        "topology": {**asdict(topology), "text": topology.text, "reach": topology.reach},
        "collectives": rows,
        "beyond_segments": {c: max(beyond.get(c, 0) for _, beyond in said) for c in causes},
    }


def _row(verdict: Support, said: Iterable[Mapping[str, list[str]]]) -> dict[str, Any]:
    """A verdict, and what was tried of it: where one rank saw something else, that."""
    tried: dict[str, str] = {}
    failed = []
    for algorithms in said:
        for algorithm, (ran, reason) in algorithms.items():
            if ran != algorithm and algorithm not in failed:
                failed.append(algorithm)
            if tried.get(algorithm, algorithm) == algorithm:
                tried[algorithm] = ran if ran == algorithm else reason
    return {**asdict(verdict), "tried": tried, "failed": failed}


def _tried(found: Iterable[Support], device: torch.device) -> dict[str, dict[str, list[str]]]:
    """``{collective: {algorithm: (how it ran, why not so)}}``, by profiled steps."""
    import torch.distributed as dist

    import symmplan
    from symmplan.registry.catalogue import collective_of

    tried: dict[str, dict[str, list[str]]] = {}
    progress = None if dist.get_rank() else ProgressLine()
    for number, algorithm in enumerate(_TRIED):
        names = [v.collective for v in found if algorithm in v.algorithms]
        if not names:
            continue
        if progress is not None:
            progress.mark(f"{algorithm}: {', '.join(names)}", number / len(_TRIED))
        acts = _acts(names, device)
        with symmplan.eager(choose=algorithm, timeout=_TIMEOUT) as session:

            def iteration(session: Any = session, acts: Any = acts) -> None:
                for act in acts:
                    act()
                session.step()

            for _ in range(2):  # the first is recorded
                iteration()
            checked = session.check(iteration)
        for seen in checked.calls:
            if seen.planned.algorithm == algorithm:
                algorithms = tried.setdefault(collective_of(seen.planned.op), {})
                algorithms[algorithm] = [seen.algorithm or "not seen", seen.reason]
    return tried


def _acts(names: Iterable[str], device: torch.device) -> list[Callable[[], Any]]:
    """What makes a small collective of each kind."""
    import torch
    import torch.distributed as dist

    ops: Any = torch.ops._c10d_functional
    size, group = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    part = torch.ones(_NBYTES // 4, device=device)
    whole = torch.ones(size * _NBYTES // 4, device=device)
    splits = [part.numel()] * size
    made = {
        "all-gather": lambda: ops.all_gather_into_tensor(part, size, group),
        "reduce-scatter": lambda: ops.reduce_scatter_tensor(whole, "sum", size, group),
        "all-reduce": lambda: ops.all_reduce(part, "sum", group),
        "all-to-all": lambda: ops.all_to_all_single(whole, splits, splits, group),
        "broadcast": lambda: ops.broadcast(part, 0, group),
    }

    def waited(act: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: ops.wait_tensor(act())

    return [waited(made[name]) for name in names]


def render(result: Mapping[str, Any]) -> str:
    """The group in a line, and a line for each collective."""
    topology, memory = result["topology"], result["memory"]
    nccl = ".".join(map(str, topology["nccl"]))
    words = [f"{topology['text']}, {topology['device']}", f"memory {memory!r}"]
    words += [f"NCCL {nccl}"] if nccl else []
    if topology["device"] == "cuda":
        for name in ("peer_access", "multicast", "copy_engines"):
            words.append(f"{'' if topology[name] else 'no '}{name.replace('_', ' ')}")
    rows = [("collective", "algorithms", "ran in a profiled step")]
    why = [""]
    for row in result["collectives"]:
        ran = [w if said == w else f"not {w} ({said})" for w, said in row["tried"].items()]
        rows.append((row["collective"], ", ".join(row["algorithms"]), ", ".join(ran) or "-"))
        why.append(row["why"])
    lines = []
    for line, reason in zip(table(rows), why, strict=True):
        lines += [line.rstrip(), f"      {reason}"] if reason else [line.rstrip()]
    measured = topology["device"] == "cuda"
    last = (
        "The fastest of these algorithms is measured for each kind and size of collective."
        if measured
        else "The last of these algorithms is taken; pushes are for FSDP2's choose='push'."
    )
    beyond = [f"{cause} {size(nbytes)}" for cause, nbytes in result["beyond_segments"].items()]
    if beyond:
        last += f"\nBeyond segments a rank has at most, by its driver: {', '.join(beyond)}."
    return "\n".join([", ".join(words), "", *lines, "", last])
