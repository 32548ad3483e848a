"""The first iteration of an eager session, and the plan that is made of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from symmplan.capture.eager import Recorder, signature
from symmplan.capture.eager_problem import capture_recorded
from symmplan.capture.poison import plan_poison
from symmplan.errors import AgreementError
from symmplan.integrate.eager.build import events_of
from symmplan.integrate.eager.copies import copies_of
from symmplan.integrate.eager.faults import public
from symmplan.integrate.eager.rescue import missing_of
from symmplan.integrate.eager.scratch import RecordingScratch
from symmplan.memory.exchange import Exchange
from symmplan.memory.own import OWN
from symmplan.memory.spares import obtain
from symmplan.place.chooser import Chosen, choose_ways
from symmplan.place.engines import known, register
from symmplan.place.program import place
from symmplan.planner import plan as plan_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import fx

    from symmplan.capture.producers import Write
    from symmplan.capture.sites import Captured
    from symmplan.integrate.eager.schedule import Event
    from symmplan.integrate.eager.streams import Streams
    from symmplan.memory import Arena
    from symmplan.memory.groups import Group
    from symmplan.model import Plan
    from symmplan.place.choice import Choice
    from symmplan.place.options import Options
    from symmplan.place.stats import Copy
    from symmplan.place.ways import Lowerings

__all__ = ["Frozen", "Recording", "Settings", "meet"]

#: Arguments of all-to-alls that differ from rank to rank.
_SPLITS = ("output_split_sizes", "input_split_sizes")


@frozen
class Settings:
    """How a session was asked to work.

    Attributes:
        groups: ``{name: group}`` of its ranks, one.
        lowerings: How ops run on its memory backend.
        device: Where declared tensors lie.
        streams: The device's streams; None if it has none.
        options: What the user asked for.
    """

    groups: Mapping[str, Group]
    lowerings: Lowerings
    device: torch.device
    streams: Streams | None
    options: Options

    @property
    def group(self) -> Group:
        """The group of its ranks."""
        (group,) = self.groups.values()
        return group


@frozen
class Frozen:
    """What a recording became.

    Attributes:
        plan: The plan.
        captured: What the recorded program does.
        arena: The plan's memory.
        rendezvous: How many were made for it.
        events: The declared calls that are expected, in order.
        tail: What to do at the end of each iteration.
        copies: See `Copy`.
        missing: What peers need of each call, should this rank not come to it; see
            `symmplan.integrate.eager.rescue`. None if no peer can wait for one.
        choices: What was measured.
    """

    plan: Plan
    captured: Captured
    arena: Arena
    rendezvous: int
    events: list[Event]
    tail: list[Callable[[], None]]
    copies: tuple[Copy, ...]
    missing: list[Callable[[], None] | None] | None
    choices: tuple[Choice, ...]


def meet(settings: Settings, op: str, detail: str = "") -> None:
    """Every rank says what it is about to do.

    Raises:
        AgreementError: Somebody is about to do something else.

    Collective: yes.
    """
    group = settings.group
    exchange = Exchange(settings.groups, settings.options.timeout)
    try:
        note = json.dumps([op, detail]).encode()
        said = exchange.round("call", note)[group.name]
    except BaseException as error:
        exchange.fail(error)
        raise
    other = next((i for i, text in enumerate(said) if text != said[0]), None)
    if other is not None:
        texts = [json.loads(said[i]) for i in (0, other)]
        names = [f"{what} {how}".strip() for what, how in texts]
        raise AgreementError(
            f"ranks 0 and {other} make different calls in a recorded iteration",
            expected=f"{names[0]} (rank 0)",
            got=f"{names[1]} (rank {other})",
            fix="make the same declared calls with the same shapes on every rank",
            group=group.name,
            rank=group.rank,
            ranks=(0, other),
            op=texts[0][0],
            buffer="",
        )
    exchange.finish()


class Recording:
    """An iteration that is being recorded, from its construction to `freeze` or `stop`.

    Args:
        settings: Of the session.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._scratch = RecordingScratch(
            settings.lowerings.memory, settings.device, settings.options.timeout
        )
        self._recorder = Recorder(
            settings.lowerings.lookup,
            self._meet_at_op,
            lambda: bool(OWN.depth),
            watch=None if settings.streams is None else settings.streams.watch,
            scratch=self._scratch,
        )
        self._recorder.__enter__()

    def _meet_at_op(self, op: Any, args: Any, kwargs: Any) -> None:
        """Before a declared op is recorded: do all ranks call the same?

        How many rows go to whom is each rank's own affair.
        """
        names = [a.name for a in op._schema.arguments]
        args = [x for name, x in zip(names, args, strict=False) if name not in _SPLITS]
        kwargs = {name: x for name, x in kwargs.items() if name not in _SPLITS}
        given = (signature(args), signature(kwargs))
        meet(self._settings, str(op.name()), repr(public(given)))

    def memory(self, kind: str, make: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """What `symmplan.empty` and `symmplan.out` do meanwhile."""
        tensor: torch.Tensor = make(*args, **kwargs)
        write: Write = "alloc" if kind == "empty" else "out"
        self._recorder.memory(tensor, kind, write, (make, *args), kwargs)
        return tensor

    def stop(self) -> None:
        """Record no more."""
        self._recorder.__exit__(None, None, None)
        self._scratch.release()

    def freeze(self) -> Frozen:
        """Plan what was recorded, and get its memory.

        Raises:
            AgreementError: Ranks recorded different programs; raised on every rank.

        Collective: yes.
        """
        settings, recorder = self._settings, self._recorder
        self.stop()
        meet(settings, "session.step()")
        chosen = Chosen()

        def choose(captured: Captured) -> Mapping[fx.Node, str]:
            nonlocal chosen
            chosen = choose_ways(captured, settings.lowerings, settings.device, settings.options)
            return chosen.ordinary

        captured = capture_recorded(
            recorder,
            lookup=settings.lowerings.lookup,
            producer=settings.lowerings.producer,
            skip=settings.lowerings.skip,
            partly=settings.lowerings.partly,
            choose=choose,
        )
        if settings.options.debug:
            captured = plan_poison(captured)
        plan = plan_problem(captured.problem, effort=settings.options.effort)
        plan.verify()
        group = settings.group
        arena, made = obtain(
            plan,
            {group.name: group.process_group},
            memory=settings.lowerings.memory,
            device=settings.device,
            timeout=settings.options.timeout,
            debug=settings.options.debug is True,
            user="eager session",
        )
        met_before = 0 if made else arena.rendezvous
        if chosen.engines:
            met = {n: m for s in arena.segments.values() for n, m in s.rendezvous.items()}
            found = ((n, known(m.group.process_group)) for n, m in met.items())
            register(arena, {name: engines for name, engines in found if engines is not None})
        with torch.inference_mode(mode=False):  # what is made here outlives the caller's mode
            program = place(captured, plan, settings.lowerings, chosen.engines, plan.barriers)
            events, tail = events_of(recorder, program, arena, settings.device, settings.lowerings)
            missing = missing_of(events, settings.device)
        copies = copies_of(captured, recorder)
        choices = tuple(chosen.choices)
        rendezvous = arena.rendezvous - met_before
        return Frozen(plan, captured, arena, rendezvous, events, tail, copies, missing, choices)
