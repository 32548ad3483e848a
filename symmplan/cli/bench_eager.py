"""Time what an eager session costs the host: per declared op, and per op that is not declared.

One process, a group of one rank, a small tensor: what is left is the time of the host. ``plain`` is
the op as torch runs it, ``placed`` the op that takes its place called by hand on a placement,
``session`` the program's own call in a frozen session. The best of alternating rounds counts;
``overhead`` is what ``session`` takes longer than ``plain``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

__all__ = ["add_arguments", "render", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan bench eager``."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default 15)")
    parser.add_argument("--calls", type=int, default=200, help="calls in a round (default 200)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time all ops.

    Raises:
        BackendError: The device has no symmetric memory.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group(
        "gloo" if args.device == "cpu" else "nccl",
        store=HashStore(),
        rank=0,
        world_size=1,
        device_id=None if args.device == "cpu" else torch.device("cuda", 0),
    )
    try:
        rows = [_row(name, make, args) for name, make in _PROGRAMS.items()]
    finally:
        dist.destroy_process_group()
    return {
        "ok": True,
        "device": args.device,
        "torch": torch.__version__,
        "rounds": args.rounds,
        "calls": args.calls,
        "results": rows,
    }


def _undeclared(x: Any, _name: str) -> None:
    import torch

    torch.add(x, x)


def _all_gather(x: Any, name: str) -> None:
    import torch

    ops = torch.ops._c10d_functional
    ops.wait_tensor(ops.all_gather_into_tensor(x, 1, name))


#: What is timed: name -> one call.
_PROGRAMS: dict[str, Callable[[Any, str], None]] = {
    "aten::add (not declared)": _undeclared,
    "_c10d_functional::all_gather_into_tensor": _all_gather,
}


def _row(label: str, call: Callable[[Any, str], None], args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from symmplan.integrate.eager import eager

    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    x = torch.ones(64, 64, device=args.device)
    plain: list[float] = []
    served: list[float] = []
    placed: list[float] = []
    _timed(lambda: call(x, name), args.calls)
    for _ in range(max(1, args.rounds // 5)):
        plain += [_timed(lambda: call(x, name), args.calls) for _ in range(5)]
        with eager(memory="auto" if args.device == "cuda" else "shm") as session:
            for _ in range(args.calls):
                call(x, name)
            session.step()
            for _ in range(6):
                served.append(_timed(lambda: call(x, name), args.calls))
                session.step()
            served.pop(-6)  # warming up
            placed += _by_hand(session, x, args.calls)
    return {
        "op": label,
        "plain_us": round(min(plain), 2),
        "session_us": round(min(served), 2),
        "placed_us": round(min(placed), 2) if placed else None,
        "overhead_us": round(min(served) - min(plain), 2),
    }


def _by_hand(session: Any, x: Any, calls: int) -> list[float]:
    """The same bytes moved by the bare op, on a placement of the same plan."""
    import torch
    import torch.distributed as dist

    from symmplan.memory import realize

    if not session.plan.placements:
        return []
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    with realize(session.plan, memory="auto" if x.is_cuda else "shm", device=x.device) as arena:
        out = arena.tensor(next(iter(session.plan.placements)), x.dtype, x.shape)
        if x.is_cuda:
            ops = torch.ops._c10d_functional

            def call() -> None:
                ops.wait_tensor(ops.all_gather_into_tensor_out(x, 1, name, out=out))
        else:

            def call() -> None:
                torch.ops.symmplan.all_gather_out(x, 1, name, out=out)

        return [_timed(call, calls) for _ in range(5)]


def _timed(call: Callable[[], None], calls: int) -> float:
    """Microseconds of host time for one call."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def render(result: dict[str, Any]) -> str:
    """A table for people."""
    columns = ("plain", "placed", "session", "overhead")
    lines = [f"{'us of host time per call':44}" + "".join(f"{c:>10}" for c in columns)]
    for row in result["results"]:
        cells = (row[f"{c}_us"] for c in columns)
        lines.append(f"{row['op']:44}" + "".join(f"{'-' if c is None else c:>10}" for c in cells))
    return "\n".join(lines)
