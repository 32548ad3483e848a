"""The field's words: a name or a sentence uses no word that only this project would know."""

from __future__ import annotations

import ast
import re

import pytest
from paths import ROOT, parsed

#: ``{a word that was given up: what to say}``, in names of the package.
NAMES = {
    "way": "algorithm",
    "ways": "algorithms",
    "departure": "divergence",
    "departures": "divergences",
    "guest": "suballocation, tenant",
    "guests": "suballocations, tenants",
    "carveout": "suballocation",
    "company": "concurrent",
    "stake": "demotable",
    "stakes": "demotables",
    "spare": "segment cache",
    "spares": "segment cache",
    "resident": "pinned input",
    "residents": "pinned inputs",
    "home": "parameter storage, placed storage",
    "homes": "parameter storages, placed storages",
    "direct": "zero copy",
    "directs": "unshards",
    "unit": "compiled graph",
    "units": "compiled graphs",
    "tape": "program",
    "spot": "scheduled collective",
    "spots": "scheduled collectives",
    "throughout": "all_agree",
    "board": "epoch counters",
    "boards": "epoch counters",
    "lend": "lease_out",
    "lent": "leased",
    "loan": "lease",
    "loans": "leases",
    "meets": "synchronizes",
}
#: Words that were given up in one folder; elsewhere they say what everybody says, as units of
#: bytes.
ONLY_IN = dict.fromkeys(("unit", "units"), "symmplan/integrate/compile/")
#: The same in sentences: code's comments and docstrings, messages, pages.
PHRASES = {
    r"\b(?:gave|gives?|giving) way to (?:a|the) budget": "is demoted by the budget",
    r"\blive gathers\b": "unsharded modules",
    r"\bcarve-outs?\b": "suballocation",
    r"\bguests?\b": "tenant, suballocation",
    r"\bspare segments?\b": "segment cache",
    r"\b(?:kept|resident) inputs?\b": "pinned input",
    r"\bloans?\b": "lease",
    r"\btables? of choices\b": "tuning table",
    r"\bway of (?:a|each|this|the) collective": "algorithm of a collective",
    r"\bways (?:of|in which) collectives?\b": "algorithms of collectives",
    r"\bin company\b": "beside concurrent collectives",
    r"\bdepart(?:s|ed|ure)\b from (?:its|the|a) plan": "diverge",
    r"\bboards?\b": "epoch counters",
    # Turns of a sentence that need a second reading.
    # Docstrings that only those understand who have read the one before.
    r'"""(?:The same\b|As of\b|As `)': "what it is, or does",
    r"\bby then\b": "the moment, by its name",
    r"\bin vain\b": "what fails",
    r"\b(?:thereof|that which)\b": "the noun",
    r"\b(?:what|all) there is(?= to\b|[.,;:])": "the noun",
    r"\bis no (?:\w+ )?number\b": "is not a number",
    r"\b(?:on which|what)\b[^.,;:]{0,40}\brests?\b": "what depends on",
    r"\botherwise than\b": "not as",
    r"\bhave bytes(?: for [^.,;:]{0,40})? at once\b": "are unsharded at the same time",
}


def words_of(name: str) -> list[str]:
    """The words that a name is made of, in lower case."""
    if name == "CarveOut":
        return ["carveout"]
    return [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def names_of(source: str) -> set[str]:
    """All that a file names itself: classes, functions, arguments, variables, attributes."""
    names: set[str] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def old_names(path: str, source: str) -> list[str]:
    names = names_of(source) | set(path.removesuffix(".py").split("/"))
    return sorted(
        f"{path}: {name} (say {NAMES[word]})"
        for name in names
        for word in words_of(name)
        if word in NAMES and path.startswith(ONLY_IN.get(word, ""))
    )


def old_phrases(path: str, text: str) -> list[str]:
    text = re.sub(r"\s+(?:#:? )?", " ", text)
    return [
        f"{path}: {found[0]!r} (say {instead})"
        for phrase, instead in PHRASES.items()
        for found in re.finditer(phrase, text, re.IGNORECASE)
    ]


SOURCES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "symmplan").rglob("*.py"))
}
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.py"),
        ROOT / "tests" / "README.md",
    ]
}


def test_names_are_made_of_the_fields_words():
    assert [line for path, text in SOURCES.items() for line in old_names(path, text)] == []


def test_sentences_use_the_fields_words():
    texts = {**SOURCES, **PAGES}
    assert [line for path, text in texts.items() for line in old_phrases(path, text)] == []


@pytest.mark.parametrize(
    "source",
    [
        "class GuestBytes: pass",
        "def ways_of(x): pass",
        "home = 1",
        "a.loan = 2",
        "f = lambda way: 1",
    ],
)
def test_an_old_name_is_found(source):
    assert old_names("symmplan/x.py", source)
    assert not old_names("symmplan/x.py", "in_torchs_own_style = 1")


@pytest.mark.parametrize(
    "text",
    [
        "what gave way to the\n    # budget",
        "a table of\nchoices",
        "A loan.",
        "its carve-out",
        "in the way that this has by\n    then",
        "the buffer and the size thereof",
        "what no rank\n# waits for in vain",
        "``timeout`` is no number",
        "what correctness rests on",
        "it ran otherwise than planned",
        "modules that have bytes at once",
        "that is all there is.",
        '"""The same for groups."""',
        '"""As of `Plan`."""',
    ],
)
def test_an_old_phrase_is_found(text):
    assert old_phrases("docs/x.md", text)
    assert not old_phrases("docs/x.md", "collectives run as torch runs them; the same way")
