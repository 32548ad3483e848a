"""Every op that is declared, and every collective op that is not, in one deterministic list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from symmplan.registry.catalogue import Entry, entry_of
from symmplan.registry.declare import faults, overruled, overruled_note, store
from symmplan.registry.rows import NAMESPACES
from symmplan.registry.schema import is_defined, resolve, schema_of
from symmplan.torch_private import torch_registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from symmplan.model import OpSpec
    from symmplan.torch_private.ops import OpOverload


def inventory() -> list[Entry]:
    """All that is declared and all ops of the catalogue's namespaces, sorted by qualified name.

    Collective: no.
    """
    entries = {entry.op: entry for entry in map(describe_op, _ops())}
    return [entries[op] for op in sorted(entries)]


def _ops() -> Iterator[OpOverload]:
    """What `inventory` has, some of it more than once."""
    torch_registry.define_distributed_ops()
    names = {*store.declared(), *torch_registry.names_declared_upstream()}
    names |= {n for n in torch_registry.op_names() if n.partition("::")[0] in NAMESPACES}
    # A name may have been declared once, and its library be gone.
    for name in filter(is_defined, sorted(names)):
        yield from resolve(name)


def describe_op(op: OpOverload) -> Entry:
    """The entry of one op, whether or not anything is declared of it.

    Collective: no.
    """
    schema = schema_of(op)
    listed = entry_of(schema)
    spec = store.spec_for(op)
    if spec is None:
        if listed is None:
            return Entry(schema.op, None, "nobody declared it", known=False)
        return evolve(listed, spec=None)
    wrong = f"torch's registry is wrong about it: {faults(spec)}" if spec.wrong else ""
    if wrong and not spec.requirements:
        return Entry(schema.op, None, wrong, known=False)
    notes = [wrong]
    notes += [listed.note] if listed is not None and spec.origin == "catalogue" else []
    upstream = torch_registry.declared_arguments(op)
    if spec.origin == "user":
        dropped = overruled(spec, upstream)
        notes += [overruled_note(dropped)] if dropped else []
    elif listed is not None and listed.spec is not None:
        added = overruled(listed.spec, upstream)
        notes += [f"torch's registry adds {', '.join(added)}"] if added else []
    return Entry(schema.op, spec, "; ".join(n for n in notes if n))


def all_specs() -> Iterator[OpSpec]:
    """Every op that this process can plan for, sorted by qualified name.

    Ops that are in the catalogue but not in this torch are left out, and so are declarations in
    torch's registry that do not fit their op (`symmplan.requirements` of such an op raises).

    Collective: no.
    """
    found = (spec for spec in map(store.spec_for, _ops()) if spec is not None)
    specs = {spec.op: spec for spec in found if spec.requirements or not spec.wrong}
    return iter(specs[op] for op in sorted(specs))
