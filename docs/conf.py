"""How Sphinx builds the pages: ``sphinx-build -W docs build/docs``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.util.logging import getLogger
from sphinx.util.nodes import make_refnode

import symmplan

if TYPE_CHECKING:
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

logger = getLogger(__name__)
ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/symmplan/symmplan"

project = "symmplan"
author = "The symmplan authors"
project_copyright = author
release = version = symmplan.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
exclude_patterns = ["build"]
default_role = "py:obj"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 76
python_use_unqualified_type_names = True

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_title = f"symmplan {release}"
html_domain_indices = False
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}
highlight_language = "none"  # drawings have no mark
pygments_style = "default"
pygments_dark_style = "github-dark"

#: Names of so many characters are whole, but in wide tables and in tables on a phone.
SHORT = 20
_PARTS = re.compile(r"(?<=::)(?=\w)|(?<=[\w)][_./,])(?=\w)(?!\w*::)")
#: What users make themselves.
BY_USERS = ("symmplan.model.", "symmplan.testing.", "symmplan.memory.segment.Segment")

# Pages of the repository that are pages here, too.
PAGES = {
    "ARCHITECTURE.md": "project/architecture",
    "CONTRIBUTING.md": "project/contributing",
    "CHANGELOG.md": "project/changelog",
    "tests/README.md": "project/tests",
}


def show_page_of_repository(_app: Sphinx, name: str, source: list[str]) -> None:
    """Put a page of the repository in the place of the file that stands for it, links and all."""
    here = {page: path for path, page in PAGES.items()}.get(name)
    if here is None:
        return

    def link(match: re.Match[str]) -> str:
        target, hash_, anchor = match[1].partition("#")
        path = ((ROOT / here).parent / target).resolve().relative_to(ROOT).as_posix()
        if path in PAGES:
            return f"]({PAGES[path].removeprefix('project/')}.md{hash_}{anchor})"
        if path.startswith("docs/"):
            return f"](../{path.removeprefix('docs/')}{hash_}{anchor})"
        return f"]({REPOSITORY}/blob/main/{path}{hash_}{anchor})"

    text = (ROOT / here).read_text(encoding="utf-8")
    source[0] = re.sub(r"\]\((?!https?:|#)([^)]+)\)", link, text)


def link_source(
    _app: Sphinx, name: str, _template: str, context: dict[str, Any], _doctree: object
) -> None:
    """Let "view" and "edit" of a page of the repository lead to it."""
    here = {page: path for path, page in PAGES.items()}.get(name)
    if here is not None:
        context["theme_source_view_link"] = f"{REPOSITORY}/blob/main/{here}?plain=true"
        context["theme_source_edit_link"] = f"{REPOSITORY}/edit/main/{here}"


def break_names(_app: Sphinx, doctree: nodes.document, _name: str) -> None:
    """Keep short names whole; let names in tables break after their parts, and nowhere else."""
    for literal in list(doctree.findall(nodes.literal)):
        text = literal.astext()
        words = [text] if len(text) <= SHORT else text.split(" ")
        spans = [_span(word, breaks=_in_table(literal)) for word in words]
        literal[:] = [node for span in spans for node in (nodes.Text(" "), span)][1:]


def _in_table(node: nodes.Node | None) -> bool:
    return node is not None and (isinstance(node, nodes.entry) or _in_table(node.parent))


def _span(word: str, *, breaks: bool) -> nodes.inline:
    first, *rest = _PARTS.split(word) if breaks else [word]
    span = nodes.inline("", first, classes=["short"] if len(word) <= SHORT else [])
    for part in rest:
        span += [nodes.raw("", "<wbr>", format="html"), nodes.Text(part)]
    return span


def check_docstring(_app: Sphinx, _what: str, name: str, *rest: Any) -> None:
    """Link what docstrings call a note of the memory model; let nothing else be lost on the way."""
    lines = rest[-1]
    model = "`the memory model <../concepts.html#the-memory-model>`__"
    notes = r"\[Note: (?:happens-before|peers\s+count)\]"
    lines[:] = re.sub(notes, model, "\n".join(lines)).split("\n")
    for line in lines:
        if line.startswith((":type:", ":rtype:")) or "[Note:" in line:
            # Napoleon takes what precedes a colon for a type; other notes are in the code only.
            logger.warning("docstring of %s: a type that is a sentence, or a note: %s", name, line)


def show_signature(
    _app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    _options: Any,
    arguments: str | None,
    result: str | None,
) -> tuple[str, str | None] | None:
    """Show what users call: not how results are made, and once what all errors take."""
    error = what == "exception" and not name.endswith("SymmplanError")
    made = what == "class" and not f"{obj.__module__}.{obj.__name__}".startswith(BY_USERS)
    if error or made:
        return "", None
    return arguments and (re.sub("NOTHING|<function <lambda>>", "...", arguments), result)


def find_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Link a class, or a part of one, that a docstring of another module names."""
    target = node["reftarget"]
    if node.get("refdomain") != "py" or not re.match("[A-Z]", target):
        return None
    objects = env.domains.python_domain.objects
    for name in (target, target.rpartition(".")[0] or target):  # a field has no entry of its own
        found = {(o.docname, o.node_id) for key, o in objects.items() if key.endswith(f".{name}")}
        if len(found) == 1:  # it may have several keys
            page, anchor = found.pop()
            return make_refnode(app.builder, node["refdoc"], page, anchor, content, target)
    return None


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", check_docstring, priority=600)
    app.connect("autodoc-process-signature", show_signature)
    app.connect("missing-reference", find_name)
    app.connect("source-read", show_page_of_repository)
    app.connect("doctree-resolved", break_names)
    app.connect("html-page-context", link_source)
