"""The public calls: declare what must be symmetric, and ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from symmplan.errors import DeclarationError
from symmplan.model import DEFAULT_ALIGN, OpSpec, Requirement
from symmplan.registry.check import make_spec
from symmplan.registry.schema import OpRef, qualified_name, resolve, schema_of
from symmplan.registry.store import names_of, store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch._ops import OpOverload

__all__ = [
    "all_specs",
    "isolated",
    "register_symm_mem_args",
    "requirements",
    "spec_for",
    "symm_args",
    "unregister",
]

T = TypeVar("T")


def register_symm_mem_args(
    op: OpRef,
    where: Sequence[str | Requirement],
    *,
    group: str = "group_name",
    align: int = DEFAULT_ALIGN,
    signal_pad: bool = False,
    handshake: bool = False,
    release: bool = False,
    asynchronous: bool = False,
    out: str | None = None,
) -> None:
    """Declare which arguments and results of an op must lie in symmetric memory.

    A name without overload, or a packet, declares every overload that the declaration fits.
    Repeating a declaration is fine; changing one is an error.

    Collective: no, but every rank must declare the same.

    Args:
        op: ``"mylib::foo"``, ``"mylib::foo.overload"``, an ``OpOverload``, an
            ``OpOverloadPacket`` or what ``torch.library.custom_op`` returned.
        where: Names of arguments (also out-arguments, optional tensors, and lists of tensors: each
            element must then be symmetric), ``"return"`` for the result or all results,
            ``"return.0"``, ... for one of several. A `Requirement` gives one its own ``align`` and
            ``signal_pad``.
        group: Name of the schema argument that carries the process group: its name (``str``), a
            ``ProcessGroup`` or anything that holds one.
        align: Alignment in bytes of the placements, a power of two.
        signal_pad: Whether the op uses the signal pad of the segments that hold these tensors.
        handshake: Whether the op touches no symmetric byte, also none of this rank's own, before
            every rank of the group has started it. Unless it does, the plan puts a barrier in
            front of it where others may still be at the bytes.
        release: Whether the op ends, on any rank, only after all ranks' accesses for it are over.
            Unless it does, the plan puts a barrier behind it, before the bytes are used again.
            Either of the two also says that the ranks meet in the op: what a rank did before it
            started is over when another ends. What is declared is believed: if it is false, a rank
            reads bytes that are not written yet or overwrites what a peer still reads, and nothing
            but wrong numbers tells. `symmplan.testing.check_declaration` finds it, and so does
            ``debug=True`` on CPU ranks.
        asynchronous: Whether the op only starts the work and ``wait_tensor`` of its result ends it.
        out: Qualified name of the variant that writes the results into given tensors, if any.

    Raises:
        DeclarationError: The op is unknown, a name is not in its schema or holds no tensor, the
            group argument is missing, ``align`` is no power of two, ``out`` does not fit, or the
            op is already declared differently. Nothing is registered then.
    """
    if isinstance(where, str):
        where = [where]
    overloads = resolve(op)
    specs = []
    failures: dict[str, DeclarationError] = {}
    for overload in overloads:
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
        first = min(failures, key=_default_first)
        raise failures[first]
    store.add(specs)


def symm_args(
    *where: str | Requirement,
    group: str = "group_name",
    align: int = DEFAULT_ALIGN,
    signal_pad: bool = False,
    handshake: bool = False,
    release: bool = False,
    asynchronous: bool = False,
    out: str | None = None,
) -> Callable[[T], T]:
    """`register_symm_mem_args` as a decorator; put it above ``torch.library.custom_op``.

    Example::

        @symmplan.symm_args("input", "return", group="group_name", align=16)
        @torch.library.custom_op("mylib::bar", mutates_args=())
        def bar(input: torch.Tensor, group_name: str) -> torch.Tensor: ...

    Collective: no, but every rank must declare the same.

    Args:
        where: As for `register_symm_mem_args`, and so are the others.
        group: The schema argument that carries the process group.
        align: Alignment in bytes, a power of two.
        signal_pad: Whether the signal pad is used.
        handshake: Whether no byte is touched before all ranks have started the op.
        release: Whether the op ends only after all ranks' accesses are over.
        asynchronous: Whether ``wait_tensor`` ends the op.
        out: The out-variant, if any.

    Returns:
        A function that declares the op it is given (anything that names an op) and returns it
        unchanged.

    Raises:
        DeclarationError: As for `register_symm_mem_args`, when the op is given.
    """

    def declare(op: T) -> T:
        register_symm_mem_args(
            op,
            where,
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
    """What is declared for an op, by a user, by symmplan's catalogue or by torch; else None.

    A name without overload, or a packet, asks for ``.default``, or for the first declared overload
    where that one is not declared.

    Collective: no.

    Raises:
        DeclarationError: No such op is defined, or torch's registry is wrong about it.
    """
    overloads = sorted(resolve(op), key=lambda o: _default_first(qualified_name(o)))
    return next((s for s in map(store.spec_for, overloads) if s is not None), None)


def _default_first(name: str) -> bool:
    return not name.endswith(".default")


def spec_for(op: OpOverload) -> OpSpec | None:
    """What is declared for this very overload; fast enough to ask for every node of a graph.

    Collective: no.

    Raises:
        DeclarationError: torch's registry is wrong about the op.
    """
    return store.spec_for(op)


def unregister(op: OpRef) -> bool:
    """Forget what a user declared for an op; says whether there was anything.

    Collective: no.

    Raises:
        DeclarationError: No such op is defined.
    """
    return store.remove(names_of(op))


def isolated() -> AbstractContextManager[None]:
    """A context that undoes on exit every declaration made or removed inside; for tests.

    Collective: no.
    """
    return store.isolated()


def all_specs() -> Iterator[OpSpec]:
    """Every op that this process can plan for, sorted by qualified name.

    Ops that are in the catalogue but not in this torch are left out, and so are declarations in
    torch's registry that do not fit their op (`requirements` of such an op raises).

    Collective: no.
    """
    from symmplan.registry.inventory import inventory

    return iter(entry.spec for entry in inventory() if entry.spec is not None)
