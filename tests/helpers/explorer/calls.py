"""The steps of a tiny program, and the memory that they touch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

__all__ = ["TinyBuffer", "TinyCall"]


def _tuple(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values.split() if isinstance(values, str) else values)


@frozen
class TinyBuffer:
    """Memory that every rank has.

    Attributes:
        name: Unique in its program.
        cells: Its size in cells, each of which is read and written whole.
        group: The group over which it is symmetric; says nothing to the machine.
    """

    name: str
    cells: int = 1
    group: str = "all"


@frozen
class TinyCall:
    """One step of a program, the same on all ranks.

    Attributes:
        name: Unique in its program.
        kind: ``"local"`` or ``"copy"``; one-sided, ``"read"``, ``"push"``, ``"push_next"``,
            ``"read_write"`` or ``"read_write_next"``; ``"all_gather"``, ``"all_to_all"``,
            ``"broadcast"``, ``"all_reduce"`` or ``"reduce_scatter"``; ``"wait"``; or
            ``"barrier"``, at which the ranks of the group meet.
        reads: Names of the buffers that it is given to read, in one string or a tuple.
        writes: Names of the buffers that it is given to write.
        group: The group whose ranks take part.
        handshake: All ranks of the group meet before it touches the first byte.
        release: All ranks of the group meet after it touched the last byte.
        asynchronous: It only starts here; a call of kind ``"wait"`` ends it.
        of: For ``"wait"``: the call that ends here.
        transport: How a collective moves bytes: ``"wire"``, ``"push"``, ``"pull"`` or ``"copy"``.
        root: Where a broadcast comes from, as a rank of the group.
        empty: Pairs (from, to) of ranks of the group between which an all-to-all moves nothing.
        early: It reads its own inputs before it meets anybody, whatever ``handshake`` says.
        late: It writes its own results after it met everybody, whatever ``release`` says.
        label: Calls with equal labels and equal inputs have equal results. By default the results
            differ for each call and iteration.
    """

    name: str
    kind: str
    reads: tuple[str, ...] = field(default=(), converter=_tuple)
    writes: tuple[str, ...] = field(default=(), converter=_tuple)
    group: str = "all"
    handshake: bool = False
    release: bool = False
    asynchronous: bool = False
    of: str = ""
    transport: str = "wire"
    root: int = 0
    empty: tuple[tuple[int, int], ...] = ()
    early: bool = False
    late: bool = False
    label: Hashable = None
