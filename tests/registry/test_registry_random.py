"""Random ops, random declarations, and an oracle that shares no code with the registry.

The oracle never looks at torch's schemas: it works on the description from which the schema's text
was made.
"""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import symmplan
from examples import examples
from symmplan import registry
from symmplan.errors import CaptureError, DeclarationError
from symmplan.integrate.compile import ops as compile_ops
from symmplan.model import Requirement

LIB = torch.library.Library("symmtest_random", "FRAGMENT")
NUMBER = itertools.count()
RANDOM = examples(
    160,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

TENSORS = ["Tensor", "Tensor?", "Tensor[]", "Tensor?[]", "Tensor[]?", "Tensor[][]"]
WRITTEN = ["Tensor({}!)", "Tensor({}!)?", "Tensor({}!)[]"]
GROUPS = ["str", "str?", "Any", "__torch__.torch.classes.c10d.ProcessGroup"]
PLAIN = ["int", "SymInt", "float", "bool", "Scalar", "int[]", "ScalarType?", "str[]", "Device"]
NAMES = ["input", "self", "x", "y", "out", "group", "group_name", "pg", "tag", "dim", "name", "a_b"]
DEFAULTS = {"int": "3", "float": "0.5", "bool": "True", "str": "'g'", "str?": "None"}
DEFAULTS |= {"Tensor?": "None", "ScalarType?": "None"}


@frozen
class Arg:
    name: str
    type: str
    kwarg_only: bool = False
    default: bool = False

    @property
    def tensor(self):
        return self.type.startswith("Tensor")

    @property
    def group(self):
        return self.type in GROUPS


@frozen
class Op:
    name: str
    args: tuple[Arg, ...]
    results: tuple[str, ...]

    @property
    def qualified(self):
        return f"symmtest_random::{self.name}"

    @property
    def overload(self):
        return getattr(torch.ops.symmtest_random, self.name).default

    @property
    def places(self):
        """All that may be declared, in canonical spelling and order."""
        found = [a.name for a in self.args if a.tensor]
        for i, result in enumerate(self.results):
            if result.startswith("Tensor"):
                found.append("return" if len(self.results) == 1 else f"return.{i}")
        return found

    def text(self):
        letters = iter("abcdefghijklmnop")
        parts = []
        starred = False
        for arg in self.args:
            if arg.kwarg_only and not starred:
                parts.append("*")
                starred = True
            default = f"={DEFAULTS[arg.type]}" if arg.default else ""
            parts.append(f"{arg.type.format(next(letters))} {arg.name}{default}")
        results = ", ".join(self.results)
        if len(self.results) != 1:
            results = f"({results})"
        return f"{self.name}({', '.join(parts)}) -> {results}"


@st.composite
def ops(draw, *, declarable=False):
    """Random ops; with ``declarable`` only such that have a tensor and a group."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=2 * declarable, max_size=6))
    kinds = [st.sampled_from(k) for k in (TENSORS, WRITTEN, GROUPS, PLAIN)]
    types = [draw(st.one_of(kinds)) for _ in names]
    if declarable:
        types[0] = draw(st.one_of(kinds[:2]))
        types[1] = draw(kinds[2])
        order = draw(st.permutations(range(len(names))))
        types = [types[i] for i in order]
    only_by_name = draw(st.integers(0, len(names)))
    optional = draw(st.integers(0, len(names)))
    args = []
    for i, (name, kind) in enumerate(zip(names, types, strict=True)):
        # torch wants defaults on all positional arguments after the first that has one
        default = i >= optional and all(t in DEFAULTS for t in types[i:only_by_name])
        default = default and kind in DEFAULTS
        args.append(Arg(name, kind, kwarg_only=i >= only_by_name, default=default))
    results = draw(
        st.lists(
            st.sampled_from(["Tensor", "Tensor", "Tensor[]", "Tensor?", "int", "float"]), max_size=3
        )
    )
    op = Op(f"op{next(NUMBER)}", tuple(args), tuple(results))
    LIB.define(op.text())
    return op


@frozen
class Declaration:
    where: tuple[str, ...]
    group: str
    align: object = 256
    signal_pad: bool = False
    handshake: bool = False
    release: bool = False
    asynchronous: bool = False

    def make(self, ref):
        symmplan.register_symm_mem_args(
            ref,
            self.where,
            group=self.group,
            align=self.align,
            signal_pad=self.signal_pad,
            handshake=self.handshake,
            release=self.release,
            asynchronous=self.asynchronous,
        )


@st.composite
def fitting(draw, op):
    """Random declarations of ``op`` that the oracle accepts."""
    if draw(st.booleans()) and any(r.startswith("Tensor") for r in op.results):
        arguments = [a.name for a in op.args if a.tensor]
        where = ["return", *(a for a in arguments if draw(st.booleans()))]
    else:
        where = draw(st.lists(st.sampled_from(op.places), unique=True, min_size=1))
        if len(op.results) == 1 and draw(st.booleans()):
            where = ["return.0" if w == "return" else w for w in where]
    declaration = Declaration(
        tuple(where),
        group=draw(st.sampled_from([a.name for a in op.args if a.group])),
        align=2 ** draw(st.sampled_from([4, 8, 12])),
        signal_pad=draw(st.booleans()),
        handshake=draw(st.booleans()),
        release=draw(st.booleans()),
        asynchronous=draw(st.booleans()),
    )
    assert oracle(op, declaration) is not None
    return declaration


@st.composite
def declarations(draw, op):
    groups = [a.name for a in op.args if a.group]
    wrong = [*NAMES, "inptu", "return.1", "return.7", "return.", "return.x", "return.-1", ""]
    right = [*op.places, *(["return"] if op.places and "return.0" in op.places else [])]
    mostly_right = st.sampled_from([*right * 6, *wrong]) if right else st.sampled_from(wrong)
    return Declaration(
        where=tuple(draw(st.lists(mostly_right, max_size=3))),
        group=draw(st.sampled_from([*groups * 10, *NAMES, "grp"])),
        align=draw(
            st.sampled_from([256, 256, 1, 16, 4096, 2**20, 0, -16, 24, 3, 16.0, True, "16"])
        ),
        signal_pad=draw(st.booleans()),
        handshake=draw(st.booleans()),
        release=draw(st.booleans()),
        asynchronous=draw(st.booleans()),
    )


def right_or_wrong(op):
    if op.places and any(a.group for a in op.args):
        return declarations(op) | fitting(op)
    return declarations(op)


def oracle(op, declaration):
    """The places that an acceptable declaration covers, in order; None if it is not acceptable."""
    if declaration.group not in {a.name for a in op.args if a.group}:
        return None
    if type(declaration.align) is not int or max(declaration.align, 0).bit_count() != 1:
        return None
    covered = []
    for where in declaration.where:
        results = [f"return.{i}" for i, r in enumerate(op.results) if r.startswith("Tensor")]
        if len(op.results) == 1:
            results = ["return" for _ in results]
        if where == "return":
            found = results
        elif where.startswith("return."):
            index = where.removeprefix("return.")
            if not index.isdecimal() or int(index) >= len(op.results):
                return None
            found = ["return"] if len(op.results) == 1 else [where]
            found = [f for f in found if f in results]
        else:
            found = [a.name for a in op.args if a.name == where and a.tensor]
        if not found:
            return None
        covered += found
    if not covered or len(covered) != len(set(covered)):
        return None
    return [place for place in op.places if place in covered]


@RANDOM
@given(st.data())
def test_a_declaration_is_accepted_exactly_when_it_fits(data):
    op = data.draw(ops(declarable=data.draw(st.booleans())))
    declaration = data.draw(right_or_wrong(op))
    expected = oracle(op, declaration)
    ref = data.draw(st.sampled_from([op.qualified, f"{op.qualified}.default", op.overload]))
    with registry.isolated():
        if expected is None:
            with pytest.raises(DeclarationError) as caught:
                declaration.make(ref)
            check_error(op, caught.value)
            assert symmplan.requirements(ref) is None
            return
        declaration.make(ref)
        spec = symmplan.requirements(op.qualified)
        assert [r.where for r in spec.requirements] == expected
        assert {(r.align, r.signal_pad) for r in spec.requirements} == {
            (declaration.align, declaration.signal_pad)
        }
        assert spec.op == f"{op.qualified}.default"
        for name in ("group", "handshake", "release", "asynchronous"):
            assert getattr(spec, name) == getattr(declaration, name)
        assert registry.spec_for(op.overload) == spec


def check_error(op, error):
    """Names the op, what was given, and what exists, in words and as attributes."""
    text = str(error)
    assert error.op == f"{op.qualified}.default"
    assert op.qualified in text.splitlines()[0]
    assert "expected " in text
    assert "; got " in text
    assert "fix: " in text
    for name, value in error.fields.items():
        assert getattr(error, name) == value
    if "existing" in error.fields:
        groups = tuple(a.name for a in op.args if a.group)
        assert error.existing in (tuple(op.places), groups)


@RANDOM
@given(st.data())
def test_what_was_declared_can_be_declared_again(data):
    op = data.draw(ops(declarable=True))
    declaration = data.draw(fitting(op))
    with registry.isolated():
        declaration.make(op.qualified)
        spec = symmplan.requirements(op.qualified)
        facts = {n: getattr(spec, n) for n in ("group", "handshake", "release", "asynchronous")}
        again = data.draw(st.permutations(spec.requirements))
        symmplan.register_symm_mem_args(spec.op, again, **facts)
        assert symmplan.requirements(spec.op) == spec
        registry.unregister(spec.op)
        symmplan.register_symm_mem_args(spec.op, again, **facts)
        assert symmplan.requirements(spec.op) == spec


@RANDOM
@given(st.data())
def test_a_second_declaration_is_refused_exactly_when_it_differs(data):
    op = data.draw(ops(declarable=True))
    first = data.draw(fitting(op))
    other = data.draw(fitting(op))
    names = ["where", "group", "align", "signal_pad", "handshake", "release", "asynchronous"]
    taken = data.draw(st.lists(st.sampled_from(names), max_size=2))
    second = evolve(first, **{n: getattr(other, n) for n in taken})
    same = oracle(op, first) == oracle(op, second) and evolve(first, where=()) == evolve(
        second, where=()
    )
    with registry.isolated():
        first.make(op.qualified)
        spec = symmplan.requirements(op.qualified)
        if same:
            second.make(op.overload)
        else:
            with pytest.raises(DeclarationError, match="already declared") as caught:
                second.make(op.overload)
            assert caught.value.earlier == spec
            assert [r.where for r in caught.value.later.requirements] == oracle(op, second)
        assert symmplan.requirements(op.qualified) == spec


@RANDOM
@given(st.data())
def test_calls_are_bound_as_python_would_bind_them(data):
    op = data.draw(ops())
    kinds = {True: inspect.Parameter.KEYWORD_ONLY, False: inspect.Parameter.POSITIONAL_OR_KEYWORD}
    values = {"3": 3, "0.5": 0.5, "True": True, "'g'": "g", "None": None}
    ordered = inspect.Signature(
        [
            inspect.Parameter(
                a.name,
                kinds[a.kwarg_only],
                default=values[DEFAULTS[a.type]] if a.default else inspect.Parameter.empty,
            )
            for a in op.args
        ]
    )
    args = [object() for _ in range(data.draw(st.integers(0, len(op.args) + 1)))]
    rest = [a.name for a in op.args[len(args) :]] + (["nothing"] if len(op.args) > 4 else [])
    names = data.draw(st.lists(st.sampled_from([*rest, *rest, *NAMES]), unique=True, max_size=6))
    kwargs = {name: object() for name in names}
    try:
        expected = ordered.bind(*args, **kwargs)
    except TypeError:
        with pytest.raises(CaptureError):
            registry.bind_arguments(op.overload, args, kwargs)
        return
    expected.apply_defaults()
    bound = registry.bind_arguments(op.overload, args, kwargs)
    assert bound == dict(expected.arguments)
    assert list(bound) == [a.name for a in op.args]


def test_no_text_is_taken_for_an_op_by_mistake():
    refused = set()

    @RANDOM
    @given(st.text(max_size=20))
    @example("symmtest_random::")
    @example("::x")
    @example("symmtest_random::op0.default.more")
    @example("__class__::__name__")
    @example("higher_order::cond")
    @example("symmplan::mm_out")
    def ask(name):
        if name.partition(".")[0] in existing:
            return
        for asked in (symmplan.requirements, registry.unregister):
            with pytest.raises(DeclarationError) as caught:
                asked(name)
            assert caught.value.op == name
        refused.add(name)

    # Ops are defined at any time, and Hypothesis draws names that it has seen in the program.
    compile_ops.load()
    existing = {schema.name for schema in torch._C._jit_get_all_schemas()}
    assert "symmplan::mm_out" in existing
    assert symmplan.requirements("symmplan::mm_out") is None
    ask()
    assert len(refused) > RANDOM.max_examples // 2
    assert {"::x", "higher_order::cond"} <= refused


def test_schemas_are_as_described():
    """The generator covers what it claims to: guards the tests above against a blind generator."""
    seen = set()

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def collect(data):
        op = data.draw(ops())
        seen.update(a.type for a in op.args)
        seen.update("default" for a in op.args if a.default)
        seen.update("kwarg_only" for a in op.args if a.kwarg_only)
        seen.add(f"{len(op.results)} results")
        seen.add(oracle(op, data.draw(right_or_wrong(op))) is not None)

    collect()
    assert seen >= {*TENSORS, *WRITTEN, *GROUPS, "default", "kwarg_only", "0 results", "3 results"}
    assert seen >= {True, False}


def test_oracle_knows_right_from_wrong():
    op = Op("o", (Arg("x", "Tensor"), Arg("g", "str")), ("Tensor",))
    assert oracle(op, Declaration(("return.0", "x"), "g")) == ["x", "return"]
    assert oracle(op, Declaration(("return.0", "return"), "g")) is None
    assert oracle(op, Declaration(("g",), "g")) is None
    assert Requirement("x").align == 256
