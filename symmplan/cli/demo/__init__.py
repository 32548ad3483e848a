"""Train a small transformer on two local ranks, with and without symmplan, and compare.

The ranks are processes of this machine: gloo connects them, and what symmplan plans lies in shared
memory. The model is tensor- and sequence-parallel, with one declared op of its own that reads its
peers' memory. Both runs start from the same seeds and use the same inner compiler.

--out receives plan.json and plan.html. With --json the result has at least parity, peak_bytes,
lower_bound_bytes, unshared_bytes, rendezvous, segments, placed, staged, unplanned and
collective_speedup_vs_gloo. The exit code is 1 if the two runs differ.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from symmplan.report.format import count, size, table, visible
from symmplan.report.progress import Progress

__all__ = ["add_arguments", "render", "run"]

#: So many of the first and of the last steps are shown.
_SHOWN = 5
#: Ranks. The model's sizes would do for four, but two cores would not.
WORLD = 2
#: Seconds that the other ranks get to say what they saw when one of them has failed.
_GRACE = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan demo``."""
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="where to write the plan (default: a new folder)"
    )
    parser.add_argument(
        "--steps", type=_positive, default=8, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--inner",
        choices=("auto", "inductor", "eager"),
        default="auto",
        help="what compiles the graphs; auto: inductor if there is a C++ compiler",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="give up, and end all ranks, after this long (default: %(default)g)",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more; got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, wait for them, put their results together."""
    from symmplan.testing.ranks import run_ranks

    begin = time.monotonic()
    out = Path(tempfile.mkdtemp(prefix="symmplan-demo-")) if args.out is None else args.out
    out.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    try:
        ranks = run_ranks(
            train,
            WORLD,
            {"out": str(out.resolve()), "steps": args.steps, "inner": args.inner},
            timeout=args.timeout,
            method="spawn",
            grace=_GRACE,
            group_timeout=args.timeout,
            env={"TORCHINDUCTOR_COMPILE_THREADS": "1"},  # two ranks, and about as many cores
            threads=max(1, (os.cpu_count() or 1) // WORLD),
            quiet=True,
            progress=progress,
        )
    finally:
        progress.close()
    return {**_together(ranks, out), "seconds": round(time.monotonic() - begin, 3)}


def train(rank: int, world: int, setup: dict[str, Any]) -> dict[str, Any]:
    """What a rank does."""
    from symmplan.cli.demo.train import run_rank  # which imports torch

    return run_rank(rank, world, setup)


def _together(ranks: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    """One result out of the ranks'. What must hold, must hold on all of them."""
    first = ranks[0]
    plan, stats, timing = first["plan"], first["stats"], first["timing"]
    same_plan = all(rank["plan"] == plan for rank in ranks)
    parity = all(rank["parity"] for rank in ranks)
    return {
        "ok": parity and same_plan,
        "parity": parity,
        "same_plan_on_all_ranks": same_plan,
        "bitwise": all(rank["difference"]["bitwise"] for rank in ranks),
        "loss_difference": max(rank["difference"]["loss"] for rank in ranks),
        "tensor_difference": max(rank["difference"]["tensor"] for rank in ranks),
        "compared": sum(rank["difference"]["compared"] for rank in ranks),
        "losses": first["losses"],
        "ranks": len(ranks),
        "inner": first["inner"],
        "parameters": first["parameters"],
        **plan,
        "barriers": len(plan["barriers"]),
        **{key: stats[key] for key in ("segment_bytes", "rendezvous", "placed", "bound", "staged")},
        "staged_because": first["staged"],
        "collective_speedup_vs_gloo": timing["speedup"],
        "collectives": timing["calls"],
        "collectives_s": {"symmplan": timing["symmplan_s"], "gloo": timing["gloo_s"]},
        "step_s": first["step_s"],
        "summary": first["summary"],
        "written": {"plan": str(out / "plan.json"), "html": str(out / "plan.html")},
    }


def render(result: dict[str, Any]) -> str:
    """All that the demo found, on one screen."""
    blocks = [
        _heading(result),
        _losses(result),
        _parity(result),
        _tensors(result),
        ["", *result["summary"].splitlines()],
        _time(result),
        _next(result),
    ]
    return "\n".join(line for block in blocks for line in block)


def _heading(result: dict[str, Any]) -> list[str]:
    return [
        f"A transformer with {result['parameters']:,} parameters per rank on "
        f"{result['ranks']} ranks, torch.compile with inner={result['inner']!r}"
        + ("" if result["inner"] == "inductor" else " (for Inductor: see symmplan doctor)")
    ]


def _losses(result: dict[str, Any]) -> list[str]:
    planned, plain = result["losses"]["symmplan"], result["losses"]["plain"]
    steps = range(len(plain))
    if len(plain) > 2 * _SHOWN:
        steps = [*steps[:_SHOWN], *steps[-_SHOWN:]]  # type: ignore[assignment]
    rows = [("step", "loss with symmplan", "loss without")]
    rows += [(f"{i + 1:4}", f"{planned[i]:18.4f}", f"{plain[i]:12.4f}") for i in steps]
    return ["", *table(rows)]


def _parity(result: dict[str, Any]) -> list[str]:
    if result["bitwise"]:
        how = "equal, bit for bit"
    else:
        how = (
            f"largest relative difference: losses {result['loss_difference']:.1e}, "
            f"gradients and parameters {result['tensor_difference']:.1e} (allowed: 1e-06)"
        )
    verdict = "holds" if result["parity"] else "DOES NOT HOLD"
    lines = [f"parity {verdict}: {result['compared']:,} losses, gradients and parameters {how}"]
    if not result["same_plan_on_all_ranks"]:
        lines.append("THE RANKS MADE DIFFERENT PLANS")
    return ["", *lines]


def _tensors(result: dict[str, Any]) -> list[str]:
    how = f"{result['bound']} where they are produced or used, {result['staged']} by a copy"
    left_out = len(result["unplanned"])
    lines = ["", f"declared tensors: {result['placed']} placed ({how}), {left_out} left out"]
    reasons = Counter(
        (entry["op"], entry["where"], entry["reason"]) for entry in result["staged_because"]
    )
    rows = [
        (f"{number} x", f"{visible(where)} of {visible(op)}", visible(reason))
        for (op, where, reason), number in sorted(reasons.items())
    ]
    if rows:
        lines += ["copied because:", *table(rows)]
    lines.append(
        f"rendezvous: {result['rendezvous']} for {count(result['segments'], 'segment')}, "
        "all before the first step"
    )
    return lines


def faster(ratio: float) -> str:
    """In words: ``2.0 x faster``, ``1.5 x slower``, or about as fast.

    >>> faster(2.0), faster(0.5), faster(1.01)
    ('  2.0 x faster', '  2.0 x slower', 'about as fast')
    """
    if 0.95 < ratio < 1.05:
        return "about as fast"
    return f"{ratio:5.1f} x faster" if ratio > 1 else f"{1 / ratio:5.1f} x slower"


def _next(result: dict[str, Any]) -> list[str]:
    """How long it took, and what to do with what is there now."""
    plan, page = result["written"]["plan"], result["written"]["html"]
    return [
        "",
        f"done in {result['seconds']:.0f} s. Next:",
        f"  look at the plan:  open {page} in a browser",
        f"  read it as text:   symmplan show {plan}",
        '  your own model:    torch.compile(model, backend="symmplan"),',
        "                     symmplan.fsdp.apply(model), or with symmplan.eager():",
        "  what is it doing:  TORCH_LOGS=symmplan python train.py",
    ]


def _time(result: dict[str, Any]) -> list[str]:
    rows = [
        (
            f"{call['per_step']} x",
            call["kind"],
            size(call["nbytes"]),
            f"{1e6 * call['symmplan_s']:8.0f} us",
            f"gloo {1e6 * call['gloo_s']:8.0f} us",
            faster(call["gloo_s"] / call["symmplan_s"]),
        )
        for call in result["collectives"]
    ]
    ours, theirs = result["collectives_s"]["symmplan"], result["collectives_s"]["gloo"]
    ours_step, plain_step = (f"{1e3 * result['step_s'][k]:.0f}" for k in ("symmplan", "plain"))
    speedup = result["collective_speedup_vs_gloo"]
    return [
        "",
        "collectives of one step, one by one, median:",
        *table(rows),
        f"  together {1e3 * ours:.2f} ms, gloo {1e3 * theirs:.2f} ms"
        + ("" if speedup is None else f": {faster(speedup).strip()}"),
        f"a training step: {ours_step} ms with symmplan, {plain_step} ms without",
    ]
