"""Time the host of a push: a layer's gradients go to each peer, in one launch or one by one.

The layer is one of Llama 3 8B, in parts of equal sizes. One device plays all ranks: host time does
not depend on who owns the memory that a copy writes. Times are microseconds until the call returns,
medians of rounds that alternate.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from symmplan.bench.parts import command, timing
from symmplan.bench.parts.command import Option

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "render", "run"]

_OPTIONS = (
    Option("weights", "weights of the layer", 9),
    Option("nbytes", "bytes of each copy", 4096, 2 << 20),
    Option("peers", "ranks to push to", [1, 3, 7], None, {"nargs": "+"}),
    Option("rounds", "timed rounds", 20),
)
_COLUMNS = ("peers", "copies", "one by one, us", "one launch, us", "equal")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmarks/copies.py``."""
    command.add_options(parser, _OPTIONS, ranks=1, timeout=200.0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start a rank, time both ways.

    Raises:
        CommandError: The rank failed or did not finish in time.
    """
    about, ranks = command.measured(_measure, command.settings_of(args, _OPTIONS), args)
    return command.compared(about, ranks, lambda rounds: {"us": _us(rounds)})


def _us(rounds: dict[str, list[float]]) -> dict[str, float]:
    return {side: round(ms * 1e3, 1) for side, ms in timing.median_ms(rounds, 5).items()}


def render(result: dict[str, Any]) -> str:
    """A table for people."""
    rows = (
        [row["peers"], row["copies"], *row["us"].values(), "yes" if row["equal"] else "NO"]
        for row in result["results"]
    )
    lines = [command.heading(result, f"copies of {result['nbytes']} bytes")]
    return "\n".join([*lines, *command.cells(_COLUMNS, rows)])


def _measure(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What the rank runs."""
    device = timing.device_of(settings, rank)
    shown = timing.marked(settings["peers"], lambda n: f"a push to {n} peers")
    return {"rows": [_push(peers, device, settings) for peers in shown]}


def _push(peers: int, device: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each round in both ways, and whether both copied the same."""
    import torch

    from symmplan.device import Device, device_of

    weights, numel = settings["weights"], settings["nbytes"] // 2
    made = {"dtype": torch.bfloat16, "device": device}
    gradients = [torch.randn((1 + peers) * numel, **made) for _ in range(weights)]
    there = device_of(device)
    results: dict[str, torch.Tensor] = {}
    seconds: dict[str, list[float]] = {}
    ways: dict[str, Any] = {}
    for side, copies in (("one by one", Device.copies), ("one launch", type(there).copies)):
        rows = results[side] = torch.zeros(peers, weights, numel, **made)
        parts = [(w, p * numel, numel, rows[p, w]) for p in range(peers) for w in range(weights)]
        ways[side], seconds[side] = copies(there, parts), []
    stream = there.new_stream()
    for turn in range(-3, settings["rounds"]):
        for side, copy in ways.items():
            there.synchronize()
            with there.on_stream(stream):
                begin = time.perf_counter()
                copy(gradients)
                took = time.perf_counter() - begin
            if turn >= 0:
                seconds[side].append(took)
    there.synchronize()
    equal = torch.equal(*results.values())
    return {"peers": peers, "copies": peers * weights, "seconds": seconds, "equal": equal}


if __name__ == "__main__":
    from symmplan.cli.shell import perform

    sys.exit(perform("python benchmarks/copies.py", sys.modules[__name__], sys.argv[1:]))
