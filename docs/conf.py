"""How Sphinx builds the pages: ``sphinx-build -W docs build/docs``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes

import symmplan

if TYPE_CHECKING:
    from sphinx.application import Sphinx

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
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_title = f"symmplan {release}"
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main"}
highlight_language = "none"  # drawings have no mark
pygments_style = "friendly"
pygments_dark_style = "monokai"

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


def break_names_in_tables(_app: Sphinx, doctree: nodes.document, _name: str) -> None:
    """Let long names in tables break after their parts, and nowhere else."""
    for entry in doctree.findall(nodes.entry):
        for literal in entry.findall(nodes.literal):
            parts = re.split(r"(?<=::)(?=\w)|(?<=[\w)][_./,])(?=\w)(?!\w*::)", literal.astext())
            literal[:] = [nodes.Text(parts[0])]
            for part in parts[1:]:
                literal += [nodes.raw("", "<wbr>", format="html"), nodes.Text(part)]


def link_notes(_app: Sphinx, _what: str, _name: str, *rest: Any) -> None:
    """Link what docstrings call a note of the memory model."""
    lines = rest[-1]
    model = "`the memory model <../concepts.html#the-memory-model>`__"
    notes = r"\[Note: (?:happens-before|peers\s+count)\]"
    lines[:] = re.sub(notes, model, "\n".join(lines)).split("\n")


def hide_signature(_app: Sphinx, what: str, name: str, *_rest: Any) -> tuple[str, None] | None:
    """Say once what all errors take."""
    hidden = what == "exception" and not name.endswith("SymmplanError")
    return ("", None) if hidden else None


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", link_notes, priority=600)
    app.connect("autodoc-process-signature", hide_signature)
    app.connect("source-read", show_page_of_repository)
    app.connect("doctree-resolved", break_names_in_tables)
