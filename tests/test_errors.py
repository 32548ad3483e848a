"""Messages of errors: their shape, their values as attributes, their place in Python's tree."""

from __future__ import annotations

import ast
import inspect
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import symmplan
from symmplan import errors
from symmplan.errors import SymmplanError

ALL = [getattr(errors, name) for name in errors.__all__]


def test_the_first_line_stands_alone():
    for kind in ALL:
        error = kind("'a' has 0 bytes", expected="1 or more", got=0, fix="drop it", buffer="a")
        first, second, third = str(error).splitlines()
        assert first == f"{kind.rule}: 'a' has 0 bytes"
        assert second == "  expected 1 or more; got 0"
        assert third == "  fix: drop it"
        assert error.buffer == "a"
        assert (error.what, error.expected, error.got) == ("'a' has 0 bytes", "1 or more", 0)


def test_each_error_has_a_rule_of_its_own_and_a_docstring():
    for kind in ALL:
        assert kind.__dict__["rule"], kind
        assert kind.__doc__, kind
        assert issubclass(kind, SymmplanError)


def test_rules_tell_the_errors_apart():
    rules = [kind.rule for kind in ALL]
    assert len(set(rules)) == len(rules)


def test_every_error_of_the_module_is_exported():
    here = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert here == set(errors.__all__)


def test_errors_of_distributed_calls_say_where():
    error = errors.PeerTimeoutError("rank 1 did not come", group="tp", rank=0)
    assert str(error) == "[group tp, rank 0] peers did not arrive in time: rank 1 did not come"
    assert (error.group, error.rank) == ("tp", 0)


def test_errors_survive_a_pipe_whole():
    for kind in ALL:
        error = kind("x", expected=1, got=2, fix="y", group="tp", rank=0, ranks=(0, 1))
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert (str(again), vars(again)) == (str(error), vars(error))


def test_parts_that_are_not_known_are_left_out():
    assert str(errors.RunError("x")) == "program diverges from its plan: x"
    assert str(errors.RunError("x", got=3)).splitlines()[1:] == ["  got 3"]
    assert str(errors.RunError("x", expected=0)).splitlines()[1:] == ["  expected 0"]
    assert str(errors.RunError("x", fix="y")).splitlines()[1:] == ["  fix: y"]


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.DeclarationError, ValueError),
        (errors.ProblemError, ValueError),
        (errors.PlanFormatError, ValueError),
        (errors.PeerTimeoutError, TimeoutError),
        (errors.PeerLostError, ConnectionError),
        (errors.BackendError, RuntimeError),
        (errors.OutOfSharedMemoryError, errors.BackendError),
        (errors.CapacityError, errors.PlanningError),
    ],
)
def test_code_that_knows_only_python_can_catch_them(kind, builtin):
    with pytest.raises(builtin):
        raise kind("x")


@given(
    what=st.text(min_size=1),
    expected=st.none() | st.integers() | st.text(),
    fields=st.dictionaries(st.sampled_from(["op", "segment", "nbytes"]), st.integers()),
)
def test_every_value_is_kept(what, expected, fields):
    error = errors.RunError(what, expected=expected, **fields)
    assert error.what == what
    assert error.expected == expected
    assert error.fields == fields
    for name, value in fields.items():
        assert getattr(error, name) == value
    assert what in str(error)


def test_every_error_class_of_the_package_is_here():
    """So that whoever catches one finds it, whatever raises it."""
    known = {"Exception", "SymmplanError", *errors.__all__}
    for path in Path(errors.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and path.name != "errors.py":
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                assert not bases & known, f"{path.name}: {node.name}"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: symmplan.fsdp.apply("model"), "needs a module"),
        (lambda: symmplan.simulate("train.py", ranks=4), "is not a function"),
        (lambda: symmplan.plan("plan.csv"), "Problem.from_csv"),
        (lambda: symmplan.plan([("a", 0, 1, 64)]), "Problem.from_intervals"),
        (lambda: symmplan.eager("world").__enter__(), "no process group|init_process_group"),
    ],
)
def test_things_of_another_kind_are_named_with_what_to_pass(call, said):
    with pytest.raises(SymmplanError, match=said):
        call()
