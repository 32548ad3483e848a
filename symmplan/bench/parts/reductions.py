"""All-reduces on devices, each side in a CUDA graph: what a server replays for a batch."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from symmplan.bench.parts import timing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

__all__ = ["as_row", "measure"]

#: Calls in a graph: what launching it costs is divided among them.
_CALLS = 20
_WARM_UP = 3


def as_row(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One size, over all ranks: microseconds of each side, the slowest rank's, their medians.

    Args:
        found: What `measure` gave of it on each rank.
    """
    times = timing.slowest([each["seconds"] for each in found])
    micro = {side: round(statistics.median(s) * 1e6, 1) for side, s in times.items()}
    return {
        "op": "all_reduce",
        "bytes": found[0]["bytes"],
        **{f"{side}_us": value for side, value in micro.items()},
        "fastest": min(micro, key=micro.__getitem__),
        "equal": all(each["equal"] for each in found),
    }


def measure(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures of all sizes. Collective: yes."""
    import torch
    from attrs import evolve

    from symmplan.memory import realize
    from symmplan.model import Problem
    from symmplan.planner import plan

    device = timing.device_of(settings, rank)
    torch.cuda.set_device(device)
    dtype, memory = getattr(torch, settings["dtype"]), settings["memory"]
    problem = Problem.from_intervals([("placed", 0, 1, max(settings["sizes"]))])
    pads = [evolve(b, signal_pad=memory == "cuda") for b in problem.buffers]
    problem, rows = evolve(problem, buffers=pads), []
    with realize(plan(problem), memory=memory, device=device, timeout=60.0) as arena:
        placed = arena.tensor("placed", dtype)
        for size in timing.marked(settings["sizes"], lambda size: f"{size} bytes"):
            sides = _sides(memory, placed[: size // dtype.itemsize])
            right = [_is_right(start, given, made) for start, given, made in sides.values()]
            graphs = {name: _graph(start) for name, (start, *_) in sides.items()}
            acts = {name: lambda _, g=graph: g.replay() for name, graph in graphs.items()}
            found = timing.alternate(acts, settings["repetitions"], device, warm_up=_WARM_UP)
            seconds = {name: [s / _CALLS for s in taken] for name, taken in found.items()}
            rows.append({"bytes": size, "seconds": seconds, "equal": all(right)})
            del graphs, acts, sides
        torch.cuda.synchronize()
        timing.meet()
    return {"rows": rows}


def _sides(
    memory: str, placed: torch.Tensor
) -> dict[str, tuple[Callable[[], Any], torch.Tensor, torch.Tensor]]:
    """``{side: (what starts it, its input, its result)}``."""
    import torch
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    plain, made, ops = torch.zeros_like(placed), torch.zeros_like(placed), torch.ops.symm_mem
    sides: dict[str, tuple[Callable[[], Any], torch.Tensor, torch.Tensor]] = {
        "nccl": (lambda: dist.all_reduce(plain), plain, plain)
    }
    if memory == "cuda":
        name = group.group_name
        sides["one_shot"] = (
            lambda: ops.one_shot_all_reduce_out(placed, "sum", name, made),
            placed,
            made,
        )
        sides["two_shot"] = (lambda: ops.two_shot_all_reduce_(placed, "sum", name), placed, placed)
        own = torch.ops.symmplan.kernel_all_reduce_
        sides["symmplan"] = (lambda: own(placed, "sum", name), placed, placed)
    else:
        sides["placed"] = (lambda: dist.all_reduce(placed), placed, placed)
    return sides


def _is_right(start: Callable[[], Any], given: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether a side adds up the ranks' numbers. Collective: yes."""
    import torch
    import torch.distributed as dist

    given.fill_(dist.get_rank() + 1)
    torch.cuda.synchronize()
    timing.meet()
    start()
    torch.cuda.synchronize()
    ranks = dist.get_world_size()
    return bool((made == ranks * (ranks + 1) // 2).all())


def _graph(start: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of several calls. Collective: yes."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            start()
    torch.cuda.synchronize()
    timing.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            start()
    return graph
