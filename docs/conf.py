"""How Sphinx builds the pages: ``sphinx-build -W docs build/docs``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

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
html_css_files = ["tables.css"]
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


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", show_page_of_repository)
