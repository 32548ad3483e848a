"""Compile programs with plain Inductor and with symmplan, and compare times, losses and bytes.

Both run in the same processes. Steps of the two alternate, so that other load hits both alike; a
step's time is its slowest rank's, and medians are compared. Compile times are those of the first
step, without code caches, the least of several compilations of each; what is done once in a process
(imports, measuring collectives) is in ``own_first_compile_s``. Where this torch has an
own pass that puts collectives into symmetric memory (low contention), it is a third side on CUDA.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from symmplan.errors import CommandError
from symmplan.place.choice import CHOOSE
from symmplan.testing.ranks import mark
from symmplan_bench.machine import hardware
from symmplan_bench.processes import check_peers, meet, run_ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    import torch

__all__ = ["add_arguments", "render", "run"]

_NAMES = ("tensor_parallel", "simple_fsdp", "overlap")
_WARM_UP = 3
#: What does not depend on the device comes first; then sizes for the CPU and for CUDA devices.
_SIZES = {
    "layers": (2, 2),
    "dim": (128, 4096),
    "tokens": (64, 4096),
    "gather_bytes": (256 << 10, 64 << 20),
    "width": (256, 8192),
}
_LOW_CONTENTION = "aten_distributed_optimizations.enable_low_contention_collectives"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan bench compile``."""
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default cpu)"
    )
    parser.add_argument(
        "--cases",
        default=",".join(_NAMES),
        metavar="NAME,...",
        help=f"of {', '.join(_NAMES)} (default all)",
    )
    parser.add_argument("--memory", default="auto", help="memory backend (default auto)")
    parser.add_argument(
        "--choose",
        choices=CHOOSE,
        default="auto",
        metavar="WAY",
        help=f"how collectives run: {', '.join(CHOOSE)} (default auto: measured on devices)",
    )
    for name, (cpu, cuda) in _SIZES.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, help=f"default {cpu}, on cuda {cuda}")
    parser.add_argument(
        "--bind", action="store_true", help="keep parameters in symmetric memory from step to step"
    )
    parser.add_argument(
        "--inductor",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of torch._inductor.config for all sides, the value in JSON; repeatable",
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each (default 10)")
    parser.add_argument(
        "--compilations", type=int, default=2, help="compilations of each side (default 2)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default bfloat16 on cuda")
    parser.add_argument(
        "--zero-cta", action="store_true", help="let NCCL use the copy engine where it can"
    )
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds for everything (default 900)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, collect their times, compare.

    Raises:
        CommandError: A rank failed or did not finish in time, or a case or a setting is unknown.
    """
    check_peers(args.ranks)
    cases = args.cases.split(",")
    unknown = [name for name in cases if name not in _NAMES]
    if unknown:
        raise CommandError(
            f"unknown case {unknown[0]!r}", expected=", ".join(_NAMES), got=unknown[0]
        )
    settings = dict(_setting(given) for given in args.inductor)
    cuda = args.device == "cuda"
    options: dict[str, Any] = {
        "ranks": args.ranks,
        "device": args.device,
        "cases": cases,
        "memory": args.memory,
        "choose": args.choose,
        "bind": args.bind,
        "steps": args.steps,
        "compilations": args.compilations,
        "dtype": args.dtype or ("bfloat16" if cuda else "float32"),
        "zero_cta": args.zero_cta,
        "inductor": settings,
        "threads": max(1, (os.cpu_count() or 1) // args.ranks),
    }
    for name, (small, large) in _SIZES.items():
        given = getattr(args, name)
        options[name] = given if given is not None else (large if cuda else small)
    ranks = run_ranks(_measure, options, ranks=args.ranks, device=args.device, timeout=args.timeout)
    results = {name: _joined([r["cases"][name] for r in ranks], options) for name in cases}
    return {
        "ok": all(r["equal"] and not r["rendezvous_after_first_step"] for r in results.values()),
        "command": "symmplan bench compile " + " ".join(_words(args)),
        **options,
        "results": results,
        "machine": {
            **hardware(),
            **ranks[0]["machine"],
        },
    }


def _setting(given: str) -> tuple[str, Any]:
    """A setting of Inductor from the command line."""
    from torch._inductor import config

    name, _, value = given.partition("=")
    if name not in config.get_config_copy():
        raise CommandError(
            f"this torch's Inductor has no setting {name!r}",
            expected="--inductor NAME=VALUE, as in torch._inductor.config",
            got=given,
        )
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        raise CommandError(
            f"the value of Inductor's setting {name!r} is not JSON",
            expected='true, 3, or "text" in quotes',
            got=value,
        ) from None


def _words(args: argparse.Namespace) -> list[str]:
    names = (
        "ranks",
        "device",
        "cases",
        "memory",
        "choose",
        *_SIZES,
        "steps",
        "compilations",
        "dtype",
    )
    given = {name: getattr(args, name) for name in names}
    words = [f"--{k.replace('_', '-')} {v}" for k, v in given.items() if v is not None]
    words += [f"--inductor '{setting}'" for setting in args.inductor]
    switches = {"--bind": args.bind, "--zero-cta": args.zero_cta}
    return [*words, *(word for word, given in switches.items() if given)]


def _joined(ranks: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    """What all ranks measured of one case, as one row."""
    row: dict[str, Any] = {"sides": {}}
    for side in ranks[0]["sides"]:
        mine = [r["sides"][side] for r in ranks]
        # A step is over when its slowest rank is.
        steps = [max(t) for t in zip(*(m["steps"] for m in mine), strict=True)]
        compiles = [max(t) for t in zip(*(m["compiles"] for m in mine), strict=True)]
        row["sides"][side] = {
            "step_ms": round(statistics.median(steps) * 1e3, 3),
            "compile_s": round(min(compiles), 3),
        }
    plain, planned = row["sides"]["plain"], row["sides"]["symmplan"]
    own = max(min(r["own_compile_s"]) for r in ranks)
    first = max(r["own_compile_s"][0] for r in ranks)
    # Kernels fuse differently around a placement, so sums round differently.
    tolerance = 1e-5 if options["dtype"] == "float32" else 2e-2
    differences = [r["loss_difference"] for r in ranks]
    return {
        **row,
        "speedup": round(plain["step_ms"] / planned["step_ms"], 3),
        "own_compile_s": round(own, 3),
        "own_first_compile_s": round(first, 3),
        "compile_overhead": round(own / plain["compile_s"], 3),
        "equal": max(differences) <= tolerance,
        "loss_difference": max(differences),
        "rendezvous_after_first_step": max(r["rendezvous_after_first_step"] for r in ranks),
        "stats": ranks[0]["stats"],
        "staged": ranks[0]["staged"],
        "copied_out": sum(reason == "it leaves the graph" for *_, reason in ranks[0]["staged"]),
        "choices": ranks[0]["choices"],
    }


def render(result: dict[str, Any]) -> str:
    """A table for people."""
    machine = result["machine"]
    lines = [
        (
            f"{result['ranks']} ranks, {result['dtype']}; {machine['device']}, "
            f"{machine['cores']} cores, torch {machine['torch']}"
        ),
        f"{'case':16} {'side':15} {'step ms':>10} {'compile s':>10}",
    ]
    for name, row in result["results"].items():
        lines += [
            f"{name:16} {side:15} {times['step_ms']:>10.2f} {times['compile_s']:>10.2f}"
            for side, times in row["sides"].items()
        ]
        stats = row["stats"]
        lines += [
            (
                f"{'':16} {row['speedup']:.2f}x as fast; losses "
                f"{'equal' if row['equal'] else 'DIFFERENT'} (to {row['loss_difference']:.1e}); "
                f"symmplan's own part of compiling {row['own_compile_s']:.2f} s, "
                f"{row['compile_overhead']:.1%} of Inductor's (the first time, with measuring, "
                f"{row['own_first_compile_s']:.2f} s)"
            ),
            (
                f"{'':16} {stats['bound']} bound, {stats['staged']} staged ({row['copied_out']} "
                f"copied out), {stats['unplanned']} unplanned; {stats['crossing_bytes']} bytes "
                f"cross into backwards in place, {stats['evacuated']} copies of them"
            ),
            (
                f"{'':16} {stats['segment_bytes']} bytes, lower bound "
                f"{stats['lower_bound_bytes']}, unshared {stats['unshared_bytes']}; rendezvous "
                f"{stats['rendezvous']}, {row['rendezvous_after_first_step']} after the first "
                f"step; {stats['kept']} kept, {stats['missed']} copied in; {stats['barriers']} "
                "barriers"
            ),
        ]
    return "\n".join(lines)


# -- on each rank -------------------------------------------------------------------------------


def _measure(rank: int, _ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures of all cases."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    cuda = options["device"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    mesh = init_device_mesh(options["device"], (options["ranks"],))
    with _settings(options["inductor"]):
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))  # load the compiler
        found = {name: _case(name, options, mesh, device) for name in options["cases"]}
    return {
        "cases": found,
        "machine": {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if cuda else "CPU",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        },
    }


@contextlib.contextmanager
def _settings(given: dict[str, Any]) -> Iterator[None]:
    """Inductor as it was asked for, without its caches."""
    from torch._inductor import config

    with config.patch({**given, "force_disable_caches": True}):
        yield


def _sides(options: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Name -> makes what is passed to ``torch.compile``."""
    from torch._inductor import config

    import symmplan

    sides: dict[str, Callable[..., Any]] = {
        "plain": lambda: {"backend": "inductor"},
        "symmplan": lambda: {
            "backend": symmplan.backend(
                memory=options["memory"],
                choose=options["choose"],
                bind=options["bind"],
                timeout=120.0,
            )
        },
    }
    if options["device"] == "cuda" and _LOW_CONTENTION in config.get_config_copy():
        sides["low_contention"] = lambda: {
            "backend": "inductor",
            "options": {_LOW_CONTENTION: True},
        }
    return sides


def _case(name: str, options: dict[str, Any], mesh: Any, device: torch.device) -> dict[str, Any]:
    import attrs
    import torch

    from symmplan_bench.compile_models import CASES

    mark(name)
    sides = _sides(options)
    compiles: dict[str, list[float]] = {side: [] for side in sides}
    own: list[float] = []
    programs: dict[str, Any] = {}
    losses: dict[str, list[float]] = {}
    backend: Any = None
    for _ in range(options["compilations"]):
        torch._dynamo.reset()
        if backend is not None:
            meet()
            backend.release()
        for side, make in sides.items():
            given = make()
            if side == "symmplan":
                backend = given["backend"]
            program = CASES[name](
                options, mesh, device, lambda f, g=given: torch.compile(f, dynamic=False, **g)
            )
            meet()
            seconds, loss = _timed(program.run, 0, device)
            compiles[side].append(seconds)
            programs[side], losses[side] = program, [loss]
        own.append(backend.compile_seconds)
    first = backend.stats.rendezvous
    steps: dict[str, list[float]] = {side: [] for side in sides}
    for step in range(1, _WARM_UP + options["steps"]):
        for side, program in programs.items():
            meet()
            seconds, loss = _timed(program.run, step, device)
            losses[side].append(loss)
            if step >= _WARM_UP:
                steps[side].append(seconds)
    result = {
        "sides": {s: {"steps": steps[s], "compiles": compiles[s]} for s in sides},
        "own_compile_s": own,
        "loss_difference": max(
            abs(a - b) / max(abs(a), 1e-12)
            for a, b in zip(losses["plain"], losses["symmplan"], strict=True)
        ),
        "rendezvous_after_first_step": backend.stats.rendezvous - first,
        "stats": attrs.asdict(backend.stats),
        "staged": [list(s) for s in backend.staged()],
        "choices": [attrs.asdict(c) for c in backend.choices],
    }
    meet()
    torch._dynamo.reset()
    backend.release()
    json.dumps(result)
    return result


def _timed(
    act: Callable[[int], torch.Tensor], step: int, device: torch.device
) -> tuple[float, float]:
    import torch

    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    loss = act(step)
    if cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin, float(loss)
