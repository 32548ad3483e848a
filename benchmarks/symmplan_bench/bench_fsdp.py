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

import os
import shlex
import statistics
from typing import TYPE_CHECKING, Any

from symmplan.errors import CommandError
from symmplan.place.choice import CHOOSE
from symmplan.report.format import size
from symmplan_bench.fsdp_ranks import measure, worst
from symmplan_bench.machine import hardware
from symmplan_bench.processes import check_peers, run_ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["add_arguments", "render", "run"]

#: In the order in which they are built: torch's pool must be there before other symmetric memory.
_SIDES = ("plain", "kept", "pooled", "symmplan", "unsharded")
_ALL = ("ranks", "device", "model", "layers", "dim", "tokens", "steps", "dtype", "reduce", "choose")
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
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes to start (default 2)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (default cpu)")
    add("--model", choices=("mlp", "llama"), default="mlp", help="default mlp")
    add("--layers", type=int, help="FSDP modules (default 4; llama 12)")
    add("--dim", type=int, help="width (default 512; llama 4096, as Llama 3 8B)")
    add(
        "--tokens",
        "--sequence",
        type=int,
        nargs="+",
        help="rows of a batch, or its sequence length; several are measured one after the other "
        "(default 64; llama 4096 2048)",
    )
    add("--steps", type=int, default=10, help="timed steps of each (default 10)")
    add("--dtype", choices=("float32", "bfloat16"), help="of parameters (llama bfloat16)")
    add(
        "--reduce",
        choices=("float32", "bfloat16"),
        help="of reduced gradients, if parameters are not float32 (llama bfloat16)",
    )
    add(
        "--sides",
        nargs="+",
        choices=_SIDES,
        metavar="SIDE",
        help=f"what to compare: {', '.join(_SIDES)} (default: all there are)",
    )
    add(
        "--choose",
        nargs="+",
        choices=CHOOSE,
        default=["measure"],
        metavar="WAY",
        help=f"how collectives run: {', '.join(CHOOSE)} (default measure); each further one is a "
        "side of its own",
    )
    add(
        "--live-gathers",
        type=int,
        help="modules that have bytes at once (default: as the program)",
    )
    add(
        "--cuda-graph",
        action="store_true",
        help="replay steps that were captured (cuda; not of torch's pool)",
    )
    add("--no-profile", dest="profile", action="store_false", help="count no kernels (cuda)")
    add("--no-memory", dest="memory", action="store_false", help="count no bytes (cuda)")
    add("--timeout", type=float, default=300.0, help="seconds for everything (default 300)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, collect their times, compare.

    Raises:
        CommandError: An option makes no sense here, or a rank failed or did not finish in time.
    """
    options = _options(args)
    ranks = run_ranks(
        measure,
        options,
        ranks=args.ranks,
        device=args.device,
        timeout=args.timeout,
        connect=False,
    )
    runs = [_compared([r["runs"][i] for r in ranks], options) for i in range(len(args.tokens))]
    first = ranks[0]
    words = [
        f"--{n} {shlex.join(map(str, v)) if isinstance(v, list) else v}"
        for n, v in ((name, options[name]) for name in _ALL)
    ]
    words += ["--cuda-graph"] * args.cuda_graph
    words += [] if args.live_gathers is None else [f"--live-gathers {args.live_gathers}"]
    memory = {
        side: {key: max(r["memory"][side][key] for r in ranks) for key in first["memory"][side]}
        for side in options["sides"]
    }
    return {
        "ok": all(_right(run, options) for run in runs),
        "command": " ".join(["symmplan bench fsdp", *words]),
        **{name: options[name] for name in (*_ALL, "sides")},
        "skipped": options["skipped"],
        "runs": runs,
        "memory": memory,
        "how": first["how"],
        "stats": first.get("stats"),
        "choices": first.get("choices"),
        "machine": {
            **hardware(),
            **{name: first[name] for name in ("torch", "cuda", "nccl", "device")},
        },
    }


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What the ranks need to know, as plain data."""
    from symmplan_bench.fsdp_sides import missing

    check_peers(args.ranks)
    for name, value in _DEFAULTS[args.model].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.steps < 1 or args.layers < 1 or args.dim < 1 or min(args.tokens) < 1:
        raise CommandError(
            "nothing can be measured of a model or a run of no size",
            expected="--steps, --layers, --dim and --tokens of at least 1",
            got=f"{args.steps}, {args.layers}, {args.dim}, {args.tokens}",
        )
    if args.model == "llama" and args.dim % 16:
        raise CommandError(
            "attention heads cannot share the width evenly",
            expected="--dim that 16 divides",
            got=args.dim,
        )
    if args.cuda_graph and args.device != "cuda":
        raise CommandError(
            "the CPU has no CUDA graphs", expected="--device cuda", got=f"--device {args.device}"
        )
    graph = args.cuda_graph
    wanted = [side for side in _SIDES if side in (args.sides or _SIDES)]
    if "symmplan" in wanted:
        at = wanted.index("symmplan") + 1
        wanted[at:at] = args.choose[1:]
    found = {side: missing(side, args.device, graph=graph) for side in wanted}
    skipped = {side: why for side, why in found.items() if why is not None}
    options = {
        name: getattr(args, name)
        for name in (*_ALL, "profile", "memory", "cuda_graph", "live_gathers")
    }
    return {
        **options,
        "sides": [side for side in wanted if side not in skipped],
        "skipped": skipped,
        "wait": min(120.0, args.timeout),
        "threads": max(1, (os.cpu_count() or 1) // args.ranks),
    }


def _compared(ranks: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    """One run, over all ranks."""
    sides = {}
    steps = {}
    for name in ranks[0]["sides"]:
        mine = [r["sides"][name] for r in ranks]
        # A step is over when its slowest rank is.
        times = {
            key: [max(t) for t in zip(*(m["times"][key] for m in mine), strict=True)]
            for key in mine[0]["times"]
        }
        steps[name] = times["step"]
        low, high = _quartiles(times["step"])
        host = statistics.median(times["host"])
        count = mine[0]["collectives"]
        sides[name] = {
            "step_ms": _ms(statistics.median(times["step"])),
            "step_quartiles_ms": [_ms(low), _ms(high)],
            "wall_ms": _ms(statistics.median(times["wall"])),
            "issue_ms": _ms(statistics.median(times["issue"])),
            "collectives": count,
            "collectives_ms": _ms(host) if count and options["device"] == "cpu" else None,
            "host_us": round(host / count * 1e6, 2) if count else None,
            "loss": mine[0]["losses"][-1],
            "losses_equal": all(m["losses_equal"] for m in mine)
            if "losses_equal" in mine[0]
            else None,
            "difference": worst([m["difference"] for m in mine])
            if "difference" in mine[0]
            else None,
            "profile": mine[0].get("profile"),
        }
    plain, planned = sides.get("plain"), sides.get("symmplan")
    if plain is None or planned is None:
        return {"tokens": ranks[0]["tokens"], "sides": sides, "step_speedup": None}
    pairs = zip(steps["plain"], steps["symmplan"], strict=True)
    return {
        "tokens": ranks[0]["tokens"],
        "sides": sides,
        "step_speedup": round(plain["step_ms"] / planned["step_ms"], 3),
        "paired_speedup": round(statistics.median(a / b for a, b in pairs), 3),
        "collectives_speedup": round(plain["collectives_ms"] / planned["collectives_ms"], 2)
        if planned["collectives_ms"]
        else None,
    }


def _right(run: dict[str, Any], options: dict[str, Any]) -> bool:
    """Whether symmplan's gradients are plain FSDP2's, up to the order of sums."""
    planned = [side for name, side in run["sides"].items() if name == "symmplan" or name in CHOOSE]
    half = options["dtype"] == "bfloat16" and options["reduce"] == "bfloat16"
    limit = _ULPS["bfloat16" if half else options["reduce"]]
    found = [side.get("difference") for side in planned]
    return all(apart is None or apart <= limit for apart in found)


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def render(result: dict[str, Any]) -> str:
    """Tables for people."""
    machine = result["machine"]
    nccl = "" if machine["nccl"] is None else f", NCCL {machine['nccl']}"
    lines = [
        (
            f"{result['ranks']} ranks, {result['model']}: {result['layers']} layers of width "
            f"{result['dim']}, {result['dtype']}; {machine['device']}, {machine['cores']} cores, "
            f"torch {machine['torch']}{nccl}"
        ),
        (
            f"{'tokens':>7} {'side':11} {'step ms':>9} {'quartiles':>19} {'host us each':>13} "
            f"{'collectives ms':>15}"
        ),
    ]
    for run in result["runs"]:
        for side, row in run["sides"].items():
            low, high = row["step_quartiles_ms"]
            lines.append(
                f"{run['tokens']:>7} {side:11} {row['step_ms']:>9.2f} "
                f"{f'{low:.2f} - {high:.2f}':>19} {_number(row['host_us']):>13} "
                f"{_number(row['collectives_ms']):>15}"
            )
        if run["step_speedup"] is not None:
            comms = run["collectives_speedup"]
            lines.append(
                f"{'':7} {'speedup':11} {run['step_speedup']:>8.2f}x {'':>19} {'':>13} "
                + (f"{'-':>15}" if comms is None else f"{comms:>14.2f}x")
            )
        for side, row in run["sides"].items():
            if row["difference"] is not None:
                apart = row["difference"]
                same = "the same bits" if apart == 0 else f"{apart:.2g} from plain FSDP2's"
                losses = "equal" if row["losses_equal"] else "not equal"
                lines.append(f"{'':7} {side}: losses are {losses}, gradients are {same}")
    lines += [f"{side}: left out, {why}" for side, why in result["skipped"].items()]
    for side, seen in result["memory"].items():
        bytes_ = ", ".join(f"{key.replace('_', ' ')} {size(n)}" for key, n in seen.items() if n)
        lines += [f"{side}: {bytes_}"] if bytes_ else []
    lines += [line for run in result["runs"] for line in _profile_lines(run)]
    return "\n".join([*lines, *_plan_lines(result)])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _profile_lines(run: dict[str, Any]) -> list[str]:
    """Kernel times of one step as a table: a row for each kind, a column for each side."""
    seen = {side: row["profile"] for side, row in run["sides"].items() if row["profile"]}
    if not seen:
        return []
    kinds = sorted({kind for found in seen.values() for kind in found["ms"]})
    lines = [
        f"one profiled step, {run['tokens']} tokens, ms (kinds overlap):",
        f"{'':24}" + "".join(f"{side:>12}" for side in seen),
        f"{'span':24}" + "".join(f"{found['span_ms']:>12.2f}" for found in seen.values()),
    ]
    for kind in kinds:
        cells = (found["ms"].get(kind) for found in seen.values())
        lines.append(f"{kind:24}" + "".join(f"{_number(cell):>12}" for cell in cells))
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


def _plan_lines(result: dict[str, Any]) -> list[str]:
    stats = result["stats"]
    if not stats:
        return []
    lines = [
        (
            f"{stats['served']} collectives in placements, {stats['copies']} of them copied, "
            f"{stats['plain']} plain"
        ),
        (
            f"symmetric memory: {stats['segment_bytes']} bytes, lower bound "
            f"{stats['lower_bound_bytes']}, unshared {stats['unshared_bytes']}; "
            f"{stats['rendezvous']} rendezvous"
        ),
    ]
    for choice in result["choices"] or ():
        times = ", ".join(f"{way} {t * 1e6:.0f} us" for way, t in choice["seconds"].items())
        lines.append(f"{choice['op']} of {choice['nbytes']} bytes: {choice['way']} ({times})")
    return lines
