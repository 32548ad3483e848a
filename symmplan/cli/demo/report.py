"""The demo's result for people."""

from __future__ import annotations

from collections import Counter
from typing import Any

from symmplan.report.format import count, size, table, visible

__all__ = ["demo_report"]


def demo_report(result: dict[str, Any]) -> str:
    """All that the demo found, on one screen."""
    blocks = [
        _heading(result),
        _losses(result),
        _parity(result),
        _tensors(result),
        ["", *result["summary"].splitlines()],
        _time(result),
        ["", *(f"wrote {path}" for path in result["written"].values())],
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
    rows = [
        ("step", *(f"{i:>7}" for i in range(1, len(plain) + 1))),
        ("loss with symmplan", *(f"{loss:7.4f}" for loss in planned)),
        ("loss without", *(f"{loss:7.4f}" for loss in plain)),
    ]
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


def _time(result: dict[str, Any]) -> list[str]:
    rows = [
        (
            f"{call['per_step']} x",
            call["kind"],
            size(call["nbytes"]),
            f"{1e6 * call['symmplan_s']:8.0f} us",
            f"gloo {1e6 * call['gloo_s']:8.0f} us",
            f"{call['gloo_s'] / call['symmplan_s']:5.1f} x faster",
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
        + ("" if speedup is None else f": {speedup:.1f} x faster"),
        f"a training step: {ours_step} ms with symmplan, {plain_step} ms without",
    ]
