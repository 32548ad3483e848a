"""Time expert-parallel layers, and their dispatch and combine alone, with and without symmplan.

``plain`` is what such programs do: an all-to-all of the counts, then ``all_to_all_single`` with
splits that are known only then. ``symmplan`` is `symmplan.expert_parallel` as it chooses by itself,
``push`` the same with rows pushed into the peers' memory. All sides get the same rows, and must
give the same bits.

``exchange``: one dispatch and one combine, with the exchange of counts. ``layers``: forward and
backward of layers whose experts are two matrix products. Routes are uneven and change in each
round; sides alternate; a round is over when its slowest rank is, and the median counts.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from symmplan.bench.parts import command, timing
from symmplan.bench.parts.command import Option
from symmplan.report.format import count, size

if TYPE_CHECKING:
    import argparse

    import torch

__all__ = ["add_arguments", "render", "run"]

_WARM_UP = 3
_OPTIONS = (
    Option(
        "tokens",
        "rows that each rank sends in a call",
        [256, 2048],
        [4096, 16384, 65536],
        {"nargs": "+"},
    ),
    Option("width", "elements of a row", 512, 4096),
    Option("layers", "layers", 4),
    Option("rounds", "timed rounds", 15),
    Option("capacity", "capacity factor of the plan", 1.5),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan bench moe``."""
    command.add_options(parser, _OPTIONS, timeout=600.0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, time all sides, compare.

    Raises:
        CommandError: A rank failed or did not finish in time, or there are no peers.
    """
    command.check_peers(args.ranks)
    about, ranks = command.measured("moe", _measure, command.settings_of(args, _OPTIONS), args)
    return command.compared(about, ranks, _row)


def _row(rounds: dict[str, list[float]]) -> dict[str, Any]:
    ms = timing.median_ms(rounds)
    return {"speedup": round(ms["plain"] / ms["symmplan"], 3)}


def render(result: dict[str, Any]) -> str:
    """A table for people."""
    what = f"rows of {result['width']} elements, {count(result['layers'], 'layer')}; ms"
    heads = "what tokens plain symmplan push speedup algorithm segment equal"
    rows = []
    for row in result["results"]:
        told = {**row, **row["ms"], "segment": size(row["segment_bytes"])}
        rows.append([told[head] for head in heads.split()])
    return "\n".join([command.heading(result, what), *command.cells(heads, rows)])


def _measure(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What every rank runs."""
    kinds = [(what, n) for n in settings["tokens"] for what in ("exchange", "layers")]
    shown = timing.marked(kinds, lambda kind: f"{kind[0]} of {kind[1]} tokens")
    return {"rows": [_compare(what, tokens, rank, settings) for what, tokens in shown]}


def _compare(what: str, tokens: int, rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each round on each side, and whether all sides gave the same."""
    import torch

    import symmplan

    width, device = settings["width"], timing.device_of(settings, rank)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(rank)
    source = torch.randn(tokens, width, generator=generator).to(device, dtype)
    experts = [
        [torch.randn(width, width, generator=generator).to(device, dtype) / width**0.5] * 2
        for _ in range(settings["layers"])
    ]
    rounds = range(settings["rounds"] + _WARM_UP)
    routes = [_counts(tokens, settings["ranks"], generator).to(device) for _ in rounds]
    bound = int(settings["capacity"] * tokens)
    ours = symmplan.expert_parallel(max_tokens=bound)
    pushed = symmplan.expert_parallel(max_tokens=bound, choose="push")
    work = _exchange if what == "exchange" else _layers
    made = {"plain": _Plain(), "symmplan": ours, "push": pushed}
    sides = {side: partial(work, via, source, experts, routes) for side, via in made.items()}
    equal = True

    def judge(results: dict[str, torch.Tensor]) -> None:
        nonlocal equal
        equal &= all(torch.equal(results["plain"], result) for result in results.values())

    seconds = timing.alternate(sides, settings["rounds"], device, warm_up=_WARM_UP, judge=judge)
    stats = ours.stats
    ours.release()
    pushed.release()
    return {
        "what": what,
        "tokens": tokens,
        "seconds": seconds,
        "equal": equal,
        "algorithm": "push" if stats.served else "ordinary",
        "replans": stats.replans,
        "segment_bytes": stats.segment_bytes,
    }


def _counts(tokens: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """How many rows go to each rank: uneven, by up to a half."""
    import torch

    shares = torch.rand(size, generator=generator) + 1.0
    counts = (shares / shares.sum() * tokens).long()
    counts[0] += tokens - counts.sum()
    return counts


def _exchange(
    via: Any, source: torch.Tensor, _experts: Any, counts: list[torch.Tensor], turn: int
) -> torch.Tensor:
    routes = via.routes(counts[turn])
    back: torch.Tensor = via.combine(via.dispatch(source, routes), routes)
    return back


def _layers(
    via: Any, source: torch.Tensor, experts: Any, counts: list[torch.Tensor], turn: int
) -> torch.Tensor:
    import torch

    rows = source.clone().requires_grad_()
    x = rows
    for up, down in experts:
        routes = via.routes(counts[turn])
        inside = via.dispatch(x, routes)
        x = x + via.combine(torch.relu(inside @ up) @ down, routes)
    x.sum().backward()
    assert rows.grad is not None
    return rows.grad


class _Plain:
    """What programs do without symmplan."""

    def routes(self, counts: torch.Tensor) -> tuple[list[int], list[int]]:
        import torch
        import torch.distributed as dist

        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        return counts.tolist(), received.tolist()

    def dispatch(self, rows: torch.Tensor, routes: tuple[list[int], list[int]]) -> torch.Tensor:
        import torch.distributed as dist

        from symmplan.torch_private.benches import all_to_all_single_autograd

        group: Any = dist.group.WORLD
        made: torch.Tensor = all_to_all_single_autograd(rows, routes[1], routes[0], group)
        return made

    def combine(self, rows: torch.Tensor, routes: tuple[list[int], list[int]]) -> torch.Tensor:
        return self.dispatch(rows, (routes[1], routes[0]))
