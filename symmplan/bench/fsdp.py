"""Train under FSDP2 plainly and with symmplan, and compare times, bytes and results.

The same model is trained in the same processes in several ways, the *sides*: with FSDP2's own
collectives (``plain``); with these and ``reshard_after_forward=False``, so that backward has what
forward gathered, in more bytes (``kept``); on devices with all-gathers in torch's pool of
symmetric memory, over a communicator with copy engines (``pooled``); with `symmplan.fsdp.apply`
(``symmplan``); and without FSDP2 and communication, which is the limit (``unsharded``). A step is a
forward and a backward pass, of a batch per rank.

Steps of all sides alternate, so that other load hits them alike. A step's time is its slowest
rank's, on devices by events, and medians are compared. The time in collectives is what the host
spends in the methods of FSDP2 that issue and await them, with the copies that these make: on the
CPU that is all of it, waiting for peers included; on devices it is what the host does meanwhile.
Bytes are those of one side alone, beside the other sides' models. Gradients of every step are
compared with the plain side's.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from symmplan.bench.parts import command, timing
from symmplan.bench.parts.command import Option
from symmplan.bench.parts.fsdp_ranks import measure, worst
from symmplan.errors import CommandError, RanksFailedError
from symmplan.report.format import size
from symmplan.runtime.choice import CHOOSE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["add_arguments", "render", "run"]

#: In the order in which they are built: torch's pool must be there before other symmetric memory.
_SIDES = ("plain", "kept", "pooled", "symmplan", "unsharded")
_DTYPES = {"type": str, "choices": ("float32", "bfloat16")}
_NUMBERS = {"type": int, "nargs": "+", "also": ("--sequence",)}
_ON, _OFF = ({"action": "store_const", "const": value} for value in (True, False))
_OPTIONS = (
    Option("model", "", "mlp", more={"choices": ("mlp", "llama")}),
    Option("layers", "FSDP modules (default 4; llama 12)", None, more={"type": int}),
    Option("dim", "width (default 512; llama 4096, as Llama 3 8B)", None, more={"type": int}),
    Option(
        "tokens",
        "rows of a batch, or its sequence length; several are measured one after the other "
        "(default 64; llama 4096 2048)",
        None,
        more=_NUMBERS,
    ),
    Option("steps", "timed steps of each", 10),
    Option("dtype", "of parameters (llama bfloat16)", None, more=_DTYPES),
    Option(
        "reduce",
        "of reduced gradients, if parameters are not float32 (llama bfloat16)",
        None,
        more=_DTYPES,
    ),
    Option(
        "sides",
        f"what to compare: {', '.join(_SIDES)} (default: all there are)",
        None,
        more={"type": str, "nargs": "+", "choices": _SIDES, "metavar": "SIDE"},
    ),
    Option(
        "choose",
        f"how collectives run: {', '.join(CHOOSE)}; each further one is a side of its own",
        ["measure"],
        more={"nargs": "+", "choices": CHOOSE, "metavar": "ALGORITHM"},
    ),
    Option(
        "unsharded_modules",
        "modules that have bytes at once (default: as the program)",
        None,
        more={"type": int},
    ),
    Option(
        "room",
        "GiB of each device that are left for one side alone, in processes of its own; several "
        "are measured one after the other, behind all that there is (cuda)",
        None,
        more={"type": float, "nargs": "+", "metavar": "GIB"},
    ),
    Option("cuda_graph", "replay captured steps (cuda; not of torch's pool)", False, more=_ON),
    Option("profile", "count no kernels (cuda)", True, more={**_OFF, "flag": "--no-profile"}),
    Option("memory", "count no bytes (cuda)", True, more={**_OFF, "flag": "--no-memory"}),
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
#: Gradients may differ by so many units in the last place where sums have another order.
_ULPS = {"float32": 8 * 2.0**-23, "bfloat16": 8 * 2.0**-7}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan bench fsdp``."""
    command.add_options(parser, _OPTIONS, timeout=300.0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, collect their times, compare.

    Raises:
        CommandError: An option makes no sense here, or a rank failed or did not finish in time.
    """
    settings = _settings(args)
    if settings["room"]:
        return _swept(settings, args)
    about, ranks = command.measured("fsdp", measure, settings, args, connect=False)
    runs = [
        _compared([rank["runs"][i] for rank in ranks], settings)
        for i in range(len(settings["tokens"]))
    ]
    first = ranks[0]
    memory = {
        side: {key: max(r["memory"][side][key] for r in ranks) for key in first["memory"][side]}
        for side in settings["sides"]
    }
    told = {name: first.get(name) for name in ("how", "stats", "choices")}
    right = all(_right(run, settings) for run in runs)
    return {**about, "ok": right, "runs": runs, "memory": memory, **told}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the ranks need to know, as plain data."""
    from symmplan.bench.parts.fsdp_sides import missing

    command.check_peers(args.ranks)
    found = command.settings_of(args, _OPTIONS)
    for name, value in _DEFAULTS[found["model"]].items():
        found[name] = value if found[name] is None else found[name]
    sizes = [found["steps"], found["layers"], found["dim"], *found["tokens"]]
    graph = found["cuda_graph"]
    if min(sizes) < 1:
        raise CommandError(
            "nothing can be measured of a model or a run of no size",
            expected="--steps, --layers, --dim and --tokens of at least 1",
            got=", ".join(map(str, sizes)),
        )
    room = found["room"] or ()
    if room and (args.device != "cuda" or min(room) <= 0):
        raise CommandError(
            "there is no such room to measure in",
            expected="--device cuda, and GiB above 0",
            got=f"--device {args.device} --room {' '.join(f'{each:g}' for each in room)}",
            fix="run it where ranks have devices: a ballast leaves only so much of each free",
        )
    if found["model"] == "llama" and found["dim"] % 16:
        raise CommandError(
            "attention heads cannot share the width evenly",
            expected="--dim that 16 divides",
            got=found["dim"],
        )
    if graph and args.device != "cuda":
        raise CommandError(
            "the CPU has no CUDA graphs", expected="--device cuda", got=f"--device {args.device}"
        )
    wanted = [side for side in _SIDES if side in (found["sides"] or _SIDES)]
    if "symmplan" in wanted:
        at = wanted.index("symmplan") + 1
        wanted[at:at] = found["choose"][1:]
    why = {side: missing(side, args.device, graph=graph) for side in wanted}
    return {
        **found,
        "sides": [side for side in wanted if why[side] is None],
        "skipped": {side: reason for side, reason in why.items() if reason is not None},
        "wait": min(120.0, args.timeout),
    }


def _swept(settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Each room and each of the two sides in new processes: what one cached is not the other's."""
    rooms: list[dict[str, Any]] = []
    for room in (None, *settings["room"]):
        sides = {}
        for side in ("plain", "symmplan"):
            given = {**settings, "sides": [side], "left": room, "profile": False}
            try:
                _, ranks = command.measured("fsdp", measure, given, args, connect=False)
            except RanksFailedError as error:  # as where that is too little
                sides[side] = {"error": str(error).splitlines()[0]}
                continue
            row, _ = _side([rank["runs"][0]["sides"][side] for rank in ranks], args.device)
            sides[side] = {
                "step_ms": row["step_ms"],
                "retries": max(rank["retries"] for rank in ranks),
                "device": max(rank["memory"][side].get("device", 0) for rank in ranks),
            }
        rooms.append({"room": room, "sides": sides})
    runs = [each["sides"] for each in rooms]
    right = all("error" in of["plain"] or "error" not in of["symmplan"] for of in runs)
    return {"ok": right, "command": command.words_of("fsdp", args), **settings, "rooms": rooms}


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
        "host_us": round(host / count * 1e6, 2) if count else None,
        "loss": first["losses"][-1],
        "losses_equal": all(r["losses_equal"] for r in ranks) if compared else None,
        "difference": worst([r["difference"] for r in ranks]) if compared else None,
        "profile": first.get("profile"),
    }, steps


def _right(run: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether symmplan's gradients are plain FSDP2's, up to the order of sums."""
    planned = [side for name, side in run["sides"].items() if name == "symmplan" or name in CHOOSE]
    half = settings["dtype"] == "bfloat16" and settings["reduce"] == "bfloat16"
    limit = _ULPS["bfloat16" if half else settings["reduce"]]
    found = [side.get("difference") for side in planned]
    return all(apart is None or apart <= limit for apart in found)


# For people ---------------------------------------------------------------------------------------


def render(result: dict[str, Any]) -> str:
    """Tables for people."""
    if result.get("rooms"):
        return "\n".join(_room_lines(result["rooms"]))
    what = f"{result['model']}: {result['layers']} layers of width {result['dim']}"
    lines = [command.heading(result, f"{what}, {result['dtype']}")]
    for run in result["runs"]:
        lines += _run_lines(run)
    lines += [f"{side}: left out, {why}" for side, why in result["skipped"].items()]
    for side, seen in result["memory"].items():
        bytes_ = ", ".join(f"{key.replace('_', ' ')} {size(n)}" for key, n in seen.items() if n)
        lines += [f"{side}: {bytes_}"] if bytes_ else []
    lines += [line for run in result["runs"] for line in _profile_lines(run)]
    return "\n".join([*lines, *_plan_lines(result)])


def _room_lines(rooms: list[dict[str, Any]]) -> list[str]:
    """A row for each room: milliseconds of a step, retries of the allocator, bytes in use."""
    rows, failed = [], []
    for each in rooms:
        name = "all" if each["room"] is None else f"{each['room']:g} GiB"
        cells: list[Any] = []
        for side, row in each["sides"].items():
            if "error" in row:
                failed.append(f"{side} in {name}: {row['error']}")
            cells += [row.get("step_ms"), row.get("retries"), size(row.get("device", 0))]
        rows.append((name, *cells))
    heads = "room plain_ms retries device symmplan_ms retries device"
    return [*command.cells(heads, rows), *failed]


_ABOUT = """\
{served} collectives in placements, {copies} of them copied, {plain} plain
symmetric memory: {segment_bytes} bytes, lower bound {lower_bound_bytes}, unshared {unshared_bytes}
{rendezvous} rendezvous"""
_RANGE, _HOST = "{:.2f} - {:.2f}", ("host_us", "collectives_ms")


def _run_lines(run: dict[str, Any]) -> list[str]:
    rows = [
        (side, row["step_ms"], _RANGE.format(*row["step_quartiles_ms"]), *map(row.get, _HOST))
        for side, row in run["sides"].items()
    ]
    if run["step_speedup"] is not None:
        speedups = (run["step_speedup"], "", None, run["collectives_speedup"])
        rows.append(("speedup", *speedups))
    lines = [f"{run['tokens']} tokens"]
    lines += command.cells("side step_ms quartiles host_us_each collectives_ms", rows)
    for side, row in run["sides"].items():
        if row["difference"] is not None:
            apart = row["difference"]
            same = "the same bits" if apart == 0 else f"{apart:.2g} from plain FSDP2's"
            losses = "equal" if row["losses_equal"] else "not equal"
            lines.append(f"  {side}: losses are {losses}, gradients are {same}")
    return lines


def _profile_lines(run: dict[str, Any]) -> list[str]:
    """Kernel times of one step as a table: a row for each kind, a column for each side."""
    seen = {side: row["profile"] for side, row in run["sides"].items() if row["profile"]}
    if not seen:
        return []
    kinds = sorted({kind for found in seen.values() for kind in found["ms"]})
    rows = [("span", *(found["span_ms"] for found in seen.values()))]
    rows += [(kind, *(found["ms"].get(kind) for found in seen.values())) for kind in kinds]
    lines = [f"one profiled step, {run['tokens']} tokens, ms (kinds overlap):"]
    lines += command.cells(["", *seen], rows)
    for side, found in seen.items():
        if found["collectives"]:
            forward = found["forward"]
            names = ", ".join(f"{n} {name}" for name, n in found["collectives"].items())
            lines.append(
                f"{side}: {forward['beside']} of {forward['gathers']} gathers in forward ran "
                f"beside computation; {names}"
            )
        for name, reason in found.get("disengaged", ()):
            lines.append(f"{side}: {name} did not run as planned: {reason}")
    return lines


def _plan_lines(result: dict[str, Any]) -> Sequence[str]:
    stats = result["stats"]
    if not stats:
        return ()
    return [_ABOUT.format(**stats), *command.choice_lines(result["choices"] or ())]
