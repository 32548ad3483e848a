"""Time the one-sided collectives of memory="shm" and those of gloo, on this machine.

Both run in the same processes on the same tensors. They alternate, so that other load on the
machine affects both alike. The time of a repetition is that of its slowest rank. The results are
medians. Every result is checked against gloo's. Bytes are those of one rank's part: the input of an
all-gather, the output of a reduce-scatter, the whole tensor of an all-reduce.

On devices the benchmark times all-reduces in CUDA graphs: NCCL's in ordinary memory, and in
placements NCCL's (--memory nccl) or torch's one-shot and two-shot kernels (--memory cuda).

With -o, the benchmark times FSDP2's collectives and rows of experts instead, with every algorithm
that the device's memory backend has. It writes the choices to a tuning table, for choose= of later
runs and for symmplan simulate. If torchrun starts it on several hosts, they are collectives over
all of them.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symmplan.bench.parts import command, reductions, timing
from symmplan.bench.parts.command import Option
from symmplan.bench.parts.launched import is_launched, launched_group
from symmplan.bench.parts.numbers import sizes_of
from symmplan.choose.tuning_table import Table, TuningRow
from symmplan.report.format import count

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    import torch

    from symmplan.choose.choice import Choice

__all__ = ["OPS", "add_arguments", "compare", "fsdp_choices", "render", "run"]

OPS = ("all_gather", "reduce_scatter", "all_reduce")
#: Bytes of a row of experts, at most: a token of 2,048 numbers in bfloat16.
_ROW_BYTES = 4096
_ROW = "op bytes gloo_us shm_us speedup equal"


_SIZES = "64K,256K,1M,4M,16M,64M"
_OPTIONS = (
    Option(
        "sizes",
        f"bytes of one rank's part (default {_SIZES})",
        None,
        more={"type": sizes_of, "metavar": "N[K|M],..."},
    ),
    Option("repetitions", "timed runs of each", 15),
    Option(
        "memory",
        "memory backend of a device's all-reduces",
        "cuda",
        more={"choices": ("cuda", "nccl")},
    ),
    Option("dtype", "", "float32", more={"choices": ("float32", "bfloat16", "float64")}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan bench comm``."""
    command.add_options(parser, _OPTIONS, timeout=300.0)
    parser.set_defaults(sizes=sizes_of(_SIZES))
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help="write a tuning table")


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Start the ranks, collect their times, compare.

    Of ranks that a launcher started only rank 0 has a result.

    Raises:
        CommandError: A rank failed or did not finish in time.
    """
    command.check_peers(args.ranks)
    settings = command.settings_of(args, _OPTIONS)
    if args.output is not None:
        measured = _measured(settings, args)
        if measured is None:
            return None
        memory, rows = measured["memory"], measured["rows"]
        table = Table(memory, tuple(TuningRow(**row) for row in rows))
        args.output.write_text(table.to_json(), encoding="utf-8")
        return {"ok": True, "written": str(args.output), "memory": memory, "rows": rows}
    if args.device != "cpu":
        about, ranks = command.measured(reductions.measure, settings, args)
        found = zip(*(rank["rows"] for rank in ranks), strict=True)
        rows = [reductions.as_row(each) for each in found]
        return {**about, "ok": all(row["equal"] for row in rows), "results": rows}
    about, ranks = command.measured(_times, settings, args)
    rows = [_row(found) for found in zip(*(rank["rows"] for rank in ranks), strict=True)]
    return {**about, "ok": all(row["equal"] for row in rows), "results": rows}


def _measured(settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any] | None:
    """The rows of a tuning table; None on ranks but the first that a launcher started."""
    if not is_launched():
        _, ranks = command.measured(_choices, settings, args)
        return ranks[0]
    with launched_group("symmplan bench comm -o choices.json", args.device) as device:
        timing.meet()
        found = _choices(device.index or 0, settings)
        return None if int(os.environ["RANK"]) else found


def _row(found: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One op at one size, over all ranks."""
    times = timing.slowest([each["seconds"] for each in found])
    gloo, shm = (statistics.median(times[side]) for side in ("gloo", "shm"))
    return {
        "op": found[0]["op"],
        "bytes": found[0]["bytes"],
        "gloo_us": round(gloo * 1e6, 1),
        "shm_us": round(shm * 1e6, 1),
        "speedup": round(gloo / shm, 2),
        "best_speedup": round(min(times["gloo"]) / min(times["shm"]), 2),
        "equal": all(each["difference"] == 0 for each in found),
    }


def render(result: dict[str, Any]) -> str:
    """A table for people."""
    if "written" in result:
        chosen = [(r["op"], r["nbytes"], r["algorithm"]) for r in result["rows"]]
        return "\n".join(
            [*command.cells("op bytes algorithm", chosen), f"wrote {result['written']}"]
        )
    what = f"{count(result['threads'], 'thread')} each, {result['dtype']}"
    columns = list(result["results"][0])
    names = _ROW if "speedup" in columns else " ".join(columns)
    rows = [[row[key] for key in names.split()] for row in result["results"]]
    return "\n".join([command.heading(result, what), *command.cells(names, rows)])


# On each rank -------------------------------------------------------------------------------------


def _choices(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The algorithms of FSDP2's collectives and of rows of experts, over all ranks."""
    found = fsdp_choices(rank, settings)
    for size in settings["sizes"]:
        found["rows"] += _expert_choices(rank, settings, size)
    return found


def _expert_choices(rank: int, settings: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """How rows of experts move if each rank sends ``size`` bytes to each."""
    import torch
    import torch.distributed as dist

    import symmplan

    device, dtype = timing.device_of(settings, rank), getattr(torch, settings["dtype"])
    row = min(_ROW_BYTES, size)
    count, ranks = size // row, dist.get_world_size()
    given: dict[str, Any] = {"choose": "measure", "device": device}
    with symmplan.expert_parallel(max_tokens=count * ranks, **given) as experts:
        sent = torch.zeros(count * ranks, row // dtype.itemsize, dtype=dtype, device=device)
        experts.dispatch(sent, experts.routes([count] * ranks))
        return [_as_row(choice) for choice in experts.choices]


def _as_row(choice: Choice) -> dict[str, Any]:
    """A choice as the fields of a `TuningRow`."""
    wanted = ("op", "ranks", "nbytes", "algorithm")
    return {**{key: getattr(choice, key) for key in wanted}, "seconds": dict(choice.seconds)}


def fsdp_choices(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The algorithms of FSDP2's collectives of some sizes, over all ranks.

    Args:
        rank: This rank; on devices the number of its device.
        settings: ``sizes`` in bytes of a rank's part, ``dtype`` and ``device`` by name.

    Collective: yes.
    """
    import torch
    import torch.distributed as dist

    from symmplan.capture.fsdp_recording import Key, Recording
    from symmplan.integrate.fsdp.plans import Planning
    from symmplan.integrate.fsdp.segments import Memory
    from symmplan.runtime.options import Options
    from symmplan.torch_private.c10d import group_name

    group = dist.group.WORLD
    assert group is not None
    memory = Memory(Options(choose="measure"))
    memory.groups[group_name(group)] = group
    memory.arrive(timing.device_of(settings, rank), None, planned=False)
    dtype = getattr(torch, settings["dtype"])
    recording = Recording()
    for kind in ("all_gather", "reduce_scatter"):
        for size in settings["sizes"]:
            nbytes = size * group.size()
            name, count = str(dtype).removeprefix("torch."), nbytes // dtype.itemsize
            key = Key("bench", kind, count, name, backward=False)
            recording.run(recording.begin(key, nbytes), group_name(group))
    name, choices = Planning(Options(choose="measure"), memory).measured(recording)
    return {"memory": name, "rows": [_as_row(choice) for choice in choices]}


def _times(_rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures."""
    rows = []
    kinds = [(op, size) for op in OPS for size in settings["sizes"]]
    for op, size in timing.marked(kinds, lambda kind: f"{kind[0]} of {kind[1]} bytes"):
        found = compare(op, size, settings["dtype"], settings["repetitions"])
        rows.append({"op": op, "bytes": size, **found})
    return {"rows": rows}


def compare(op: str, nbytes: int, dtype_name: str, repetitions: int) -> dict[str, Any]:
    """Time one collective of the default group in shared memory and by gloo, and compare results.

    Args:
        op: One of `OPS`.
        nbytes: Of one rank's part.
        dtype_name: Of its elements.
        repetitions: How often it is timed.

    Returns:
        ``seconds`` of each repetition by side, ``gloo`` and ``shm``, and the largest ``difference``
        of an element: of small whole numbers, whose sums are exact in any order.

    Collective: yes.
    """
    import torch
    import torch.distributed as dist

    from symmplan.memory import realize
    from symmplan.model import Problem
    from symmplan.planner import plan

    world, dtype = dist.get_world_size(), getattr(torch, dtype_name)
    count = nbytes // dtype.itemsize
    problem = Problem.from_intervals([(name, 0, 1, nbytes * world) for name in ("large", "small")])
    with realize(plan(problem), memory="shm", timeout=60.0) as arena:
        (segment,) = arena.segments.values()
        generator = torch.Generator().manual_seed(dist.get_rank())
        large, small = arena.tensor("large", dtype), arena.tensor("small", dtype)[:count]
        part = torch.randint(-8, 8, (count,), generator=generator).to(dtype)
        whole = torch.randint(-8, 8, (count * world,), generator=generator).to(dtype)
        ours: Any = torch.ops.symmplan
        shm: Callable[[int], Any]
        gloo: Callable[[int], Any]
        want: torch.Tensor
        if op == "all_gather":
            want, got = torch.empty_like(large), large
            gloo = lambda _: dist.all_gather_into_tensor(want, part)  # noqa: E731
            shm = lambda _: ours.all_gather_out(part, world, "default", out=got)  # noqa: E731
        elif op == "reduce_scatter":
            want, got = torch.empty_like(part), torch.empty_like(part)
            large.copy_(whole)
            gloo = lambda _: dist.reduce_scatter_tensor(want, large)  # noqa: E731
            shm = lambda _: ours.reduce_scatter_out(large, "sum", world, "default", out=got)  # noqa: E731
        else:
            want, got = part.clone(), small
            small.copy_(part)
            gloo = lambda _: dist.all_reduce(want)  # noqa: E731
            shm = lambda _: ours.all_reduce_out(small, "sum", "default", out=got)  # noqa: E731
        gloo(0)
        shm(0)
        difference = float((want.double() - got.double()).abs().max())

        def begin() -> None:
            if op == "all_reduce":  # in place: without this sums would overflow
                want.fill_(1)
                small.fill_(1)
            segment.barrier()

        sides = {"gloo": gloo, "shm": shm}
        seconds = timing.alternate(sides, repetitions, torch.device("cpu"), before=begin)
    return {"seconds": seconds, "difference": difference}
