"""Declare what must be symmetric, and look it up over all who declare.

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
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from attrs import evolve

from symmplan.errors import DeclarationError
from symmplan.model import DEFAULT_ALIGN, OpSpec, Requirement
from symmplan.registry import catalogue, plugins
from symmplan.registry.check import make_spec
from symmplan.registry.schema import OpRef, qualified_name, resolve, schema_of
from symmplan.torch_private import torch_registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from symmplan.registry.schema import Schema
    from symmplan.torch_private.ops import OpOverload

T = TypeVar("T")


def register_symm_mem_args(
    op: OpRef,
    where: str | Requirement | Sequence[str | Requirement],
    *,
    group: str | None = None,
    align: int = DEFAULT_ALIGN,
    signal_pad: bool = False,
    handshake: bool = False,
    release: bool = False,
    asynchronous: bool = False,
    out: str | None = None,
) -> None:
    """Declare which arguments and results of an op must lie in symmetric memory.

    Use this for an op that is defined elsewhere. For an op of your own use the decorator
    `symm_args`, which takes the same arguments.

    A name without overload, or a packet, declares every overload that the declaration fits.
    Repeating a declaration is fine; changing one is an error.

    Collective: no, but every rank must declare the same.

    Args:
        op: ``"mylib::foo"``, ``"mylib::foo.overload"``, an ``OpOverload``, an
            ``OpOverloadPacket`` or what ``torch.library.custom_op`` returned.
        where: One name or several: of arguments (also out-arguments, optional tensors, and lists of
            tensors: each element must then be symmetric), ``"return"`` for the result or all
            results, ``"return.0"``, ... for one of several. Pass a `Requirement` instead of a name
            to set its ``align`` and ``signal_pad``.
        group: Name of the schema argument that has the process group: its name (``str``), a
            ``ProcessGroup``, or an object that holds one. None: ``group_name``, or the only
            argument with such a name. An op without such an argument runs over the default group:
            the ``default_group`` of `symmplan.backend` or `symmplan.plan`, the group of an eager
            session, or else the world.
        align: Alignment in bytes of the placements, a power of two.
        signal_pad: Whether the op uses the signal pad of the segments that hold these tensors.
        handshake: Whether the op touches no symmetric byte, not even of its own rank, before every
            rank of the group has started it. If it may, the plan puts a barrier before it wherever
            peers may still use the bytes.
        release: Whether the op ends on a rank only after all ranks' accesses for it are over. If it
            may end earlier, the plan puts a barrier after it, before the bytes are used again. Each
            of these two facts also says that the ranks synchronize in the op: everything before a
            rank's start is over at every rank's end. symmplan relies on these facts. If one is
            false, a rank may read bytes that are not written yet, or overwrite bytes that a peer
            still reads, and only wrong numbers show it. `symmplan.testing.check_declaration` finds
            false facts, and so does ``debug=True`` on CPU ranks.
        asynchronous: Whether the op only starts the work and ``wait_tensor`` of its result ends it.
        out: Qualified name of the variant that writes the results into given tensors, if any.

    Raises:
        DeclarationError: The op is unknown, a name is not in its schema or holds no tensor, the
            group argument is missing or one of several, ``align`` is no power of two, ``out`` does
            not fit, or the op is already declared differently. Nothing is registered then.
    """
    where = [where] if isinstance(where, str | Requirement) else where
    specs = []
    failures: dict[str, DeclarationError] = {}
    for overload in resolve(op):
        schema = schema_of(overload)
        try:
            spec = make_spec(
                schema,
                where,
                group=group,
                align=align,
                signal_pad=signal_pad,
                handshake=handshake,
                release=release,
                asynchronous=asynchronous,
                out=out,
            )
        except DeclarationError as error:
            failures[schema.op] = error
        else:
            specs.append((spec, schema))
    if not specs:
        raise failures[min(failures, key=_default_first)]
    store.add(specs)


def symm_args(
    *where: str | Requirement | Sequence[str | Requirement],
    group: str | None = None,
    align: int = DEFAULT_ALIGN,
    signal_pad: bool = False,
    handshake: bool = False,
    release: bool = False,
    asynchronous: bool = False,
    out: str | None = None,
) -> Callable[[T], T]:
    """Declare which arguments and results of an op must lie in symmetric memory, as a decorator.

    Put it above ``torch.library.custom_op``. For an op that is defined elsewhere call
    `register_symm_mem_args`, which explains the arguments.

    Example::

        @symmplan.symm_args("input", "return", group="group_name", align=16)
        @torch.library.custom_op("mylib::bar", mutates_args=())
        def bar(input: torch.Tensor, group_name: str) -> torch.Tensor: ...

    Collective: no, but every rank must declare the same.

    Args:
        where: Names of arguments and results, also in a list. They and all others are explained at
            `register_symm_mem_args`.
        group: Name of the argument that carries the process group.
        align: Alignment in bytes of the placements, a power of two.
        signal_pad: Whether the op uses the signal pad.
        handshake: Whether the op touches no symmetric byte before every rank has started it.
        release: Whether the op ends only after all ranks' accesses for it are over.
        asynchronous: Whether ``wait_tensor`` of the result ends the op.
        out: Qualified name of the variant that writes the results into given tensors, if any.

    Returns:
        A function that declares the op it is given (anything that names an op) and returns it
        unchanged.

    Raises:
        DeclarationError: Something else than names is given; and, when the op is given, as for
            `register_symm_mem_args`.
    """
    names: list[Any] = []
    for given in where:
        names += given if isinstance(given, list | tuple) else [given]
    bare = [name for name in names if not isinstance(name, str | Requirement)]
    if bare:
        raise DeclarationError(
            f"symm_args was given {getattr(bare[0], '__qualname__', repr(bare[0]))} instead of "
            "names of arguments",
            expected='names, such as @symmplan.symm_args("input", "return")',
            got="the decorator without parentheses"
            if callable(bare[0])
            else type(bare[0]).__name__,
            fix="write the names in parentheses after symm_args",
            where=bare[0],
        )

    def declare(op: T) -> T:
        register_symm_mem_args(
            op,
            names,
            group=group,
            align=align,
            signal_pad=signal_pad,
            handshake=handshake,
            release=release,
            asynchronous=asynchronous,
            out=out,
        )
        return op

    return declare


def requirements(op: OpRef) -> OpSpec | None:
    """The declaration of an op, by a user, symmplan's catalogue or torch; None if none.

    A name without overload, or a packet, asks for ``.default``, or for the first declared overload
    where that one is not declared.

    Collective: no.

    Raises:
        DeclarationError: No such op is defined, or torch's registry is wrong about it.
    """
    overloads = sorted(resolve(op), key=lambda o: _default_first(qualified_name(o)))
    spec = next((s for s in map(store.spec_for, overloads) if s is not None), None)
    if spec is not None and spec.wrong:
        raise DeclarationError(
            f"torch's registry of symmetric arguments is wrong about {spec.op}: {faults(spec)}",
            expected="names of tensors in the op's schema",
            got=", ".join(name for name, _ in spec.wrong),
            fix=f"correct that registration, or override it with "
            f'symmplan.register_symm_mem_args("{spec.op}", ...)',
            op=spec.op,
            names=tuple(name for name, _ in spec.wrong),
        )
    return spec


def _default_first(name: str) -> bool:
    return not name.endswith(".default")


def unregister(op: OpRef) -> bool:
    """Remove a user's declaration of an op. Returns whether there was one.

    Collective: no.

    Raises:
        DeclarationError: No such op is defined.
    """
    return store.remove([qualified_name(overload) for overload in resolve(op)])


class _Store:
    """The declarations of one process. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # What users declared, each void once its op is defined anew with another schema.
        self._user: dict[str, tuple[OpSpec, Schema]] = {}
        self._originals: dict[OpOverload, OpOverload] = {}
        # op -> (what upstream said then, the answer); dropped whenever a declaration changes
        self._cache: dict[OpOverload, tuple[tuple[str, ...], OpSpec | None]] = {}
        # Whether what packages publish is being loaded, or is there.
        self._published: Literal["no", "loading", "yes"] = "no"

    def add(self, specs: Sequence[tuple[OpSpec, Schema]]) -> None:
        """Keep the declarations, all or none.

        Raises:
            DeclarationError: One contradicts an earlier declaration of the same op.
        """
        with self._lock:
            for spec, schema in specs:
                earlier, of = self._user.get(spec.op, (spec, schema))
                if of.text != schema.text or earlier == spec:
                    continue
                raise DeclarationError(
                    f"{spec.op} is already declared in another way",
                    expected=_describe(earlier),
                    got=_describe(spec),
                    fix="keep one of the two declarations, or call "
                    f"symmplan.unregister({spec.op!r}) first",
                    op=spec.op,
                    earlier=earlier,
                    later=spec,
                )
            self._replace({**self._user, **{spec.op: (spec, schema) for spec, schema in specs}})

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

    def original(self, op: OpOverload) -> OpOverload:
        """The op for which one stands; itself if it stands for none."""
        return self._originals.get(op, op)

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """A context that undoes on exit every declaration made or removed inside; for tests.

        Collective: no.
        """
        self._publish()  # or they would count as made inside, and be undone for good
        with self._lock:
            before = self._user
        try:
            yield
        finally:
            with self._lock:
                self._replace(before)

    def _publish(self) -> None:
        """Load the declarations that packages publish, once per process."""
        if self._published == "yes":
            return
        with self._lock:  # other threads wait here until all is loaded
            if self._published != "no":
                return
            self._published = "loading"  # first, since what is loaded may look something up
            plugins.load()
            self._published = "yes"

    def _replace(self, user: dict[str, tuple[OpSpec, Schema]]) -> None:
        # Readers take no lock. One that still holds the old cache may fill it from the old or the
        # new declarations; nobody reads that cache again.
        self._user = user
        self._cache = {}

    def spec_for(self, op: OpOverload) -> OpSpec | None:
        """What is declared for this very overload; fast enough to ask for every node of a graph.

        A user's declaration counts first, then the catalogue, then torch's registry. Collective:
        no.
        """
        op = self.original(op)
        cache = self._cache  # read before the declarations: see `_replace`
        upstream = torch_registry.declared_arguments(op)
        known = cache.get(op)
        if known is not None and known[0] == upstream:
            return known[1]
        spec = self._look_up(op, upstream)
        cache[op] = (upstream, spec)
        return spec

    def _look_up(self, op: OpOverload, upstream: tuple[str, ...]) -> OpSpec | None:
        self._publish()
        schema = schema_of(op)
        spec, of = self._user.get(schema.op, (None, schema))
        if spec is not None and of.text == schema.text:
            dropped = overruled(spec, upstream)
            if dropped:
                warnings.warn(f"symmplan: {schema.op}: {overruled_note(dropped)}", stacklevel=3)
            return spec
        listed = catalogue.spec_of(schema)
        if not upstream:
            return listed
        if listed is None:
            return _adopt(schema, upstream)
        return _with_upstream(listed, schema, upstream)

    def declared(self) -> dict[str, OpSpec]:
        """Users' declarations by op name."""
        self._publish()
        return {name: spec for name, (spec, _) in self._user.items()}


def overruled(spec: OpSpec, upstream: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments that upstream's registry names and the spec does not."""
    have = {r.where for r in spec.requirements}
    return tuple(name for name in upstream if name not in have)


def faults(spec: OpSpec) -> str:
    """What is wrong with what torch's registry holds for an op, for people; empty if nothing."""
    return "; ".join(dict.fromkeys(why for _, why in spec.wrong))


def overruled_note(dropped: tuple[str, ...]) -> str:
    """What to tell people about `overruled` arguments."""
    return f"torch's registry also names {', '.join(dropped)}; the user's declaration wins"


def _adopt(schema: Schema, names: Sequence[str]) -> OpSpec:
    """The spec of what upstream's registry holds for an op without another declaration.

    What of it does not fit the op is told, and left out: plain torch compiles such a program.
    """
    wrong: list[tuple[str, str]] = []
    group: str | None = None
    try:
        group = make_spec(schema, (), group=None, origin="catalogue").group
    except DeclarationError as error:
        wrong = [(str(name), error.what) for name in names]
        names = ()
    fitting: list[str] = []
    for name in dict.fromkeys(names):
        why = _why_not(schema, (*fitting, name), group)
        if why:
            wrong.append((str(name), why))
        else:
            fitting.append(name)
    spec = make_spec(schema, fitting, group=group, origin="catalogue")
    return evolve(spec, origin="torch", wrong=tuple(wrong))


def _why_not(schema: Schema, names: Sequence[str], group: str | None) -> str:
    """Why these names cannot be declared, empty if they can."""
    try:
        make_spec(schema, names, group=group, origin="torch")
    except DeclarationError as error:
        return error.what
    return ""


def _with_upstream(listed: OpSpec, schema: Schema, names: tuple[str, ...]) -> OpSpec:
    if not overruled(listed, names):
        return listed
    have = {r.where: r for r in listed.requirements}
    both = _adopt(schema, (*names, *(w for w in have if w not in names)))
    requirements = tuple(have.get(r.where, r) for r in both.requirements)
    return evolve(listed, requirements=requirements, wrong=both.wrong)


def _describe(spec: OpSpec) -> str:
    """A declaration on one line, defaults left out."""
    places = [f"{r.where}@{r.align}{'+pad' * r.signal_pad}" for r in spec.requirements]
    parts = [", ".join(places) or "nothing", f"group={spec.group!r}"]
    parts += [n for n in ("handshake", "release", "asynchronous") if getattr(spec, n)]
    if spec.out is not None:
        parts.append(f"out={spec.out!r}")
    return " ".join(parts)


#: The one store of this process.
store = _Store()
spec_for = store.spec_for
isolated = store.isolated
