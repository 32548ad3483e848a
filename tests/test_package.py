"""The package as a whole: cheap to import, layered, documented, with examples that run."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest
from paths import parsed

import symmplan

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "symmplan"
TESTS = ROOT / "tests"

#: What each layer may import, besides itself: see ARCHITECTURE.md. All but the pure layers may
#: stand on `torch_private` and `device`.
BASE = {"model", "errors", "torch_private", "device", "process"}
PLANS = BASE | {"registry", "planner", "coordination"}
PLACES = PLANS | {"capture", "memory", "report"}
CHOOSES = PLACES | {"place"}
RUNS = CHOOSES | {"choose"}
INTEGRATES = RUNS | {"runtime", "integrate"}
ALLOWED = {
    "errors": set(),
    "process": set(),
    "model": {"errors"},
    "torch_private": {"errors"},
    "device": {"torch_private", "process"},
    "report": {"model", "errors"},
    "planner": {"model", "errors"},
    "registry": BASE,
    "coordination": BASE | {"planner"},
    "capture": BASE | {"registry", "planner"},
    "memory": PLANS,
    "place": PLACES,
    "choose": CHOOSES,
    "runtime": RUNS,
    "integrate": RUNS | {"runtime"},
    "simulation": INTEGRATES,
    "launcher": BASE | {"report"},
    "testing": INTEGRATES | {"launcher"},
    "fsdp": BASE | {"choose", "runtime", "integrate"},
    "placed": BASE | {"memory", "integrate"},
    "api": BASE | {"registry", "planner", "capture", "integrate", "report"},
    "__main__": {"cli"},
    "trainers": {"errors", "runtime", "integrate", "fsdp"},
    "bench": INTEGRATES | {"launcher", "api", "fsdp", ""},
    "cli": INTEGRATES | {"simulation", "launcher", "bench", "api", ""},
}
#: `Problem` and `Plan` have methods that belong to later stages. These imports are inside
#: functions, and nothing else may look ahead.
LOOKS_AHEAD = {
    ("model", "planner"): {"model/problem.py", "model/plan.py"},
    ("model", "report"): {"model/plan.py", "model/problem.py"},
}
#: Pure Python: planning must work where torch is not installed, and must stay quick to import.
WITHOUT_TORCH = {"errors", "process", "model", "planner", "report"}


@functools.cache
def _imports(source: str, package: str) -> list[tuple[str, int, bool]]:
    """``(module, line, inside a function)`` of every import, for types alone or not."""
    found = []

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, child.lineno, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parts = package.split(".")
                    base = ".".join([*parts[: len(parts) - child.level + 1], base]).rstrip(".")
                # `from symmplan import memory` imports a module; `from symmplan.x import y` may.
                names = [f"{base}.{alias.name}" for alias in child.names]
                found.extend((name, child.lineno, inside) for name in names)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            visit(child, inside or is_function)

    visit(ast.parse(source), False)
    return found


def _layer(module: str) -> str | None:
    """The layer of ``symmplan.<layer>...``; ``""`` for the package's own names, None for others."""
    parts = module.split(".")
    if parts[0] != "symmplan":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else ""


def wrong_imports(files: dict[str, str]) -> list[str]:
    """Imports against the direction, in ``{path inside the package: source}``."""
    wrong = []
    for path, source in sorted(files.items()):
        parts = path.removesuffix(".py").split("/")
        package = ".".join(["symmplan", *parts[:-1]])
        layer = parts[0]
        if layer == "__init__":
            continue
        if layer not in ALLOWED:
            wrong.append(f"{path}: {layer} is no known layer; say in ALLOWED what it may import")
            continue
        for module, line, inside in _imports(source, package):
            other = _layer(module)
            if layer in WITHOUT_TORCH and module.split(".")[0] == "torch":
                wrong.append(f"{path}:{line}: {layer} must not import torch")
            if layer == other == "integrate" and len(parts) > 2:
                there = module.split(".")[2]
                if there != parts[1] and f"integrate/{there}/__init__.py" in files:
                    wrong.append(f"{path}:{line}: {parts[1]} must not import {module}")
            if other is None or other == layer or other in ALLOWED[layer]:
                continue
            if inside and path in LOOKS_AHEAD.get((layer, other), ()):
                continue
            wrong.append(f"{path}:{line}: {layer} must not import {module}")
    return wrong


def _sources() -> dict[str, str]:
    return {
        str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
    }


def test_layers_import_in_one_direction():
    assert wrong_imports(_sources()) == []


@pytest.mark.parametrize(
    ("path", "source", "says"),
    [
        ("planner/x.py", "from symmplan.memory import realize", "planner must not import"),
        ("planner/x.py", "import symmplan.capture.fx", "planner must not import"),
        ("planner/x.py", "from symmplan import memory", "planner must not import"),
        ("planner/x.py", "from ..memory import arena", "planner must not import"),
        ("planner/deep/x.py", "from ...capture import fx", "planner must not import"),
        ("planner/x.py", "def f():\n    import torch.fx", "planner must not import torch"),
        ("registry/x.py", "from symmplan.planner import plan", "registry must not import"),
        ("report/x.py", "if True:\n    import symmplan.integrate", "report must not import"),
        ("memory/x.py", "from symmplan.capture import fx", "memory must not import"),
        ("coordination/x.py", "from symmplan.memory import arena", "coordination must not import"),
        ("errors.py", "from symmplan import model", "errors must not import"),
        ("torch_private/x.py", "from symmplan import model", "torch_private must not import"),
        ("device/x.py", "from symmplan.memory import streams", "device must not import"),
        ("model/x.py", "from symmplan.planner import plan", "model must not import"),
        ("model/x.py", "def f():\n    from symmplan.memory import x", "model must not import"),
        ("runtime/x.py", "from symmplan.integrate.eager import streams", "runtime must not import"),
        ("integrate/x.py", "import symmplan.cli", "integrate must not import"),
        ("integrate/eager/x.py", "import symmplan.integrate.compile.emit", "eager must not import"),
        ("integrate/fsdp/x.py", "from symmplan.integrate.eager import x", "fsdp must not import"),
        ("capture/x.py", "import symmplan", "capture must not import"),
        ("bench/x.py", "from symmplan.cli import files", "bench must not import"),
        ("fsdp.py", "from symmplan import trainers", "fsdp must not import"),
        ("testing/x.py", "import symmplan.bench.comm", "testing must not import"),
        ("novel/x.py", "import os", "no known layer"),
    ],
)
def test_the_check_of_the_direction_can_fail(path, source, says):
    files = {**_sources(), path: source}
    assert [line for line in wrong_imports(files) if line.startswith(path) and says in line]


#: `Problem` and `Plan` have methods of the planner and of the reports; nobody else is in a circle.
OF_PLANS = ("model", "planner", "report")


def circles(files: dict[str, str]) -> list[list[str]]:
    """The circles in which files import each other, also for types alone."""
    graph = nx.DiGraph()
    names = {path.removesuffix(".py").removesuffix("/__init__"): path for path in files}
    for path, source in files.items():
        if path.split("/")[0] in OF_PLANS or path.endswith("__init__.py"):
            continue
        package = ".".join(["symmplan", *path.split("/")[:-1]])
        for module, _, _ in _imports(source, package):
            where = "/".join(module.split(".")[1:])
            other = names.get(where) or names.get(where.rpartition("/")[0])
            if other is not None and other != path:
                graph.add_edge(path, other)
    return [sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1]


def test_no_files_import_each_other_in_a_circle():
    assert circles(_sources()) == []
    more = {
        "runtime/x.py": "from symmplan.runtime.y import z",
        "runtime/y.py": "def f():\n    from symmplan.runtime import x",
        "runtime/u.py": "if TYPE_CHECKING:\n    from symmplan.runtime.v import a",
        "runtime/v.py": "from symmplan.runtime.u import b",
        "runtime/w.py": "from symmplan.runtime.u import b",
    }
    found = circles({**_sources(), **more})
    assert sorted(found) == [["runtime/u.py", "runtime/v.py"], ["runtime/x.py", "runtime/y.py"]]


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import symmplan",
        "import symmplan; symmplan.Problem, symmplan.Plan, symmplan.errors, dir(symmplan)",
        "import symmplan.planner, symmplan.report, symmplan.model",
        "import symmplan.registry",
        "from symmplan.cli import main; main(['bench'])",
        "import symmplan as s; s.plan(s.Problem.from_intervals([('a', 0, 1, 8)])).verify()",
    ],
)
def test_importing_does_not_import_torch(code):
    assert _python(f"{code}\nimport sys; print('torch' in sys.modules)").endswith("False\n")


@pytest.mark.long
def test_a_plain_install_has_all_modules():
    """Without what the extras install."""
    shown = _python(
        "import sys; sys.modules['hypothesis'] = sys.modules['pytest'] = None\n"
        "import symmplan.memory, symmplan.testing as t\n"
        "print(callable(t.check_declaration), set(t.__all__) <= set(dir(t)))\n"
        "try: t.check_packer\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    assert shown == (
        "True True\nsymmplan.testing.check_packer needs hypothesis: "
        "python -m pip install 'symmplan[test]'\n"
    )


def test_import_is_cheap():
    code = "import sys; before = set(sys.modules); import symmplan; "
    loaded = _python(code + "print(sorted(m for m in set(sys.modules) - before))")
    assert "networkx" not in loaded
    assert "numpy" not in loaded


def test_public_names_are_there_and_documented():
    for name in set(symmplan.__all__) - {"__version__"}:
        assert name in dir(symmplan)
        assert inspect.getdoc(getattr(symmplan, name)), name


def test_all_public_names_are_typed():
    """What `__getattr__` finds, a type checker must find, too."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(symmplan.__all__) - {"__version__"} <= typed


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = symmplan.nonsense


def test_a_class_name_means_one_class():
    """Who greps for a name finds one class, or learns of none."""
    where = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_no_file_is_much_too_long():
    """About 400 lines is the wish; this only stops the growth beyond it."""
    long = {
        str(path.relative_to(ROOT)): lines
        for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.js"), *TESTS.rglob("*.py")]
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 450
    }
    assert not long


def test_readme_has_its_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python -m pip install .*$", text, re.MULTILINE)
    assert commands == [
        "python -m pip install . && symmplan demo",
        "python -m pip install '.[test]' && python -m pytest -n 2 --dist worksteal",
    ]


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "examples").glob("*.py")))
@pytest.mark.ranks
@pytest.mark.further
def test_examples_run(name, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},  # where it was, should it be killed
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_notebook_plans_and_draws(capsys):
    notebook = json.loads((ROOT / "examples" / "plan.ipynb").read_text(encoding="utf-8"))
    space = {}
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    cells = ["".join(c["source"]) for c in code]
    said = ""
    for cell, shown in zip(cells, code, strict=True):
        exec(cell, space)
        said += (printed := capsys.readouterr().out)
        kept = [o for o in shown["outputs"] if o["output_type"] == "stream"]
        assert "".join(t for o in kept for t in o["text"]) == printed, "run the notebook again"
    assert "reached: no plan needs fewer bytes" in said
    assert "fix: increase the capacity" in said
    assert "plan" in cells  # whose value is shown
    assert "<iframe" in space["plan"]._repr_html_()


def test_the_changelog_has_this_version_with_a_date_and_a_plan_format():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{symmplan.__version__}\] - \d{{4}}-\d\d-\d\d", headings[1])
    this = text.partition(f"## {headings[1]}")[2].partition("\n## [")[0]
    assert "### Plan format" in this


def test_tests_lie_in_the_folders_of_the_package():
    ours = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*") if p.is_dir()}
    theirs = {str(p.parent.relative_to(TESTS)) for p in TESTS.rglob("test_*.py")}
    assert theirs - ours == {".", "gpu", "examples", "benchmarks"}
    helpers = {p.name for p in TESTS.rglob("*.py") if not p.name.startswith("test_")}
    apart = {p.name for p in (TESTS / "helpers").rglob("*.py")}
    assert helpers - apart == {"conftest.py", "devices.py"}
    assert not {name for name in apart if name.startswith("test_")}


def test_the_map_of_the_tests_names_every_file():
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    patterns = re.findall(r"`([\w*]+\.py)`", text)
    unnamed = [
        path.name
        for path in sorted(TESTS.rglob("*.py"))
        if path.parent.name != "gpu" and not any(path.match(pattern) for pattern in patterns)
    ]
    assert not unnamed
    measured = re.findall(r"`(\w+)`", text.partition("| seconds |")[2].partition("\n\n")[0])
    there = {path.stem.removeprefix("test_") for path in TESTS.rglob("test_*.py")}
    assert len(measured) > 50
    assert set(measured) <= there | {"test_"}


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_the_files_that_pages_name_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:[\w*]+/)*[\w*]+\.py)`", text)
    assert len(named) > 3
    folders = ("symmplan", "tests", "docs", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert [name for name in named if not any(path.match(name) for path in files)] == []


def test_no_name_hides_one_that_attrs_uses_in_its_methods():
    """Methods that attrs generates look for ``_compat`` in their module's globals."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "attrs" in text and re.search(
            r"^(from|import) attrs|^    from attrs", text, re.MULTILINE
        ):
            assert not re.search(r"^(from|import) .*\b_compat$", text, re.MULTILINE), path


def test_tests_for_devices_import_what_there_is():
    """Also inside functions, which run nowhere but there."""
    files = sorted((Path(__file__).parent / "gpu").glob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("symmplan"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
