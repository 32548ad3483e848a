"""A plan as one self-contained HTML page.

The page holds the plan's data as JSON and a small script that draws it on canvases; it loads
nothing from anywhere and a content security policy keeps it so. Names come from users' programs,
so none is ever parsed as HTML: the static part escapes them, the script sets them as text, and the
policy runs no script but the one of known hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from symmplan.report.data import drawing
from symmplan.report.format import count, size
from symmplan.report.text import ENDS, plan_summary

if TYPE_CHECKING:
    import os

    from symmplan.model import Plan

__all__ = ["plan_frame", "plan_html", "write_plan_html"]

#: A notebook keeps what it shows; larger pictures belong into a file.
_MOST_IN_NOTEBOOK = 5_000

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; img-src data:">
<title>symmplan plan {fingerprint}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>symmplan <code>{fingerprint}</code></h1>
{tiles}
</header>
<main>
<div id="tools" hidden>
<input id="filter" type="search" placeholder="filter by buffer, op or type" aria-label="filter">
<button id="reset" type="button">whole picture</button>
<span class="hint">wheel: zoom in time, with shift: in bytes; drag: move, with shift: zoom; \
click: pin; <kbd>?</kbd> keys</span>
<div id="keys" hidden></div>
<div id="legend"></div>
</div>
<div id="pictures"></div>
<div id="tables"></div>
<details open id="summary"><summary>Summary</summary><pre>{summary}</pre></details>
</main>
<div id="tip" role="status" hidden></div>
<aside id="pin" aria-label="pinned buffer" hidden></aside>
<script type="application/json" id="plan">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def plan_html(plan: Plan, beside: Plan | None = None) -> str:
    """The page as text, with a second plan ``beside`` it. Equal plans give equal texts."""
    folder = resources.files("symmplan.report")
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    parts = ("page.js", "picture.js", "svg.js", "tables.js")
    texts = (folder.joinpath(part).read_text(encoding="utf-8") for part in parts)
    script = '"use strict";\n(() => {\n' + "\n".join(texts) + "})();\n"
    # In a script element only "<" could end the data or open a comment; JSON can spell it.
    shown = {**drawing(plan), "beside": None if beside is None else drawing(beside)}
    data = json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")
    return _PAGE.format(
        fingerprint=escape(plan.fingerprint[:12]),
        tiles="".join(f"<dl>{_tiles(p)}</dl>" for p in (plan, beside) if p is not None),
        summary=escape("\n\n".join(plan_summary(p) for p in (plan, beside) if p is not None)),
        data=data,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def plan_frame(plan: Plan) -> str:
    """The page in a frame of its own, for notebooks; of a large plan its summary alone."""
    if len(plan.placements) > _MOST_IN_NOTEBOOK:
        advice = f"{plan_summary(plan)}\n\nplan.to_html(path) draws it."
        return f"<pre>{escape(advice)}</pre>"
    page = escape(plan_html(plan))
    look = "width:100%;height:640px;border:0"
    return f'<iframe sandbox="allow-scripts" style="{look}" srcdoc="{page}"></iframe>'


def write_plan_html(plan: Plan, path: str | os.PathLike[str], beside: Plan | None = None) -> None:
    """Write the page of ``plan``, which is not verified here; the folder must exist.

    Raises:
        OSError: It cannot be written.
    """
    Path(path).write_text(plan_html(plan, beside), encoding="utf-8", newline="\n")


def _tiles(plan: Plan) -> str:
    reached = plan.peak_bytes == plan.lower_bound_bytes
    saved = f"{plan.unshared_bytes / plan.peak_bytes:.1f} x peak" if plan.peak_bytes else ""
    tiles = [
        ("peak", size(plan.peak_bytes), count(len(plan.segments), "segment")),
        ("lower bound", size(plan.lower_bound_bytes), "reached" if reached else ENDS[plan.search]),
        ("one buffer per tensor", size(plan.unshared_bytes), saved),
        ("buffers", f"{len(plan.placements):,}", count(len(plan.barriers), "barrier")),
        ("left out", f"{len(plan.unplanned):,}", "with reasons" if plan.unplanned else ""),
    ]
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in tiles
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
