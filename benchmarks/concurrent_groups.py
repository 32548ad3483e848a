"""Run sharded gathers beside tensor-parallel sums: is the measured choice as fast as a forced one?

There are two programs. Each uses two groups of the same ranks.

- compiled: one group gathers each layer's weight two layers ahead. Meanwhile
  earlier layers run matrix products, and the other group sums their results,
  as tensor parallelism does. --inner selects the compiler.
- FSDP2: forward and backward, with such sums in its blocks.

The sides are the same program with different ``choose=``. They alternate. The time of a round is
that of its slowest rank. The results are medians. All sides get the same inputs, and must return
the same results, up to the order of sums.
"""

from __future__ import annotations

import statistics
import sys
from typing import TYPE_CHECKING, Any

from symmplan.bench.parts import command, timing
from symmplan.bench.parts.command import Option
from symmplan.report.format import count

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    import torch

__all__ = ["add_arguments", "render", "run"]

_PROGRAMS = ["compiled", "FSDP2"]
_NAMED = {"nargs": "+", "choices": _PROGRAMS, "metavar": "NAME"}
_OPTIONS = (
    Option("tokens", "rows of the activations", [64], [2048, 8192], {"nargs": "+"}),
    Option("width", "width of the layers", 256, 4096),
    Option("layers", "", 6),
    Option("rounds", "timed rounds", 20),
    Option("programs", "", _PROGRAMS, None, _NAMED),
    Option("inner", "", "eager", None, {"choices": ("inductor", "eager")}),
)
#: How much slower than the best forced side the choice may be.
_WITHIN = 1.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmarks/concurrent_groups.py``."""
    command.add_options(parser, _OPTIONS, timeout=500.0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, time all sides, compare.

    Raises:
        CommandError: A rank failed or did not finish in time, or there are no peers.
    """
    command.check_peers(args.ranks)
    settings = command.settings_of(args, _OPTIONS)
    about, ranks = command.measured(_measure, settings, args, connect=False)
    return command.compared(about, ranks, _row)


def _row(rounds: dict[str, list[float]]) -> dict[str, Any]:
    """One size, over all ranks."""
    ms = timing.median_ms(rounds)
    best = min((side for side in ms if side not in ("plain", "measure")), key=ms.__getitem__)
    # Rounds are compared in pairs: other load hits both sides alike.
    ratios = (a / b for a, b in zip(rounds["measure"], rounds[best], strict=True))
    within = ms["measure"] <= _WITHIN * ms[best]
    return {"best": best, "ratio": round(statistics.median(ratios), 3), "within": within}


def render(result: dict[str, Any]) -> str:
    """A table for people."""
    what = f"{count(result['layers'], 'layer')} of width {result['width']}"
    lines = [command.heading(result, what)]
    for row in result["results"]:
        rows = [(side, ms) for side, ms in row["ms"].items()]
        lines += [f"{row['program']}, {row['tokens']} tokens", *command.cells("side ms", rows)]
        lines += [f"  {side} left out: {why}" for side, why in row["skipped"].items()]
        lines.append(
            f"  measured / best forced ({row['best']}): {row['ratio']:.3f}; results "
            f"{'agree' if row['equal'] else 'DIFFER'}"
        )
        lines += command.choice_lines(row["choices"])
    return "\n".join(lines)


def _measure(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What every rank runs."""
    import torch.distributed as dist

    other = dist.new_group(range(settings["ranks"]))
    if settings["device"] == "cuda":
        dist.barrier(group=other, device_ids=[rank])
    groups, device = (dist.group.WORLD, other), timing.device_of(settings, rank)
    kinds = [(program, n) for program in settings["programs"] for n in settings["tokens"]]
    shown = timing.marked(kinds, lambda kind: f"{kind[0]}, {kind[1]} tokens")
    return {"rows": [_compare(*kind, groups, device, settings) for kind in shown]}


def _compare(
    program: str, tokens: int, groups: Sequence[Any], device: torch.device, settings: dict[str, Any]
) -> dict[str, Any]:
    """Seconds of each round on each side, and whether all sides gave the same."""
    import torch
    import torch.distributed as dist
    from attrs import asdict
    from two_groups import FORCED, TwoGroups

    from symmplan.errors import SymmplanError

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(tokens, settings["width"], generator=generator).to(device, dtype)
    # Once: sides that were there before would be compiled again while they are timed.
    torch.compiler.reset()
    sides: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for side in ("plain", "measure", *FORCED[program]):
        try:
            sides[side] = TwoGroups(program, side, settings, groups, x)
        except SymmplanError as error:  # noqa: PERF203
            skipped[side] = str(error).splitlines()[0]
    results: dict[str, torch.Tensor] = {}
    seconds = timing.alternate(sides, settings["rounds"], device, judge=results.update)
    want = results["plain"].float()
    most = float(want.abs().max()) * (0.05 if dtype is torch.bfloat16 else 1e-4)
    apart = max(float((result.float() - want).abs().max()) for result in results.values())
    choices = [asdict(choice) for choice in sides["measure"].choices]
    for side in sides.values():
        side.end()
    return {
        "program": program,
        "tokens": tokens,
        "seconds": seconds,
        "skipped": skipped,
        "equal": apart <= most,
        "choices": choices,
    }


if __name__ == "__main__":
    from symmplan.cli.shell import perform

    sys.exit(perform("python benchmarks/concurrent_groups.py", sys.modules[__name__], sys.argv[1:]))
