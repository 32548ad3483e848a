"""Draw the pictures of these pages: ``python docs/drawings.py``.

They carry their own background and follow the reader's colour scheme, so they are readable on any
page. Placements are those of real plans.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from pathlib import Path

import symmplan

HERE = Path(__file__).parent
TABLES = HERE / "benchmarks.md"
MIB = 1 << 20

_STYLE = """
text{font:13px system-ui,sans-serif;fill:#1f2933}.small{font-size:11px}.head{font-weight:600}
.page{fill:#fff;stroke:#d5dae1}.grid{stroke:#d5dae1}.line{stroke:#52606d;fill:none}
.tip{fill:#52606d}.bound{stroke:#b42318;stroke-dasharray:5 4}.bound-text{fill:#b42318}
.gather{fill:#9ecbff}.grads{fill:#ffd08a}.other{fill:#a8e0b8}.idle{fill:#e4e7eb}
.box{stroke:#3e4c59;stroke-opacity:.55}.mid{text-anchor:middle}.end{text-anchor:end}
@media (prefers-color-scheme:dark){
text{fill:#e4e7eb}.page{fill:#161b22;stroke:#3e4c59}.grid{stroke:#323f4b}.line{stroke:#9aa5b1}
.tip{fill:#9aa5b1}.bound{stroke:#ff8a80}.bound-text{fill:#ff8a80}
.gather{fill:#1f5f9e}.grads{fill:#8a5a10}.other{fill:#22693a}.idle{fill:#323f4b}
.box{stroke:#cbd2d9}}
""".replace("\n", "")


class Drawing:
    """Shapes of one picture; lengths in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._shapes = [
            (f'<rect class="page" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>')
        ]

    def text(self, x: float, y: float, text: str, *classes: str) -> None:
        """A line of text."""
        self._add(f'<text class="{" ".join(classes)}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def box(self, x: float, y: float, w: float, h: float, kind: str, text: str = "") -> None:
        """A box with its name inside."""
        self._add(
            f'<rect class="box {kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2"/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + 4, text, "small", "mid")

    def line(self, *points: tuple[float, float], kind: str = "line", arrow: bool = False) -> None:
        """A line through points, with a tip at its end if asked for."""
        tip = ' marker-end="url(#tip)"' if arrow else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._add(f'<polyline class="{kind}" fill="none" points="{path}"{tip}/>')

    def write(self, name: str) -> None:
        """Write it beside this file."""
        width, height = self._size
        text = "\n".join(
            [
                (
                    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                    f'width="{width}" height="{height}" role="img">'
                ),
                f"<title>{escape(self._title)}</title>",
                f"<style>{_STYLE}</style>",
                (
                    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" '
                    'markerWidth="8" markerHeight="8" orient="auto">'
                    '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
                ),
                *self._shapes,
                "</svg>\n",
            ]
        )
        (HERE / name).write_text(text, encoding="utf-8")

    def _add(self, shape: str) -> None:
        self._shapes.append(shape)


def step() -> symmplan.Problem:
    """Four layers under FSDP2: parameters are gathered one layer ahead, gradients scattered."""
    size = [6 * MIB, 4 * MIB, 4 * MIB, 4 * MIB]
    live = [(f"gather {i}", i, i + 2 + (i == 3), size[i]) for i in range(4)]
    for turn, i in enumerate(reversed(range(4))):
        if i < 3:
            live.append((f"regather {i}", 4 + turn, 6 + turn, size[i]))
        live.append((f"grads {i}", 5 + turn, 7 + turn, size[i]))
    return symmplan.Problem.from_intervals(live)


def draw_plan() -> None:
    """One buffer per tensor beside a plan, at one scale."""
    plan = symmplan.plan(step())
    assert plan.peak_bytes == plan.lower_bound_bytes
    begin = {op.name: at for at, op in enumerate(plan.problem.operations)}
    live: dict[str, tuple[int, int]] = {}
    for access in plan.problem.accesses:
        first, last = live.get(access.buffer, (len(begin), 0))
        at = begin[access.operation]
        live[access.buffer] = (min(first, at), max(last, at + 1))
    end = max(last for _, last in live.values())
    total = sum(b.nbytes for b in plan.problem.buffers)
    out = Drawing(
        860, 372, f"{total // MIB} MiB in one buffer per tensor, {plan.peak_bytes // MIB} in a plan"
    )
    scale, top, wide = 5.5, 50, 380
    bottom = top + total / MIB * scale

    def panel(left: float, head: str, offsets: dict[str, int], *, idle: bool) -> None:
        out.text(left, 30, head, "head")
        for buffer in plan.problem.buffers:
            first, last = live[buffer.name]
            high = buffer.nbytes / MIB * scale
            y = bottom - offsets[buffer.name] / MIB * scale - high
            if idle:
                out.box(left, y, wide, high, "idle")
            kind = "grads" if buffer.name.startswith("grads") else "gather"
            x, w = left + first * wide / end, (last - first) * wide / end
            out.box(x, y, w, high, kind, buffer.name)
        out.line((left, top - 4), (left, bottom), (left + wide + 4, bottom))
        out.text(left + wide, bottom + 18, "one training step, time \u2192", "small", "end")

    stacked, offset = {}, 0
    for buffer in plan.problem.buffers:
        stacked[buffer.name] = offset
        offset += buffer.nbytes
    panel(20, f"One symmetric buffer per tensor: {total // MIB} MiB", stacked, idle=True)
    placed = {name: place.offset for name, place in plan.placements.items()}
    panel(450, f"Planned, one segment: {plan.peak_bytes // MIB} MiB", placed, idle=False)
    y = bottom - plan.lower_bound_bytes / MIB * scale
    out.line((450, y), (450 + wide, y), kind="bound")
    out.text(458, y - 6, "lower bound: no plan of this step needs less", "small", "bound-text")
    for k, (kind, text) in enumerate(
        [("gather", "gathered parameters"), ("grads", "gradients to be scattered"),
         ("idle", "registered, not in use")]
    ):  # fmt: skip
        out.box(458, top + 8 + 20 * k, 14, 12, kind)
        out.text(480, top + 18 + 20 * k, text, "small")
    out.write("plan.svg")


def draw_ranks() -> None:
    """What symmetric means: the same offsets in every rank's segment."""
    out = Drawing(640, 264, "Three ranks, each with the same segment")
    parts = [("x", 40, "gather"), ("y", 70, "grads"), ("", 30, "idle"), ("z", 40, "other")]
    for rank in range(3):
        left, y = 60 + 200 * rank, 50.0
        out.text(left + 60, 32, f"rank {rank}", "head", "mid")
        for name, high, kind in parts:
            out.box(left, y, 120, high, kind, name)
            y += high
    for a, b in ((180, 260), (380, 460)):
        out.line((b, 125), (a, 125), arrow=True)
        out.line((a, 125), (b, 125), arrow=True)
    out.line((44, 50), (44, 90), arrow=True)
    out.text(20, 74, "40", "small")
    out.text(
        60,
        250,
        "y lies at offset 40 on every rank: its address at a peer is the peer's base + 40",
        "small",
    )
    out.write("ranks.svg")


def draw_stage_and_bind() -> None:
    """A copy, and none."""
    out = Drawing(640, 150, "Staged: copied into the placement; bound: written there")
    for y, name, boxes in (
        (30, "stage", [("matmul", "other"), ("its own tensor", "idle"), ("placement", "gather")]),
        (90, "bind", [("matmul", "other"), None, ("placement", "gather")]),
    ):
        out.text(20, y + 22, name, "head")
        for k, box in enumerate(boxes):
            if box is not None:
                out.box(80 + 150 * k, y, 110, 34, box[1], box[0])
        if boxes[1] is not None:
            out.line((190, y + 17), (230, y + 17), arrow=True)
            out.line((340, y + 17), (380, y + 17), arrow=True)
            out.text(360, y + 8, "copy", "small", "mid")
        else:
            out.line((190, y + 17), (380, y + 17), arrow=True)
        out.line((490, y + 17), (520, y + 17), arrow=True)
        out.text(526, y + 22, "all-gather")
    out.write("stage-and-bind.svg")


def draw_algorithms() -> None:
    """By the four algorithms, from a rank's tensor to its peer's."""
    out = Drawing(760, 262, "How bytes travel by each algorithm")
    rows = [
        (
            "ordinary",
            ["tensor", "NCCL's buffer", "peer's NCCL buffer", "peer's tensor"],
            ["kernel", "kernel", "kernel"],
        ),
        ("symmetric", ["placement", None, None, "peer's placement"], ["one kernel"]),
        ("copy engine", ["placement", None, None, "peer's placement"], ["DMA, no kernel"]),
        ("push", ["gradient", None, "peer's slot", "peer's gradient"], ["DMA, no kernel", "sum"]),
    ]
    for row, (name, boxes, moves) in enumerate(rows):
        y = 22 + 58 * row
        out.text(18, y + 22, name, "head")
        at = [120 + 165 * k for k, box in enumerate(boxes) if box]
        for x, box in zip(at, (b for b in boxes if b), strict=True):
            free = box in {"tensor", "peer's tensor", "gradient", "peer's gradient"}
            kind = "idle" if "NCCL" in box else "other" if free else "gather"
            out.box(x, y, 112, 34, kind, box)
        for (a, b), move in zip(pairwise(at), moves, strict=True):
            out.line((a + 112, y + 17), (b, y + 17), arrow=True)
            out.text((a + 112 + b) / 2, y + 10, move, "small", "mid")
    out.write("algorithms.svg")


def rooms() -> list[tuple[str, float, float]]:
    """``(GiB free, ms with FSDP2, ms with symmplan)``, as the table of benchmarks has them."""
    lines = TABLES.read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("| GiB free | FSDP2, ms"))
    found = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        room, plain, _, planned, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        found.append((room, float(plain), float(planned)))
    return found


def draw_rooms() -> None:
    """Steps on a device of which a ballast leaves less and less."""
    found = rooms()
    most = 50 * -(-max(max(row[1:]) for row in found) // 50)
    out = Drawing(760, 330, "Milliseconds of a step by what is free of the device")
    left, right, top, bottom = 60, 730, 50, 280

    def place(index: int, ms: float) -> tuple[float, float]:
        x = left + 30 + index * (right - left - 60) / (len(found) - 1)
        return x, bottom - ms / most * (bottom - top)

    out.text(left, 28, "ms of a step, by GiB that are free when training begins", "head")
    for ms in range(0, int(most) + 1, 50):
        _, y = place(0, ms)
        out.line((left, y), (right, y), kind="grid")
        out.text(left - 8, y + 4, str(ms), "small", "end")
    for column, kind, name in ((1, "bound", "FSDP2"), (2, "line", "symmplan")):
        points = [place(index, float(row[column])) for index, row in enumerate(found)]
        out.line(*points, kind=kind)
        x, y = points[-1]
        out.text(x, y + (-8 if column == 1 else 18), name, "small", "mid")
    for index, (room, *_) in enumerate(found):
        x, _ = place(index, 0)
        out.text(x, bottom + 20, room, "small", "mid")
    out.write("rooms.svg")


def main() -> None:
    """Draw them all."""
    draw_rooms()
    draw_plan()
    draw_ranks()
    draw_stage_and_bind()
    draw_algorithms()


if __name__ == "__main__":
    main()
