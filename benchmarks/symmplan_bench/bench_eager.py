"""Time what an eager session costs the host, and collectives with and without one.

``host``: a small tensor, so that what counts is the time of the host for one call. ``plain`` is the
program as torch runs it, ``placed`` the op that takes its place called by hand on a placement,
``session`` the same program in a frozen session. The best of alternating rounds counts;
``overhead`` is what ``session`` takes longer than ``plain``. Where the program does not make an
argument in its placement, a copy is part of that: ``copies`` is what such a copy takes by hand.

``messages``: what one all-reduce of so many bytes takes together with the op that writes them, as
torch runs it and in a session; on CUDA also as CUDA graphs. The median of alternating rounds of the
slowest rank counts.
"""

from __future__ import annotations

import logging
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from symmplan.report.format import count
from symmplan_bench.processes import meet, run_ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

__all__ = ["add_arguments", "render", "run"]

_MESSAGES = (64 << 10, 1 << 20, 8 << 20)
_TIMES = ("plain_us", "session_us", "plain_graph_us", "session_graph_us")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan bench eager``."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default 15)")
    parser.add_argument("--calls", type=int, default=200, help="calls in a round (default 200)")
    parser.add_argument(
        "--messages",
        type=_sizes,
        default=_MESSAGES,
        help="bytes of the all-reduces, with commas (default 64 KiB, 1 MiB and 8 MiB)",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for everything (default 600)"
    )


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, time everything.

    Raises:
        CommandError: A rank failed, or did not finish in time.
    """
    options = {
        "device": args.device,
        "ranks": args.ranks,
        "rounds": args.rounds,
        "calls": args.calls,
        "messages": list(args.messages),
    }
    ranks = run_ranks(_measure, options, ranks=args.ranks, device=args.device, timeout=args.timeout)
    messages = [_slowest(rows) for rows in zip(*(r["messages"] for r in ranks), strict=True)]
    return {
        "ok": all(row["equal"] for row in messages),
        **options,
        "torch": ranks[0]["torch"],
        "machine": ranks[0]["machine"],
        "host": ranks[0]["host"],
        "messages": messages,
    }


def _slowest(rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One row for all ranks."""
    found = {k: max(r[k] for r in rows) for k in _TIMES if rows[0][k] is not None}
    return {
        **rows[0],
        **found,
        "equal": all(r["equal"] for r in rows),
    }


def _measure(rank: int, _ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """What every rank runs."""
    import torch

    cuda = options["device"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    # One of the programs declares nothing, which is worth a warning elsewhere.
    logging.getLogger("symmplan").setLevel(logging.ERROR)
    bench = _Bench(device, options["rounds"], options["calls"])
    with torch.inference_mode():
        host = [bench.host(label, *what) for label, what in _PROGRAMS.items()]
        meet()
        messages = [bench.message(nbytes) for nbytes in options["messages"]]
    return {
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(device) if cuda else "cpu",
        "host": host,
        "messages": messages,
    }


# What is timed: a call of ordinary ops (``x``, how to call a producer), and the declared op that
# runs in its place, called by hand.


def _undeclared(x: Any, _make: Any) -> None:
    x.add(x)


def _gather_made(x: Any, make: Any) -> None:
    import torch

    _all_gather(make(torch.mul, x, 2.0), make)


def _all_gather(x: Any, _make: Any) -> None:
    import torch
    import torch.distributed as dist

    ops, group = torch.ops._c10d_functional, dist.group.WORLD
    assert group is not None
    ops.wait_tensor(ops.all_gather_into_tensor(x, group.size(), group.group_name))


def _all_gather_by_hand(x: Any, out: Any) -> None:
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    if x.is_cuda:
        ops = torch.ops._c10d_functional
        ops.wait_tensor(ops.all_gather_into_tensor_out(x, group.size(), group.group_name, out=out))
    else:
        torch.ops.symmplan.all_gather_out(x, group.size(), group.group_name, out=out)


def _all_reduce(x: Any, make: Any) -> None:
    import torch
    import torch.distributed as dist

    part = make(torch.mul, x, 2.0)
    dist.all_reduce(part)


def _all_reduce_by_hand(x: Any, out: Any) -> None:
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    torch.mul(x, 2.0, out=out)
    if x.is_cuda:
        dist.all_reduce(out)
    else:
        torch.ops.symmplan.all_reduce_out(out, "sum", group.group_name, out=out)


#: name -> (the program, the same by hand on a placement).
_PROGRAMS: dict[str, tuple[Callable[[Any, Any], None], Callable[[Any, Any], None] | None]] = {
    "aten::add (not declared)": (_undeclared, None),
    "functional all-gather": (_all_gather, _all_gather_by_hand),
    "out(mul), functional all-gather": (_gather_made, None),
    "out(mul), dist.all_reduce": (_all_reduce, _all_reduce_by_hand),
}


def _copy(x: Any, y: Any) -> None:
    y.copy_(x)


def _plainly(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


class _Bench:
    """Runs programs with and without a session on one rank."""

    def __init__(self, device: Any, rounds: int, calls: int) -> None:
        self.device = device
        self.rounds = rounds
        self.calls = calls
        self.cuda = device.type == "cuda"
        self.memory = "auto" if self.cuda else "shm"

    def host(
        self,
        label: str,
        program: Callable[[Any, Any], None],
        by_hand: Callable[[Any, Any], None] | None,
    ) -> dict[str, Any]:
        """Host time of one small call."""
        import torch

        import symmplan
        from symmplan.memory import realize

        x = torch.ones(64, 64, device=self.device)
        plain: list[float] = []
        served: list[float] = []
        placed: list[float] = []
        barriers = 0
        for _ in range(max(1, self.rounds // 5)):
            plain += [self._host(lambda: program(x, _plainly)) for _ in range(5)]
            with symmplan.eager(memory=self.memory, choose="placed") as session:
                for _ in range(self.calls):
                    program(x, symmplan.out)
                session.step()
                for _ in range(6):
                    served.append(self._host(lambda: program(x, symmplan.out)))
                    session.step()
                served.pop(-6)  # warming up
                plan, staged = session.plan, session.stats.staged
            assert plan is not None
            barriers = len(plan.barriers)
            if by_hand is None or not plan.placements:
                continue
            with realize(plan, memory=self.memory, device=self.device) as arena:
                buffer = plan.problem.buffers[0]
                out = arena.tensor(buffer.name, x.dtype, buffer.shape)
                placed += [self._host(partial(by_hand, x, out)) for _ in range(5)]
        y = torch.empty_like(x)
        copy = min(self._host(lambda: _copy(x, y)) for _ in range(5))
        return {
            "op": label,
            "plain_us": round(min(plain), 2),
            "placed_us": round(min(placed), 2) if placed else None,
            "session_us": round(min(served), 2),
            "overhead_us": round(min(served) - min(plain), 2),
            "copies_us": round(copy * staged / self.calls, 2),
            "staged": staged,
            "barriers": barriers,
        }

    def message(self, nbytes: int) -> dict[str, Any]:
        """Time of one all-reduce of ``nbytes`` bytes and of what writes them."""
        import torch

        import symmplan

        calls = max(1, min(20, self.calls))
        dtype = torch.bfloat16 if self.cuda else torch.float32
        x = torch.ones(nbytes // dtype.itemsize, device=self.device, dtype=dtype)
        out: list[Any] = [None]

        def iteration(make: Callable[..., Any]) -> None:
            for _ in range(calls):
                part = make(torch.mul, x, 2.0)
                torch.distributed.all_reduce(part)
                out[0] = part.sum()
                del part

        iteration(_plainly)
        expected = out[0].clone()
        times: dict[str, list[float]] = {}
        with symmplan.eager(memory=self.memory, choose="placed") as session:
            iteration(symmplan.out)
            session.step()

            def served() -> None:
                iteration(symmplan.out)
                session.step()

            sides: dict[str, Callable[[], None]] = {"session_us": served}
            if self.cuda:
                served()
                sides["session_graph_us"] = self._graph(lambda: iteration(symmplan.out))
                session.step()
            plan = session.plan
            self._alternate(sides, calls, times)
            equal = bool(torch.equal(out[0], expected))
        sides = {"plain_us": lambda: iteration(_plainly)}
        if self.cuda:
            sides["plain_graph_us"] = self._graph(sides["plain_us"])
        self._alternate(sides, calls, times)
        assert plan is not None
        return {
            "nbytes": nbytes,
            "equal": equal,
            "barriers": len(plan.barriers),
            **{k: round(statistics.median(times[k]), 2) if k in times else None for k in _TIMES},
        }

    def _graph(self, work: Callable[[], None]) -> Callable[[], None]:
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    def _alternate(
        self, sides: dict[str, Callable[[], None]], calls: int, times: dict[str, list[float]]
    ) -> None:
        for turn in range(self.rounds + 1):
            for name, act in sides.items():
                seconds = self._whole(act)
                if turn:  # the first one warms up
                    times.setdefault(name, []).append(seconds / calls * 1e6)

    def _whole(self, act: Callable[[], None]) -> float:
        """Seconds until everything that ``act`` started has ended, ranks starting together."""
        import torch

        from symmplan.memory.own import own_work

        with own_work:
            meet()
        if not self.cuda:
            began = time.perf_counter()
            act()
            return time.perf_counter() - began
        torch.cuda.synchronize()
        began = time.perf_counter()
        act()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def _host(self, call: Callable[[], None]) -> float:
        """Microseconds of host time for one call."""
        if self.cuda:
            import torch

            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(self.calls):
            call()
        return (time.perf_counter() - began) / self.calls * 1e6


def render(result: dict[str, Any]) -> str:
    """Two tables for people."""
    columns = ("plain", "placed", "session", "overhead", "copies")
    lines = [f"{count(result['ranks'], 'rank')} on {result['machine']}, torch {result['torch']}"]
    lines.append(f"{'us of host time per call':35}" + "".join(f"{c:>9}" for c in columns))
    for row in result["host"]:
        cells = (row[f"{c}_us"] for c in columns)
        lines.append(f"{row['op']:35}" + "".join(map(_cell, cells)))
    heads = ("plain", "session", "graph", "s. graph")
    lines.append(f"{'us per all-reduce of so many bytes':35}" + "".join(f"{c:>9}" for c in heads))
    for row in result["messages"]:
        cells = (row[name] for name in _TIMES)
        lines.append(f"{row['nbytes']:<35}" + "".join(map(_cell, cells)))
    return "\n".join(lines)


def _cell(us: float | None) -> str:
    return f"{'-':>9}" if us is None else f"{us:>9.2f}"
