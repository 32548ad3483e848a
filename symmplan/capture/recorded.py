"""What a recording of an eager program is made of: storages, calls, and ops that say too little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field

from symmplan.capture.streams import MAIN

if TYPE_CHECKING:
    from torch import fx

    from symmplan.capture.c10d import Functional


def opaque(*_args: Any) -> None:
    """Stands for a collective that has no functional form: it may write all that it is given."""


@define(eq=False)
class Storage:
    """A storage that the program uses."""

    meta: Any  # its stand-in on the meta device
    origin: fx.Node  # the first node
    made: bool  # whether an op of the iteration made it
    #: ``{(offset, size, stride, dtype): the last node with that view}``, the view that was made or
    #: used last at the end.
    nodes: dict[Any, fx.Node] = field(factory=dict)
    stream: str = MAIN  # name of the stream on which it was made
    dropped: int = 0  # when it was released; 0 while it lives
    #: Names of streams that may use it until then, by ``record_stream``.
    users: list[str] = field(factory=list)
    elsewhere: bool = False  # whether a collective over another group uses it
    opaque: bool = False  # whether a collective without a functional form uses it


@define(eq=False)
class Recorded:
    """A call of the program that the session serves: a declared op, or a request for memory."""

    node: fx.Node  # its node
    op: Any  # the op as the program called it, None for memory
    #: What stands for it in the graph, of `CallValue`; None for memory, and if nothing does.
    form: Functional | None
    kind: str  # ``"op"``, ``"empty"`` or ``"out"``
    args: Any = ()  # positional arguments that say what it does, as `signature` has them
    kwargs: Any = field(factory=dict)  # the same by name
    line: str = ""  # where in the user's program, ``"file:line"``
    stream: str = MAIN  # name of the stream that was current
    storages: tuple[Storage, ...] = ()  # of its arguments and results, if it is an op
