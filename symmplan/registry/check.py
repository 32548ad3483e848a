"""Check a declaration against the op's schema and turn it into an `OpSpec`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attrs import evolve

from symmplan.errors import DeclarationError
from symmplan.model import DEFAULT_ALIGN, OpSpec, Requirement
from symmplan.registry.schema import resolve, schema_of, suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from symmplan.registry.schema import Schema

_RESULT = re.compile(r"return(?:\.(\d+))?\Z", re.ASCII)


def make_spec(
    schema: Schema,
    where: Sequence[str | Requirement],
    *,
    group: str | None,
    align: int = DEFAULT_ALIGN,
    signal_pad: bool = False,
    handshake: bool = False,
    release: bool = False,
    synchronizes: bool = False,
    asynchronous: bool = False,
    out: str | None = None,
    origin: str = "user",
) -> OpSpec:
    """The `OpSpec` of a declaration, its requirements in the order of the schema.

    ``"return"`` of an op with several results becomes one requirement per result that holds
    tensors, and ``"return.0"`` of an op with one result becomes ``"return"``, so that equal
    declarations make equal specs.

    Raises:
        DeclarationError: The declaration does not fit the schema, or a fact is neither true nor
            false.
    """
    facts = {"signal_pad": signal_pad, "handshake": handshake, "release": release}
    _check_facts(schema, {**facts, "asynchronous": asynchronous})
    group = _group_argument(schema) if group is None else _checked_group(schema, group)
    found: dict[str, Requirement] = {}
    for item in where:
        asked = item if isinstance(item, Requirement) else Requirement(item, align, signal_pad)
        _check_align(schema, asked)
        for place in _places(schema, asked.where):
            if place in found:
                names = (w.where if isinstance(w, Requirement) else w for w in where)
                raise DeclarationError(
                    f"{schema.op} is given {place!r} twice",
                    expected="each argument and result once",
                    got=", ".join(map(repr, names)),
                    fix=f"drop one of the entries that cover {place!r}",
                    op=schema.op,
                    where=place,
                )
            found[place] = evolve(asked, where=place)
    order = _tensor_places(schema)
    if not found and origin != "catalogue":
        raise DeclarationError(
            f"nothing of {schema.op} is declared symmetric",
            expected=f"at least one of {', '.join(order)}",
            got="no names",
            fix="name the arguments and results that must be symmetric",
            op=schema.op,
            existing=tuple(order),
        )
    return OpSpec(
        op=schema.op,
        requirements=tuple(found[place] for place in order if place in found),
        group=group,
        handshake=handshake,
        release=release,
        synchronizes=synchronizes or handshake or release,
        asynchronous=asynchronous,
        out=None if out is None else _check_out(schema, out),
        origin=origin,
    )


def _tensor_places(schema: Schema) -> list[str]:
    """Everything that can be declared, arguments first, spelled the way specs spell it."""
    arguments = [a.name for a in schema.arguments if a.tensor]
    if len(schema.results) == 1:
        return arguments + (["return"] if schema.results[0].tensor else [])
    return arguments + [f"return.{r.index}" for r in schema.results if r.tensor]


def _places(schema: Schema, where: object) -> list[str]:
    if not isinstance(where, str):
        raise DeclarationError(
            f"{where!r} does not name an argument or result of {schema.op}",
            expected="a string",
            got=type(where).__name__,
            fix="pass names of the schema",
            op=schema.op,
            where=where,
        )
    argument = schema.argument(where)
    if argument is not None:
        if not argument.tensor:
            what = f"argument {where!r} of {schema.op} holds no tensor"
            got = f"{where!r} of type {argument.type}"
            raise _wrong_place(
                schema, where, what, got, "declare tensors only; the group goes into group="
            )
        return [where]
    match = _RESULT.match(where)
    if match is None:
        existing = [*(a.name for a in schema.arguments), "return"]
        fix = suggestion(where, existing) or f"the schema is {schema.text}"
        raise _wrong_place(
            schema, where, f"{schema.op} has no argument {where!r}", repr(where), fix
        )
    index, results = match.group(1), schema.results
    chosen = list(results) if index is None else list(results[int(index) : int(index) + 1])
    if chosen and any(r.tensor for r in chosen):
        if len(results) == 1:
            return ["return"]
        return [f"return.{r.index}" for r in chosen if r.tensor]
    if not chosen:
        what = f"{schema.op} has no result {where!r}"
        got = f"an op with {len(results)} result{'' if len(results) == 1 else 's'}"
    else:
        what = f"result {where!r} of {schema.op} holds no tensor"
        got = f"results of type ({', '.join(r.type for r in results)})"
    raise _wrong_place(schema, where, what, got, f"the schema is {schema.text}")


def _wrong_place(schema: Schema, where: str, what: str, got: str, fix: str) -> DeclarationError:
    places = tuple(_tensor_places(schema))
    return DeclarationError(
        what,
        expected=f"one of {', '.join(map(repr, places))}"
        if places
        else "nothing: the op has no tensors",
        got=got,
        fix=fix,
        op=schema.op,
        where=where,
        existing=places,
    )


def _group_argument(schema: Schema) -> str | None:
    """The argument that names the group, by its own name; None if the op has none.

    Raises:
        DeclarationError: It may be several.
    """
    likely = [a.name for a in schema.arguments if a.group and ("group" in a.name or a.name == "pg")]
    if "group_name" in likely or len(likely) == 1:
        return "group_name" if "group_name" in likely else likely[0]
    if not likely:
        return None
    raise DeclarationError(
        f"{schema.op} has several arguments that may name its process group",
        expected="one",
        got=", ".join(map(repr, likely)),
        fix=f"pass group={likely[0]!r}, or whichever it is",
        op=schema.op,
        existing=tuple(likely),
    )


def _checked_group(schema: Schema, group: object) -> str:
    candidates = [a.name for a in schema.arguments if a.group]
    if isinstance(group, str) and group in candidates:
        return group
    argument = schema.argument(group) if isinstance(group, str) else None
    if argument is not None:
        what = f"argument {group!r} of {schema.op} cannot name a process group"
        got = f"{group!r} of type {argument.type}"
    else:
        what = f"{schema.op} has no argument {group!r} to name its process group"
        got = repr(group)
    expected = f"one of {', '.join(map(repr, candidates))}"
    if len(candidates) == 1:
        fix = f"pass group={candidates[0]!r}"
    elif candidates:
        fix = f"the schema is {schema.text}"
    else:
        expected = "a str, ProcessGroup or Any argument; the op has none"
        fix = "leave group out: it then runs over the default group"
    raise DeclarationError(
        what,
        expected=expected,
        got=got,
        fix=fix,
        op=schema.op,
        where=group,
        existing=tuple(candidates),
    )


def _check_facts(schema: Schema, facts: Mapping[str, object]) -> None:
    for name, value in facts.items():
        if not isinstance(value, bool):
            raise DeclarationError(
                f"{name} of {schema.op} is {value!r}",
                expected="True or False",
                got=repr(value),
                fix=f"say {name}=True if that always holds, else leave it out",
                op=schema.op,
            )


def _check_align(schema: Schema, asked: Requirement) -> None:
    align = asked.align
    whole = isinstance(align, int) and not isinstance(align, bool)
    if whole and align > 0 and align & (align - 1) == 0:
        return
    raise DeclarationError(
        f"alignment of {asked.where!r} of {schema.op} is {align!r}",
        expected="a positive power of two, in bytes",
        got=repr(align),
        fix=f"leave align out for {DEFAULT_ALIGN} bytes, or give a power of two",
        op=schema.op,
        where=asked.where,
        align=align,
    )


def _check_out(schema: Schema, out: str) -> str:
    """The name with overload of ``out``, which must write as many tensors as ``schema`` returns."""
    wanted = sum(r.tensor for r in schema.results)
    tried = []
    for overload in resolve(out):
        other = schema_of(overload)
        written = [a for a in other.arguments if a.written and a.tensor]
        own = {a.name for a in schema.arguments}
        if wanted and len([a for a in written if a.name not in own]) == wanted:
            return other.op
        tried.append(other.text)
    raise DeclarationError(
        f"{out} is not an out-variant of {schema.op}",
        expected=f"{wanted} written tensor argument(s) that {schema.op} lacks",
        got="; ".join(tried),
        fix="name the op that writes its results into given tensors, or leave out= out",
        op=schema.op,
        out=out,
    )
