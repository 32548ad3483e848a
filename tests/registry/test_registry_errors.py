"""Every error of the registry, word for word."""

from __future__ import annotations

import pytest
import torch

import symmplan
from symmplan import registry
from symmplan.errors import DeclarationError, UnknownOpError
from symmplan.model import Requirement

LIB = torch.library.Library("symmtest_errors", "FRAGMENT")
LIB.define("f(Tensor input, int n, str group_name) -> (Tensor, int)")
LIB.define("g.named(Tensor x, str tag, str pg) -> Tensor")
LIB.define("f_out(Tensor input, int n, str group_name, *, Tensor(a!) out) -> (Tensor(a!), int)")
LIB.define("no_group(Tensor x) -> Tensor")
LIB.define("two_groups(Tensor x, str group_a, str group_b) -> Tensor")
LIB.define("no_result(Tensor x, str group_name) -> ()")
LIB.define("no_tensor(int n, str g) -> ()")
F = "symmtest_errors::f"


@pytest.fixture(autouse=True)
def _isolated():
    with registry.isolated():
        yield


def refused(op, *where, **options):
    with pytest.raises(DeclarationError) as caught:
        symmplan.register_symm_mem_args(op, where, **options)
    assert isinstance(caught.value, ValueError)
    text = str(caught.value)
    prefix = f"{type(caught.value).rule}: "
    assert text.startswith(prefix)
    return text.removeprefix(prefix), caught.value


def test_unknown_argument():
    text, error = refused(F, "inputs")
    assert text == (
        "symmtest_errors::f.default has no argument 'inputs'\n"
        "  expected one of 'input', 'return.0'; got 'inputs'\n"
        "  fix: did you mean 'input'?"
    )
    assert (error.op, error.where) == (f"{F}.default", "inputs")
    assert error.existing == ("input", "return.0")


def test_unknown_argument_with_nothing_close():
    text, _ = refused(F, "weights")
    assert text.splitlines()[2] == (
        "  fix: the schema is symmtest_errors::f(Tensor input, int n, str group_name) "
        "-> (Tensor, int)"
    )


def test_argument_without_tensors():
    text, error = refused(F, "n")
    assert text == (
        "argument 'n' of symmtest_errors::f.default holds no tensor\n"
        "  expected one of 'input', 'return.0'; got 'n' of type int\n"
        "  fix: declare tensors only; the group goes into group="
    )
    assert error.where == "n"


def test_op_without_tensors():
    text, _ = refused("symmtest_errors::no_tensor", "n", group="g")
    assert "expected nothing: the op has no tensors; got 'n' of type int" in text


@pytest.mark.parametrize("where", ["return.2", "return.17"])
def test_result_that_is_not_there(where):
    text, error = refused(F, where)
    assert text == (
        f"symmtest_errors::f.default has no result '{where}'\n"
        "  expected one of 'input', 'return.0'; got an op with 2 results\n"
        "  fix: the schema is symmtest_errors::f(Tensor input, int n, str group_name) "
        "-> (Tensor, int)"
    )
    assert error.where == where


def test_result_without_tensors():
    text, _ = refused(F, "return.1")
    assert text.splitlines()[:2] == [
        "result 'return.1' of symmtest_errors::f.default holds no tensor",
        "  expected one of 'input', 'return.0'; got results of type (Tensor, int)",
    ]


@pytest.mark.parametrize("where", [None, 3, b"input"])
def test_a_name_that_is_no_string(where):
    text, _ = refused(F, where)
    assert text == (
        f"{where!r} does not name an argument or result of symmtest_errors::f.default\n"
        f"  expected a string; got {type(where).__name__}\n"
        "  fix: pass names of the schema"
    )


def test_a_name_given_twice():
    text, error = refused(F, "return", "return.0")
    assert text == (
        "symmtest_errors::f.default is given 'return.0' twice\n"
        "  expected each argument and result once; got 'return', 'return.0'\n"
        "  fix: drop one of the entries that cover 'return.0'"
    )
    assert error.where == "return.0"


def test_no_names():
    text, error = refused(F)
    assert text == (
        "nothing of symmtest_errors::f.default is declared symmetric\n"
        "  expected at least one of input, return.0; got no names\n"
        "  fix: name the arguments and results that must be symmetric"
    )
    assert error.existing == ("input", "return.0")


def test_group_argument_that_is_not_there():
    text, error = refused("symmtest_errors::g", "x", group="group_name")
    assert text == (
        "symmtest_errors::g.named has no argument 'group_name' to name its process group\n"
        "  expected one of 'tag', 'pg'; got 'group_name'\n"
        "  fix: the schema is symmtest_errors::g.named(Tensor x, str tag, str pg) -> Tensor"
    )
    assert error.existing == ("tag", "pg")


def test_group_argument_of_the_wrong_type():
    text, error = refused(F, "input", group="n")
    assert text == (
        "argument 'n' of symmtest_errors::f.default cannot name a process group\n"
        "  expected one of 'group_name'; got 'n' of type int\n"
        "  fix: pass group='group_name'"
    )
    assert error.where == "n"


def test_op_without_any_group_argument():
    text, error = refused("symmtest_errors::no_group", "x", group="group_name")
    assert text == (
        "symmtest_errors::no_group.default has no argument 'group_name' to name its process "
        "group\n"
        "  expected a str, ProcessGroup or Any argument; the op has none; got 'group_name'\n"
        "  fix: leave group out: it then runs over the default group"
    )
    assert error.existing == ()


def test_several_arguments_that_may_name_the_group():
    text, error = refused("symmtest_errors::two_groups", "x")
    assert text == (
        "symmtest_errors::two_groups.default has several arguments that may name its process "
        "group\n"
        "  expected one; got 'group_a', 'group_b'\n"
        "  fix: pass group='group_a', or whichever it is"
    )
    assert error.existing == ("group_a", "group_b")


@pytest.mark.parametrize("fact", ["handshake", "release", "signal_pad", "asynchronous"])
@pytest.mark.parametrize("value", ["maybe", 1, None])
def test_facts_are_true_or_false(fact, value):
    text, error = refused(F, "input", **{fact: value})
    assert f"{fact} of symmtest_errors::f.default is {value!r}\n" in text
    assert "expected True or False" in text
    assert error.op == "symmtest_errors::f.default"


@pytest.mark.parametrize("align", [0, -8, 24, 16.0, True, "16", None])
def test_alignment(align):
    text, error = refused(F, "input", align=align)
    assert text == (
        f"alignment of 'input' of symmtest_errors::f.default is {align!r}\n"
        f"  expected a positive power of two, in bytes; got {align!r}\n"
        "  fix: leave align out for 256 bytes, or give a power of two"
    )
    assert error.align is align


def test_alignment_of_one_requirement():
    text, _ = refused(F, "return.0", Requirement("input", align=48))
    assert text.startswith("alignment of 'input' of symmtest_errors::f.default is 48\n")


def test_op_that_is_not_defined_yet():
    text, error = refused("symmtest_errors::later", "x")
    assert text.splitlines()[0] == "no op named symmtest_errors::later is defined"
    assert text.splitlines()[2] == ("  fix: import or define symmtest_errors::later first")
    assert isinstance(error, UnknownOpError)
    assert error.op == "symmtest_errors::later"
    assert "symmtest_errors::f" in error.existing


def test_op_that_is_misspelt():
    text, _ = refused("symmtest_errors::no_gruop", "x")
    assert text.splitlines()[2] == (
        "  fix: did you mean 'symmtest_errors::no_group'? "
        "If not, import or define symmtest_errors::no_gruop first"
    )


def test_namespace_that_is_unknown():
    text, error = refused("symmtest_nobody::f", "x")
    assert text.splitlines()[1] == (
        "  expected a namespace that has ops; 'symmtest_nobody' has none; got 'symmtest_nobody::f'"
    )
    assert error.existing == ()


def test_overload_that_is_not_there():
    text, error = refused("symmtest_errors::g.nmaed", "x")
    assert text == (
        "symmtest_errors::g has no overload 'nmaed'\n"
        "  expected one of named; got 'nmaed'\n"
        "  fix: did you mean 'named'?"
    )
    assert error.existing == ("named",)


@pytest.mark.parametrize(
    "name", ["", "f", "a:b", "a::b.", "::b", "a::", "a::b.c.d", "torch.ops.a.b"]
)
def test_not_a_qualified_name(name):
    text, error = refused(name, "x")
    assert text == (
        f"{name!r} is not a qualified op name\n"
        f'  expected "namespace::name" or "namespace::name.overload"; got {name!r}\n'
        "  fix: write the name as it is registered, with its namespace and two colons"
    )
    assert error.op == name


def test_not_an_op():
    def kernel(x):
        return x

    text, _ = refused(kernel, "x")
    assert text == (
        "test_not_an_op.<locals>.kernel is not an op\n"
        '  expected a name like "mylib::foo", an OpOverload, an OpOverloadPacket or the result '
        "of torch.library.custom_op; got function\n"
        "  fix: put symm_args above torch.library.custom_op, not below it"
    )
    text, _ = refused(17, "x")
    assert text.splitlines()[0] == "17 is not an op"


def test_contradiction():
    symmplan.register_symm_mem_args(F, ["input"], handshake=True)
    text, error = refused(F, "return", Requirement("input", 16, signal_pad=True))
    assert text == (
        "symmtest_errors::f.default is already declared in another way\n"
        "  expected input@256 group='group_name' handshake; "
        "got input@16+pad, return.0@256 group='group_name'\n"
        "  fix: keep one of the two declarations, or call "
        "symmplan.unregister('symmtest_errors::f.default') first"
    )
    assert error.earlier.handshake
    assert not error.later.handshake


@pytest.mark.parametrize("out", ["symmtest_errors::g", F])
def test_out_variant_that_writes_nothing(out):
    text, error = refused(F, "input", out=out)
    assert text.splitlines()[:2][0] == f"{out} is not an out-variant of {F}.default"
    assert "expected 1 written tensor argument(s) that symmtest_errors::f.default lacks" in text
    assert error.out == out
    symmplan.register_symm_mem_args(F, ["input"], out="symmtest_errors::f_out")


def test_out_variant_of_an_op_without_results():
    text, _ = refused("symmtest_errors::no_result", "x", out="symmtest_errors::no_group")
    assert text.splitlines()[0] == (
        "symmtest_errors::no_group is not an out-variant of symmtest_errors::no_result.default"
    )


def test_out_variant_that_is_unknown():
    text, _ = refused(F, "input", out="symmtest_errors::f_oot")
    assert text.startswith("no op named symmtest_errors::f_oot is defined")


@pytest.mark.parametrize("given", [lambda x: x, 3, torch.ops.aten.add])
def test_the_decorator_without_parentheses(given):
    with pytest.raises(DeclarationError, match="instead of names of arguments") as caught:
        symmplan.symm_args(given)
    assert caught.value.fix == "write the names in parentheses after symm_args"


def test_what_a_message_advises_can_be_called():
    symmplan.register_symm_mem_args(F, ["input"])
    with pytest.raises(DeclarationError, match=r"symmplan\.unregister") as caught:
        symmplan.register_symm_mem_args(F, ["return"])
    assert symmplan.unregister(caught.value.op)
    symmplan.register_symm_mem_args(F, ["return"])
    assert not symmplan.unregister("symmtest_errors::g")
