"""What a placed call does: copies in, the op or its ``out`` form, copies out.

It is written once, for a `Machine` that can make a tensor of a placement, copy, and call ops. One
is the emitter of compiled graphs, whose values are nodes. The other is a call of an eager session,
whose values are tensors.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from symmplan.capture.graphs import at_path
from symmplan.place.algorithms import overload_named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from symmplan.capture.graphs import Path, Value
    from symmplan.capture.sites import Site
    from symmplan.place.algorithms import Lowering
    from symmplan.place.program import PlacedCall

V = TypeVar("V")
#: ``{site: (its placement, the program's tensor)}`` of arguments.
Staged: TypeAlias = "dict[Site, tuple[Any, Any]]"


class Machine(Protocol[V]):
    """Carries out a placed call. A ``V`` stands for a tensor."""

    def doing(self, operation: str) -> None:
        """Begin an operation of the problem; the next steps belong to it."""

    def view(self, buffer: str, like: Value, *, contiguous: bool) -> V:
        """The placement of a buffer, as a tensor like one of the program's."""

    def empty(self, like: Value) -> V:
        """Ordinary memory for a tensor like one of the program's."""

    def copy(self, target: V, source: V) -> None:
        """Copy a tensor."""

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call an op that writes what it is given."""

    def original(self, call: PlacedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> V:
        """Call the op itself; returns what stands for its result."""

    def item(self, result: V, path: Path) -> V:
        """One tensor of a result."""


def launch(
    call: PlacedCall, machine: Machine[Any], bound: Mapping[str, Any]
) -> tuple[dict[Path, Any], Staged]:
    """Copy in, launch, and copy into placements what the op cannot write there.

    Args:
        call: The call.
        machine: Who carries it out.
        bound: Its arguments by name: what stands for tensors, and plain values.

    Returns:
        ``{path: tensor}`` of its results, those with a placement there; and its staged arguments.
    """
    given = dict(bound)
    staged: Staged = {}
    for site in call.staged:
        assert site.buffer is not None
        source = at_path(given[site.head], site.index)
        view = machine.view(site.buffer, site.value, contiguous=True)
        machine.doing(call.copy("copy in", site))
        if call.reads(site):
            machine.copy(view, source)
        given[site.head] = _put(given[site.head], site.index, view)
        staged[site] = (view, source)
    placed = {
        path: machine.view(buffer, (call.node, path), contiguous=False)
        for path, buffer in call.results.items()
    }
    if call.row is not None:
        results = _by_row(call, call.row, machine, given, placed)
    elif call.spec.out is not None and placed and len(placed) == len(call.paths):
        results = _variant(call, call.spec.out, machine, given, placed)
    else:
        results = _as_it_is(call, machine, given, placed)
    return results, staged


def _by_row(
    call: PlacedCall,
    row: Lowering,
    machine: Machine[Any],
    given: dict[str, Any],
    placed: dict[Path, Any],
) -> dict[Path, Any]:
    """The form that writes into given memory, once or for each element of a list."""
    assert call.spec.group is not None  # collectives name theirs
    given = {**given, call.spec.group: call.engine or call.group}
    target = call.target
    elements: dict[Path, dict[str, Any]] = {(): given}
    if row.each:
        elements = {(i,): {**given, "input": x} for i, x in enumerate(given["inputs"])}
    outs: dict[Path, Any] = {}
    for path, element in elements.items():
        out = element[row.out] if row.out != "return" else placed.get(path)
        outs[path] = machine.empty((call.node, path)) if out is None else out
    if row.inplace:
        for path, out in outs.items():
            filled = [call.copy("copy in", site) for site in call.made_at(path)]
            machine.doing(filled[0] if filled else call.operation)
            machine.copy(out, elements[path]["input"])
            elements[path] = {**elements[path], "input": out}
    machine.doing(call.operation)
    for path, element in elements.items():
        args, kwargs = _arranged(target, {**element, "out": outs[path]})
        machine.call(target, args, kwargs)
    return outs


def _variant(
    call: PlacedCall,
    variant: str,
    machine: Machine[Any],
    given: dict[str, Any],
    placed: dict[Path, Any],
) -> dict[Path, Any]:
    """The out variant, where all results have placements."""
    op = overload_named(variant)
    outs = iter([placed[path] for path in call.paths])
    values = {
        a.name: given[a.name] if a.name in given else next(outs) for a in op._schema.arguments
    }
    machine.doing(call.operation)
    machine.call(op, *_arranged(op, values))
    return placed


def _as_it_is(
    call: PlacedCall,
    machine: Machine[Any],
    given: dict[str, Any],
    placed: dict[Path, Any],
) -> dict[Path, Any]:
    """The op itself, on placements; what it makes is copied into those that want it."""
    machine.doing(call.operation)
    result = machine.original(call, *_arranged(call.overload, given))
    made = {}
    for path in call.paths:
        made[path] = machine.item(result, path)
        if path in placed:
            for site in call.made_at(path):
                if site.stays:
                    machine.doing(call.copy("copy in", site))
            machine.copy(placed[path], made[path])
            made[path] = placed[path]
    return made


def _arranged(op: Any, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name, as an op takes them."""
    positional, named = _names(op)
    return tuple([values[name] for name in positional]), {name: values[name] for name in named}


@functools.cache
def _names(op: Any) -> tuple[list[str], list[str]]:
    """An op's arguments: those that are given by position, and those by name."""
    arguments = op._schema.arguments
    positional = [a.name for a in arguments if not a.kwarg_only]
    return positional, [a.name for a in arguments if a.kwarg_only]


def _put(value: Any, index: Path, new: Any) -> Any:
    if not index:
        return new
    items = list(value)
    items[index[0]] = _put(items[index[0]], index[1:], new)
    return items
