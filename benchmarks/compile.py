"""Compile programs with plain Inductor and with symmplan, and compare times, losses and bytes.

Both run in the same processes. Their steps alternate, so that other load on the machine affects
both alike. The time of a step is that of its slowest rank. The results are medians.

The compile time is that of the first step without code caches: the smallest of several compilations
of each side. Work that runs once per process (imports, measurements of collectives) is in
``own_first_compile_s``.

--micro-pipeline adds Inductor's own pipelined products as another side. They use a symmetric
workspace of torch (``memory="cuda"``).
"""

from __future__ import annotations

import functools
import json
import sys
from typing import TYPE_CHECKING, Any

from symmplan.bench.parts import command, timing
from symmplan.bench.parts.command import Option
from symmplan.choose.choice import CHOOSE
from symmplan.errors import CommandError
from symmplan.torch_private.benches import (
    MICRO_PIPELINE,
    enable_symmetric_memory,
    inductor_settings,
)

if TYPE_CHECKING:
    import argparse

    import torch

__all__ = ["add_arguments", "render", "run"]

_DEFAULT = ("tensor_parallel", "simple_fsdp", "overlap")
_NAMES = (*_DEFAULT, "tensor_parallel_4096", "tensor_parallel_8192")
_WARM_UP = 3
_OPTIONS = (
    Option(
        "cases",
        f"of {', '.join(_NAMES)} (default the first three)",
        None,
        more={"metavar": "NAME,..."},
    ),
    Option("memory", "memory backend", "auto"),
    Option(
        "choose",
        f"how collectives run: {', '.join(CHOOSE)}",
        "auto",
        more={"choices": CHOOSE, "metavar": "ALGORITHM"},
    ),
    Option("layers", "", 2),
    Option("dim", "", 128, 4096),
    Option("tokens", "", 64, 4096),
    Option("gather_bytes", "", 256 << 10, 64 << 20),
    Option("width", "", 256, 8192),
    Option("micro_pipeline", "also Inductor's own pipelined products", cpu=False),
    Option("bind", "keep parameters in symmetric memory from step to step", cpu=False),
    Option(
        "inductor",
        "a setting of Inductor for all sides, the value in JSON; repeatable",
        None,
        more={"action": "append", "metavar": "NAME=VALUE"},
    ),
    Option("steps", "timed steps of each", 10),
    Option("compilations", "compilations of each side", 2),
    Option("dtype", "", "float32", "bfloat16", {"choices": ("float32", "bfloat16")}),
)
_ABOUT = """\
{name}: {speedup:.2f}x as fast; losses {same} (to {loss_difference:.1e})
  symmplan's own part of compiling {own_compile_s:.2f} s, {compile_overhead:.1%} of Inductor's
  (the first time, with measuring, {own_first_compile_s:.2f} s)
  {bound} bound, {staged} staged ({copied_out} copied out), {unplanned} unplanned
  {crossing_bytes} bytes cross into backwards in place, {evacuated} copies of them
  {segment_bytes} bytes, lower bound {lower_bound_bytes}, unshared {unshared_bytes}
  rendezvous {rendezvous}, {rendezvous_after_first_step} after the first step; {kept} kept,
  {missed} copied in; {barriers} barriers"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmarks/compile.py``."""
    command.add_options(parser, _OPTIONS, timeout=900.0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, collect their times, compare.

    Raises:
        CommandError: A rank failed or did not finish in time, or a case or a setting is unknown.
    """
    command.check_peers(args.ranks)
    settings = command.settings_of(args, _OPTIONS)
    cases = (args.cases or ",".join(_DEFAULT)).split(",")
    unknown = [name for name in cases if name not in _NAMES]
    if unknown:
        raise CommandError(
            f"unknown case {unknown[0]!r}",
            expected=", ".join(_NAMES),
            got=unknown[0],
            fix=f"--cases {_NAMES[0]}",
        )
    settings["cases"] = cases
    settings["inductor"] = dict(_inductor(given) for given in args.inductor or ())
    about, ranks = command.measured(_measure, settings, args)
    results = {name: _joined([r[name] for r in ranks], settings["dtype"]) for name in cases}
    right = all(r["equal"] and not r["rendezvous_after_first_step"] for r in results.values())
    return {**about, "ok": right, "results": results}


def _inductor(given: str) -> tuple[str, Any]:
    """A setting of Inductor from the command line."""
    name, _, value = given.partition("=")
    if name not in inductor_settings().get_config_copy():
        raise CommandError(
            f"this torch's Inductor has no setting {name!r}",
            expected="--inductor NAME=VALUE, as in Inductor's config",
            got=given,
            fix="look up its name in torch._inductor.config",
        )
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        raise CommandError(
            f"the value of Inductor's setting {name!r} is not JSON",
            expected='true, 3, or "text" in quotes',
            got=value,
            fix=f"--inductor {name}=true, or another JSON value",
        ) from None


def _joined(ranks: list[dict[str, Any]], dtype: str) -> dict[str, Any]:
    """The measurements of all ranks of one case, as one row."""
    ms = timing.median_ms(timing.slowest([r["steps"] for r in ranks]))
    compiles = timing.slowest([r["compiles"] for r in ranks])
    compile_s = {side: round(min(times), 3) for side, times in compiles.items()}
    own = max(min(r["own_compile_s"]) for r in ranks)
    # Kernels fuse differently around a placement, so sums round differently.
    difference = max(r["loss_difference"] for r in ranks)
    first = ranks[0]
    return {
        "sides": {s: {"step_ms": ms[s], "compile_s": compile_s[s]} for s in ms},
        "speedup": round(ms["plain"] / ms["symmplan"], 3),
        "own_compile_s": round(own, 3),
        "own_first_compile_s": round(max(r["own_compile_s"][0] for r in ranks), 3),
        "compile_overhead": round(own / compile_s["plain"], 3),
        "equal": difference <= (1e-5 if dtype == "float32" else 2e-2),
        "loss_difference": difference,
        "rendezvous_after_first_step": max(r["rendezvous_after_first_step"] for r in ranks),
        **{name: first[name] for name in ("stats", "staged", "choices")},
        "copied_out": sum(reason == "it leaves the graph" for *_, reason in first["staged"]),
    }


def render(result: dict[str, Any]) -> str:
    """A table for people."""
    sides = [
        (name, side, times["step_ms"], times["compile_s"])
        for name, row in result["results"].items()
        for side, times in row["sides"].items()
    ]
    lines = [command.heading(result, result["dtype"])]
    lines += command.cells("case side step_ms compile_s", sides)
    for name, row in result["results"].items():
        told = {**row, **row["stats"], "same": "equal" if row["equal"] else "DIFFERENT"}
        lines.append(_ABOUT.format(name=name, **told))
    return "\n".join(lines)


# On each rank -------------------------------------------------------------------------------------


def _measure(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The measurements of one rank of all cases."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    device = timing.device_of(settings, rank)
    mesh = init_device_mesh(settings["device"], (settings["ranks"],))
    if settings["micro_pipeline"]:
        enable_symmetric_memory(mesh.get_group().group_name)
    with inductor_settings().patch({**settings["inductor"], "force_disable_caches": True}):
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))  # load the compiler
        cases = timing.marked(settings["cases"], str)
        return {name: _case(name, settings, mesh, device) for name in cases}


def _case(name: str, settings: dict[str, Any], mesh: Any, device: torch.device) -> dict[str, Any]:
    import attrs
    import torch
    from compiled_programs import CASES

    import symmplan

    compiles: list[dict[str, float]] = []
    own: list[float] = []
    programs: dict[str, Any] = {}
    losses: dict[str, list[float]] = {}
    backend: Any = None
    for _ in range(settings["compilations"]):
        torch.compiler.reset()
        if backend is not None:
            timing.meet()
            backend.release()
        backend = symmplan.backend(
            **{option: settings[option] for option in ("memory", "choose", "bind")}, timeout=120.0
        )
        compiles.append({})
        sides: dict[str, dict[str, Any]] = {
            "plain": {"backend": "inductor"},
            "symmplan": {"backend": backend},
        }
        if settings["micro_pipeline"]:
            sides["micro_pipeline"] = {"backend": "inductor", "options": MICRO_PIPELINE}
        for side, given in sides.items():
            wrap = functools.partial(torch.compile, dynamic=False, **given)
            program = CASES[name](settings, mesh, device, wrap)
            timing.meet()
            compiles[-1][side], loss = timing.timed(lambda p=program: float(p(0)), device)  # type: ignore[misc]
            programs[side], losses[side] = program, [loss]
        own.append(backend.compile_seconds)
    first = backend.stats.rendezvous

    def judge(results: dict[str, torch.Tensor]) -> None:
        for side, loss in results.items():
            losses[side].append(float(loss))

    acts = {side: lambda turn, p=program: p(turn + 1) for side, program in programs.items()}
    steps = timing.alternate(acts, settings["steps"], device, warm_up=_WARM_UP - 1, judge=judge)
    pairs = zip(losses["plain"], losses["symmplan"], strict=True)
    result = {
        "steps": steps,
        "compiles": {side: [seconds[side] for seconds in compiles] for side in programs},
        "own_compile_s": own,
        "loss_difference": max(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs),
        "rendezvous_after_first_step": backend.stats.rendezvous - first,
        "stats": attrs.asdict(backend.stats),
        "staged": [list(s) for s in backend.staged()],
        "choices": [attrs.asdict(c) for c in backend.choices],
    }
    timing.meet()
    torch.compiler.reset()
    backend.release()
    return result


if __name__ == "__main__":
    from symmplan.cli.shell import perform

    sys.exit(perform("python benchmarks/compile.py", sys.modules[__name__], sys.argv[1:]))
