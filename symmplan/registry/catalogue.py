"""The built-in catalogue: rows of data, checked against the live schema when first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from symmplan.errors import DeclarationError
from symmplan.model import Requirement
from symmplan.registry.check import make_spec
from symmplan.registry.rows import (
    COLLECTIVES,
    NAMESPACES,
    NOT_SYMMETRIC,
    SENT,
    SYMM_MEM,
    CatalogueRow,
)
from symmplan.registry.schema import is_defined

if TYPE_CHECKING:
    from symmplan.model import OpSpec
    from symmplan.registry.schema import Schema

NOT_CATALOGUED = "not catalogued: new in this torch"
_ROWS = {row.op: row for row in (*COLLECTIVES, *SYMM_MEM)}
_OF_GROUPS = frozenset(row.op for row in COLLECTIVES)


@frozen
class Entry:
    """The entry of one op.

    Attributes:
        op: Qualified name with overload.
        spec: Its declaration, or None.
        note: For people: what to know, or why nothing is declared.
        known: Whether somebody decided about it: False for an op that a new torch brought, and for
            a declaration that does not fit its op.
    """

    op: str
    spec: OpSpec | None
    note: str = ""
    known: bool = True


def collective_of(op: str) -> str:
    """What an op of the catalogue does, such as ``"all-gather"``; empty for other ops.

    Args:
        op: Its qualified name, with or without overload.
    """
    row = _ROWS.get(op.partition(".")[0])
    return "" if row is None else row.collective


def runs_on_groups(op: str) -> bool:
    """Whether an op is one of the process group's own collectives, which take any memory.

    Args:
        op: Its qualified name, with or without overload.
    """
    return op.partition(".")[0] in _OF_GROUPS


def is_sent(op: str) -> bool:
    """Whether NCCL runs an op as sends and receives.

    Args:
        op: Its qualified name, with or without overload.
    """
    return op.partition(".")[0] in SENT


def spec_of(schema: Schema) -> OpSpec | None:
    """The catalogue's declaration of an op, or None.

    A row that does not fit the schema of this torch counts as no row: an argument that a new torch
    renames must not break a program that never asked for symmetric memory. `entry_of` tells.
    """
    entry = entry_of(schema)
    return None if entry is None else entry.spec


def entry_of(schema: Schema) -> Entry | None:
    """The op's entry, or None if it is no business of the catalogue."""
    name = schema.name
    row = _ROWS.get(name) if schema.overload == "default" else None
    if row is not None:
        try:
            return Entry(schema.op, _spec(row, schema), row.note)
        except DeclarationError as error:
            return Entry(schema.op, None, f"changed in this torch: {error.what}", known=False)
    if name in NOT_SYMMETRIC:
        return Entry(schema.op, None, NOT_SYMMETRIC[name])
    if name.partition("::")[0] in NAMESPACES:
        return Entry(schema.op, None, NOT_CATALOGUED, known=False)
    return None


def _spec(row: CatalogueRow, schema: Schema) -> OpSpec:
    out = row.out_name
    facts = {"enters": row.enters, "releases": row.releases}
    return make_spec(
        schema,
        [Requirement(place, signal_pad=place in row.pads, **facts) for place in row.where],
        group=row.group,
        handshake=row.handshake,
        release=row.release,
        synchronizes=row.synchronizes,
        asynchronous=row.asynchronous,
        out=out if out is not None and is_defined(out) else None,
        origin="catalogue",
    )
