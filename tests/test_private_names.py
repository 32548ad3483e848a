"""Names: torch's private ones are in ``torch_private``, and tests for GPUs use what is there."""

from __future__ import annotations

import ast
import importlib
import pathlib
import re

import pytest
from test_package import _imports as imports
from test_package import _sources as sources

TESTS = pathlib.Path(__file__).parent
#: Documented, though their names do not look it.
DOCUMENTED = ("_ops.", "_subclasses.", "_foreach_", "utils._pytree.", "utils._python_dispatch.")
#: Who stands on what has no public names: torch's registry, and the compilers.
STANDS_ON = {
    "integrate/compile/backend.py": ("_dynamo.", "_functorch.", "_inductor."),
    "integrate/compile/inductor.py": ("_functorch.", "_inductor."),
}


def private_names(files: dict[str, str]) -> list[str]:
    """Private modules and names of torch that are used outside of ``torch_private``."""
    found = []
    for path, source in sorted(files.items()):
        if path.startswith("torch_private/"):
            continue
        tree, alias = ast.walk(ast.parse(source)), {}
        names = [name for name, _, _ in imports(source, "symmplan")]
        for node in tree:
            if isinstance(node, ast.Import):
                alias.update((n.asname or n.name, n.name) for n in node.names)
            elif isinstance(node, ast.ImportFrom):
                alias.update((n.asname or n.name, f"{node.module}.{n.name}") for n in node.names)
            elif isinstance(node, ast.Attribute):
                first, _, rest = ast.unparse(node).partition(".")
                names.append(f"{alias.get(first, first)}.{rest}")
        known = tuple(f"torch.{n}" for n in (*DOCUMENTED, *STANDS_ON.get(path, ())))
        for name in dict.fromkeys(names):
            private = re.fullmatch(r"torch(\.\w+)*?\._[A-Za-z]\w*(\.\w+)*", name)
            parts = f"{name}."
            if private and not name.startswith("torch.ops.") and not parts.startswith(known):
                found.append(f"{path}: {name}")
    return found


def test_private_names_of_torch_are_in_one_place():
    assert private_names(sources()) == []


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
    assert private_names({"place/x.py": source})
    assert not private_names({"torch_private/x.py": source})


def missing_names(source: str) -> list[str]:
    """What a file of tests uses of other files of tests, and is not there."""
    tree = list(ast.walk(ast.parse(source)))
    tests = {path.stem for path in TESTS.glob("*.py")}
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


def test_what_runs_on_gpus_only_names_what_is_there():
    found = {path.name: missing_names(path.read_text()) for path in TESTS.glob("gpu/*.py")}
    assert {name: missing for name, missing in found.items() if missing} == {}
    assert missing_names("import test_package as package\npackage.test_of_no_name()")
