"""What a placed call of an eager session does, as steps over a frame.

[Note: frames]
    A call is lowered once, when the plan is made (see `symmplan.place.lower`). What stands for a
    tensor then is either the placement itself or a slot of a frame, which is filled anew for each
    call: the op's arguments in the order of its schema, the elements of those that are lists, the
    dispatch keys behind the session's, and behind them placements, other constants, and what is
    made on the way. So a step finds all it needs at places of the frame.

    A collective of the process group is launched by the group's backend, past the dispatcher, as
    its own kernel would launch it. Somebody who watches all ops gets to see it: then it is called.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from attrs import frozen

from symmplan.memory.ops import IMPLEMENTATIONS
from symmplan.place.watching import watched
from symmplan.registry import bind_arguments
from symmplan.torch_private import c10d, dispatch, works

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from symmplan.capture.graphs import Value
    from symmplan.place.program import PlacedCall

__all__ = ["Section", "Slot", "Step", "Tape", "getter", "in_order", "starter"]

#: What is done with a frame.
Step: TypeAlias = "Callable[[list[Any]], Any]"


@frozen
class Slot:
    """What a call finds in its frame at ``index``."""

    index: int


#: Steps by the operation of the problem that they belong to, in program order.
Section: TypeAlias = "dict[str, list[Step]]"


def in_order(section: Section) -> list[Step]:
    """All steps of a section."""
    return [step for steps in section.values() for step in steps]


class Tape:
    """A `Machine` that takes down what to do with a frame.

    Args:
        view: Gives a placement as a tensor like one of the program's.
        shapes: The stand-ins of the program's tensors.
        device: Where tensors lie.
        first: How many slots the frame has before those of the tape; the last of them is for the
            dispatch keys.
        watched: Whether somebody watches all ops.
        direct: Whether functional collectives can be launched past the dispatcher.
        works: For a ``c10d::`` call, which gets the work of what it launches: whether that is
            asynchronous. Else None.

    Attributes:
        begin: What is done when the call comes.
        late: What is done when the call is over.
        away: The same for results that are copied out when the program waits for them.
        result: What the op itself returned, or the work of what was launched; None if nothing of
            the kind was called.
        rest: What the slots of the tape hold when a call begins.
        needs_keys: Whether a step needs the dispatch keys.
    """

    def __init__(
        self,
        view: Callable[[str, Value, bool], torch.Tensor],
        shapes: Mapping[Value, Any],
        device: torch.device,
        first: int,
        *,
        watched: bool,
        direct: bool,
        works: bool | None,
    ) -> None:
        self.begin: Section = {}
        self.late: Section = {}
        self.away: Section = {}
        self.result: Slot | None = None
        self.rest: list[Any] = []
        self.needs_keys = False
        self._view = view
        self._shapes = shapes
        self._device = device
        self._first = first
        self._behind = Slot(first - 1)
        self._watched = watched
        self._direct = direct and not watched
        self._works = works
        self._steps: list[Step] = []
        self.part(self.begin)

    def part(self, section: Section) -> None:
        """What follows belongs to another section."""
        self._section = section
        self.doing("")

    # As a machine.

    def doing(self, operation: str) -> None:
        """What follows belongs to an operation of the problem."""
        self._steps = self._section.setdefault(operation, [])

    def view(self, buffer: str, like: Value, *, contiguous: bool) -> torch.Tensor:
        """The placement of a buffer, as a tensor like one of the program's."""
        return self._view(buffer, like, contiguous)

    def empty(self, like: Value) -> Slot:
        """Ordinary memory for a tensor like one of the program's."""
        fake = self._shapes[like]
        make = functools.partial(torch.empty, fake.shape, dtype=fake.dtype, device=self._device)
        return self.do(make)

    def copy(self, target: Any, source: Any) -> None:
        """Copy a tensor."""
        self.do(torch.Tensor.copy_, target, source)

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call an op that writes what it is given."""
        given = bind_arguments(op, args, kwargs)
        launch = self._launcher(op, given)
        if launch is None:
            function = op if self._watched else IMPLEMENTATIONS.get(op._schema.name, op)
            self.do(function, *args, **kwargs)
            return
        made = self.do(launch, given.get("out", given["input"]), given["input"])
        if self._works is not None:
            self.result = made

    def original(self, call: PlacedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Slot:
        """Call the op itself; the slot of what it returns."""
        op, self.needs_keys = call.overload, True
        run = functools.partial(_watched, op) if self._watched else dispatch.redispatch_of(op)
        self.result = self.do(run, self._behind, *args, **kwargs)
        return self.result

    def item(self, result: Slot, path: tuple[int, ...]) -> Slot:
        """One tensor of a result."""
        for index in path:
            result = self.do(operator.itemgetter(index), result)
        return result

    # What else a call of a session does.

    def do(self, function: Callable[..., Any], *values: Any, **named: Any) -> Slot:
        """Call a function of slots and other values; the slot of what it returns."""
        given = [self._place(value) for value in values]
        names = {name: self._place(value) for name, value in named.items()}
        at = self._slot(None)
        self._steps.append(_step(function, given, names, at))
        return Slot(at)

    def _slot(self, value: Any) -> int:
        """A new slot of the frame, that holds this when a call begins."""
        self.rest.append(value)
        return self._first + len(self.rest) - 1

    def _place(self, value: Any) -> int:
        """Where in the frame a value is found."""
        if isinstance(value, Slot):
            return value.index
        if not (isinstance(value, list) and any(isinstance(x, (Slot, list)) for x in value)):
            return self._slot(value)
        at, get = self._slot(None), getter(value)

        def step(frame: list[Any]) -> None:
            frame[at] = get(frame)

        self._steps.append(step)
        return at

    def _launcher(self, op: Any, given: dict[str, Any]) -> Callable[..., Any] | None:
        """What launches a collective of the process group, if it needs not be called."""
        if op.namespace != "_c10d_functional":
            return None
        ask = functools.partial(starter, op._schema.name, given, self._device)
        if self._works is not None:
            direct = None if self._watched else ask(asynchronous=self._works)
            return direct or ask(asynchronous=self._works, dispatched=True)
        register, start = works.register_work(), ask() if self._direct else None
        if register is None or start is None:
            return None
        return lambda out, source: register(out, start(out, source))


def _step(function: Callable[..., Any], given: list[int], names: dict[str, int], at: int) -> Step:
    """Calls a function with what a frame has at some places, and leaves the result at one."""
    if names:

        def step(frame: list[Any]) -> None:
            more = {name: frame[place] for name, place in names.items()}
            frame[at] = function(*[frame[place] for place in given], **more)
    elif not given:

        def step(frame: list[Any]) -> None:
            frame[at] = function()
    elif len(given) == 1:
        (only,) = given

        def step(frame: list[Any]) -> None:
            frame[at] = function(frame[only])
    else:
        take = operator.itemgetter(*given)

        def step(frame: list[Any]) -> None:
            frame[at] = function(*take(frame))

    return step


def _watched(op: Any, *args: Any, **kwargs: Any) -> Any:
    return watched(op)(*args, **kwargs)


def getter(value: Any) -> Callable[[list[Any]], Any]:
    """What takes a value out of a frame: a slot's, those of a list's slots, or the value itself."""
    if isinstance(value, Slot):
        return operator.itemgetter(value.index)
    if isinstance(value, list) and any(isinstance(x, (Slot, list)) for x in value):
        parts = [getter(x) for x in value]
        return lambda frame: [part(frame) for part in parts]
    return lambda _frame: value


def starter(
    target: str,
    given: Mapping[str, Any],
    device: torch.device,
    *,
    asynchronous: bool = True,
    dispatched: bool = False,
) -> Callable[[torch.Tensor, torch.Tensor], Any] | None:
    """What a functional collective starts, past the dispatcher unless ``dispatched``.

    ``given`` are its arguments; what is ``asynchronous`` may run on a stream of the group's.

    Returns:
        A function of the tensor that is written and the one that is read; it returns the work. None
        if there is no such way here.
    """
    name, group = target.partition("::")[2].removesuffix(".default"), given.get("group_name")
    reduction, root = given.get("reduce_op"), given.get("src")
    asked = c10d.collective_options(name, reduction=reduction, root=root)
    if asked is None or not isinstance(group, str):
        return None
    method, options = asked
    options.asyncOp = asynchronous
    if dispatched:  # by the method of all groups: the session's own is not there yet
        owner = torch.distributed.ProcessGroup
        run = functools.partial(getattr(owner, method), c10d.group_by_name(group))
    else:
        backend = c10d.group_backend(group, device)
        if backend is None:
            return None
        run = getattr(backend, method)
    if method in ("allreduce", "broadcast"):
        return lambda out, _: run([out], options)
    return lambda out, source: run(out, source, options)
