"""What is declared in this process, and the look-up over all who declare.

[Note: who wins]
    A user's declaration replaces what anyone else says of the op. The catalogue comes second: its
    facts (handshake, release, ...) stand, and arguments that only upstream's registry names are
    added, since a tensor that needs no symmetric memory does no harm in it. Upstream's registry
    alone comes last, with the facts that are safe for any op (no handshake, no release).

    Where a user's declaration drops an argument that upstream's registry names, the first look-up
    warns: one of the two is wrong.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from symmplan.errors import DeclarationError
from symmplan.registry import _upstream, catalogue, plugins
from symmplan.registry.check import make_spec
from symmplan.registry.schema import qualified_name, resolve, schema_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._ops import OpOverload

    from symmplan.model import OpSpec, Requirement
    from symmplan.registry.schema import Schema

__all__ = ["Store", "store"]


@frozen
class _Declared:
    """A user's declaration, void once the op is defined anew with another schema."""

    spec: OpSpec
    schema: str


class Store:
    """The declarations of one process. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._user: dict[str, _Declared] = {}
        self._originals: dict[OpOverload, OpOverload] = {}
        # op -> (what upstream said then, the answer); dropped whenever a declaration changes
        self._cache: dict[OpOverload, tuple[tuple[str, ...], OpSpec | None]] = {}

    def add(self, specs: Sequence[tuple[OpSpec, Schema]]) -> None:
        """Keep the declarations, all or none.

        Raises:
            DeclarationError: One contradicts an earlier declaration of the same op.
        """
        with self._lock:
            for spec, schema in specs:
                earlier = self._user.get(spec.op)
                if earlier is None or earlier.schema != schema.text or earlier.spec == spec:
                    continue
                raise DeclarationError(
                    f"{spec.op} is already declared, and differently",
                    expected=describe(earlier.spec),
                    got=describe(spec),
                    fix="keep one of the two declarations, or unregister the first",
                    op=spec.op,
                    earlier=earlier.spec,
                    later=spec,
                )
            new = {spec.op: _Declared(spec, schema.text) for spec, schema in specs}
            self._replace({**self._user, **new})

    def remove(self, names: Sequence[str]) -> bool:
        """Forget users' declarations of these ops; says whether there were any."""
        with self._lock:
            kept = {name: d for name, d in self._user.items() if name not in names}
            changed = len(kept) != len(self._user)
            self._replace(kept)
            return changed

    def stand_in(self, op: OpOverload, original: OpOverload) -> None:
        """What is declared of ``original`` holds for ``op``, too, which has the same arguments."""
        self._originals[op] = original

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """Undo on exit every declaration made or removed inside."""
        plugins.load()  # or they would count as made inside, and be undone for good
        with self._lock:
            before = self._user
        try:
            yield
        finally:
            with self._lock:
                self._replace(before)

    def _replace(self, user: dict[str, _Declared]) -> None:
        # Readers take no lock. One that still holds the old cache may fill it from the old or the
        # new declarations; nobody reads that cache again.
        self._user = user
        self._cache = {}

    def spec_for(self, op: OpOverload) -> OpSpec | None:
        """What holds for ``op``; see [Note: who wins].

        Raises:
            DeclarationError: Upstream's registry holds a declaration that does not fit the op.
        """
        op = self._originals.get(op, op)
        cache = self._cache  # read before the declarations: see `_replace`
        upstream = _upstream.declared_arguments(op)
        known = cache.get(op)
        if known is not None and known[0] == upstream:
            return known[1]
        spec = self._look_up(op, upstream)
        cache[op] = (upstream, spec)
        return spec

    def _look_up(self, op: OpOverload, upstream: tuple[str, ...]) -> OpSpec | None:
        plugins.load()
        schema = schema_of(op)
        declared = self._user.get(schema.op)
        if declared is not None and declared.schema == schema.text:
            dropped = overruled(declared.spec, upstream)
            if dropped:
                warnings.warn(f"symmplan: {schema.op}: {overruled_note(dropped)}", stacklevel=4)
            return declared.spec
        listed = catalogue.spec_of(schema)
        if not upstream:
            return listed
        if listed is None:
            return adopt(schema, upstream)
        return _with_upstream(listed, schema, upstream)

    def declared(self) -> dict[str, OpSpec]:
        """Users' declarations by op name."""
        plugins.load()
        return {name: d.spec for name, d in self._user.items()}


def overruled(spec: OpSpec, upstream: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments that upstream's registry names and the spec does not."""
    have = {r.where for r in spec.requirements}
    return tuple(name for name in upstream if name not in have)


def overruled_note(dropped: tuple[str, ...]) -> str:
    """What to tell people about `overruled` arguments."""
    return f"torch's registry also names {', '.join(dropped)}; the user's declaration wins"


def adopt(schema: Schema, names: tuple[str, ...]) -> OpSpec:
    """The spec of what upstream's registry holds for an op that nobody else declares."""
    groups = [a.name for a in schema.arguments if a.group]
    group = "group_name" if "group_name" in groups else None
    if group is None:
        likely = [g for g in groups if "group" in g or g == "pg"]
        group = likely[0] if len(likely) == 1 else "group_name"
    try:
        return make_spec(schema, names, group=group, origin="torch")
    except DeclarationError as error:
        raise DeclarationError(
            f"torch's registry of symmetric arguments is wrong about {schema.op}: {error.what}",
            expected=error.expected,
            got=error.got,
            fix=f"mend that registration, or overrule it with "
            f'symmplan.register_symm_mem_args("{schema.op}", ...)',
            op=schema.op,
            names=names,
        ) from error


def _with_upstream(listed: OpSpec, schema: Schema, names: tuple[str, ...]) -> OpSpec:
    if not overruled(listed, names):
        return listed
    have = {r.where: r for r in listed.requirements}
    both = adopt(schema, (*names, *(w for w in have if w not in names)))
    return evolve(listed, requirements=tuple(have.get(r.where, r) for r in both.requirements))


def describe(spec: OpSpec) -> str:
    """A declaration on one line, defaults left out."""
    parts = [", ".join(_describe_requirement(r) for r in spec.requirements) or "nothing"]
    parts.append(f"group={spec.group!r}")
    parts += [n for n in ("handshake", "release", "asynchronous") if getattr(spec, n)]
    if spec.out is not None:
        parts.append(f"out={spec.out!r}")
    return " ".join(parts)


def _describe_requirement(requirement: Requirement) -> str:
    pad = "+pad" if requirement.signal_pad else ""
    return f"{requirement.where}@{requirement.align}{pad}"


def names_of(ref: object) -> tuple[str, ...]:
    """Qualified names with overload of all that ``ref`` points at."""
    return tuple(qualified_name(op) for op in resolve(ref))


#: The one store of this process.
store = Store()
