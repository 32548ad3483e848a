"""Declarations that the registry takes over: from torch's registry and from installed packages."""

from __future__ import annotations

import importlib.metadata
import sys
import types

import pytest
import torch

import symmplan
from symmplan import registry
from symmplan.errors import DeclarationError
from symmplan.model import OpSpec, Requirement
from symmplan.registry import plugins
from symmplan.registry.declare import store
from symmplan.torch_private import torch_registry

LIB = torch.library.Library("symmtest_adopted", "FRAGMENT")
LIB.define("plain(Tensor input, Tensor other, str where) -> Tensor")
LIB.define("upstream(Tensor x, Tensor y, str group_name) -> Tensor")
LIB.define("upstream_pg(Tensor x, __torch__.torch.classes.c10d.ProcessGroup my_group) -> Tensor")
LIB.define("upstream_bad(Tensor x, str reduce_op) -> Tensor")
OPS = torch.ops.symmtest_adopted
NS = "symmtest_adopted"


@pytest.fixture(autouse=True)
def _isolated():
    with registry.isolated():
        yield


def declare(op, *where, **options):
    symmplan.register_symm_mem_args(op, where, **options)
    return symmplan.requirements(op)


class _Holder:
    def __init__(self, names):
        self.names = names

    def get(self):
        return self.names

    def is_registered(self):
        return bool(self.names)


class _Upstream:
    """Stands in for ``torch._library.simple_registry.singleton``, also where torch has none."""

    def __init__(self):
        self._data = {}

    def get(self, name):
        return self._data.get(name)

    def register(self, name, *arguments):
        self._data[name] = types.SimpleNamespace(symm_mem_args=_Holder(arguments))


@pytest.fixture
def upstream(monkeypatch):
    fake = _Upstream()
    monkeypatch.setattr(torch_registry, "_simple_registry", lambda: fake)
    return fake


def test_upstream_is_adopted_at_look_up(upstream):
    assert symmplan.requirements(f"{NS}::upstream") is None
    upstream.register(f"{NS}::upstream", "y")
    assert symmplan.requirements(f"{NS}::upstream") == OpSpec(
        op=f"{NS}::upstream.default",
        requirements=(Requirement("y"),),
        group="group_name",
        handshake=False,
        release=False,
        origin="torch",
    )
    upstream.register(f"{NS}::upstream", "y", "x")
    assert [r.where for r in symmplan.requirements(f"{NS}::upstream").requirements] == ["x", "y"]
    assert f"{NS}::upstream.default" in {s.op for s in registry.all_specs()}
    upstream.register(f"{NS}::upstream")
    assert symmplan.requirements(f"{NS}::upstream") is None


def test_upstream_declarations_of_a_group_by_another_name(upstream):
    upstream.register(f"{NS}::upstream_pg", "x")
    assert symmplan.requirements(f"{NS}::upstream_pg").group == "my_group"


def test_a_broken_upstream_declaration_is_named_where_it_is_asked_for(upstream):
    upstream.register(f"{NS}::upstream", "z", "y", "y")
    upstream.register(f"{NS}::upstream_bad", "reduce_op")
    for name in ("upstream", "upstream_bad"):
        with pytest.raises(DeclarationError, match="torch's registry") as caught:
            symmplan.requirements(f"{NS}::{name}")
        assert caught.value.names == ("z" if name == "upstream" else "reduce_op",)
    spec = registry.spec_for(OPS.upstream.default)  # what fits of it counts
    assert ([r.where for r in spec.requirements], len(spec.wrong)) == (["y"], 1)
    listed = {s.op for s in registry.all_specs()}
    assert f"{NS}::upstream.default" in listed
    assert f"{NS}::upstream_bad.default" not in listed
    with pytest.warns(UserWarning, match="also names reduce_op; the user's declaration wins"):
        declare(f"{NS}::upstream_bad", "x", group="reduce_op")
    assert symmplan.requirements(f"{NS}::upstream_bad").origin == "user"


def test_upstream_declarations_without_a_group(upstream):
    upstream.register(f"{NS}::upstream_bad", "x")
    spec = symmplan.requirements(f"{NS}::upstream_bad")
    assert (spec.group, [r.where for r in spec.requirements]) == (None, ["x"])


def test_a_user_overrules_upstream_and_is_told(upstream):
    upstream.register(f"{NS}::upstream", "x", "y")
    with pytest.warns(UserWarning, match="also names y; the user's declaration wins"):
        declare(f"{NS}::upstream", "x", "return", group="group_name")
    spec = symmplan.requirements(f"{NS}::upstream")  # told once
    assert spec.origin == "user"
    assert [r.where for r in spec.requirements] == ["x", "return"]


def test_upstream_adds_to_the_catalogue(upstream):
    upstream.register("symm_mem::reduce_scatter_out", "output")
    spec = symmplan.requirements("symm_mem::reduce_scatter_out")
    assert [(r.where, r.signal_pad) for r in spec.requirements] == [
        ("input", True),
        ("output", False),
    ]
    assert spec.origin == "catalogue"
    assert spec.handshake


def test_the_real_upstream_registry_where_torch_has_one():
    if not hasattr(torch.library.Library, "register_symm_mem_args"):
        assert torch_registry.names_declared_upstream() == []
        return
    lib = torch.library.Library("symmtest_real_upstream", "FRAGMENT")
    lib.define("f(Tensor x, str group_name) -> Tensor")
    assert symmplan.requirements("symmtest_real_upstream::f") is None
    lib.register_symm_mem_args("f", ["x"])
    spec = symmplan.requirements("symmtest_real_upstream::f")
    assert (spec.origin, spec.requirements) == ("torch", (Requirement("x"),))
    assert spec in list(registry.all_specs())
    lib._destroy()


# -- published declarations ---------------------------------------------------------------------


def test_declarations_that_packages_publish(monkeypatch):
    module = types.ModuleType("symmtest_plugin")
    module.declare = lambda: symmplan.register_symm_mem_args(OPS.plain, ["other"], group="where")
    module.explode = lambda: 1 / 0
    monkeypatch.setitem(sys.modules, "symmtest_plugin", module)
    points = [
        importlib.metadata.EntryPoint(name, f"symmtest_plugin{attr}", plugins.GROUP)
        for name, attr in (("b", ":declare"), ("a", ":explode"), ("c", ""))
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(store, "_published", "no")
    with pytest.warns(UserWarning, match="'a' publishes .*symmtest_plugin:explode.* Zero"):
        registry.spec_for(torch.ops.aten.sub.Tensor)
    assert symmplan.requirements(OPS.plain) is not None
