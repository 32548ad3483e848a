"""Time expert-parallel layers, and their dispatch and combine alone, with and without symmplan.

- plain: what eager programs do, an all-to-all of the counts, for which the
  host waits, and then all_to_all_single with these splits
- known: only the all_to_all_single, with splits that the host knows in advance
- push: symmplan.expert_parallel with copies into the peers' memory
- symmplan: symmplan.expert_parallel with its default; on devices the host does
  not know the routes, and kernels move the rows
- graph: the same in a CUDA graph

All sides get the same rows, and must return the same bits.

``dispatch`` includes the exchange of counts. ``layers`` is forward and backward of layers whose
experts are two matrix products. On devices they are grouped, so that nothing is computed on the
padding of routes. ``shared`` is the same with a shared expert for all rows of a rank, which runs
while they are dispatched.
A size whose tensors do not fit the device is left out, and the output says so.
Routes are uneven and change in each round. Sides alternate. The time of a round is that of its
slowest rank. The results are medians. On devices dispatch and combine run several times per round,
and the host time is the time until all calls have returned.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from symmplan.bench.parts import command, timing
from symmplan.bench.parts.command import Option
from symmplan.errors import CommandError
from symmplan.report.format import count, size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    import torch

    #: Rows that go to each rank and that come from each, and how many come, on the device.
    _Known: TypeAlias = tuple[list[int], list[int], torch.Tensor]

__all__ = ["add_arguments", "render", "run"]

_WARM_UP = 3
#: How often a dispatch or combine runs in a round, on a device and elsewhere.
_OFTEN = {"cuda": 20, "cpu": 1}
#: How many sides a device has.
_SIDES = 5
_SHAPES = ("dispatch", "combine", "layers", "shared")
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
    about, ranks = command.measured(_measure, command.settings_of(args, _OPTIONS), args)
    left_out = ranks[0]["left_out"]
    if not ranks[0]["rows"]:
        raise CommandError(
            "nothing was measured: " + "; ".join(map(_too_large, left_out)),
            expected="sizes that fit the device",
            got=", ".join(map(str, about["tokens"])),
            fix="pass fewer --tokens, or a smaller --width",
        )
    return {**command.compared(about, ranks, _row), "left_out": left_out}


def _row(rounds: dict[str, list[float]]) -> dict[str, Any]:
    ms = timing.median_ms(rounds)
    return {"speedup": round(ms["plain"] / ms["symmplan"], 3)}


def render(result: dict[str, Any]) -> str:
    """Tables for people."""
    what = f"rows of {result['width']} elements, {count(result['layers'], 'layer')}; ms"
    results = result["results"]
    sides = list(results[0]["ms"])
    heads = ["what", "tokens", "bytes", *sides, "speedup"]
    rows = []
    for row in results:
        told = {**row, **row["ms"], "bytes": size(row["nbytes"])}
        rows.append([told[head] for head in heads])
    lines = [command.heading(result, what), *command.cells(heads, rows)]
    rows = [[row["what"], row["tokens"], *(row["host_ms"][s] for s in sides)] for row in results]
    lines += ["", "the host's part; ms", *command.cells(["what", "tokens", *sides], rows)]
    segments = {row["tokens"]: row["segment_bytes"] for row in results}
    needs = ", ".join(f"{size(nbytes)} for {tokens} tokens" for tokens, nbytes in segments.items())
    wrong = [f"{row['what']} of {row['tokens']} tokens" for row in results if not row["equal"]]
    equal = f"NOT THE SAME RESULTS: {', '.join(wrong)}" if wrong else "all sides: the same results"
    lines += ["", f"symmetric memory: {needs}", *map(_too_large, result["left_out"]), equal]
    return "\n".join(lines)


def _too_large(row: dict[str, Any]) -> str:
    sizes = f"{size(row['needs'])} needed, {size(row['free'])} free"
    return f"left out: {row['what']} of {row['tokens']} tokens, {sizes}"


def _measure(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What every rank runs."""
    free = timing.least_free(timing.device_of(settings, rank))
    kinds, left_out = [], []
    for tokens in settings["tokens"]:
        for what in _SHAPES:
            needs = _bytes_of(what, tokens, settings)
            if free is None or needs <= free:
                kinds.append((what, tokens))
            else:
                left_out.append({"what": what, "tokens": tokens, "needs": needs, "free": free})
    shown = timing.marked(kinds, lambda kind: f"{kind[0]} of {kind[1]} tokens")
    rows = [_compare(what, tokens, rank, settings) for what, tokens in shown]
    return {"rows": rows, "left_out": left_out}


def _bytes_of(what: str, tokens: int, settings: dict[str, Any]) -> int:
    """Bytes of the tensors of all sides, at most: 16-bit rows on a device."""
    sent: int = 2 * tokens * settings["width"]
    received = int(settings["capacity"] * sent)
    experts = 2 * settings["layers"] * settings["width"] ** 2
    # Each side has rows and a result; three have a segment, for what comes and what returns.
    nbytes: int = sent + experts + _SIDES * 2 * received + 3 * 2 * received
    if what in (
        "layers",
        "shared",
    ):  # saved for backward, once more for the graph, which keeps its memory
        nbytes += 2 * settings["layers"] * (4 * received + 2 * sent)
    return nbytes


def _compare(what: str, tokens: int, rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each round on each side, and whether all sides gave the same."""
    import statistics

    import torch

    import symmplan

    work = _Layers(what, tokens, rank, settings)
    bound = int(settings["capacity"] * tokens)
    cuda = work.device.type == "cuda"

    def ours(choose: Literal["auto", "push"] = "auto") -> Any:
        return symmplan.expert_parallel(max_tokens=bound, choose=choose)

    made = {"push": ours("push"), "symmplan": ours()}
    acts = {"plain": _Exchanging(work, _Plain()), "known": _Exchanging(work, _Plain(work.counts))}
    acts["push"] = _Exchanging(work, made["push"])
    acts["symmplan"] = _Exchanging(work, made["symmplan"], padded=cuda)
    if cuda:
        made["graph"] = ours()
        acts["graph"] = _Graph(work, made["graph"])
    host: dict[str, list[float]] = {name: [] for name in acts}

    def timed(name: str) -> Callable[[int], torch.Tensor]:
        def run(_: int) -> torch.Tensor:
            begin = time.perf_counter()
            result = acts[name].run()
            host[name].append(time.perf_counter() - begin)
            return result

        return run

    equal = True

    def judge(results: dict[str, torch.Tensor]) -> None:
        nonlocal equal
        expected = results["plain"]
        equal &= all(torch.equal(expected, r[: len(expected)]) for r in results.values())

    sides = {name: timed(name) for name in acts}
    seconds = timing.alternate(
        sides,
        settings["rounds"],
        work.device,
        warm_up=_WARM_UP,
        judge=judge,
        prepare=lambda name, turn: acts[name].prepare(turn),
    )
    segment = made["symmplan"].stats.segment_bytes
    acts.clear()
    for via in made.values():
        via.release()
    often = work.often
    return {
        "what": what,
        "tokens": tokens,
        "nbytes": work.source.nbytes,
        "seconds": {name: [s / often for s in times] for name, times in seconds.items()},
        "host_ms": {
            name: round(statistics.median(times[_WARM_UP:]) / often * 1e3, 3)
            for name, times in host.items()
        },
        "equal": equal,
        "segment_bytes": segment,
    }


class _Layers:
    """What one row of the table runs on one rank: the same rows and routes on all sides."""

    def __init__(self, what: str, tokens: int, rank: int, settings: dict[str, Any]) -> None:
        import torch

        width, self.device = settings["width"], timing.device_of(settings, rank)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(rank)
        self.source = torch.randn(tokens, width, generator=generator).to(self.device, dtype)
        self.experts = [
            torch.randn(width, width, generator=generator).to(self.device, dtype) / width**0.5
            for _ in range(settings["layers"])
        ]
        rounds = range(settings["rounds"] + _WARM_UP)
        made = [_counts(tokens, settings["ranks"], generator) for _ in rounds]
        self.counts = [counts.to(self.device) for counts in made]
        self.often = _OFTEN[self.device.type] if what in ("dispatch", "combine") else 1
        self.what = what


class _Exchanging:
    """What runs the rounds of one side."""

    def __init__(self, work: _Layers, via: Any, *, padded: bool = False) -> None:
        self._work, self._via = work, via
        self._more = {"rows": len(work.source)} if padded else {}
        self._counts = work.counts[0].clone()
        self._routes: Any = None
        self._inside: Any = None

    def prepare(self, turn: int) -> None:
        """What is not timed: the counts, and what a combine has behind it."""
        self._counts.copy_(self._work.counts[turn])
        if isinstance(self._via, _Plain):
            self._via.turn = turn
        if self._work.what == "combine":
            self._begin()

    def _begin(self) -> None:
        self._routes = self._via.routes(self._counts, **self._more)
        self._inside = self._via.dispatch(self._work.source, self._routes)

    def run(self) -> torch.Tensor:
        """One round."""
        from symmplan.torch_private.benches import waited

        via, work = self._via, self._work
        for _ in range(work.often):
            if work.what == "combine":
                made = via.combine(self._inside, self._routes)
            elif work.what == "dispatch":
                made = via.dispatch(work.source, via.routes(self._counts, **self._more))
            else:
                made = self._layers()
            if isinstance(via, _Plain):  # as its user would
                made = waited(made)
        return made  # type: ignore[no-any-return]

    def _layers(self) -> torch.Tensor:
        import torch

        via = self._via
        rows = self._work.source.detach().requires_grad_()
        x = rows
        for weight in self._work.experts:
            routes = via.routes(self._counts, **self._more)
            ends, passed = self._ends(routes), x
            if self._work.what == "shared":
                wait = self._started(x, routes)
                passed = x + torch.relu(x @ weight) @ weight
                inside = wait()
            else:
                inside = via.dispatch(x, routes)
            inner = torch.relu(_product(inside, weight, ends))
            x = passed + via.combine(_product(inner, weight, ends), routes)
        (gradient,) = torch.autograd.grad(x.sum(), rows)
        return gradient

    def _started(self, rows: torch.Tensor, routes: Any) -> Callable[[], torch.Tensor]:
        """Start a dispatch; what is returned waits for the rows."""
        from symmplan.torch_private.benches import waited

        if not isinstance(self._via, _Plain):
            return self._via.dispatch(rows, routes, async_op=True).wait  # type: ignore[no-any-return]
        made = self._via.dispatch(rows, routes)
        return lambda: waited(made)

    def _ends(self, routes: Any) -> torch.Tensor:
        """Behind how many rows those end that have come; on the device."""
        import torch

        if isinstance(routes, tuple):
            ends: torch.Tensor = routes[2]
        else:
            received = torch.as_tensor(routes.received, device=self._work.device)
            ends = received.sum(0, keepdim=True, dtype=torch.int32)
        return ends


class _Graph(_Exchanging):
    """Exchanges in CUDA graphs: one of what is timed, one of what a combine has behind it."""

    def __init__(self, work: _Layers, via: Any) -> None:
        import torch

        super().__init__(work, via, padded=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            super()._begin()
            super().run()
        timing.meet()
        torch.cuda.synchronize()
        self._before, self._timed = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._before):
            super()._begin()
        with torch.cuda.graph(self._timed):
            self._made = super().run()

    def _begin(self) -> None:
        self._before.replay()

    def run(self) -> torch.Tensor:
        """One round."""
        self._timed.replay()
        return self._made


def _product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """What one expert makes of its rows; nothing of those behind them, where devices can."""
    if rows.device.type != "cuda":
        return rows @ weight
    from torch.nn.functional import grouped_mm

    made: torch.Tensor = grouped_mm(rows, weight[None], offs=ends)
    return made


def _counts(tokens: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """How many rows go to each rank: uneven, by up to a half."""
    import torch

    shares = torch.rand(size, generator=generator) + 1.0
    counts = (shares / shares.sum() * tokens).long()
    counts[0] += tokens - counts.sum()
    return counts


class _Plain:
    """The exchange of programs without symmplan.

    Args:
        told: The counts of all rounds, for one that exchanges them before these begin.
    """

    def __init__(self, told: Sequence[torch.Tensor] = ()) -> None:
        self.turn = 0
        self._told = [self._exchanged(counts) for counts in told]

    def routes(self, counts: torch.Tensor) -> _Known:
        return self._told[self.turn] if self._told else self._exchanged(counts)

    def _exchanged(self, counts: torch.Tensor) -> _Known:
        import torch
        import torch.distributed as dist

        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        ends = received.sum(0, keepdim=True, dtype=torch.int32)
        return counts.tolist(), received.tolist(), ends

    def dispatch(self, rows: torch.Tensor, routes: _Known) -> torch.Tensor:
        import torch.distributed as dist

        from symmplan.torch_private.benches import all_to_all_single_autograd

        group: Any = dist.group.WORLD
        made: torch.Tensor = all_to_all_single_autograd(rows, routes[1], routes[0], group)
        return made

    def combine(self, rows: torch.Tensor, routes: _Known) -> torch.Tensor:
        sent, received, ends = routes
        return self.dispatch(rows, (received, sent, ends))
