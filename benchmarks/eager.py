"""Time the host cost of an eager session, and collectives with and without a session.

``host`` is the host time of one call until it returns, in microseconds. By default there is one
rank and a small tensor, so no side waits for a peer or moves many bytes. What remains is
bookkeeping:

- plain: the program as torch runs it, with the cost of torch and the process
  group
- session: the same program in a session that has a plan, with the cost of
  torch and symmplan
- placed: the op that the session runs, called by hand on a placement
- overhead: session minus plain
- copies: the time of one copy by hand; session includes such a copy if the
  program does not produce an argument in its placement

Rounds of the sides alternate, and the fastest round counts. A round is a group of calls that is
short compared with a time slice of the processor. With more ranks, ``session`` in shared memory
waits for the peers in each call.

``messages`` is the time of one all-reduce together with the op that writes its input, with and
without a session, on CUDA also in CUDA graphs. Rounds alternate. The time of a round is that of its
slowest rank. The results are medians. ``gather`` is the time of one all-gather of as many bytes of
each rank into a tensor that is made for it: with a session that copies the result there, as the
program has used the tensor before, and with one in which the tensor lies in its placement.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from symmplan.bench.parts import command, timing
from symmplan.bench.parts.command import Option
from symmplan.bench.parts.numbers import sizes_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    import torch

__all__ = ["add_arguments", "render", "run"]

#: So many calls in a row are timed: short beside a turn of the processor.
_GROUP = 20

_HOST = ("plain", "placed", "session", "overhead", "copies")
_SIDES = ("plain", "session", "plain_graph", "session_graph")
_GATHERS = ("gather", "gather_copied", "gather_session")


_OPTIONS = (
    Option("rounds", "timed rounds", 15),
    Option("calls", "calls in a round", 200),
    Option(
        "messages",
        "bytes of the all-reduces, with commas",
        (64 << 10, 1 << 20, 8 << 20),
        more={"type": sizes_of},
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmarks/eager.py``."""
    command.add_options(parser, _OPTIONS, ranks=1, timeout=600.0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, time everything.

    Raises:
        CommandError: A rank failed, or did not finish in time.
    """
    about, ranks = command.measured(_measure, command.settings_of(args, _OPTIONS), args)
    found = command.compared(about, ranks, _per_call)
    return {**found, "host": ranks[0]["host"], "messages": found.pop("results")}


def _per_call(rounds: dict[str, list[float]]) -> dict[str, Any]:
    us = {side: ms * 1e3 for side, ms in timing.median_ms(rounds, 5).items()}
    sides = (*_SIDES, *_GATHERS)
    return {f"{side}_us": round(us[side], 2) if side in us else None for side in sides}


def render(result: dict[str, Any]) -> str:
    """Two tables for people."""
    host = ([row["op"], *(row[f"{side}_us"] for side in _HOST)] for row in result["host"])
    lines = [command.heading(result, "us of host time per call")]
    lines += command.cells(("op", *_HOST), host)
    for what, sides in (("all-reduce", _SIDES), ("all-gather into a new tensor", _GATHERS)):
        cells = [[row["nbytes"], *(row[f"{s}_us"] for s in sides)] for row in result["messages"]]
        lines += [f"us per {what}", *command.cells(("bytes", *sides), cells)]
    return "\n".join(lines)


# On each rank -------------------------------------------------------------------------------------


def _measure(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What every rank runs."""
    import torch

    # One of the programs declares nothing, which is worth a warning elsewhere.
    logging.getLogger("symmplan").setLevel(logging.ERROR)
    device = timing.device_of(settings, rank)
    with torch.inference_mode():
        host = [_host(name, device, settings) for name in timing.marked([*_PROGRAMS], str)]
        timing.meet()
        messages = timing.marked(settings["messages"], lambda n: f"an all-reduce of {n} bytes")
        rows = [_message(nbytes, device, settings) for nbytes in messages]
    return {"host": host, "rows": rows}


# What is timed: a call of ordinary ops (``x``, how to call a producer), and the declared op that
# runs in its place, called by hand.


def _undeclared(x: Any, _make: Any) -> None:
    x.add(x)


def _gather_made(x: Any, make: Any) -> None:
    import torch

    _all_gather(make(torch.mul, x, 2.0), make)


def _all_gather(x: Any, _make: Any) -> None:
    import torch

    ops, (size, group) = torch.ops._c10d_functional, _world()
    ops.wait_tensor(ops.all_gather_into_tensor(x, size, group))


def _all_gather_by_hand(x: Any, out: Any) -> None:
    import torch

    ops, (size, group) = torch.ops._c10d_functional, _world()
    if x.is_cuda:
        ops.wait_tensor(ops.all_gather_into_tensor_out(x, size, group, out=out))
    else:
        torch.ops.symmplan.all_gather_out(x, size, group, out=out)


def _all_reduce(x: Any, make: Any) -> None:
    import torch

    torch.distributed.all_reduce(make(torch.mul, x, 2.0))


def _all_reduce_by_hand(x: Any, out: Any) -> None:
    import torch

    torch.mul(x, 2.0, out=out)
    if x.is_cuda:
        torch.distributed.all_reduce(out)
    else:
        torch.ops.symmplan.all_reduce_out(out, "sum", _world()[1], out=out)


def _world() -> tuple[int, str]:
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    return group.size(), group.group_name


def _gather_into(x: Any, _make: Any) -> None:
    import torch

    torch.distributed.all_gather_into_tensor(x.new_empty(_world()[0] * len(x), *x.shape[1:]), x)


def _reduce_scatter(x: Any, make: Any) -> None:
    import torch

    out = x.new_empty(len(x) // _world()[0], *x.shape[1:])
    torch.distributed.reduce_scatter_tensor(out, make(torch.mul, x, 2.0))


def _custom(x: Any, make: Any) -> None:
    import torch

    op, _ = _custom_op()
    op(make(torch.mul, x, 2.0), _world()[1])


@functools.cache
def _custom_op() -> tuple[Any, Any]:
    """A declared op that does nothing, and what keeps it."""
    import torch

    import symmplan

    library = torch.library.Library("symmplan_bench", "FRAGMENT")
    library.define("nothing(Tensor(a!) x, str group_name) -> ()")
    library.impl("nothing", lambda *_: None, "CompositeExplicitAutograd")
    symmplan.register_symm_mem_args("symmplan_bench::nothing", ["x"], group="group_name")
    return torch.ops.symmplan_bench.nothing, library


#: name -> (the program, the same by hand on a placement).
_PROGRAMS: dict[str, tuple[Callable[[Any, Any], None], Callable[[Any, Any], None] | None]] = {
    "aten::add (not declared)": (_undeclared, None),
    "functional all-gather": (_all_gather, _all_gather_by_hand),
    "out(mul), functional all-gather": (_gather_made, None),
    "out(mul), dist.all_reduce": (_all_reduce, _all_reduce_by_hand),
    "dist.all_gather_into_tensor": (_gather_into, None),
    "out(mul), dist.reduce_scatter_tensor": (_reduce_scatter, None),
    "out(mul), custom op": (_custom, None),
}


def _plainly(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def _host(name: str, device: torch.device, settings: dict[str, Any]) -> dict[str, Any]:
    """Host time of one small call."""
    import torch

    import symmplan
    from symmplan.memory import realize

    program, by_hand = _PROGRAMS[name]
    x = torch.ones(64, 64, device=device)
    memory, calls = _memory(device), settings["calls"]
    plain: list[float] = []
    served: list[float] = []
    placed: list[float] = []
    for _ in range(max(1, settings["rounds"] // 5)):
        plain += [_host_us(lambda: program(x, _plainly), calls, device) for _ in range(5)]
        with symmplan.eager(memory=memory, choose="placed") as session:
            for _ in range(calls):
                program(x, symmplan.placed.out)
            session.step()
            for turn in range(6):
                taken = _host_us(lambda: program(x, symmplan.placed.out), calls, device)
                served += [taken] if turn else []  # the first one warms up
                session.step()
            plan, staged = session.plan, session.stats.staged
        assert plan is not None
        barriers = len(plan.barriers)
        if by_hand is None or not plan.placements:
            continue
        with realize(plan, memory=memory, device=device) as arena:
            buffer = plan.problem.buffers[0]
            call = functools.partial(by_hand, x, arena.tensor(buffer.name, x.dtype, buffer.shape))
            placed += [_host_us(call, calls, device) for _ in range(5)]
    copy = functools.partial(torch.empty_like(x).copy_, x)
    each = min(_host_us(copy, calls, device) for _ in range(5))
    return {
        "op": name,
        "plain_us": round(min(plain), 2),
        "placed_us": round(min(placed), 2) if placed else None,
        "session_us": round(min(served), 2),
        "overhead_us": round(min(served) - min(plain), 2),
        "copies_us": round(each * staged / calls, 2),
        "staged": staged,
        "barriers": barriers,
    }


def _message(nbytes: int, device: torch.device, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one all-reduce of ``nbytes`` bytes and of what writes them, in each round."""
    import torch

    import symmplan

    cuda, calls = device.type == "cuda", max(1, min(20, settings["calls"]))
    dtype = torch.bfloat16 if cuda else torch.float32
    x = torch.ones(nbytes // dtype.itemsize, device=device, dtype=dtype)
    out: list[Any] = [None]

    def iteration(make: Callable[..., Any]) -> None:
        for _ in range(calls):
            part = make(torch.mul, x, 2.0)
            torch.distributed.all_reduce(part)
            out[0] = part.sum()
            del part

    def graph(make: Callable[..., Any]) -> Callable[[int], None]:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            iteration(make)
        return lambda _: captured.replay()

    def rounds(sides: dict[str, Callable[[int], None]]) -> dict[str, list[float]]:
        seconds = timing.alternate(sides, settings["rounds"], device, warm_up=1, before=_meet)
        return {side: [taken / calls for taken in times] for side, times in seconds.items()}

    iteration(_plainly)
    expected = out[0].clone()
    with symmplan.eager(memory=_memory(device), choose="placed") as session:
        iteration(symmplan.placed.out)
        session.step()

        def served(_turn: int) -> None:
            iteration(symmplan.placed.out)
            session.step()

        sides: dict[str, Callable[[int], None]] = {"session": served}
        if cuda:
            served(0)
            sides["session_graph"] = graph(symmplan.placed.out)
            session.step()
        plan = session.plan
        seconds = rounds(sides)
        equal = bool(torch.equal(out[0], expected))
    sides = {"plain": lambda _: iteration(_plainly)}
    if cuda:
        sides["plain_graph"] = graph(_plainly)
    seconds |= rounds(sides)
    assert plan is not None
    seconds |= _gathers(x, calls, rounds)
    return {"nbytes": nbytes, "equal": equal, "barriers": len(plan.barriers), "seconds": seconds}


def _gathers(x: Any, calls: int, rounds: Callable[..., dict[str, list[float]]]) -> dict[str, Any]:
    """Seconds of one all-gather of ``x`` into a new tensor, in each of ``rounds``."""
    import torch

    import symmplan

    size = _world()[0]

    def iteration(*, used: bool) -> None:
        for _ in range(calls):
            whole = x.new_empty(size * len(x))
            if used:
                whole[:0].zero_()
            torch.distributed.all_gather_into_tensor(whole, x)

    seconds = rounds({"gather": lambda _: iteration(used=False)})
    for side, used in (("gather_copied", True), ("gather_session", False)):
        with symmplan.eager(memory=_memory(x.device), choose="placed") as session:

            def served(_turn: int, used: bool = used, session: Any = session) -> None:
                iteration(used=used)
                session.step()

            served(0)
            seconds |= rounds({side: served})
    return seconds


def _memory(device: torch.device) -> Any:
    return "auto" if device.type == "cuda" else "shm"


def _meet() -> None:
    """Let ranks start together, unseen by a session."""
    from symmplan.coordination.own import own_work

    with own_work:
        timing.meet()


def _host_us(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Microseconds of host time for one call: of the best group of calls."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize()
    group, seconds = min(calls, _GROUP), []
    for _ in range(calls // group):
        began = time.perf_counter()
        for _ in range(group):
            call()
        seconds.append(time.perf_counter() - began)
    for _ in range(calls % group):
        call()
    return min(seconds) / group * 1e6


if __name__ == "__main__":
    from symmplan.cli.shell import perform

    sys.exit(perform("python benchmarks/eager.py", sys.modules[__name__], sys.argv[1:]))
