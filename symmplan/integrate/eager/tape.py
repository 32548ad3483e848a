"""What a placed call of an eager session does, as steps over a frame.

[Note: frames]
    A call is lowered once, when the plan is made (see `symmplan.place.lower`). What stands for a
    tensor then is either the placement itself or a slot of a frame, which is filled anew for each
    call: the op's arguments in the order of its schema, the elements of those that are lists, what
    the call needs besides, and what is made on the way.

    A collective of the process group is launched by the group's backend, past the dispatcher, as
    its own kernel would launch it. Somebody who watches all ops gets to see it: then it is called.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from attrs import define, field, frozen

from symmplan import _compat as compat
from symmplan.integrate.eager.direct import starter
from symmplan.memory.ops import IMPLEMENTATIONS
from symmplan.place.watching import watched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.capture.graphs import Value
    from symmplan.place.program import PlacedCall

__all__ = ["Section", "Slot", "Step", "Tape", "frameless", "getter"]

#: What is done with a frame.
Step: TypeAlias = "Callable[[list[Any]], Any]"

_WAIT = torch.ops._c10d_functional.wait_tensor.default


@frozen
class Slot:
    """What a call finds in its frame at ``index``."""

    index: int


@define(eq=False)
class Section:
    """Steps by the operation of the problem that they belong to, in program order.

    Attributes:
        steps: Those of each operation.
        ahead: What comes right before an operation: barriers.
    """

    steps: dict[str, list[Step]] = field(factory=dict)
    ahead: dict[str, list[Callable[[], None]]] = field(factory=dict)

    def all(self) -> list[Step]:
        """Everything in order."""
        found: list[Step] = []
        for operation, steps in self.steps.items():
            found += map(frameless, self.ahead.get(operation, ()))
            found += steps
        return found

    def acts(self) -> list[Callable[[], None]]:
        """What comes before its operations."""
        return [act for name in self.steps for act in self.ahead.get(name, ())]


def frameless(act: Callable[[], None]) -> Step:
    """What needs no frame, as a step."""
    return lambda _frame: act()


class Tape:
    """A `Machine` that takes down what to do with a frame.

    Args:
        view: Gives a placement as a tensor like one of the program's.
        shapes: Gives the stand-in of one of the program's tensors.
        device: Where tensors lie.
        size: How many slots the frame has before the tape adds to it; the last is for the dispatch
            keys.
        watched: Whether somebody watches all ops.
        direct: Whether collectives of the process group can be launched past the dispatcher.
        launches: Whether what launches the op is in the frame, behind its first two slots; see
            [Note: past the dispatcher] in `symmplan.integrate.eager.calls`.

    Attributes:
        begin: What is done when the call comes.
        late: What is done when the call is over.
        away: The same for results that are copied out when the program waits for them.
        result: The slot of what the op itself returned, or of the work that was launched; None if
            nothing of the kind was called.
        size: How many slots the frame has.
        keys: Equal for tapes that do the same to the same bytes.
        needs_keys: Whether a step needs the call's dispatch keys.
    """

    def __init__(
        self,
        view: Callable[[str, Value, bool], torch.Tensor],
        shapes: Callable[[Value], Any],
        device: torch.device,
        size: int,
        *,
        watched: bool,
        direct: bool,
        launches: bool,
    ) -> None:
        self.begin, self.late, self.away = Section(), Section(), Section()
        self.result: int | None = None
        self.size = size
        self.keys: list[Any] = []
        self.needs_keys = False
        self._view = view
        self._shapes = shapes
        self._device = device
        self._behind = size - 1
        self._watched = watched
        self._direct = direct and not watched
        self._launches = launches
        self._steps: list[Step] = []
        self.part(self.begin)

    def part(self, section: Section) -> None:
        """What follows belongs to another section."""
        self._section = section
        self.doing("")

    # As a machine.

    def doing(self, operation: str) -> None:
        """What follows belongs to an operation of the problem."""
        self._steps = self._section.steps.setdefault(operation, [])

    def view(self, buffer: str, like: Value, *, contiguous: bool) -> torch.Tensor:
        """The placement of a buffer, as a tensor like one of the program's."""
        return self._view(buffer, like, contiguous)

    def empty(self, like: Value) -> Slot:
        """Ordinary memory for a tensor like one of the program's."""
        fake, device = self._shapes(like), self._device
        shape, dtype, at = fake.shape, fake.dtype, self._new()

        def step(frame: list[Any]) -> None:
            frame[at] = torch.empty(shape, dtype=dtype, device=device)

        self._take(step, "empty", shape, dtype, at)
        return Slot(at)

    def copy(self, target: Any, source: Any) -> None:
        """Copy a tensor."""
        to, of = _index(target), _index(source)
        if to is None and of is not None:
            copy, at = target.copy_, of
            self._take(lambda frame: copy(frame[at]), "copy", id(target), of)
            return
        get_to, get_of = getter(target), getter(source)
        step: Step = lambda frame: get_to(frame).copy_(get_of(frame))  # noqa: E731
        self._take(step, "copy", _key(target), _key(source))

    def clone(self, source: Any) -> Slot:
        """A copy in ordinary memory."""
        at, get = self._new(), getter(source)

        def step(frame: list[Any]) -> None:
            frame[at] = get(frame).clone()

        self._take(step, "clone", _key(source), at)
        return Slot(at)

    def wait(self, tensor: Any) -> None:
        """Wait for what writes a tensor."""
        get = getter(tensor)
        self._take(lambda frame: _WAIT(get(frame)), "wait", _key(tensor))

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call an op that writes what it is given."""
        key = ("call", op, *map(_key, args), *((k, _key(v)) for k, v in kwargs.items()))
        if self._launches:
            at = self.result = self._new()
            tensors = getter([kwargs.get("out", args[0]), args[0]])

            def launch(frame: list[Any]) -> None:
                frame[at] = frame[2](*tensors(frame), frame[3])

            self._take(launch, *key)
            return
        if self._direct and self._start(op, args, kwargs, key):
            return
        function = op if self._watched else IMPLEMENTATIONS.get(op._schema.name, op)
        get, named = getter(list(args)), {k: getter(v) for k, v in kwargs.items()}
        if len(named) == 1:
            ((name, one),) = named.items()
            if name == "out":
                self._take(lambda frame: function(*get(frame), out=one(frame)), *key)
                return

        def step(frame: list[Any]) -> None:
            function(*get(frame), **{k: value(frame) for k, value in named.items()})

        self._take(step, *key)

    def original(self, call: PlacedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Slot:
        """Call the op itself; the slot of what it returns."""
        at = self.result = self._new()
        self.needs_keys = True
        op, behind, after = call.overload, self._behind, compat.keyset_after_select()
        run = functools.partial(_watched, op) if self._watched else compat.redispatch_of(op)
        given, named = getter(list(args)), {k: getter(v) for k, v in kwargs.items()}

        def step(frame: list[Any]) -> None:
            more = {k: value(frame) for k, value in named.items()} if named else {}
            frame[at] = run(frame[behind] & after, *given(frame), **more)

        self._take(step, "run", op, *map(_key, args), *map(_key, kwargs.values()), at)
        return Slot(at)

    def item(self, result: Slot, path: tuple[int, ...]) -> Slot:
        """One tensor of a result."""
        if not path:
            return result
        at, of = self._new(), result.index

        def step(frame: list[Any]) -> None:
            value = frame[of]
            for i in path:
                value = value[i]
            frame[at] = value

        self._take(step, "item", of, path)
        return Slot(at)

    # What it is made of.

    def _start(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> bool:
        """Launch a collective of the process group past the dispatcher, if that can be done."""
        register = compat.register_work()
        if op.namespace != "_c10d_functional" or register is None:
            return False
        names = [a.name for a in op._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        start = starter(
            f"{op._schema.name}.{op._overloadname}",
            given["group_name"],
            self._device,
            reduction=given.get("reduce_op"),
            root=given.get("src"),
        )
        if start is None:
            return False
        source = given["input"]
        out = given.get("out", source)
        to, of = _index(out), _index(source)
        if to is None and of is not None:  # nearly always
            at = of
            step: Step = lambda frame: register(out, start(out, frame[at]))  # noqa: E731
        else:
            get = getter([out, source])

            def step(frame: list[Any]) -> None:
                tensors = get(frame)
                register(tensors[0], start(*tensors))

        self._take(step, *key)
        return True

    def _new(self) -> int:
        self.size += 1
        return self.size - 1

    def _take(self, step: Step, *key: Any) -> None:
        self._steps.append(step)
        self.keys.append(key)


def _watched(op: Any, *args: Any, **kwargs: Any) -> Any:
    return watched(op)(*args, **kwargs)


def _index(value: Any) -> int | None:
    return value.index if isinstance(value, Slot) else None


def _key(value: Any) -> Any:
    """What is equal for values that are the same bytes, or the same slot."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, torch.Tensor):
        return id(value)
    return value.__class__, value


def getter(value: Any) -> Callable[[Sequence[Any]], Any]:
    """What takes a value out of a frame: a slot's, those of a list's slots, or the value itself."""
    if isinstance(value, Slot):
        at = value.index
        return lambda frame: frame[at]
    if isinstance(value, list) and any(isinstance(x, (Slot, list)) for x in value):
        if all(isinstance(x, Slot) for x in value):
            indices = [x.index for x in value]
            if indices == list(range(len(indices))):
                end = len(indices)
                return lambda frame: frame[:end]
            return lambda frame: [frame[i] for i in indices]
        if not any(isinstance(x, list) for x in value):
            pairs = [(x.index, None) if isinstance(x, Slot) else (-1, x) for x in value]
            return lambda frame: [x if i < 0 else frame[i] for i, x in pairs]
        parts = [getter(x) for x in value]
        return lambda frame: [part(frame) for part in parts]
    return lambda _frame: value
