"""The registry: every way to declare, to ask, and to undo."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import threading
import types

import pytest
import torch
import torch.distributed as dist

import symmplan
from symmplan import registry
from symmplan.errors import CaptureError, DeclarationError
from symmplan.model import OpSpec, Requirement
from symmplan.registry import _upstream, plugins

LIB = torch.library.Library("symmtest_registry", "FRAGMENT")
LIB.define("plain(Tensor input, Tensor other, str where) -> Tensor")
LIB.define("many(Tensor[] xs, Tensor? y, Tensor[][] zs, str g) -> (Tensor, int, Tensor[])")
LIB.define("outs(Tensor x, str g, *, Tensor(a!) out) -> Tensor(a!)")
LIB.define("lists_out(Tensor x, Tensor(a!)[] out, str? g=None) -> ()")
LIB.define("over(Tensor x, str g) -> Tensor")
LIB.define("over.two(Tensor x, Tensor y, str g) -> Tensor")
LIB.define("over.numbers(int x) -> int")
LIB.define("over_out(Tensor x, str g, *, Tensor(a!) out) -> Tensor(a!)")
LIB.define("with_pg(Tensor x, __torch__.torch.classes.c10d.ProcessGroup pg) -> Tensor")
LIB.define("with_any(Tensor x, Any team, int n=3) -> Tensor")
LIB.define("upstream(Tensor x, Tensor y, str group_name) -> Tensor")
LIB.define("upstream_pg(Tensor x, __torch__.torch.classes.c10d.ProcessGroup my_group) -> Tensor")
LIB.define("upstream_bad(Tensor x, str reduce_op) -> Tensor")
OPS = torch.ops.symmtest_registry
NS = "symmtest_registry"


@torch.library.custom_op(f"{NS}::custom", mutates_args=())
def custom(input: torch.Tensor, g: str) -> torch.Tensor:
    return input.clone()


@pytest.fixture(autouse=True)
def _isolated():
    with registry.isolated():
        yield


def declare(op, *where, **options):
    symmplan.register_symm_mem_args(op, where, **options)
    return symmplan.requirements(op)


def test_declares_arguments_and_results_in_schema_order():
    spec = declare(f"{NS}::plain", "return", "other", group="where")
    assert spec == OpSpec(
        op=f"{NS}::plain.default",
        requirements=(Requirement("other"), Requirement("return")),
        group="where",
        handshake=False,
        release=False,
    )


@pytest.mark.parametrize(
    "ref",
    [
        f"{NS}::custom",
        f"{NS}::custom.default",
        custom,
        OPS.custom,
        OPS.custom.default,
    ],
    ids=["name", "overload name", "CustomOpDef", "packet", "overload"],
)
def test_every_way_to_point_at_an_op(ref):
    returned = symmplan.symm_args("input", "return", group="g", align=16, signal_pad=True)(ref)
    assert returned is ref
    spec = symmplan.requirements(custom)
    assert spec is not None
    assert spec.requirements == (Requirement("input", 16, True), Requirement("return", 16, True))
    assert symmplan.requirements(ref) == spec == registry.spec_for(OPS.custom.default)


def test_decorator_sits_above_custom_op():
    @symmplan.symm_args("x", group="g")
    @torch.library.custom_op(f"{NS}::decorated", mutates_args=())
    def decorated(x: torch.Tensor, g: str) -> torch.Tensor:
        return x + 1

    assert torch.equal(decorated(torch.zeros(2), "0"), torch.ones(2))
    assert [r.where for r in symmplan.requirements(decorated).requirements] == ["x"]


def test_a_requirement_carries_its_own_alignment_and_pad():
    spec = declare(f"{NS}::plain", "input", Requirement("other", 4096, True), group="where")
    assert spec.requirements == (Requirement("input"), Requirement("other", 4096, True))


def test_lists_optionals_and_several_results():
    spec = declare(f"{NS}::many", "return", "zs", "xs", "y", group="g")
    assert [r.where for r in spec.requirements] == ["xs", "y", "zs", "return.0", "return.2"]
    with registry.isolated():
        registry.unregister(f"{NS}::many")
        assert [r.where for r in declare(f"{NS}::many", "return.2", group="g").requirements] == [
            "return.2"
        ]


def test_out_arguments():
    assert declare(f"{NS}::outs", "out", group="g").requirements == (Requirement("out"),)
    assert declare(f"{NS}::lists_out", "out", group="g").requirements == (Requirement("out"),)


def test_out_variant_is_named_with_its_overload():
    spec = declare(f"{NS}::over.default", "return", group="g", out=f"{NS}::over_out")
    assert spec.out == f"{NS}::over_out.default"


def test_a_name_without_overload_declares_all_overloads_that_fit():
    declare(f"{NS}::over", "x", group="g")
    declared = [o for o in OPS.over.overloads() if registry.spec_for(getattr(OPS.over, o))]
    assert declared == ["default", "two"]
    registry.unregister(OPS.over)
    declare(OPS.over, "y", group="g")
    assert registry.spec_for(OPS.over.default) is None
    assert symmplan.requirements(OPS.over).op == f"{NS}::over.two"


def test_a_failed_declaration_leaves_nothing_behind():
    declare(f"{NS}::over.two", "y", group="g")
    with pytest.raises(DeclarationError, match="already declared"):
        declare(f"{NS}::over", "x", group="g")
    assert registry.spec_for(OPS.over.default) is None


def test_repeating_is_fine_and_contradicting_is_not():
    spec = declare(f"{NS}::plain", "input", "return", group="where")
    assert declare(OPS.plain.default, "return.0", "input", group="where") == spec
    with pytest.raises(DeclarationError) as caught:
        declare(f"{NS}::plain", "input", group="where")
    assert caught.value.earlier == spec
    assert symmplan.requirements(f"{NS}::plain") == spec
    assert registry.unregister(f"{NS}::plain")
    assert not registry.unregister(f"{NS}::plain")
    assert declare(f"{NS}::plain", "input", group="where") != spec


def test_an_op_defined_anew_is_not_bound_by_its_old_declaration():
    old = torch.library.Library("symmtest_redefined", "FRAGMENT")
    old.define("f(Tensor x, str g) -> Tensor")
    declare("symmtest_redefined::f", "x", group="g")
    old._destroy()
    new = torch.library.Library("symmtest_redefined", "FRAGMENT")
    new.define("f(Tensor y, str g) -> Tensor")
    assert symmplan.requirements("symmtest_redefined::f") is None
    assert declare("symmtest_redefined::f", "y", group="g").requirements == (Requirement("y"),)
    new._destroy()


def test_isolated_undoes_declarations_and_removals():
    declare(f"{NS}::plain", "input", group="where")
    with registry.isolated():
        declare(f"{NS}::over", "x", group="g")
        registry.unregister(f"{NS}::plain")
        assert symmplan.requirements(f"{NS}::plain") is None
    assert symmplan.requirements(f"{NS}::over") is None
    assert symmplan.requirements(f"{NS}::plain") is not None


def test_all_specs_are_sorted_and_hold_what_was_declared():
    declare(f"{NS}::plain", "input", group="where")
    specs = list(registry.all_specs())
    assert [s.op for s in specs] == sorted(s.op for s in specs)
    assert f"{NS}::plain.default" in {s.op for s in specs}
    assert "_c10d_functional::all_reduce.default" in {s.op for s in specs}
    assert specs == list(registry.all_specs())


def test_a_user_overrules_the_catalogue():
    op = torch.ops._c10d_functional.all_reduce.default
    assert registry.spec_for(op).origin == "catalogue"
    declare(op, "return", group="group_name")
    assert registry.spec_for(op).origin == "user"
    registry.unregister(op)
    assert registry.spec_for(op).origin == "catalogue"


def test_an_undeclared_op_has_no_requirements():
    assert symmplan.requirements("aten::add") is None
    assert registry.spec_for(torch.ops.aten.add.Tensor) is None


def test_threads_see_one_declaration_or_none():
    start = threading.Barrier(8)
    outcomes = []

    def work(i):
        start.wait()
        try:
            declare(f"{NS}::plain", "input", group="where", align=2 ** (i % 2 + 4))
        except DeclarationError:
            outcomes.append("refused")
        else:
            outcomes.append("declared")
        assert registry.spec_for(OPS.plain.default).requirements[0].align in (16, 32)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["declared"] * 4 + ["refused"] * 4


def test_importing_the_registry_does_not_import_torch():
    code = "import symmplan.registry, symmplan.cli.ops, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- upstream's registry -----------------------------------------------------------------------


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
    monkeypatch.setattr(_upstream, "_simple_registry", lambda: fake)
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
    upstream.register(f"{NS}::upstream", "z")
    upstream.register(f"{NS}::upstream_bad", "x")
    for name in ("upstream", "upstream_bad"):
        with pytest.raises(DeclarationError, match="torch's registry"):
            symmplan.requirements(f"{NS}::{name}")
    assert not {s.op for s in registry.all_specs()} & {
        f"{NS}::upstream.default",
        f"{NS}::upstream_bad.default",
    }
    declare(f"{NS}::upstream_bad", "x", group="reduce_op")
    assert symmplan.requirements(f"{NS}::upstream_bad").origin == "user"


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
        assert _upstream.names_declared_upstream() == []
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
    monkeypatch.setattr(plugins, "_begun", threading.Event())
    monkeypatch.setattr(plugins, "_done", threading.Event())
    with pytest.warns(UserWarning, match="'a' publishes .*symmtest_plugin:explode.* Zero"):
        registry.spec_for(torch.ops.aten.sub.Tensor)
    assert symmplan.requirements(OPS.plain) is not None


# -- calls ----------------------------------------------------------------------------------------


def test_bind_arguments_fills_in_defaults():
    bound = registry.bind_arguments(OPS.with_any.default, (1,), {"team": "t"})
    assert bound == {"x": 1, "team": "t", "n": 3}
    assert list(bound) == ["x", "team", "n"]


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ((1, 2, 3, 4), {}, "at most 3 positional"),
        ((1,), {"x": 2, "team": 3}, "'x' by position and by name"),
        ((1, 2), {"m": 3}, "'m'"),
        ((1,), {}, "a value for 'team'"),
    ],
)
def test_bind_arguments_refuses_a_call_that_does_not_fit(args, kwargs, told):
    with pytest.raises(CaptureError, match="does not fit its schema") as caught:
        registry.bind_arguments(OPS.with_any.default, args, kwargs)
    assert told in str(caught.value)
    assert caught.value.op == f"{NS}::with_any.default"


def test_kwarg_only_arguments_do_not_go_by_position():
    with pytest.raises(CaptureError, match="at most 2 positional"):
        registry.bind_arguments(OPS.outs.default, (1, "g", 3), {})


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def group_name(op, args, kwargs, where):
    spec = OpSpec(op=op.name(), requirements=(), group=where)
    return registry.resolve_group_name(spec, op, args, kwargs)


def test_the_group_is_found_however_it_is_given(group):
    name = group.group_name
    assert group_name(OPS.with_any.default, (1, "some"), {}, "team") == "some"
    assert group_name(OPS.with_any.default, (1,), {"team": group}, "team") == name
    assert group_name(OPS.with_pg.default, (1, group), {}, "pg") == name
    assert group_name(OPS.with_pg.default, (1, group.boxed()), {}, "pg") == name
    assert group_name(OPS.lists_out.default, (1, []), {}, "g") == name


def test_the_group_is_found_behind_graph_nodes(group):
    root = torch.nn.Module()
    root.inner = torch.nn.Module()
    root.inner.pg = group
    graph = torch.fx.Graph(owning_module=root)
    x = graph.placeholder("x")
    given = graph.placeholder("given")
    given.meta["val"] = group
    held = graph.create_node("get_attr", "inner.pg")
    lost = graph.create_node("get_attr", "inner.nothing")
    for node in (given, held):
        assert group_name(OPS.with_any.default, (x, node), {}, "team") == group.group_name
    with pytest.raises(CaptureError, match="names no process group"):
        group_name(OPS.with_any.default, (x, lost), {}, "team")


def test_a_call_without_a_group_is_refused():
    with pytest.raises(CaptureError, match="names no process group") as caught:
        group_name(OPS.lists_out.default, (1, []), {}, "g")
    assert "None means the default group, and there is none" in str(caught.value)
    with pytest.raises(CaptureError, match="names no process group"):
        group_name(OPS.with_any.default, (1, 7), {}, "team")
