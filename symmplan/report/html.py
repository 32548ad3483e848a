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
from typing import TYPE_CHECKING, Any

from symmplan.report.data import drawing
from symmplan.report.format import count, size
from symmplan.report.text import choice_rows, plan_summary

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from symmplan.model import Plan

__all__ = ["page", "plan_frame", "plan_html", "tiles", "write_plan_html"]

#: A notebook keeps what it shows; larger pictures belong into a file.
_MOST_IN_NOTEBOOK = 5_000
#: Advice makes plans, which of more buffers take longer than a page may.
_MOST_ADVISED = 20_000

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; img-src data:">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

_PLAN = """\
<header>
<h1>symmplan {which}</h1>
{tiles}
</header>
<main>
<div id="tools" hidden>
<input id="filter" type="search" placeholder="filter by buffer, op or type" aria-label="filter">
<button id="reset" type="button">whole picture</button>
<button id="peak" type="button">peak</button>
<button id="differ" type="button" aria-pressed="false" hidden>differences</button>
<span class="hint">wheel: zoom in time, with shift: in bytes; drag: move, with shift: zoom; \
click: pin; <kbd>?</kbd> keys</span>
<div id="keys" hidden></div>
<div id="legend"></div>
</div>
<div id="pictures"></div>
<div id="tables"></div>
{collectives}
<details open id="summary"><summary>Summary</summary><pre>{summary}</pre></details>
</main>
<div id="tip" role="status" hidden></div>
<aside id="pin" aria-label="pinned buffer" hidden></aside>
<script type="application/json" id="plan">{data}</script>
<script>{script}</script>"""


def page(title: str, body: str) -> str:
    """A page that loads nothing and runs no script but the one that draws plans.

    Args:
        title: Text.
        body: HTML, in which names are escaped already.
    """
    style = _text("page.css")
    return _PAGE.format(
        title=escape(title),
        body=body,
        style=style,
        style_hash=_hash(style),
        script_hash=_hash(_script()),
    )


def plan_html(plan: Plan, beside: Plan | None = None, choices: Iterable[Any] = ()) -> str:
    """The page as text. Equal plans give equal texts.

    Args:
        plan: The plan.
        beside: A second one, drawn beside it.
        choices: How the collectives of the first run, and what was measured.
    """
    both = [p for p in (plan, beside) if p is not None]
    # In a script element only "<" could end the data or open a comment; JSON can spell it.
    asked = [len(p.placements) <= _MOST_ADVISED for p in both]
    advice = [p.advice() if ask else None for p, ask in zip(both, asked, strict=True)]
    trades = [p.trades() if ask else () for p, ask in zip(both, asked, strict=True)]
    drawn = [drawing(*each) for each in zip(both, advice, trades, strict=True)]
    shown = {**drawn[0], "beside": drawn[1] if beside is not None else None}
    body = _PLAN.format(
        which=" beside ".join(f"<code>{escape(p.fingerprint[:12])}</code>" for p in both),
        tiles="".join(tiles(_facts(p, a)) for p, a in zip(both, advice, strict=True)),
        summary=escape("\n\n".join(plan_summary(p) for p in both)),
        collectives=_collectives(choices),
        data=json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c"),
        script=_script(),
    )
    return page(f"symmplan plan {plan.fingerprint[:12]}", body)


def plan_frame(plan: Plan) -> str:
    """The page in a frame of its own, for notebooks; of a large plan its summary alone."""
    if len(plan.placements) > _MOST_IN_NOTEBOOK:
        advice = f"{plan_summary(plan)}\n\nplan.to_html(path) draws it."
        return f"<pre>{escape(advice)}</pre>"
    # Attributes, for the page around it may allow no style but its own.
    look = 'sandbox="allow-scripts allow-downloads" width="100%" height="640" frameborder="0"'
    # Viewers that strip frames, as of repositories, show the text.
    text = f"<summary>{escape(repr(plan))}</summary><pre>{escape(plan_summary(plan))}</pre>"
    return f'<details>{text}</details><iframe {look} srcdoc="{escape(plan_html(plan))}"></iframe>'


def write_plan_html(
    plan: Plan,
    path: str | os.PathLike[str],
    beside: Plan | None = None,
    choices: Iterable[Any] = (),
) -> None:
    """Write the page of ``plan``, which is not verified here; the folder must exist.

    Args:
        plan: The plan.
        path: Where to.
        beside: As for `plan_html`.
        choices: As for `plan_html`.

    Raises:
        OSError: It cannot be written.
    """
    Path(path).write_text(plan_html(plan, beside, choices), encoding="utf-8", newline="\n")


def _collectives(choices: Iterable[Any]) -> str:
    """A table of how collectives run, as HTML; empty without any."""
    rows = choice_rows(choices)
    if not rows:
        return ""
    heads = ("collective", "group", "bytes", "algorithm", "measured")
    lines = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    title = "<summary>How collectives run</summary>"
    return f'<details open id="collectives">{title}<table>{"".join(lines)}</table></details>'


def tiles(facts: list[tuple[str, str, str]]) -> str:
    """Rows of a name, a value and a note, as HTML."""
    found = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in facts
    )
    return f"<dl>{found}</dl>"


def _facts(plan: Plan, advice: tuple[Any, ...] | None) -> list[tuple[str, str, str]]:
    missed = sum(tensor.needed for tensor in plan.unplanned)
    free = len(plan.unplanned) - missed
    saves = max((a.saves for a in advice or ()), default=0)
    pieces = sum(a.kind != "total" for a in advice or ())
    told = "not computed" if advice is None else "no change found"
    if pieces:
        told = count(pieces, "change")
    beside = [tensor.nbytes for tensor in plan.unplanned]
    unknown = beside.count(None)
    budget = plan.budget
    saved = f"{plan.unshared_bytes / plan.peak_bytes:.1f} x peak" if plan.peak_bytes else ""
    return [
        ("peak", size(plan.peak_bytes), count(len(plan.segments), "segment")),
        ("lower bound", size(plan.lower_bound_bytes), "reached" if plan.optimal else "not reached"),
        ("one buffer per tensor", size(plan.unshared_bytes), saved),
        ("buffers", f"{len(plan.placements):,}", count(len(plan.barriers), "barrier")),
        ("could save", size(saves), told),
        ("left out", f"{missed:,}", f"{free:,} more need not be symmetric" if free else ""),
        (
            "beside it in ordinary memory",
            size(sum(nbytes for nbytes in beside if nbytes is not None)),
            f"and {count(unknown, 'tensor')} of unknown size" if unknown else "",
        ),
        *(
            [("budget", size(budget.capacity), f"{count(len(budget.demotions), 'kind')} demoted")]
            if budget is not None
            else []
        ),
    ]


def _text(part: str) -> str:
    return resources.files("symmplan.report").joinpath(part).read_text(encoding="utf-8")


def _script() -> str:
    parts = ("page.js", "compare.js", "picture.js", "svg.js", "tables.js")
    return '"use strict";\n(() => {\n' + "\n".join(map(_text, parts)) + "})();\n"


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
