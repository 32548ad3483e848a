"""Train a small transformer on two local ranks, with and without symmplan, and compare.

The ranks are processes of this machine: gloo connects them, and what symmplan plans lies in shared
memory. The model is tensor- and sequence-parallel, with one declared op of its own that reads its
peers' memory. Both runs start from the same seeds and use the same inner compiler.

--out receives plan.json and plan.html. With --json the result has at least parity, peak_bytes,
lower_bound_bytes, unshared_bytes, rendezvous, segments, placed, staged, unplanned and
collective_speedup_vs_gloo. The exit code is 1 if the two runs differ.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symmplan.bench.parts.numbers import count_of, number_of
from symmplan.report.format import count, size, table, visible

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "render", "run"]

#: So many of the first and of the last steps are shown.
_SHOWN = 5
#: Ranks. The model's sizes would do for four, but two cores would not.
WORLD = 2
_COMPILES = (
    "training on two ranks; first Inductor compiles, for up to two minutes on two cores "
    "(--inner eager: without)"
)
_NEXT = """
done in {seconds:.0f} s. Next:
  look at the plan:  open {html} in a browser
  read it as text:   symmplan show {plan}
  your own model:    torch.compile(model, backend="symmplan"),
                     symmplan.fsdp.apply(model), or with symmplan.eager():
  what is it doing:  TORCH_LOGS=symmplan python train.py"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan demo``."""
    add = parser.add_argument
    add("--out", metavar="DIR", type=Path, help="where to write the plan (default: a new folder)")
    add("--steps", type=count_of, default=8, help="training steps (default: %(default)s)")
    about = "what compiles the graphs; auto: inductor if there is a C++ compiler"
    add("--inner", choices=("auto", "inductor", "eager"), default="auto", help=about)
    about = "give up, and end all ranks, after this long (default: %(default)g)"
    add("--timeout", type=number_of, default=300.0, metavar="SECONDS", help=about)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, wait for them, put their results together."""
    from symmplan.launcher.ranks import run_shown

    begin = time.monotonic()
    out = Path(tempfile.mkdtemp(prefix="symmplan-demo-")) if args.out is None else args.out
    out.mkdir(parents=True, exist_ok=True)
    if args.inner != "eager":
        print(_COMPILES, file=sys.stderr, flush=True)
    setup = {name: getattr(args, name) for name in ("steps", "inner", "timeout")}
    ranks = run_shown(
        train,
        WORLD,
        {**setup, "out": str(out.resolve())},
        timeout=args.timeout,
        group_timeout=args.timeout,
        env={"TORCHINDUCTOR_COMPILE_THREADS": "1"},  # two ranks, and about as many cores
        threads=max(1, (os.cpu_count() or 1) // WORLD),
    )
    return {**_together(ranks, out), "seconds": round(time.monotonic() - begin, 3)}


def train(rank: int, world: int, setup: dict[str, Any]) -> dict[str, Any]:
    """What a rank does."""
    from symmplan.cli.demo.train import run_rank  # which imports torch

    return run_rank(rank, world, setup)


def _together(ranks: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    """One result out of the ranks'. What must hold, must hold on all of them."""
    apart, plan, told = [rank["difference"] for rank in ranks], ranks[0]["plan"], ranks[0]["told"]
    parity = all(rank["parity"] for rank in ranks)
    same_plan = all(rank["plan"] == plan for rank in ranks)
    calls = told["collectives"]
    ours, gloo = (sum(c["per_step"] * c[f"{k}_s"] for c in calls) for k in ("symmplan", "gloo"))
    return {
        "ok": parity and same_plan,
        "parity": parity,
        "same_plan_on_all_ranks": same_plan,
        "bitwise": all(found["bitwise"] for found in apart),
        **{f"{k}_difference": max(found[k] for found in apart) for k in ("loss", "tensor")},
        "compared": sum(found["compared"] for found in apart),
        "ranks": len(ranks),
        **plan,
        "barriers": len(plan["barriers"]),
        **told,
        "collective_speedup_vs_gloo": gloo / ours if calls else None,
        "collectives_s": {"symmplan": ours, "gloo": gloo},
        "written": {"plan": str(out / "plan.json"), "html": str(out / "plan.html")},
    }


def render(result: dict[str, Any]) -> str:
    """All that the demo found, on one screen."""
    inner = result["inner"]
    return "\n".join(
        [
            f"A transformer with {result['parameters']:,} parameters per rank on "
            f"{result['ranks']} ranks, torch.compile with inner={inner!r}"
            + ("" if inner == "inductor" else " (for Inductor: see symmplan doctor)"),
            *_losses(result),
            *_parity(result),
            *_tensors(result),
            "",
            result["summary"],
            *_time(result),
            _NEXT.format(seconds=result["seconds"], **result["written"]),
        ]
    )


def _losses(result: dict[str, Any]) -> list[str]:
    planned, plain = result["losses"]["symmplan"], result["losses"]["plain"]
    steps = sorted({*range(len(plain))[:_SHOWN], *range(len(plain))[-_SHOWN:]})
    rows = [("step", "loss with symmplan", "loss without")]
    rows += [(f"{i + 1:4}", f"{planned[i]:.4f}", f"{plain[i]:.4f}") for i in steps]
    return ["", *table(rows, right=(1, 2))]


def _parity(result: dict[str, Any]) -> list[str]:
    how = "equal, bit for bit"
    if not result["bitwise"]:
        how = (
            f"largest relative difference: losses {result['loss_difference']:.1e}, "
            f"gradients and parameters {result['tensor_difference']:.1e} (allowed: 1e-06)"
        )
    verdict = "holds" if result["parity"] else "DOES NOT HOLD"
    lines = ["", f"parity {verdict}: {result['compared']:,} losses, gradients and parameters {how}"]
    if not result["same_plan_on_all_ranks"]:
        lines.append("THE RANKS MADE DIFFERENT PLANS")
    return lines


def _tensors(result: dict[str, Any]) -> list[str]:
    how = f"{result['bound']} where they are produced or used, {result['staged']} by a copy"
    free = sum(not tensor["needed"] for tensor in result["unplanned"])
    how += f"), {free} need not be symmetric, {len(result['unplanned']) - free} left out"
    lines = ["", f"declared tensors: {result['placed']} placed ({how}"]
    reasons = Counter((e["op"], e["where"], e["reason"]) for e in result["staged_because"])
    rows = [
        (f"{number} x", f"{visible(where)} of {visible(op)}", visible(reason))
        for (op, where, reason), number in sorted(reasons.items())
    ]
    if rows:
        lines += ["copied because:", *table(rows)]
    met = f"{result['rendezvous']} for {count(result['segments'], 'segment')}"
    return [*lines, f"rendezvous: {met}, all before the first step"]


def faster(ratio: float) -> str:
    """In words: ``2.0 x faster``, ``1.5 x slower``, or about as fast.

    >>> faster(2.0), faster(0.5), faster(1.01)
    ('  2.0 x faster', '  2.0 x slower', 'about as fast')
    """
    if 0.95 < ratio < 1.05:
        return "about as fast"
    return f"{ratio:5.1f} x faster" if ratio > 1 else f"{1 / ratio:5.1f} x slower"


def _time(result: dict[str, Any]) -> list[str]:
    rows = []
    for c in result["collectives"]:
        ours, gloo = (f"{1e6 * c[k]:.0f} us" for k in ("symmplan_s", "gloo_s"))
        how = faster(c["gloo_s"] / c["symmplan_s"])
        rows.append((f"{c['per_step']} x", c["kind"], size(c["nbytes"]), ours, "gloo", gloo, how))
    ours, gloo = (f"{1e3 * result['collectives_s'][k]:.2f}" for k in ("symmplan", "gloo"))
    step, plain = (f"{1e3 * result['step_s'][k]:.0f}" for k in ("symmplan", "plain"))
    speedup = result["collective_speedup_vs_gloo"]
    how = "" if speedup is None else f": {faster(speedup).strip()}"
    return [
        "",
        "collectives of one step, one by one, median:",
        *table(rows, right=(3, 5)),
        f"  together {ours} ms, gloo {gloo} ms{how}",
        f"a training step: {step} ms with symmplan, {plain} ms without",
    ]
