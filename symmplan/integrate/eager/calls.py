"""Planned calls of a frozen session, made when the program makes them.

What a placed call does is written once, in `symmplan.runtime.lower`. A compiled graph has it as
nodes; here the values are the program's tensors and their placements, and what the machine is told
to do is done at once.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from symmplan.capture.graphs import at_path
from symmplan.errors import RunError
from symmplan.registry import bind_arguments
from symmplan.runtime.lower import launch
from symmplan.runtime.watching import watched
from symmplan.torch_private import c10d, works

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.capture.c10d import Functional
    from symmplan.capture.graphs import Value
    from symmplan.capture.sites import Site
    from symmplan.integrate.eager.faults import Faults
    from symmplan.integrate.eager.schedule import Act, Event
    from symmplan.runtime.lower import Launched
    from symmplan.runtime.program import PlacedCall

__all__ = ["EagerMachine", "counted", "perform", "serve", "serve_memory"]

_WAIT = torch.ops._c10d_functional.wait_tensor.default


@define(eq=False)
class EagerMachine:
    """A `Machine` to which values are tensors, for one call.

    Args:
        event: The call.
        behind: The dispatch keys behind the session's.

    Attributes:
        raw: What the op itself returned, if it is that which ran.
        work: Of the collective that a ``c10d::`` call started, if one was.
    """

    event: Event
    behind: Any
    raw: Any = None
    work: Any = None
    _due: dict[str, list[Act]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._due = dict(self.event.due)

    def doing(self, operation: str) -> None:
        """What must be done before an operation of the problem is done now, once."""
        perform(self._due.pop(operation, ()))

    def view(self, buffer: str, like: Value, *, contiguous: bool) -> torch.Tensor:  # noqa: ARG002
        """The placement of a buffer."""
        return self.event.views[buffer, contiguous]

    def empty(self, like: Value) -> torch.Tensor:
        """Ordinary memory for a result."""
        fake = self.event.shapes[like[1]]
        return torch.empty(fake.shape, dtype=fake.dtype, device=self.event.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor."""
        target.copy_(source)

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call an op that writes what it is given.

        A ``c10d::`` call makes that of its process group, and has a work to wait for.
        """
        if not self.event.form or op.namespace != "_c10d_functional":
            op(*args, **kwargs)
            return
        given = bind_arguments(op, args, kwargs)
        asynchronous = self.event.call.asynchronous or bool(self.event.engine)
        self.work = c10d.start_collective(op, given, asynchronous=asynchronous)

    def original(self, call: PlacedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the op itself."""
        self.raw = watched(call.overload)(self.behind, *args, **kwargs)
        return self.raw

    def item(self, result: Any, path: tuple[int, ...]) -> Any:
        """One tensor of a result."""
        for index in path:
            result = result[index]
        return result


def perform(acts: Sequence[Act]) -> None:
    """Barriers, overwriting of dead placements."""
    for act in acts:
        act()


def serve(
    event: Event, faults: Faults, behind: Any, args: Any, kwargs: Any, form: Functional | None
) -> Any:
    """Make a declared call, which is known to be the planned one.

    Args:
        event: What is planned.
        faults: Hears of what fails when a work is waited for.
        behind: The dispatch keys behind the session's.
        args: What the program gives.
        kwargs: The same by name.
        form: The functional form of a ``c10d::`` call.

    Returns:
        What the op returns.

    Raises:
        RunError: An argument lies elsewhere than planned.

    Collective: as the op.
    """
    perform(event.before)
    if event.placed is None:  # nothing of it is in a placement
        result = watched(event.call.op)(behind, *args, **kwargs)
    else:
        given = (args, kwargs) if form is None else (form.args, form.kwargs)
        bound = bind_arguments(event.placed.overload, *given)
        for site, address in event.bound.items():
            _check_place(event, site, address, bound)
        machine = EagerMachine(event, behind)
        launched = launch(event.placed, machine, bound)
        if form is None:
            result = _results(event, machine, launched)
        else:
            result = form.results(_work(event, faults, machine, launched, form.written).boxed())
    perform(event.after)
    return result


def _check_place(event: Event, site: Site, address: int, bound: dict[str, Any]) -> None:
    found = at_path(bound[site.head], site.index).data_ptr()
    if found != address:
        raise RunError(
            f"{event.name}: argument {site.head!r} is not the tensor that it was when the "
            f"iteration was recorded, buffer {site.buffer!r}",
            expected=f"a tensor at {address:#x}",
            got=f"one at {found:#x}",
            fix="pass the same tensor in every iteration, or call session.replan() on all ranks",
            op=event.name,
            buffer=site.buffer,
        )


def _work(
    event: Event,
    faults: Faults,
    machine: EagerMachine,
    launched: Launched,
    written: torch.Tensor,
) -> Any:
    """The work that a ``c10d::`` call returns. What was staged is copied back at its end."""
    work = machine.work
    if event.pends:

        def finish() -> None:
            with faults.guarded():
                _copy_back(event, machine, launched)

        # Also where nothing is copied: torch's own works hold their tensors for as long as they
        # live, this one does until it was waited for.
        work = event.work = works.watched_work(work, finish, written)[0]
    else:
        if work is not None and (event.engine or any(s.writes for s in launched.staged)):
            work.wait()  # what ran on this stream has none
        _copy_back(event, machine, launched)
    return works.finished() if work is None else work


def _results(event: Event, machine: EagerMachine, launched: Launched) -> Any:
    """What the program gets of an op that gives tensors: copies of those that leave."""
    call, results = event.placed, dict(launched.results)
    assert call is not None
    back = _copy_back(event, machine, launched)
    for site in call.sites:
        if site.leaves and site.path not in event.leaving:
            machine.doing(call.copy("copy out", site))
            results[site.path] = results[site.path].clone()
    if call.row is None and not call.results:  # the op itself ran
        return next((source for view, source in back if machine.raw is view), machine.raw)
    for path, value in results.items():
        if path in event.lent or path in event.leaving:
            results[path] = value.detach()  # else it would be the session's own
        else:
            results[path] = next((source for view, source in back if view is value), value)
    return results[()] if () in results else list(results.values())


def _copy_back(
    event: Event, machine: EagerMachine, launched: Launched
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Bring what the op wrote in staged arguments to where the program has it.

    Returns:
        Each placement, with the program's tensor.
    """
    call, back = event.placed, []
    assert call is not None
    for site, (view, source) in launched.staged.items():
        if site.writes:
            machine.doing(call.copy("copy back", site))
            if call.spec.asynchronous and not event.form:
                _WAIT(view)
            source.copy_(view)
            back.append((view, source))
    return back


def serve_memory(event: Event, make: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor:
    """What `symmplan.empty` and `symmplan.out` return where the plan expects them."""
    perform(event.before)
    if not event.lent:
        result: torch.Tensor = make(*args, **kwargs)
    else:
        (lent,) = event.lent.values()
        place = lent.tensor
        if event.call.kind == "out":
            make(*args, **kwargs, out=place)
        result = place.detach()
    perform(event.after)
    return result


def counted(events: Sequence[Event]) -> Counter[str]:
    """What the calls of ``events`` add to `Stats`."""
    return Counter(
        served=sum(e.placed is not None for e in events),
        plain=sum(e.call.kind == "op" and e.placed is None for e in events),
        copies=sum(e.copies for e in events),
    )
