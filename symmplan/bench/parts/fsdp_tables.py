"""The result of ``symmplan bench fsdp`` for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan.bench.parts import command
from symmplan.report.format import size

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["counted_in", "more_steps", "render"]

#: More steps than anybody waits for.
_MOST = 1_000_000


def render(result: dict[str, Any]) -> str:
    """Tables for people."""
    if result.get("rooms"):
        return "\n".join(_room_lines(result["rooms"]))
    lines = [command.heading(result, _what(result))]
    what = counted_in(result["model"])
    for run in result["runs"]:
        lines += _run_lines(run, what)
    lines += [f"{side}: left out, {why}" for side, why in result["skipped"].items()]
    lines += [f"{side}: failed, {why}" for side, why in result.get("failed", {}).items()]
    for side, seen in result["memory"].items():
        bytes_ = ", ".join(f"{key.replace('_', ' ')} {size(n)}" for key, n in seen.items() if n)
        lines += [f"{side}: {bytes_}"] if bytes_ else []
    if result["device"] == "cpu":
        lines.append("bytes of the device: not counted, a CPU has no driver that knows them")
    for run in result["runs"]:
        lines += _gain_lines(run, result["memory"], what, result["steps"])
    lines += [line for run in result["runs"] for line in _profile_lines(run, what)]
    return "\n".join([*lines, *_plan_lines(result)])


def counted_in(model: str) -> str:
    """What the rows of a model's batch are.

    Args:
        model: Its name.
    """
    return "samples" if model == "mlp" else "tokens"


def more_steps(ours: dict[str, Any], theirs: dict[str, Any], steps: int) -> int | None:
    """About how many more steps tell two sides apart whose quartiles overlap; else None.

    A median is known to about 1.57 times the distance of the quartiles, divided by the root of the
    number of steps (McGill, Tukey and Larsen, Variations of box plots, 1978). At least as many
    again are asked for.

    Args:
        ours: A side, with its median and its quartiles.
        theirs: The other one.
        steps: How many steps of each were timed.
    """
    (low, high), (first, last) = ours["step_quartiles_ms"], theirs["step_quartiles_ms"]
    if high < first or last < low:
        return None
    apart = abs(ours["step_ms"] - theirs["step_ms"])
    spread = 1.57 * (high - low + last - first)
    needed = _MOST if apart * _MOST**0.5 < spread else int((spread / apart) ** 2) + 1
    return max(needed - steps, steps)


def _what(result: dict[str, Any]) -> str:
    """What was trained."""
    if result["program"] is not None:
        return str(result["program"])
    said = [f"{result['model']}: {result['layers']} layers of width {result['dim']}"]
    said += [name for name in ("compile", "checkpoint") if result[name]]
    said += [result["optimizer"]] if result["optimizer"] else []
    said += [f"{result['accumulate']} passes in a step"] if result["accumulate"] > 1 else []
    return ", ".join([*said, result["dtype"]])


def _gain_lines(
    run: dict[str, Any], memory: dict[str, dict[str, int]], what: str, steps: int
) -> list[str]:
    """What symmplan gains over each side that a user has without it, in time and bytes."""
    sides = run["sides"]
    if "symmplan" not in sides:
        return []
    ours = sides["symmplan"]["step_ms"]
    lines = []
    for side in ("plain", "kept", "pooled", "kept, pool"):
        if side not in sides:
            continue
        theirs = sides[side]["step_ms"]
        more = more_steps(sides["symmplan"], sides[side], steps)
        gain = f"{theirs / ours:.2f}x"
        if more is not None:
            gain = f"not resolved (the quartiles overlap; about {more:,} more steps tell)"
        line = f"symmplan against {side}: {gain}, {ours:.2f} ms instead of {theirs:.2f}"
        if "device" in memory["symmplan"]:
            had, has = memory[side]["device"], memory["symmplan"]["device"]
            line += f"; {size(has)} of the device, not {size(had)}"
        lines.append(line if run["tokens"] is None else f"{run['tokens']} {what}, {line}")
    return lines


def _room_lines(rooms: list[dict[str, Any]]) -> list[str]:
    """A row for each room: milliseconds of a step, retries of the allocator, bytes in use.

    Those are the bytes between steps, and the most while all is recorded, measured and planned. The
    last number is how far symmplan's losses are from FSDP2's, relatively.
    """
    rows, failed = [], []
    for each in rooms:
        name = "all" if each["room"] is None else f"{each['room']:g} GiB"
        cells: list[Any] = []
        for side, row in each["sides"].items():
            if "error" in row:
                failed.append(f"{side} in {name}: {row['error']}")
            cells += [row.get("step_ms"), row.get("retries")]
            cells += [size(row.get(key, 0)) for key in ("device", "peak_device")]
        apart = each["sides"]["symmplan"].get("difference")
        rows.append((name, *cells, "" if apart is None else f"{apart:.1e}"))
    heads = "room plain_ms retries device peak symmplan_ms retries device peak losses_apart"
    return [*command.cells(heads, rows), *failed]


_ABOUT = """\
{served} collectives in placements, {copies} of them copied, {plain} plain
symmetric memory: {segment_bytes} bytes, lower bound {lower_bound_bytes}, unshared {unshared_bytes}
{rendezvous} rendezvous"""
_RANGE = "{:.2f} - {:.2f}"


def _run_lines(run: dict[str, Any], what: str) -> list[str]:
    own = run["tokens"] is None  # a program of the user's, whose collectives nobody has counted
    host = ("host_ms", "collectives_ms") if own else ("host_us", "collectives_ms")
    rows = [
        (side, row["step_ms"], _RANGE.format(*row["step_quartiles_ms"]), *map(row.get, host))
        for side, row in run["sides"].items()
    ]
    if run["step_speedup"] is not None:
        sides = run["sides"]
        resolved = more_steps(sides["symmplan"], sides["plain"], 1) is None
        speedup = run["step_speedup"] if resolved else "not resolved"
        speedups = (speedup, "", None, run["collectives_speedup"])
        rows.append(("speedup", *speedups))
    heads = f"side step_ms quartiles {'host_ms' if own else 'host_us_each'} collectives_ms"
    lines = [] if own else [f"{run['tokens']} {what}"]
    lines += command.cells(heads, rows)
    for side, row in run["sides"].items():
        apart = row["difference"]
        if apart is None:
            continue
        losses = "equal" if row["losses_equal"] else "not equal"
        if own:
            by = "" if apart == 0 else f", they differ by up to {apart:.2g} of plain FSDP2's"
            lines.append(f"  {side}: losses of all steps are {losses}{by}")
            continue
        same = "the same bits" if apart == 0 else f"{apart:.2g} from plain FSDP2's"
        lines.append(f"  {side}: losses are {losses}, gradients are {same}")
    return lines


def _profile_lines(run: dict[str, Any], what: str) -> list[str]:
    """Kernel times of one step as a table: a row for each kind, a column for each side."""
    seen = {side: row["profile"] for side, row in run["sides"].items() if row["profile"]}
    if not seen:
        return []
    kinds = sorted({kind for found in seen.values() for kind in found["ms"]})
    rows = [("span", *(found["span_ms"] for found in seen.values()))]
    rows += [(kind, *(found["ms"].get(kind) for found in seen.values())) for kind in kinds]
    about = "" if run["tokens"] is None else f", {run['tokens']} {what}"
    lines = [f"one profiled step{about}, ms (kinds overlap):"]
    lines += command.cells(["", *seen], rows)
    for side, found in seen.items():
        if found["collectives"]:
            forward = found["forward"]
            names = ", ".join(f"{n} {name}" for name, n in found["collectives"].items())
            lines.append(
                f"{side}: {forward['beside']} of {forward['gathers']} gathers in forward ran "
                f"beside computation; {names}"
            )
        for name, reason in found.get("disengaged", ()):
            lines.append(f"{side}: {name} did not run as planned: {reason}")
    return lines


def _plan_lines(result: dict[str, Any]) -> Sequence[str]:
    stats = result["stats"]
    if not stats:
        return ()
    return [_ABOUT.format(**stats), *command.choice_lines(result["choices"] or ())]
