"""Train under FSDP2 with and without symmplan, and compare times, bytes and results.

The benchmark trains the same model in several ways, the *sides*:

- plain: FSDP2's own collectives
- kept: the same with reshard_after_forward=False, so backward gathers
  nothing, but parameters take more bytes
- pooled: all-gathers in torch's pool of symmetric memory, over a
  communicator with copy engines (GPUs only)
- kept, pool: both of these, the fastest side without symmplan
- symmplan: symmplan.fsdp.apply
- unsharded: no FSDP2 and no communication, the limit

A step is a forward and a backward pass over one batch per rank. ``--accumulate`` runs several such
pairs per step, each with its reductions. ``--optimizer`` adds the optimizer step.

All sides run in the same processes. Their steps alternate, so that other load on the machine
affects all of them alike. The time of a step is that of its slowest rank, on devices measured by
events. The results are medians. The time in collectives is the host time in those methods of FSDP2
that start collectives and wait for them, including copies. On the CPU this is the whole time,
including waits for peers. On devices it is host time only. Bytes are those of one side, while the
models of the other sides exist, too. The gradients of every step are compared with those of
``plain``.

PROGRAM is your own model: train.py:build, or package.module:build. The benchmark calls ``build()``
on each rank, after it has created the default process group. ``build()`` returns
``(model, step)``: a model under ``fully_shard`` without symmplan, and a function without arguments
that runs one whole step and may return the loss. Each side then runs in separate processes, with
the same seed, one side after the other, so that it has the whole device.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from symmplan.bench.parts import command, timing
from symmplan.bench.parts.command import Option
from symmplan.bench.parts.fsdp_ranks import measure, worst
from symmplan.bench.parts.fsdp_tables import render
from symmplan.bench.parts.programs import check_program
from symmplan.choose.choice import CHOOSE
from symmplan.errors import CommandError, RanksFailedError

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "render", "run"]

#: In the order in which they are built: torch's pool must be there before other symmetric memory.
_SIDES = ("plain", "kept", "pooled", "kept, pool", "symmplan", "unsharded")
_DTYPES = {"type": str, "choices": ("float32", "bfloat16")}
_NUMBERS = {"type": int, "nargs": "+", "also": ("--sequence",)}
_OPTIONS = (
    Option("model", "", "mlp", more={"choices": ("mlp", "llama")}),
    Option("layers", "FSDP modules (default 4; llama 12)", None, more={"type": int}),
    Option("dim", "width (default 512; llama 4096, as Llama 3 8B)", None, more={"type": int}),
    Option(
        "tokens",
        "rows of a batch, or its sequence length; several values run one after the other "
        "(default 64; llama 4096 2048)",
        None,
        more=_NUMBERS,
    ),
    Option("vocabulary", "tokens that an embedding and a head know (llama; default neither)", 0),
    Option("steps", "timed steps of each", 10),
    Option("compile", "compile each layer", cpu=False),
    Option("checkpoint", "recompute activations of each layer in backward", cpu=False),
    Option(
        "optimizer",
        "optimizer; the time of adamw is part of the step (default sgd, not timed)",
        None,
        more={"type": str, "choices": ("sgd", "adamw")},
    ),
    Option("accumulate", "forward and backward passes per step", 1),
    Option("dtype", "type of parameters (llama bfloat16)", None, more=_DTYPES),
    Option(
        "reduce",
        "type of reduced gradients, if parameters are not float32 (llama bfloat16)",
        None,
        more=_DTYPES,
    ),
    Option(
        "sides",
        f"what to compare: {', '.join(_SIDES)} (default: all)",
        None,
        more={"type": str, "nargs": "+", "choices": _SIDES, "metavar": "SIDE"},
    ),
    Option(
        "choose",
        f"how collectives run: {', '.join(CHOOSE)}; each value is one more side",
        ["measure"],
        more={"nargs": "+", "choices": CHOOSE, "metavar": "ALGORITHM"},
    ),
    Option(
        "unsharded_modules",
        "modules that may be unsharded at the same time (default: as in the program)",
        None,
        more={"type": int},
    ),
    Option(
        "room",
        "GiB of each device that stay free for a side, which then runs alone in its processes; "
        "several values run one after the other, after all other measurements (cuda)",
        None,
        more={"type": float, "nargs": "+", "metavar": "GIB"},
    ),
    Option("cuda_graph", "replay captured steps (cuda; not torch's pool)", cpu=False),
)
#: Per model: what an option is where the user does not say.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mlp": {"layers": 4, "dim": 512, "tokens": [64], "dtype": "float32", "reduce": "float32"},
    "llama": {
        "layers": 12,
        "dim": 4096,
        "tokens": [4096, 2048],
        "dtype": "bfloat16",
        "reduce": "bfloat16",
    },
}
#: What a user's program decides by itself.
_OF_MODEL = ("model", "layers", "dim", "tokens", "dtype", "reduce", "compile", "checkpoint")
_OF_PROGRAM = (*_OF_MODEL, "vocabulary", "optimizer", "accumulate", "cuda_graph")
#: Gradients may differ by so many units in the last place where sums have another order.
_ULPS = {"float32": 8 * 2.0**-23, "bfloat16": 8 * 2.0**-7}
#: The losses of sides that run one after the other, relatively: of some tens of steps in bfloat16.
_LOSSES = 5e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan bench fsdp``."""
    parser.add_argument("program", metavar="PROGRAM", nargs="?", help="a model of your own")
    command.add_options(parser, _OPTIONS, timeout=300.0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, collect their times, compare.

    Raises:
        CommandError: An option makes no sense here, or a rank failed or did not finish in time.
    """
    settings = _settings(args)
    if settings["room"]:
        return _swept(settings, args)
    if settings["program"]:
        return _each_alone(settings, args)
    about, ranks = command.measured(measure, settings, args, connect=False)
    runs = [
        _compared([rank["runs"][i] for rank in ranks], settings)
        for i in range(len(settings["tokens"]))
    ]
    first = ranks[0]
    memory = {side: _most(ranks, side) for side in first["memory"]}
    told = {name: first.get(name) for name in ("how", "stats", "choices")}
    right = all(_right(run, settings) for run in runs)
    told["skipped"] = {**about["skipped"], **first["left_out"]}
    return {**about, "ok": right, "runs": runs, "memory": memory, **told}


def _most(ranks: list[dict[str, Any]], side: str) -> dict[str, int]:
    """Bytes of a side on the rank that has most, of each kind."""
    first = ranks[0]["memory"][side]
    return {key: max(rank["memory"][side].get(key, 0) for rank in ranks) for key in first}


def _each_alone(settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """A user's program: each side in new processes, which have the whole device."""
    about: dict[str, Any] = {}
    sides: dict[str, list[dict[str, Any]]] = {}
    memory, failed = {}, {}
    told: dict[str, Any] = {}
    for side in settings["sides"]:
        try:
            given = _given(settings, side)
            about, ranks = command.measured(measure, given, args, connect=False)
        except RanksFailedError as error:
            if not sides:  # the program itself
                raise
            failed[side] = str(error).splitlines()[0]
            continue
        sides[side] = [rank["runs"][0]["sides"][side] for rank in ranks]
        memory[side] = _most(ranks, side)
        told |= {name: ranks[0][name] for name in ("stats", "choices") if name in ranks[0]}
    _compare_losses(sides)
    count = range(settings["ranks"])
    of_ranks = [{"sides": {side: found[i] for side, found in sides.items()}} for i in count]
    runs = [_compared([{"tokens": None, **found} for found in of_ranks], settings)]
    right = not any(side == "symmplan" or side in CHOOSE for side in failed)
    result = {**about, **settings, "ok": right, "runs": runs, "memory": memory, "failed": failed}
    runs[0].pop("paired_speedup", None)  # the sides' steps were no pairs
    return {**result, "stats": None, "choices": None, **told}


def _given(settings: dict[str, Any], side: str) -> dict[str, Any]:
    """What ranks are told that train one side alone."""
    from symmplan.bench.parts.fsdp_sides import POOLED

    return {**settings, "sides": [side], "zero_cta": side in POOLED, "profile": False}


def _compare_losses(sides: dict[str, list[dict[str, Any]]]) -> None:
    """How far the losses of all steps are from the plain side's; nothing where none are told."""
    plain = sides.get("plain")
    for name, ranks in sides.items():
        for rank, found in enumerate(ranks):
            expected = None if plain is None else plain[rank]["losses"]
            if name == "plain" or not expected or any(map(math.isnan, expected)):
                continue
            pairs = [*zip(expected, found["losses"], strict=True)]
            found["losses_equal"] = all(a == b for a, b in pairs)
            found["difference"] = worst([abs(a - b) / max(abs(a), 1e-30) for a, b in pairs])


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the ranks need to know, as plain data."""
    from symmplan.bench.parts.fsdp_sides import missing

    command.check_peers(args.ranks)
    if args.program is not None:
        _check_program(args)
    found = {**command.settings_of(args, _OPTIONS), "program": args.program}
    for name, value in _DEFAULTS[found["model"]].items():
        found[name] = value if found[name] is None else found[name]
    if args.program is not None:
        found["tokens"] = [1]  # it knows its own
    graph = found["cuda_graph"]
    room = found["room"] or ()
    if room and args.device != "cuda":
        raise CommandError(
            "--room needs a GPU",
            expected="--device cuda",
            got=f"--device {args.device}",
            fix="add --device cuda, or leave --room out",
        )
    if found["model"] == "llama" and found["dim"] % 16:
        raise CommandError(
            "attention heads cannot share the width evenly",
            expected="a --dim that 16 divides",
            got=found["dim"],
            fix=f"--dim {max(1, found['dim'] // 16) * 16}",
        )
    if found["vocabulary"] and found["model"] != "llama":
        raise CommandError(
            "only a Llama has a vocabulary",
            expected="--model llama",
            got=f"--model {found['model']}",
            fix="add --model llama, or leave --vocabulary out",
        )
    if graph and args.device != "cuda":
        raise CommandError(
            "the CPU has no CUDA graphs",
            expected="--device cuda",
            got=f"--device {args.device}",
            fix="leave --cuda-graph out, or add --device cuda",
        )
    wanted = [side for side in _SIDES if side in (found["sides"] or _SIDES)]
    if "symmplan" in wanted:
        at = wanted.index("symmplan") + 1
        wanted[at:at] = found["choose"][1:]
    program = args.program is not None
    why = {side: missing(side, args.device, graph=graph, program=program) for side in wanted}
    return {
        **found,
        "sides": [side for side in wanted if why[side] is None],
        "skipped": {side: reason for side, reason in why.items() if reason is not None},
        "wait": min(120.0, args.timeout),
    }


def _check_program(args: argparse.Namespace) -> None:
    """Before ranks start.

    Raises:
        CommandError: There is no such program, or an option is given that it decides.
    """
    check_program(args.program)
    given = [name for name in _OF_PROGRAM if getattr(args, name) is not None]
    if given:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise CommandError(
            f"{args.program!r} decides what is trained",
            expected="options of the measurement only",
            got=words,
            fix=f"leave out {words}",
        )


def _swept(settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Each room and each of the two sides in new processes: what one cached is not the other's."""
    rooms: list[dict[str, Any]] = []
    for room in (None, *settings["room"]):
        sides: dict[str, dict[str, Any]] = {}
        found: dict[str, list[dict[str, Any]]] = {}
        for side in ("plain", "symmplan"):
            given = {**_given(settings, side), "left": room}
            try:
                _, ranks = command.measured(measure, given, args, connect=False)
            except RanksFailedError as error:  # as where that is too little
                sides[side] = {"error": str(error).splitlines()[0]}
                continue
            found[side] = [rank["runs"][0]["sides"][side] for rank in ranks]
            most = _most(ranks, side)
            sides[side] = {"retries": max(rank["retries"] for rank in ranks)}
            sides[side] |= {key: most.get(key, 0) for key in ("device", "peak_device")}
            if "choices" in ranks[0]:
                sides[side]["choices"] = ranks[0]["choices"]
        _compare_losses(found)
        for side, of in found.items():
            row, _ = _side(of, args.device)
            sides[side] |= {key: row[key] for key in ("step_ms", "difference")}
            sides[side]["losses"] = [rank["losses"] for rank in of]
        rooms.append({"room": room, "sides": sides})
    runs = [each["sides"] for each in rooms]
    right = all("error" in of["plain"] or "error" not in of["symmplan"] for of in runs)
    right = right and all(_right({"sides": of}, settings, _LOSSES) for of in runs)
    return {"ok": right, "command": command.words_of(args), **settings, "rooms": rooms}


def _compared(ranks: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """One run, over all ranks."""
    sides = {
        name: _side([rank["sides"][name] for rank in ranks], settings["device"])
        for name in ranks[0]["sides"]
    }
    found = {
        "tokens": ranks[0]["tokens"],
        "sides": {name: row for name, (row, _) in sides.items()},
        "step_speedup": None,
    }
    if not {"plain", "symmplan"} <= sides.keys():
        return found
    (plain, before), (planned, after) = sides["plain"], sides["symmplan"]
    pairs = zip(before, after, strict=True)
    each = planned["collectives_ms"]
    return {
        **found,
        "step_speedup": round(plain["step_ms"] / planned["step_ms"], 3),
        "paired_speedup": round(statistics.median(a / b for a, b in pairs), 3),
        "collectives_speedup": round(plain["collectives_ms"] / each, 2) if each else None,
    }


def _side(ranks: list[dict[str, Any]], device: str) -> tuple[dict[str, Any], list[float]]:
    """A side over all ranks, and the seconds of its steps."""
    times = timing.slowest([rank["times"] for rank in ranks])
    ms, steps, first = timing.median_ms(times), times["step"], ranks[0]
    low = high = steps[0]
    if len(steps) > 1:
        low, _, high = statistics.quantiles(steps, n=4, method="inclusive")
    count = first["collectives"]
    host = statistics.median(times["host"])
    compared = "difference" in first
    return {
        "step_ms": ms["step"],
        "step_quartiles_ms": [round(low * 1e3, 3), round(high * 1e3, 3)],
        "wall_ms": ms["wall"],
        "issue_ms": ms["issue"],
        "collectives": count,
        "collectives_ms": ms["host"] if count and device == "cpu" else None,
        "host_ms": ms["host"],
        "host_us": round(host / count * 1e6, 2) if count else None,
        "loss": None if math.isnan(first["losses"][-1]) else first["losses"][-1],
        "losses_equal": all(r["losses_equal"] for r in ranks) if compared else None,
        "difference": worst([r["difference"] for r in ranks]) if compared else None,
        "profile": first.get("profile"),
    }, steps


def _right(run: dict[str, Any], settings: dict[str, Any], most: float = math.inf) -> bool:
    """Whether symmplan's gradients, or losses, are plain FSDP2's, up to the order of sums.

    They may be ``most`` apart, relatively, if that is less than their type allows. On devices
    attention's backward adds in another order each time, in the type in which it computes.
    """
    planned = [side for name, side in run["sides"].items() if name == "symmplan" or name in CHOOSE]
    rounds = settings["device"] == "cuda" or settings["reduce"] == "bfloat16"
    half = settings["dtype"] == "bfloat16" and rounds
    limit = _ULPS["bfloat16" if half else settings["reduce"]]
    found = [side.get("difference") for side in planned]
    return all(apart is None or apart <= min(limit, most) for apart in found)
