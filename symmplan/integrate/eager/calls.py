"""The planned calls of a frozen session: each is decided once, when it first comes.

`symmplan.place.lower` says what a placed call does. A compiled graph has that as nodes. A session
writes it as a Python function of its arguments, with views, addresses and groups filled in.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field

from symmplan.capture.apart import storage_key
from symmplan.capture.graphs import argument_nodes, at_path, unequal_parts, written_arguments
from symmplan.capture.signatures import CallValue
from symmplan.device import device_of
from symmplan.errors import RunError
from symmplan.integrate.eager.faults import REDO
from symmplan.integrate.eager.moving import and_back, move
from symmplan.memory.ops.library import IMPLEMENTATIONS
from symmplan.memory.ops.one_sided import all_to_all_single_out
from symmplan.memory.segment import in_segment
from symmplan.place.lower import launch
from symmplan.registry import bind_arguments
from symmplan.runtime.watching import watched
from symmplan.torch_private import c10d, works

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.capture.c10d import Functional
    from symmplan.capture.graphs import Path, Value
    from symmplan.capture.sites import Site
    from symmplan.integrate.eager.faults import Faults
    from symmplan.integrate.eager.schedule import Event
    from symmplan.place.lower import Staged
    from symmplan.place.program import PlacedCall

_WAIT = torch.ops._c10d_functional.wait_tensor.default

#: What an event's function is given: the program's arguments, and the dispatch keys behind ours.
_ARGS, _KWARGS, _KEYS = CallValue("args"), CallValue("kwargs"), CallValue("keys")
_GIVEN = CallValue("*args"), CallValue("**kwargs")


@define(eq=False)
class EagerMachine:
    """A `Machine` that writes what each call of an event does as a Python function.

    A value is a tensor, if it is the same in every call, or a `CallValue`.

    Attributes:
        raw: The result of the op, if the op itself runs.
        work: Of the collective that a ``c10d::`` call starts, if it starts one.
        bound: The placements of arguments that lie there already. Only symmplan's ops get these.
            Other ops get the program's tensor, so that a wait for that tensor waits for the work on
            its storage.
        staged: Placements of arguments that are copied back, each with the program's tensor.
        ahead: Barriers and overwriting that come before the launch.
        behind: The same after it.
    """

    event: Event
    raw: CallValue | None = None
    work: CallValue | None = None
    bound: dict[CallValue, torch.Tensor] = field(factory=dict)
    staged: list[tuple[torch.Tensor, CallValue]] = field(factory=list)
    ahead: list[Callable[[], None]] = field(factory=list)
    behind: list[Callable[[], None]] = field(factory=list)
    _launched: bool = False
    _lines: list[str] = field(factory=list)
    _constants: list[Any] = field(factory=list)

    def do(self, function: Any, *args: Any, **kwargs: Any) -> CallValue:
        """Call a function of values, or of lists of them; returns what stands for its result."""
        given = [self._text(x) for x in args]
        given += [f"**{{{name!r}: {self._text(x)}}}" for name, x in kwargs.items()]
        result = CallValue(f"v{len(self._lines)}")
        self._lines.append(f"{result.text} = {self._text(function)}({', '.join(given)})")
        return result

    def _text(self, value: Any) -> str:
        if isinstance(value, CallValue):
            return value.text
        if isinstance(value, (list, tuple)):
            items = "".join(f"{self._text(x)}, " for x in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        self._constants.append(value)
        return f"c{len(self._constants) - 1}"

    def function(self, result: Any = None) -> Callable[[Any, Any, Any], Any]:
        """The written code as a function of args, kwargs and keys that returns ``result``."""
        lines = [*self._lines, f"return {self._text(result)}"]
        given = ", ".join(f"c{i}" for i in range(len(self._constants)))
        body = "".join(f"  {line}\n" for line in lines)
        source = f"def make({given}):\n def run(args, kwargs, keys):\n{body} return run\n"
        made: Callable[[Any, Any, Any], Any] = _maker(source)(*self._constants)
        return made

    def doing(self, operation: str) -> None:
        """Do the work that is due before an operation of the problem, once."""
        self.acts(self.event.due.pop(operation, ()))

    def acts(self, acts: Sequence[Callable[[], None]]) -> None:
        """Barriers, overwriting of dead placements."""
        (self.behind if self._launched else self.ahead).extend(acts)
        for act in acts:
            self.do(act)

    def view(self, buffer: str, like: Value, *, contiguous: bool) -> torch.Tensor:  # noqa: ARG002
        """The placement of a buffer."""
        return self.event.views[buffer, contiguous]

    def empty(self, like: Value) -> CallValue:
        """Ordinary memory for a result."""
        fake = self.event.shapes[like[1]]
        made = self.do(torch.empty, fake.shape, dtype=fake.dtype, device=self.event.device)
        return evolve(made, like=(fake.shape, fake.dtype))

    def copy(self, target: Any, source: Any) -> None:
        """Copy a tensor."""
        self.do(torch.Tensor.copy_, target, source)

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call an op that writes what it is given.

        A ``c10d::`` call makes that of its process group, and has a work to wait for. Symmplan's
        own ops are checked now, on tensors like those of the call.
        """
        self._launched = True
        form, prepare = self.event.form, IMPLEMENTATIONS.get(op._schema.name)
        row = None if self.event.placed is None else self.event.placed.row
        if prepare is not None:
            named = {name: self._like(x) for name, x in kwargs.items()}
            if prepare is all_to_all_single_out:
                named["declines"] = functools.partial(getattr, self.event, "declined")
                named["declined"] = self.event.other_sizes
            elif self.event.may_decline or unequal_parts(self.event.call.node) is not None:
                named["others"] = True
            run = prepare(*map(self._like, args), **named)
            given = (*args, *kwargs.values())
            changing = (x for x in given if isinstance(x, CallValue) and x not in self.bound)
            work = self.do(run, *changing)
            if row is not None and row.kernel:
                self._until(self.do(_queued, args[0]), args[0])
            elif row is not None and not row.synchronous:
                self._until(work, kwargs["out"])
        elif op.namespace == "symm_mem":
            found = {name: self._found(x) for name, x in kwargs.items()}
            self.do(op, *map(self._found, args), **found)
        elif form is None or op.namespace != "_c10d_functional":
            self.do(op, *args, **kwargs)
        else:
            placed = self.event.placed
            asynchronous = form.asynchronous or bool(placed and placed.engine)
            start = c10d.starter_of(op, bind_arguments(op, args, kwargs), asynchronous=asynchronous)
            self.work = self.do(start, args[0], *kwargs.values())

    def _until(self, work: CallValue, out: Any) -> None:
        """What symmplan's own op started ends where the program waits for it."""
        if self.event.form is None:
            self.do(_ended_by_wait, out, work)
        elif self.event.pends:
            self.work = work
        else:
            self.do(_wait, work)

    def _like(self, value: Any) -> Any:
        """The placement of what a value stands for; or a tensor like it, of one element's bytes."""
        if not isinstance(value, CallValue):
            return value
        if value in self.bound:
            return self.bound[value]
        shape, dtype = value.like
        return self.event.elements[dtype].expand(shape)

    def original(
        self, call: PlacedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallValue:
        """Call the op itself."""
        if call.overload.namespace == "symm_mem":
            args = tuple(map(self._found, args))
            kwargs = {name: self._found(x) for name, x in kwargs.items()}
        self.raw = self.do(watched(call.overload), _KEYS, *args, **kwargs)
        return self.raw

    def _found(self, value: Any) -> Any:
        """A tensor for torch's kernels, which count from where an allocation begins."""
        if isinstance(value, CallValue) and value in self.bound:
            self.staged.append((self.bound[value], value))  # what the program gets back
            return self.bound[value]
        return in_segment(value) if isinstance(value, torch.Tensor) else value  # a leased one

    def item(self, result: CallValue, path: tuple[int, ...]) -> CallValue:
        """One tensor of a result."""
        return CallValue(result.text + "".join(f"[{i}]" for i in path))


@functools.cache
def _maker(source: str) -> Callable[..., Any]:
    """Of calls that do the same all but the constants are one function."""
    made: dict[str, Any] = {}
    exec(compile(source, "<symmplan call>", "exec"), made)  # noqa: S102 (written above)
    return made["make"]  # type: ignore[no-any-return]


@torch.inference_mode(mode=False)  # what is made here outlives the caller's mode
def settle(event: Event, faults: Faults) -> Callable[[Any, Any, Any], Any]:
    """Decide what each call of an event does: write its ``run``, and return it.

    Only the session may hold its placements then, as before each call.

    Args:
        event: What is planned.
        faults: Is told of errors in the wait for a work.
    """
    machine, placed, form = EagerMachine(event), event.placed, event.call.form
    result: Any
    alone = placed is not None and placed.row is not None and not placed.row.one_sided
    if event.may_decline and alone:
        machine.do(_decline, event)
    machine.acts(event.before)
    if event.call.kind != "op":
        result = _memory(event, machine)
    elif placed is None or form is None:  # nothing of it is in a placement
        result = machine.do(watched(event.call.op), _KEYS, *_GIVEN)
    else:
        bound = bind_arguments(placed.overload, form.args, form.kwargs)
        for site, place in event.bound.items():
            given = at_path(bound[site.head], site.index)
            check = functools.partial(_check_place, event, site, place.data_ptr(), place.stride())
            lease = event.moving.get(site)
            machine.do(check if lease is None else functools.partial(move, event, lease), given)
            machine.bound[given] = place
        _check_shared(event, machine)
        results, staged = launch(placed, machine, bound)
        if event.form is None:
            result = _results(placed, machine, results, staged)
        else:
            result = event.form.results(_work(placed, event.form, machine, staged, faults))
    machine.acts(event.after)
    run = machine.function(result)
    if event.may_decline:
        run = _or_declined(event, run, machine.ahead if alone else (), machine.behind)
    event.run = run = and_back(event, run) if event.moving else run
    for lease in event.leases:
        lease.own()
    return run


def _or_declined(
    event: Event,
    planned: Callable[[Any, Any, Any], Any],
    ahead: Sequence[Callable[[], None]],
    behind: Sequence[Callable[[], None]],
) -> Callable[[Any, Any, Any], Any]:
    """Of an all-to-all: what makes it as planned, or else as the program does.

    See [Note: other sizes] in `symmplan.integrate.eager.schedule`.
    """
    machine = EagerMachine(event)
    machine.acts(ahead)
    made = machine.do(watched(event.call.op), _KEYS, *_GIVEN)
    for lease in event.leased.values():
        made = machine.do(functools.partial(_in_place_of, lease.tensor), made)
    machine.acts(behind)
    own = machine.function(made)

    def run(args: Any, kwargs: Any, keys: Any) -> Any:
        try:
            return planned(args, kwargs, keys)
        except RunError as error:
            if error is not event.other_sizes:
                raise
            error.__traceback__ = None  # its frames hold tensors
            event.declined = True
            event.declines += 1
        return own(args, kwargs, keys)

    return run


def _decline(event: Event) -> None:
    if event.declined:
        raise event.other_sizes


def _in_place_of(placement: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """A result where later calls look for it, if it is as large as planned."""
    if result.shape != placement.shape:
        return result
    return placement.copy_(_WAIT(result)).detach()


def _check_shared(event: Event, machine: EagerMachine) -> None:
    """An op that writes has the same memory in the same arguments as in the recording."""
    call = event.call
    if event.form is not None or call.form is None or not written_arguments(call.op):
        return
    nodes = list(argument_nodes((call.node.args, list(call.node.kwargs.values()))))
    recorded = _first_with_memory([node.meta["val"] for _, node in nodes])

    def check(*tensors: torch.Tensor) -> None:
        found = _first_with_memory(tensors)
        if found != recorded:
            raise RunError(
                f"{event.name}: its tensors do not share memory as in the recorded iteration",
                expected=f"for each tensor the first one with its memory: {recorded}",
                got=found,
                fix=REDO,
                op=event.name,
            )

    if len(recorded) > 1:
        given = call.form.args, list(call.form.kwargs.values())
        machine.do(check, *(at_path(given, path) for path, _ in nodes))


def _first_with_memory(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the number of the first one on its storage."""
    keys = [storage_key(tensor) for tensor in tensors]
    return [keys.index(key) for key in keys]


def _check_place(
    event: Event, site: Site, address: int, strides: tuple[int, ...], tensor: torch.Tensor
) -> None:
    if event.declined:
        return
    if tensor.data_ptr() != address or tensor.stride() != strides:
        raise RunError(
            f"{event.name}: argument {site.head!r} is not the tensor of the recorded "
            f"iteration, buffer {site.buffer!r}",
            expected=f"a tensor at {address:#x}, strides {strides}",
            got=f"one at {tensor.data_ptr():#x}, strides {tensor.stride()}",
            fix="pass the same tensor in every iteration, or call session.replan() on all ranks",
            op=event.name,
            buffer=site.buffer,
        )


def _memory(event: Event, machine: EagerMachine) -> CallValue:
    """The results of `symmplan.placed.empty` and `symmplan.placed.out` where planned."""
    make, given = CallValue("args[0]"), (CallValue("*args[1:]"), CallValue("**kwargs"))
    if not event.leased:
        return machine.do(make, *given)
    (leased,) = event.leased.values()
    if event.call.kind == "out":
        machine.do(make, *given, out=leased.tensor)
    return machine.do(leased.tensor.detach)


def _work(
    call: PlacedCall, form: Functional, machine: EagerMachine, staged: Staged, faults: Faults
) -> Any:
    """The box of the work that a ``c10d::`` call returns.

    Staged arguments are copied back at its end.
    """
    event = machine.event
    if not event.pends:
        if machine.work is not None and (call.engine or any(s.writes for s in staged)):
            machine.do(_wait, machine.work)
        _copy_back(call, machine, staged)

        def over(work: Any, written: torch.Tensor) -> Any:
            if work is not None:
                return work.boxed()
            event.work, box = works.finished_work(written)
            return box

        return machine.do(over, machine.work, form.written)
    behind = EagerMachine(event)
    _copy_back(call, behind, staged)
    back = behind.function()

    def pending(work: Any, written: torch.Tensor, args: Any, kwargs: Any) -> Any:
        def finish() -> None:
            with faults.guarded():
                back(args, kwargs, None)

        # Also where nothing is copied: torch's own works hold their tensors for as long as they
        # live, this one does until it was waited for.
        done = device_of(written.device).record_event
        event.work, box = works.watched_work(work, finish, written, done)
        return box

    return machine.do(pending, machine.work, form.written, _ARGS, _KWARGS)


def _wait(work: Any) -> None:
    if work is not None:  # what ran on this stream has none
        work.wait()


def _queued(out: torch.Tensor) -> Any:
    """What the current stream has queued, for which another one may wait."""
    return works.queued_work(device_of(out.device).record_event())


def _ended_by_wait(out: torch.Tensor, work: Any) -> None:
    if work is not None:
        works.ended_by_wait(out, work)


def _results(
    call: PlacedCall, machine: EagerMachine, results: dict[Path, Any], staged: Staged
) -> Any:
    """The tensors that the program gets from an op: copies of those that leave."""
    event, back = machine.event, machine.staged
    _copy_back(call, machine, staged)
    for site in call.sites:
        if site.leaves and site.path not in event.leaving:
            machine.doing(call.copy("copy out", site))
            results[site.path] = machine.do(torch.Tensor.clone, results[site.path])
    if call.row is None and not call.results:  # the op itself runs
        return machine.do(_staged_or_own, machine.raw, *back) if back else machine.raw
    for path, value in results.items():
        if path in event.leased or path in event.leaving:
            results[path] = machine.do(torch.Tensor.detach, value)  # else it would be the session's
        elif back:
            results[path] = machine.do(_staged_or_own, value, *back)
    return _returned(call.node.meta["val"], (), results, machine)


def _returned(recorded: Any, path: Path, results: dict[Path, Any], machine: EagerMachine) -> Any:
    """What an op returns, also nested: its tensors, and values of other types."""
    if path in results:
        return results[path]
    if isinstance(recorded, (list, tuple)):
        return [_returned(x, (*path, i), results, machine) for i, x in enumerate(recorded)]
    return recorded if machine.raw is None else machine.item(machine.raw, path)


def _staged_or_own(result: Any, *back: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """The program's tensor of a result: its own one, if that was staged."""
    return next((source for view, source in back if result is view), result)


def _copy_back(call: PlacedCall, machine: EagerMachine, staged: Staged) -> None:
    """Bring what the op wrote in staged arguments to where the program has it."""
    for site, (view, source) in staged.items():
        if site.writes:
            machine.doing(call.copy("copy back", site))
            if call.spec.asynchronous and machine.event.form is None:
                machine.do(_WAIT, view)
            machine.copy(source, view)
            machine.staged.append((view, source))
