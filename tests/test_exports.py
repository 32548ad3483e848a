"""What each module exports is there and documented; examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import types

import pytest
from paths import ROOT

PACKAGE = ROOT / "symmplan"
#: What adapters to other people's packages are for.
ADAPTERS = {
    "hugging_face": "transformers",
    "torchtitan": "torchtitan",
    "torchtitan_experts": "torchtitan",
}


def _modules() -> list[str]:
    return sorted(
        ".".join(["symmplan", *path.relative_to(PACKAGE).with_suffix("").parts])
        for path in PACKAGE.rglob("*.py")
        if path.name not in {"__init__.py", "__main__.py"}
    )


def _is_installed(name):
    """Whether what a module needs beyond a plain install is there."""
    if name.endswith("_kernel"):
        return importlib.util.find_spec("triton") is not None
    if name.startswith("symmplan.trainers."):
        needs = ADAPTERS.get(name.rsplit(".", 1)[1], "symmplan")
        return importlib.util.find_spec(needs) is not None
    return True


def _undocumented(module):
    """What a module exports without a docstring; the module itself, too."""
    name = module.__name__
    found = [] if module.__doc__ else [name]
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == name]
    for public in getattr(module, "__all__", [n for n in own if not n.startswith("_")]):
        value = getattr(module, public)
        if (inspect.isclass(value) or inspect.isfunction(value)) and not inspect.getdoc(value):
            found.append(f"{name}.{public}")
    return found


def test_what_modules_export_is_there_and_documented():
    modules = [importlib.import_module(name) for name in filter(_is_installed, _modules())]
    assert len(modules) > 200
    assert [name for module in modules for name in _undocumented(module)] == []


def test_an_undocumented_export_is_found():
    module = types.ModuleType("some", "It has a docstring.")
    exec("def shown(): 'Says it.'\ndef silent(): pass\ndef _own(): pass", vars(module))
    for function in ("shown", "silent", "_own"):
        vars(module)[function].__module__ = "some"
    assert _undocumented(module) == ["some.silent"]


def _modules_with_examples():
    files = (p for p in PACKAGE.rglob("*.py") if ">>> " in p.read_text(encoding="utf-8"))
    return sorted(".".join(p.relative_to(ROOT).with_suffix("").parts) for p in files)


@pytest.mark.parametrize("name", _modules_with_examples())
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name.removesuffix(".__init__"))
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
