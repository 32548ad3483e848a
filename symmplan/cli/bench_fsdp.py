"""Train under FSDP2 plainly and with symmplan, and compare times, bytes and results.

The same model is trained in the same processes in several ways, the *sides*: with FSDP2's own
collectives; with `symmplan.fsdp.apply`; on devices also with all-gathers in torch's pool of
symmetric memory, over a communicator with copy engines; and without FSDP2, which is the limit.
Steps of all sides alternate, so that other load hits them alike; a step's time is its slowest
rank's, and medians are compared. The time in collectives is what the host spends in FSDP2's calls
of them, waiting for peers included, which on the CPU is all of it. Peak memory is that of other
runs, with one side each.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import multiprocessing
import os
import platform
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any

from symmplan.errors import RunError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess


__all__ = ["add_arguments", "render", "run"]

_ALL = ("ranks", "device", "model", "layers", "dim", "tokens", "steps", "dtype", "reduce", "choose")


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
        type=int,
        nargs="+",
        help="rows of a batch, or its sequence length; several are measured one after the other "
        "(default 64; llama 4096 2048)",
    )
    add("--steps", type=int, default=10, help="timed steps of each (default 10)")
    add("--dtype", choices=("float32", "bfloat16"), help="of parameters (llama bfloat16)")
    add("--reduce", choices=("float32", "bfloat16"), help="of reduced gradients, if not float32")
    add("--sides", nargs="+", metavar="SIDE", help="plain, pooled, symmplan, unsharded")
    add(
        "--choose",
        choices=("measure", "placed", "copy engine"),
        default="measure",
        help="how collectives run: as measured (default), all in symmetric memory, or all there "
        "by copy engines",
    )
    add("--no-profile", dest="profile", action="store_false", help="count no kernels (cuda)")
    add("--no-memory", dest="memory", action="store_false", help="no runs for memory alone (cuda)")
    add("--timeout", type=float, default=300.0, help="seconds for everything (default 300)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, collect their times, compare.

    Raises:
        RunError: A rank failed or did not finish in time.
    """
    from symmplan.cli.bench_fsdp_sides import sides_of

    if args.ranks < 2:
        raise RunError("a comparison needs peers", expected="--ranks 2 or more", got=args.ranks)
    options = {name: getattr(args, name) for name in (*_ALL, "sides", "profile")}
    llama = args.model == "llama"
    options["layers"] = args.layers or (12 if llama else 4)
    options["dim"] = args.dim or (4096 if llama else 512)
    options["tokens"] = args.tokens or ([4096, 2048] if llama else [64])
    options["dtype"] = args.dtype or ("bfloat16" if llama else "float32")
    options["reduce"] = args.reduce or ("bfloat16" if llama else "float32")
    options["wait"] = min(60.0, args.timeout)
    options["threads"] = max(1, (os.cpu_count() or 1) // args.ranks)
    known = sides_of(args.device)
    options["sides"] = [side for side in known if side in (args.sides or known)]
    deadline = time.monotonic() + args.timeout
    ranks = _start(options, deadline)
    runs = [_compared([r["runs"][i] for r in ranks]) for i in range(len(options["tokens"]))]
    alone = _alone(options, deadline) if args.memory and args.device == "cuda" else {}
    first = ranks[0]
    words = [
        f"--{n} {' '.join(map(str, v)) if isinstance(v, list) else v}"
        for n, v in ((name, options[name]) for name in _ALL)
    ]
    return {
        # Sums of more than two ranks depend on the order of summing.
        "ok": all(r["losses_equal"] is not False for r in runs)
        and (args.ranks > 2 or all(r["difference"] in (None, 0.0) for r in runs)),
        "command": "symmplan bench fsdp " + " ".join(words),
        **{name: options[name] for name in (*_ALL, "sides")},
        "runs": runs,
        "memory": alone,
        "stats": first.get("stats"),
        "choices": first.get("choices"),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": first["torch"],
            "nccl": first["nccl"],
            "device": first["device"],
        },
    }


def _compared(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One run, over all ranks."""
    sides = {}
    for name in ranks[0]["sides"]:
        mine = [r["sides"][name] for r in ranks]
        # A step is over when its slowest rank is.
        steps = [max(t) for t in zip(*(m["step"] for m in mine), strict=True)]
        comms = [max(t) for t in zip(*(m["collectives"] for m in mine), strict=True)]
        quarters = statistics.quantiles(steps, n=4) if len(steps) > 1 else [steps[0]] * 3
        sides[name] = {
            "step_ms": round(statistics.median(steps) * 1e3, 3),
            "step_quartiles_ms": [round(quarters[0] * 1e3, 3), round(quarters[2] * 1e3, 3)],
            "collectives_ms": round(statistics.median(comms) * 1e3, 3) or None,
            "host_us": {
                method: round(statistics.median(times) * 1e6, 1)
                for method, times in mine[0]["host"].items()
            },
            "profile": mine[0].get("profile"),
        }
    plain, planned = sides.get("plain"), sides.get("symmplan")
    compared = plain is not None and planned is not None
    comms = [s["collectives_ms"] for s in (plain, planned) if s]
    return {
        "tokens": ranks[0]["tokens"],
        "sides": sides,
        "step_speedup": round(plain["step_ms"] / planned["step_ms"], 3)
        if plain and planned
        else None,
        "collectives_speedup": round(comms[0] / comms[1], 2) if compared and all(comms) else None,
        "losses_equal": all(r["losses_equal"] for r in ranks) if compared else None,
        "difference": max(r["difference"] for r in ranks) if compared else None,
    }


def _alone(options: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Peak bytes of runs with one side each, of the rank that needs most."""
    found = {}
    for side in options["sides"]:
        few = {**options, "sides": [side], "steps": 2, "profile": False}
        few["tokens"] = options["tokens"][:1]
        ranks = _start(few, deadline)
        seen = [r["runs"][0]["sides"][side]["bytes"] for r in ranks]
        found[side] = {key: max(s[key] for s in seen) for key in seen[0]}
    return found


def render(result: dict[str, Any]) -> str:
    """Tables for people."""
    stats, machine = result["stats"], result["machine"]
    nccl = "" if machine["nccl"] is None else f", NCCL {machine['nccl']}"
    lines = [
        (
            f"{result['ranks']} ranks, {result['model']}: {result['layers']} layers of width "
            f"{result['dim']}, {result['dtype']}; {machine['device']}, {machine['cores']} cores, "
            f"torch {machine['torch']}{nccl}"
        ),
        f"{'tokens':>8} {'side':10} {'step ms':>10} {'quartiles':>19} {'collectives ms':>15}",
    ]
    for run in result["runs"]:
        for side, row in run["sides"].items():
            low, high = row["step_quartiles_ms"]
            comms = "-" if row["collectives_ms"] is None else f"{row['collectives_ms']:.2f}"
            lines.append(
                f"{run['tokens']:>8} {side:10} {row['step_ms']:>10.2f} "
                f"{f'{low:.2f} - {high:.2f}':>19} {comms:>15}"
            )
        if run["step_speedup"] is not None:
            comms = run["collectives_speedup"]
            lines.append(
                f"{'':8} {'speedup':10} {run['step_speedup']:>9.2f}x {'':>19} "
                + (f"{'-':>15}" if comms is None else f"{comms:>14.2f}x")
            )
            same = "the same losses" if run["losses_equal"] else "DIFFERENT losses"
            lines.append(f"{'':8} {same}; largest difference {run['difference']:.2g}")
    lines += _memory_lines(result["memory"]) + _profile_lines(result["runs"])
    if stats:
        lines += [
            (
                f"{stats['placed']} collectives placed, {stats['staged']} staged, "
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
        lines.append(f"{choice['kind']} of {choice['nbytes']} bytes: {choice['way']} ({times})")
    return "\n".join(lines)


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    return [
        f"{side}: peak allocated {m['peak_allocated'] / 2**20:.0f} MiB, reserved "
        f"{m['peak_reserved'] / 2**20:.0f} MiB, symmetric {m['symmetric'] / 2**20:.0f} MiB"
        for side, m in memory.items()
    ]


def _profile_lines(runs: list[dict[str, Any]]) -> list[str]:
    lines = []
    for run in runs:
        for side, row in run["sides"].items():
            if row["profile"]:
                spent = ", ".join(f"{k} {t}" for k, t in row["profile"]["ms"].items())
                span = row["profile"]["span_ms"]
                lines.append(f"{run['tokens']} {side}: span {span} ms; {spent}")
                lines.append(f"    host us {row['host_us']}; {row['profile']['collectives']}")
    return lines


def _start(options: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
    """Run the ranks; what each measured."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=_rank, args=(rank, store.port, options), daemon=True)
        for rank in range(options["ranks"])
    ]
    with _ended(processes):
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            if any(p.exitcode for p in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        codes = [process.exitcode for process in processes]
        if any(code != 0 for code in codes):
            raise RunError(
                "ranks of the benchmark failed or did not finish",
                expected="all of them done in time",
                got=f"exit codes {codes} (None: still running)",
                fix="see their output above, or raise --timeout",
                exit_codes=codes,
            )
        return [
            json.loads(bytes(store.get(f"bench/result/{rank}"))) for rank in range(options["ranks"])
        ]


@contextlib.contextmanager
def _ended(processes: list[BaseProcess]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join()


def _rank(rank: int, port: int, options: dict[str, Any]) -> None:
    """One rank's life."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    from symmplan.cli.bench_fsdp_sides import measure

    warnings.simplefilter("ignore", FutureWarning)  # newer torch renames collectives
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cuda = options["device"] == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    torch.set_num_threads(options["threads"])
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=PrefixStore("bench/group", store),
        rank=rank,
        world_size=options["ranks"],
        timeout=dt.timedelta(seconds=120),
    )
    store.set(f"bench/result/{rank}", json.dumps(measure(rank, options)))
    dist.barrier()
    dist.destroy_process_group()
