"""Names: torch's private ones are in ``torch_private``, and tests for GPUs use what is there."""

from __future__ import annotations

import ast
import importlib
import re
import sys

import pytest
from paths import TESTS, parsed
from test_package import _imports as imports
from test_package import _sources as sources

from symmplan.torch_private.table import SEAMS


def private_names(files: dict[str, str]) -> list[str]:
    """Private modules and names of torch that are used outside of ``torch_private``."""
    found = []
    for path, source in sorted(files.items()):
        if path.startswith("torch_private/"):
            continue
        alias = aliases(source)
        names = [name for name, _, _ in imports(source, "symmplan")]
        tree = ast.walk(parsed(source))
        names += [named(node, alias) for node in tree if isinstance(node, ast.Attribute)]
        for name in dict.fromkeys(names):
            private = re.fullmatch(r"torch(\.\w+)*?\._[A-Za-z]\w*(\.\w+)*", name)
            if private and not name.startswith("torch.ops."):
                found.append(f"{path}: {name}")
    return found


def aliases(source: str) -> dict[str, str]:
    """``{name in a file: what was imported}``."""
    alias = {}
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            alias.update((n.asname or n.name, n.name) for n in node.names)
        elif isinstance(node, ast.ImportFrom):
            alias.update((n.asname or n.name, f"{node.module}.{n.name}") for n in node.names)
    return alias


def named(node: ast.expr, alias: dict[str, str]) -> str:
    """What a name or an attribute is, with the names of imports in place of the file's own."""
    first, dot, rest = ast.unparse(node).partition(".")
    return f"{alias.get(first, first)}{dot}{rest}"


def patches(files: dict[str, str]) -> list[str]:
    """Attributes of torch that are replaced outside of ``torch_private``."""
    found = []
    for path, source in sorted(files.items()):
        if path.startswith("torch_private/"):
            continue
        alias = aliases(source)
        for node in ast.walk(parsed(source)):
            name = ""
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                name = named(node, alias)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
                name = named(node.args[0], alias)
            if name.startswith("torch."):
                found.append(f"{path}:{node.lineno}: {name}")
    return found


def unlisted(files: dict[str, str]) -> list[str]:
    """Private names that ``torch_private`` uses, of which no row of its table tells."""
    told = {part for seam in SEAMS for name in seam.targets for part in re.findall(r"\w+", name)}
    for path, source in files.items():
        if path.startswith("torch_private/"):
            told |= own_names(source)
    found = []
    for path, source in sorted(files.items()):
        if not path.startswith("torch_private/") or "/table/" in path:
            continue
        for node in ast.walk(parsed(source)):
            names = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*(node.module or "").split("."), *(name.name for name in node.names)]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                names = [n.value for n in node.args[1:2] if isinstance(n, ast.Constant)]
            elif isinstance(node, ast.keyword):  # of `Seam.replaced`
                names = [node.arg]
            private = (n for n in names if re.fullmatch(r"_[a-zA-Z]\w*", str(n)))
            found += [f"{path}:{node.lineno}: {name}" for name in private if name not in told]
    return found


#: What every op and every storage has. Functions for them would say no more.
EVERYWHERE = {"_cdata", "_overloadname", "_schema"}


def taken_elsewhere(files: dict[str, str]) -> list[str]:
    """Private attributes of which rows tell, and that are used outside of ``torch_private``."""
    inside = (name.partition(":")[2] for seam in SEAMS for name in seam.targets)
    told = set(re.findall(r"\b_[a-z]\w*", " ".join(inside))) - EVERYWHERE
    found = []
    for path, source in sorted(files.items()):
        if path.startswith("torch_private/"):
            continue
        taken = told - own_names(source)
        for node in ast.walk(parsed(source)):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            if isinstance(name, str) and name in taken:
                found.append(f"{path}:{node.lineno}: {name}")
    return found


def own_names(source: str) -> set[str]:
    """Private names that a file gives to its own functions, classes and attributes."""
    own = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            own.add(node.attr)
    return own


def test_private_names_of_torch_are_in_one_place():
    assert private_names(sources()) == []


def test_private_attributes_are_used_in_one_place():
    assert taken_elsewhere(sources()) == []


@pytest.mark.parametrize("source", ["x._training_state", "getattr(x, '_training_state')"])
def test_the_check_of_private_attributes_can_fail(source):
    assert taken_elsewhere({"integrate/x.py": source})
    assert not taken_elsewhere({"torch_private/x.py": source})


def test_patches_of_torch_are_in_one_place():
    assert patches(sources()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.cuda.synchronize = len",
        "import torch\nfrom torch import nn\nnn.Module.__init__ = len",
        "import torch\nsetattr(torch.cuda.Event, 'record', len)",
        "import torch\ndel torch.nn.Module.forward",
    ],
)
def test_the_check_of_patches_can_fail(source):
    assert patches({"runtime/x.py": source})
    assert not patches({"torch_private/x.py": source})


def test_every_private_name_has_a_row_that_says_what_rests_on_it():
    assert unlisted(sources()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._no_such_name()",
        "from torch._C import _no_such_name",
        "def f(group):\n    return group._no_such_name",
        "def f(group):\n    return getattr(group, '_no_such_name', None)",
        "def f(row):\n    return row.replaced(_no_such_name=len)",
    ],
)
def test_the_check_of_rows_can_fail(source):
    (found,) = unlisted({"torch_private/x.py": source})
    assert found.endswith("_no_such_name")


@pytest.mark.parametrize(
    "source",
    [
        "import torch._guards",
        "from torch._C import DispatchKey",
        "from torch.distributed import _symmetric_memory",
        "def f():\n    from torch._inductor import config",
        "x = torch._C._cuda_getDevice()",
        "torch.distributed.distributed_c10d._get_default_group()",
        "import torch.distributed as dist\ndist.distributed_c10d._world",
    ],
)
def test_the_check_of_private_names_can_fail(source):
    assert private_names({"runtime/x.py": source})
    assert not private_names({"torch_private/x.py": source})


def missing_names(source: str) -> list[str]:
    """What a file of tests uses of other files of tests, and is not there."""
    tree = list(ast.walk(parsed(source)))
    tests = {path.stem for path in TESTS.rglob("*.py")}
    modules = {
        name.asname or name.name: importlib.import_module(name.name)
        for node in tree
        if isinstance(node, ast.Import)
        for name in node.names
        if name.name in tests
    }
    used = [
        (modules[node.value.id], node.attr)
        for node in tree
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    ]
    return [f"{module.__name__}.{name}" for module, name in used if not hasattr(module, name)]


def test_what_runs_on_gpus_only_names_what_is_there(monkeypatch):
    monkeypatch.setattr(
        sys, "path", [*sys.path, *sorted({str(f.parent) for f in TESTS.rglob("*.py")})]
    )
    found = {path.name: missing_names(path.read_text()) for path in TESTS.glob("gpu/*.py")}
    assert {name: missing for name, missing in found.items() if missing} == {}
    assert missing_names("import test_package as package\npackage.test_of_no_name()")
