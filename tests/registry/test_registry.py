"""The registry: every way to declare, to ask, and to undo."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

import symmplan
from symmplan import registry
from symmplan.errors import DeclarationError
from symmplan.model import OpSpec, Requirement

LIB = torch.library.Library("symmtest_registry", "FRAGMENT")
LIB.define("plain(Tensor input, Tensor other, str where) -> Tensor")
LIB.define("many(Tensor[] xs, Tensor? y, Tensor[][] zs, str g) -> (Tensor, int, Tensor[])")
LIB.define("outs(Tensor x, str g, *, Tensor(a!) out) -> Tensor(a!)")
LIB.define("lists_out(Tensor x, Tensor(a!)[] out, str? g=None) -> ()")
LIB.define("over(Tensor x, str g) -> Tensor")
LIB.define("over.two(Tensor x, Tensor y, str g) -> Tensor")
LIB.define("over.numbers(int x) -> int")
LIB.define("over_out(Tensor x, str g, *, Tensor(a!) out) -> Tensor(a!)")
OPS = torch.ops.symmtest_registry
NS = "symmtest_registry"


@torch.library.custom_op(f"{NS}::custom", mutates_args=())
def custom(x: torch.Tensor, g: str) -> torch.Tensor:
    return x.clone()


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
def test_every_algorithm_to_point_at_an_op(ref):
    returned = symmplan.symm_args("x", "return", group="g", align=16, signal_pad=True)(ref)
    assert returned is ref
    spec = symmplan.requirements(custom)
    assert spec is not None
    assert spec.requirements == (Requirement("x", 16, True), Requirement("return", 16, True))
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


def test_one_name_and_a_list_of_names_are_accepted_alike():
    op, specs = f"{NS}::plain", []
    for where in ("other", ["other"], ("other",), Requirement("other")):
        symmplan.register_symm_mem_args(op, where, group="where")
        specs.append(symmplan.requirements(op))
        symmplan.unregister(op)
        symmplan.symm_args(where, group="where")(op)
        specs.append(symmplan.requirements(op))
        symmplan.unregister(op)
    assert specs == [OpSpec(op=f"{op}.default", requirements=(where,), group="where")] * 8
    symmplan.symm_args(["input"], "return", group="where")(op)
    assert [r.where for r in symmplan.requirements(op).requirements] == ["input", "return"]


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
