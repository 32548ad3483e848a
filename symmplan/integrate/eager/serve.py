"""The long way through one call of a frozen session, for whoever is not caught in front."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from symmplan import _compat
from symmplan.errors import RunError
from symmplan.integrate.eager.calls import frame_of
from symmplan.integrate.eager.schedule import bound_values
from symmplan.memory.races import LIVE
from symmplan.place.watching import watched

if TYPE_CHECKING:
    from symmplan.capture.c10d import Functional
    from symmplan.integrate.eager.schedule import Event

__all__ = ["serve", "take_away"]


def serve(event: Event, behind: Any, args: Any, kwargs: Any, form: Functional | None) -> Any:
    """Run ``event``.

    Args:
        event: What the schedule expects; the call is known to fit it.
        behind: The dispatch keys behind the session's own.
        args: Arguments of the op as the program called it.
        kwargs: The same by name.
        form: The functional form of a ``c10d::`` call.

    Returns:
        What the op returns.

    Raises:
        RunError: An argument lies elsewhere than planned.

    Collective: as the op.
    """
    original = watched(event.call.op) if LIVE else event.call.op.redispatch
    if event.run is None:  # nothing of it is in a placement
        for act in event.before:
            act()
        result = original(behind, *args, **kwargs)
        for act in event.after:
            act()
        return result
    values = bound_values(event, *((args, kwargs) if form is None else (form.args, form.kwargs)))
    for bound in event.binds:
        tensor = values[bound.head]
        for i in bound.index:
            tensor = tensor[i]
        if tensor.data_ptr() != bound.address:
            raise RunError(
                f"{event.name}: argument {bound.head!r} is not the tensor that it was when the "
                f"iteration was recorded, buffer {bound.buffer!r}",
                expected=f"a tensor at {bound.address:#x}",
                got=f"one at {tensor.data_ptr():#x}",
                fix="pass the same tensor in every iteration, or call session.replan() on all "
                "ranks",
                op=event.name,
                buffer=bound.buffer,
            )
    if form is None:
        return event.run(frame_of(event, [values[name] for name in event.names], behind))
    started: list[Any] = [None]

    def launch(out: torch.Tensor, source: torch.Tensor, _options: Any) -> Any:
        """The op itself, on what takes the place of its tensors."""
        by = {id(values["input"]): source, id(form.written): out}
        given, named = _swap(args, by), {k: _swap(v, by) for k, v in kwargs.items()}
        started[0] = original(behind, *given, **named)[1]
        return torch.distributed.Work.unbox(started[0])

    given = (values["input"], form.written, event.launch or launch, None)
    work = event.run(frame_of(event, given))
    if event.pends and work is not None:
        event.work = work  # its Python half
        return form.results(work.boxed())
    return form.results(_compat.finished_work() if started[0] is None else started[0])


def take_away(event: Event, tensor: torch.Tensor) -> None:
    """Copy a result that leaves, which has just been waited for, out of its placement.

    Whoever holds the tensor, as asynchronous tensors of torch do, holds the copy from now on.
    """
    assert event.tape is not None
    for act in event.tape.away.acts():
        act()
    copy = tensor.clone()
    tensor.set_(copy.untyped_storage(), 0, copy.shape, copy.stride())


def _swap(value: Any, by: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return by.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)(_swap(v, by) for v in value)
    return value
