"""Problems and plans as canonical JSON.

[Note: JSON form]
    A problem is ``{"format": "symmplan.problem", "version": 1, "buffers": [...], "operations":
    [...], "accesses": [...]}`` with objects whose keys are the fields of `Buffer`, `Operation` and
    `Access`; ``edges``, ``together``, ``apart`` and ``shared_groups`` are lists of lists of names,
    ``unplanned`` is a list of objects. What equals its default may be left out, and is. Operations
    of one stream run in the order listed; everything else may be listed in any order. Writing
    sorts: buffers by name, operations by the canonical linear extension, the rest by content.

    A plan is ``{"format": "symmplan.plan", "version": 1, "problem": {...}, "segments": [...],
    "placements": {name: [segment, offset, nbytes]}, ...}``; what a budget demoted is its
    ``budget``.

    Reading is strict: unknown keys, wrong types, repeated keys and other versions are errors.
    Nothing is ever unpickled or evaluated.
"""

from __future__ import annotations

import functools
import json
import typing
from typing import Any, NoReturn

import attrs

from symmplan.errors import PlanFormatError, ProblemError
from symmplan.model import (
    Access,
    Barrier,
    Bound,
    Budget,
    Buffer,
    Demotion,
    Operation,
    Placement,
    Plan,
    Problem,
    SegmentSpec,
    Unplanned,
)
from symmplan.planner.order import order_of

__all__ = ["plan_from_json", "plan_to_json", "problem_from_json", "problem_to_json"]

#: Version of the JSON form; raised when older readers could misread it.
VERSION = 1
#: Longer texts are refused before they are parsed. A plan of 100,000 buffers has about 30 MB.
MAX_TEXT = 1 << 29
_PROBLEM = "symmplan.problem"
_PLAN = "symmplan.plan"


def problem_to_json(problem: Problem) -> str:
    """See `Problem.to_json`."""
    return _dump(_problem_tree(problem))


def problem_from_json(text: str) -> Problem:
    """See `Problem.from_json`."""
    return _read_problem(_parse(text, _PROBLEM))


def plan_to_json(plan: Plan) -> str:
    """See `Plan.to_json`."""
    tree: dict[str, Any] = {
        "format": _PLAN,
        "version": VERSION,
        "problem": _problem_tree(plan.problem),
        "segments": [_tree(s) for s in plan.segments],
        "placements": {
            name: [p.segment, p.offset, p.nbytes] for name, p in plan.placements.items()
        },
        "barriers": [_tree(b) for b in plan.barriers],
        "bounds": [_tree(b) for b in plan.bounds],
    }
    if plan.budget is not None:
        gave = [_tree(g) for g in plan.budget.demotions]
        tree["budget"] = {**_tree(plan.budget), "demotions": gave}
    return _dump(tree)


def plan_from_json(text: str) -> Plan:
    """See `Plan.from_json`."""
    tree = _parse(text, _PLAN)
    _check_keys("the plan", tree, Plan)
    problem_tree = tree["problem"]
    if not isinstance(problem_tree, dict) or problem_tree.get("format") != _PROBLEM:
        _wrong("the plan's problem is not one", f"an object of the format {_PROBLEM}", "another")
    problem = _read_problem(problem_tree)
    placements = tree["placements"]
    if not isinstance(placements, dict):
        _wrong("placements is no object", "{name: [segment, offset, nbytes]}", _type(placements))
    placed = {name: _placement(name, value) for name, value in placements.items()}
    made = Plan(
        problem=problem,
        segments=_objects(SegmentSpec, "segments", tree["segments"]),
        placements={name: placed[name] for name in sorted(placed)},
        barriers=_objects(Barrier, "barriers", tree.get("barriers", [])),
        bounds=_objects(Bound, "bounds", tree.get("bounds", [])),
        budget=_budget(tree.get("budget")),
    )
    made.verify()
    return made


def _budget(value: object) -> Budget | None:
    if value is None:
        return None
    rest = (
        {k: v for k, v in value.items() if k != "demotions"} if isinstance(value, dict) else value
    )
    made: Budget = _objects(Budget, "budget", [rest])[0]
    gave = value.get("demotions", []) if isinstance(value, dict) else []
    return attrs.evolve(made, demotions=_objects(Demotion, "budget.demotions", gave))


def _placement(name: str, value: object) -> Placement:
    if (
        not isinstance(value, list)
        or len(value) != 3
        or not isinstance(value[0], str)
        or not all(type(v) is int for v in value[1:])
    ):
        _wrong(f"the placement of {name!r} is malformed", "[segment, offset, nbytes]", repr(value))
    return Placement(*value)


def _problem_tree(problem: Problem) -> dict[str, Any]:
    index = order_of(problem).index
    tree: dict[str, Any] = {
        "format": _PROBLEM,
        "version": VERSION,
        "buffers": [_tree(b) for b in sorted(problem.buffers, key=lambda b: b.name)],
        "operations": [_tree(o) for o in sorted(problem.operations, key=lambda o: index[o.name])],
        "accesses": [
            _tree(a)
            for a in sorted(
                set(problem.accesses), key=lambda a: (index[a.operation], *attrs.astuple(a))
            )
        ],
    }
    lists = {
        "edges": sorted({tuple(e) for e in problem.edges}),
        "together": sorted({tuple(sorted(p)) for p in problem.together}),
        "apart": sorted({tuple(sorted(p)) for p in problem.apart}),
        "shared_groups": sorted({tuple(sorted(g)) for g in problem.shared_groups}),
    }
    tree.update({key: [list(e) for e in value] for key, value in lists.items() if value})
    if problem.unplanned:
        key = attrs.astuple
        tree["unplanned"] = [
            _tree(u) for u in sorted(problem.unplanned, key=lambda u: tuple(map(str, key(u))))
        ]
    return tree


def _read_problem(tree: dict[str, Any]) -> Problem:
    _check_version("problem", tree)
    _check_keys("the problem", tree, Problem)
    try:
        return Problem(
            buffers=_objects(Buffer, "buffers", tree["buffers"]),
            operations=_objects(Operation, "operations", tree["operations"]),
            accesses=_objects(Access, "accesses", tree["accesses"]),
            edges=_names("edges", tree.get("edges", [])),
            together=_names("together", tree.get("together", [])),
            apart=_names("apart", tree.get("apart", [])),
            shared_groups=_names("shared_groups", tree.get("shared_groups", [])),
            unplanned=_objects(Unplanned, "unplanned", tree.get("unplanned", [])),
        )
    except ProblemError as e:
        raise PlanFormatError(
            f"its problem is not well formed: {e.what}",
            expected=e.expected,
            got=e.got,
            fix=e.fix,
            problem=e,
        ) from e


def _tree(entry: Any) -> dict[str, Any]:
    """An object of all fields that differ from their default."""
    tree = {}
    for name, default in _defaults(entry.__class__):
        value = getattr(entry, name)
        if value != default or type(value) is not type(default):
            tree[name] = list(value) if isinstance(value, tuple) else value
    return tree


@functools.cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((f.name, f.default) for f in attrs.fields(kind))


def _dump(tree: dict[str, Any]) -> str:
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _wrong(what: str, expected: object, got: object) -> NoReturn:
    raise PlanFormatError(
        what,
        expected=expected,
        got=got,
        fix="read a text that to_json of this version of symmplan wrote, or plan again",
    )


def _type(value: object) -> str:
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")


def _parse(text: str, wanted: str) -> dict[str, Any]:
    if not isinstance(text, str):
        _wrong("the text is no str", "JSON text", type(text).__name__)
    if len(text) > MAX_TEXT:
        _wrong(f"the text has {len(text)} characters", f"at most {MAX_TEXT}", len(text))
    try:
        tree = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as e:
        _wrong(
            f"the text is not JSON, or was cut off, at line {e.lineno}, column {e.colno}: {e.msg}",
            "JSON",
            e.msg,
        )
    except (RecursionError, ValueError, MemoryError) as e:
        if isinstance(e, PlanFormatError):
            raise
        _wrong(f"the text cannot be parsed: {e}", "JSON as symmplan writes it", type(e).__name__)
    if not isinstance(tree, dict):
        _wrong("the text holds no object", f"an object of the format {wanted}", _type(tree))
    found = tree.get("format")
    if found != wanted:
        _wrong("the text is of another kind", f'"format": "{wanted}"', repr(found))
    _check_version(wanted.rpartition(".")[2], tree)
    return tree


def _check_version(kind: str, tree: dict[str, Any]) -> None:
    version = tree.get("version")
    if type(version) is not int or version != VERSION:
        _wrong(f"the {kind} has version {version!r}", f"version {VERSION}", repr(version))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        keys = [k for k, _ in pairs]
        twice = next(k for i, k in enumerate(keys) if k in keys[:i])
        _wrong(f"the key {twice!r} appears twice in one object", "unique keys", repr(twice))
    return tree


def _no_constant(name: str) -> NoReturn:
    _wrong(f"the text holds the number {name}", "whole numbers", name)


def _check_keys(where: str, tree: dict[str, Any], kind: type) -> None:
    """Whether an object has the fields of a class, at least those without a default."""
    fields = [f for f in attrs.fields(kind) if f.init]
    known = {"format", "version", *(f.name for f in fields)}
    extra = sorted(tree.keys() - known)
    if extra:
        _wrong(f"{where} has the unknown key {extra[0]!r}", sorted(known), repr(extra[0]))
    for f in fields:
        if f.default is attrs.NOTHING and f.name not in tree:
            _wrong(f"{where} lacks {f.name!r}", f"the key {f.name!r}", "none")


def _names(key: str, value: object) -> Any:
    if not isinstance(value, list):
        _wrong(f"{key} is {_type(value)}", "a list of lists of names", _type(value))
    for k, entry in enumerate(value):
        if not isinstance(entry, list) or not all(isinstance(n, str) for n in entry):
            _wrong(f"{key}[{k}] is malformed", "a list of names", repr(entry)[:200])
    return tuple(tuple(e) for e in value)


def _objects(kind: type[Any], key: str, value: object) -> Any:
    if not isinstance(value, list):
        _wrong(f"{key} is {_type(value)}", "a list of objects", _type(value))
    hints = typing.get_type_hints(kind)
    shapes = {f.name: _shape(hints[f.name]) for f in attrs.fields(kind)}
    needed = [f.name for f in attrs.fields(kind) if f.default is attrs.NOTHING]
    made = []
    for k, entry in enumerate(value):
        if not isinstance(entry, dict):
            _wrong(f"{key}[{k}] is {_type(entry)}", "an object", _type(entry))
        values = {}
        for name, v in entry.items():
            if name not in shapes:
                _wrong(f"{key}[{k}] has the unknown key {name!r}", sorted(shapes), repr(name))
            values[name] = _value(f"{key}[{k}].{name}", v, *shapes[name])
        for name in needed:
            if name not in values:
                _wrong(f"{key}[{k}] lacks {name!r}", f"the key {name!r}", sorted(values))
        made.append(kind(**values))
    return tuple(made)


def _shape(hint: Any) -> tuple[type, bool, bool]:
    """Of a field's type: the type itself or its elements', whether a tuple, whether optional."""
    if typing.get_origin(hint) is typing.Literal:
        return hint, False, False
    args = [a for a in typing.get_args(hint) if a is not type(None)]
    many = typing.get_origin(hint) is tuple
    return args[0] if args else hint, many, bool(args) and not many


def _value(where: str, value: Any, kind: type, many: bool = False, optional: bool = False) -> Any:
    """Check and convert the JSON value of a field."""
    if many:
        if not isinstance(value, list):
            _wrong(f"{where} is {_type(value)}", "a list", _type(value))
        return tuple(_value(f"{where}[{k}]", v, kind) for k, v in enumerate(value))
    words = typing.get_args(kind)  # of a Literal
    if words and value not in words:
        _wrong(f"{where} is none of what it may be", words, repr(value)[:200])
    if not words and type(value) is not kind and not (optional and value is None):
        _wrong(f"{where} is {_type(value)}", kind.__name__, repr(value)[:200])
    return value
