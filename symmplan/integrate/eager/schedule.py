"""What a frozen session expects next.

[Note: when bytes may be overwritten]
    Every placement that the program gets to see is lent as a storage of its own on the segment's
    bytes. Before an event writes a placement, the storages of all buffers that share bytes with it
    must have no user but the session. So a tensor that is held longer than planned is found before
    a byte of it changes, at the price of a few reference counts.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from symmplan import _compat as compat
from symmplan.capture.eager import signature
from symmplan.capture.streams import MAIN
from symmplan.registry import bind_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.capture.eager import Recorded
    from symmplan.integrate.eager.tape import Tape
    from symmplan.place.ways import Lowering

__all__ = ["Bound", "Event", "Lent", "Stage", "bound_values"]

#: Seconds that threads of the process group have to let go of what a finished work held.
_PATIENCE = 0.25
_POLL = 0.01


@define(eq=False)
class Lent:
    """A placement that the program gets to see; one for all buffers with the same shape there.

    Attributes:
        tensor: The whole storage, as its maker shapes it.
        address: Of its first byte.
        storage: Address of its storage's description, by which a tensor on it is known.
        own: How many users the storage has without the program's.
    """

    tensor: torch.Tensor
    address: int
    storage: int = field(init=False)
    own: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.storage = self.tensor.untyped_storage()._cdata
        self.own = compat.storage_use_count(self.storage)

    @property
    def held(self) -> bool:
        """Whether anybody but the session has a tensor on it."""
        return compat.storage_use_count(self.storage) > self.own

    def give(self) -> torch.Tensor:
        """A tensor for the program."""
        return self.tensor.detach()


@define(eq=False)
class Stage:
    """An argument that is copied into its placement.

    Attributes:
        head: Name of the argument.
        index: Where in the argument, if it is a list.
        view: The placement.
        copy_in: Whether the op reads it.
        copy_back: Whether the op writes it.
    """

    head: str
    index: tuple[int, ...]
    view: torch.Tensor
    copy_in: bool
    copy_back: bool


@define(eq=False)
class Bound:
    """An argument that must already lie in its placement.

    Attributes:
        head: Name of the argument.
        index: Where in the argument, if it is a list.
        address: Of its first byte.
        buffer: Name of the buffer.
        view: The bytes, in the argument's shape.
    """

    head: str
    index: tuple[int, ...]
    address: int
    buffer: str
    view: torch.Tensor


@define(eq=False)
class Event:
    """A call that the schedule expects.

    Attributes:
        call: What was recorded.
        overload: The op that stands for it in the graph; None for memory.
        stream: Name of the stream on which it runs.
        device: Where its tensors lie.
        names: Names of that op's arguments.
        defaults: What they are if nothing is given.
        lists: Which of them are lists of tensors, by position.
        form: Whether it is a ``c10d::`` call in the words of a functional collective.
        watched: Whether somebody watches all ops.
        before: What to do first: overwriting of dead placements, barriers.
        after: Barriers of ops behind it that are not declared.
        writes: Names of the buffers that it writes first.
        claims: Those, each with a buffer on its bytes whose placement nobody may hold any more.
        placed: Whether any of its tensors is in a placement. The rest is only known if so.
        stages: See `Stage`.
        binds: See `Bound`.
        results: ``{path: placement}`` of results.
        lent: ``{path: Lent}`` of those results that stay there.
        leaving: ``{path: Lent}`` of pending results that are copied out when they are waited for.
        row: How it runs on this memory backend.
        shapes: ``{path: stand-in}`` of the op's results.
        group: Name of the process group.
        engine: Name of the communicator over which copy engines run it; empty if they do not.
        launch: What launches it there, of the tensors that are written and read, and options.
        tape: What it does.
        size: How many slots its frame has.
        gives: Equal for calls of which the program gets the same.
        run: Makes it: of a frame, or for memory of a function and its arguments.
        work: The Python half of the last work that C++ got, if it is symmplan's.
        copies: How often bytes are copied into and out of placements.
    """

    call: Recorded
    overload: Any
    device: torch.device
    stream: str = MAIN
    names: list[str] = field(factory=list)
    defaults: list[Any] = field(factory=list)
    lists: list[int] = field(factory=list)
    form: bool = False
    watched: bool = False
    before: list[Callable[[], None]] = field(factory=list)
    after: list[Callable[[], None]] = field(factory=list)
    writes: list[str] = field(factory=list)
    claims: list[tuple[str, str, Lent]] = field(factory=list)
    placed: bool = False
    stages: list[Stage] = field(factory=list)
    binds: list[Bound] = field(factory=list)
    results: dict[tuple[int, ...], torch.Tensor] = field(factory=dict)
    lent: dict[tuple[int, ...], Lent] = field(factory=dict)
    leaving: dict[tuple[int, ...], Lent] = field(factory=dict)
    row: Lowering | None = None
    shapes: dict[tuple[int, ...], Any] = field(factory=dict)
    group: str = ""
    engine: str = ""
    launch: Callable[..., Any] | None = None
    tape: Tape | None = None
    size: int = 0
    gives: tuple[Any, ...] = ()
    run: Callable[..., Any] | None = None
    work: Any = None
    copies: int = 0

    @property
    def has_out(self) -> bool:
        """Whether it writes a tensor that it does not read; of ``c10d::`` calls."""
        return "out" in self.call.kwargs

    @property
    def pends(self) -> bool:
        """Whether the program gets a work to wait for; of ``c10d::`` calls."""
        return bool(self.call.asynchronous) and not self.one_sided

    @property
    def one_sided(self) -> bool:
        """Whether it runs as an op of symmplan's, which is over when it returns."""
        return self.row is not None and self.row.one_sided

    @property
    def name(self) -> str:
        """For people."""
        if self.call.op is not None:
            return str(self.call.op.name())
        return f"symmplan.{self.call.kind}"

    def ahead(self, operation: str, acts: Sequence[Callable[[], None]]) -> None:
        """Do something right before an operation of this call, or else before all of it."""
        tape = self.tape
        for section in () if tape is None else (tape.begin, tape.late, tape.away):
            if operation in section.steps:
                section.ahead.setdefault(operation, []).extend(acts)
                return
        self.before += acts

    def behind_launch(self) -> list[str]:
        """The copies that are made before the call returns."""
        waits = self.tape is None or (self.form and self.pends)
        return [] if waits or self.tape is None else [name for name in self.tape.late.steps if name]

    def overdue(self) -> tuple[str, str] | None:
        """A buffer that is about to be written, and one on its bytes that is still held."""
        for buffer, other, lent in self.claims:
            if lent.held:
                gc.collect()  # it may only hang in a cycle
                deadline = time.monotonic() + _PATIENCE
                while lent.held:
                    if time.monotonic() >= deadline:
                        return buffer, other
                    time.sleep(_POLL)
        return None

    def marks(self) -> tuple[tuple[int, int], ...]:
        """The storages that nobody may hold any more, each with the uses that are the session's."""
        return tuple(dict.fromkeys((lent.storage, lent.own) for _, _, lent in self.claims))

    def differs(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """What the call was expected to be and is, if not the same."""
        if len(args) == len(self.call.args) and kwargs.keys() == self.call.kwargs.keys():
            for want, have in zip(self.call.args, args, strict=True):
                if isinstance(have, torch.Tensor):
                    if want.__class__ is tuple and want[0] == have.shape and want[1] is have.dtype:
                        continue
                elif want is have or want == signature(have):
                    continue
                return self.call.args, signature(args)
            if not kwargs or signature(kwargs) == self.call.kwargs:
                return None
        return (self.call.args, self.call.kwargs), (signature(args), signature(kwargs))


def bound_values(event: Event, args: Any, kwargs: Any) -> dict[str, Any]:
    """The call's arguments by name, defaults filled in."""
    if len(args) == len(event.names):
        return dict(zip(event.names, args, strict=True))
    if len(args) + len(kwargs) == len(event.names):
        return {**dict(zip(event.names, args, strict=False)), **kwargs}
    return bind_arguments(event.overload, args, kwargs)
