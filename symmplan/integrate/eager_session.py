"""An eager program: its first iteration recorded, planned, the following ones served."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from attrs import evolve

from symmplan import _compat as compat
from symmplan.capture.c10d import functional_form
from symmplan.capture.eager import Recorder, signature
from symmplan.errors import AgreementError, ReleasedError, RunError, SymmplanError
from symmplan.integrate.eager_build import events_of
from symmplan.integrate.eager_faults import REDO, Faults, name_of_buffer, public
from symmplan.integrate.eager_kernels import install
from symmplan.integrate.eager_quick import MISS, quick_call, quick_memory
from symmplan.integrate.eager_serve import serve
from symmplan.integrate.eager_stats import Copy, Stats, copies_of
from symmplan.integrate.lowering import Lowerings
from symmplan.integrate.poison import plan_poison
from symmplan.memory import Arena, realize, resolve_backend
from symmplan.memory.exchange import Exchange
from symmplan.memory.groups import resolve_groups
from symmplan.memory.own import OWN
from symmplan.planner import plan as plan_problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from symmplan.capture.producers import Write
    from symmplan.capture.sites import Captured
    from symmplan.integrate.eager_schedule import Event
    from symmplan.model import Plan

__all__ = ["ACTIVE", "Session"]

ACTIVE: list[Session] = []


class Session:
    """An eager program whose declared ops run in planned placements. Made by `eager`.

    Attributes:
        plan: The frozen plan; None while an iteration is being recorded.
    """

    def __init__(
        self,
        group: Any,
        *,
        memory: str,
        device: torch.device,
        effort: Literal["fast", "optimal"],
        timeout: float,
        debug: bool,
    ) -> None:
        name = compat.world_name() if group is None else compat.group_name(group)
        self._groups = resolve_groups([name])
        self._group = self._groups[name]
        self._device = device
        self._effort = effort
        self._timeout = timeout
        self._debug = debug
        self._lowerings = Lowerings(resolve_backend(memory, device, self._groups).name)
        self._faults = Faults(self._groups, timeout, self._stop_serving)
        self._state: Literal["new", "recording", "frozen", "released"] = "new"
        self._recorder: Recorder | None = None
        self._kernels: list[torch.library.Library] = []
        self._events: list[Event] = []
        self._live: list[Event] = []  # the same, but none once anybody failed
        self._tail: list[Callable[[], None]] = []
        self._next = 0
        self._arena: Arena | None = None
        self._captured: Captured | None = None
        self._copies: tuple[Copy, ...] = ()
        self._counts = {"rendezvous": 0, "iterations": 0, "served": 0, "copies": 0}
        self.plan: Plan | None = None

    def __repr__(self) -> str:
        state = "failed" if self._faults.failed else self._state
        return f"<symmplan.eager session: {state}, {len(self._events)} calls planned>"

    @property
    def stats(self) -> Stats:
        """See `Stats`."""
        sites = () if self._captured is None else self._captured.sites
        return Stats(
            placed=sum(s.how is not None for s in sites),
            staged=sum(s.how == "stage" for s in sites),
            bound=sum(s.how == "bind" for s in sites),
            segment_bytes=0 if self._arena is None else self._arena.segment_bytes,
            lower_bound_bytes=0 if self.plan is None else self.plan.lower_bound_bytes,
            **self._counts,
        )

    @property
    def copies(self) -> tuple[Copy, ...]:
        """Every declared tensor that is copied, why, and the line that would avoid it."""
        return self._copies

    # Recording.

    def __enter__(self) -> Self:
        if ACTIVE:
            raise RunError(
                "two eager sessions at a time",
                expected="at most one in a process",
                got="one inside another",
                fix="leave the first session before the next is entered",
            )
        self._usable()
        ACTIVE.append(self)
        self._record()
        return self

    def _record(self) -> None:
        self._state = "recording"
        self._recorder = Recorder(self._lowerings.lookup, self._meet_at_op, lambda: bool(OWN.depth))
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def _meet_at_op(self, op: Any, args: Any, kwargs: Any) -> None:
        """Before a declared op is recorded: do all ranks call the same?"""
        given = (signature(args), signature(kwargs))
        self._meet(str(op.name()), repr(public(given)))

    def _meet(self, op: str, detail: str = "") -> None:
        """Every rank says what it is about to do.

        Raises:
            AgreementError: Somebody is about to do something else.

        Collective: yes.
        """
        exchange = Exchange(self._groups, self._timeout)
        try:
            note = json.dumps([op, detail]).encode()
            said = exchange.round("call", note)[self._group.name]
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
                group=self._group.name,
                rank=self._group.rank,
                ranks=(0, other),
                op=texts[0][0],
                buffer="",
            )
        exchange.finish()

    def step(self) -> None:
        """End an iteration. The first one is planned here, and its memory rendezvoused.

        Raises:
            AgreementError: Ranks recorded different programs; raised on every rank.
            RunError: The iteration made fewer calls than planned.
            ReleasedError: The session was left.

        Collective: yes, but in a frozen session nobody waits unless the plan has a barrier there.
        """
        self._usable()
        if self._state == "recording":
            self._freeze()
            self._counts["iterations"] += 1
            return
        if self._next != len(self._events):
            event = self._events[self._next]
            self._depart(
                f"the iteration ended before call {self._next}, {event.name}",
                expected=f"{len(self._events)} declared calls",
                got=self._next,
                event=event,
            )
        self._run(self._tail)
        self._next = 0
        self._counts["iterations"] += 1

    def _freeze(self) -> None:
        recorder = self._recorder
        assert recorder is not None
        self._stop_recording()
        self._meet("session.step()")
        captured = recorder.capture(
            lookup=self._lowerings.lookup,
            producer=self._lowerings.producer,
            skip=self._lowerings.skip,
        )
        if self._debug:
            captured = evolve(captured, problem=plan_poison(captured.problem))
        plan = plan_problem(captured.problem, effort=self._effort)
        plan.verify()
        self._arena = realize(
            plan,
            memory=self._lowerings.memory,
            device=self._device,
            groups={self._group.name: self._group.process_group},
            timeout=self._timeout,
        )
        self._counts["rendezvous"] += self._arena.rendezvous
        with torch.inference_mode(mode=False):  # what is made here outlives the caller's mode
            self._events, self._tail = events_of(
                recorder, captured, plan, self._arena, self._lowerings
            )
        self._captured, self.plan = captured, plan
        self._copies = copies_of(captured, recorder)
        self._next = 0
        self._live = self._events
        self._state = "frozen"
        self._kernels = install(self)

    def _stop_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._recorder = None

    def replan(self) -> None:
        """Forget the plan; the next iteration is recorded and planned afresh.

        Also the way on after an error that every rank has seen.

        Collective: yes.
        """
        if self._state == "released":
            self._usable()
        self._let_go()
        self._meet("session.replan()")
        self._faults = Faults(self._groups, self._timeout, self._stop_serving)
        self._record()

    # Serving.

    def serve(self, op: Any, behind: Any, args: Any, kwargs: Any) -> Any:
        """Run a declared op as the schedule says. Called by the session's kernels.

        Args:
            op: The op.
            behind: The dispatch keys behind the kernel.
            args: Its arguments.
            kwargs: The same by name.
        """
        live, at = self._live, self._next
        if at < len(live):
            event = live[at]
            if event.quick is not None and event.call.op is op and not kwargs:
                try:
                    result = event.quick(behind, args)
                except BaseException as error:
                    self._faults.found(error)
                    raise
                if result is not MISS:
                    self._next = at + 1
                    self._count(event)
                    return result
        return self._serve(op, behind, args, kwargs)

    def _serve(self, op: Any, behind: Any, args: Any, kwargs: Any) -> Any:
        """The long way, which finds out what is wrong."""
        self._usable()
        form = functional_form(op, args, kwargs) if op.namespace == "c10d" else None
        event = self._expect(op, *((args, kwargs) if form is None else (form.args, form.kwargs)))
        self._run(event.before)
        self._check_claims(event)
        with self._faults.guarded():
            result = serve(event, behind, args, kwargs, form)
        self._count(event)
        if event.quick is None:
            event.quick = quick_call(event, args, kwargs, form)
        return result

    def _count(self, event: Event) -> None:
        if event.placed:
            self._counts["served"] += 1
            self._counts["copies"] += event.copies

    def _run(self, acts: list[Callable[[], None]]) -> None:
        if acts:
            with self._faults.guarded():
                for act in acts:
                    act()

    def _expect(self, op: Any, args: Any, kwargs: Any, kind: str = "op") -> Event:
        name = f"symmplan.{kind}" if op is None else op.name()
        if self._next >= len(self._live):
            self._depart(
                f"{name} was called after the last call of the recorded iteration",
                expected="session.step()",
                got=name,
                event=None,
                op=name,
            )
        event = self._live[self._next]
        if op is not event.call.op or kind != event.call.kind:
            self._depart(
                f"call {self._next} is another op than planned",
                expected=f"{event.name} ({event.call.line})",
                got=name,
                event=event,
                op=name,
            )
        difference = event.differs(args, kwargs)
        if difference is not None:
            self._depart(
                f"call {self._next}, {name}, has other arguments than planned",
                expected=public(difference[0]),
                got=public(difference[1]),
                event=event,
            )
        self._next += 1
        return event

    def _check_claims(self, event: Event) -> None:
        overdue = event.overdue()
        if overdue is None:
            return
        buffer, lent = overdue
        self._depart(
            f"{event.name} is about to write buffer {buffer!r} over {lent.buffer!r}, which is "
            "still held",
            expected="no tensor on it any more, as in the recorded iteration",
            got="one that is kept longer",
            event=event,
            buffer=lent.buffer,
            fix=f"drop the tensor or keep a clone of it; or {REDO}",
        )

    def _depart(
        self,
        what: str,
        *,
        expected: object,
        got: object,
        event: Event | None,
        op: str = "",
        buffer: str = "",
        fix: str = REDO,
    ) -> NoReturn:
        self._faults.depart(
            what,
            expected=expected,
            got=got,
            op=op or (event.name if event is not None else ""),
            buffer=buffer or name_of_buffer(event),
            fix=fix,
        )

    def _stop_serving(self, error: BaseException) -> None:
        """The first failure, here or elsewhere: nothing is in its placement any more."""
        self._live = []
        if self._arena is not None:
            for segment in self._arena.segments.values():
                segment.health.break_(error)

    # Memory.

    def memory(
        self,
        kind: Literal["empty", "out"],
        make: Callable[..., torch.Tensor],
        args: Any,
        kwargs: Any,
    ) -> torch.Tensor:
        """What `symmplan.empty` and `symmplan.out` return: ``make(*args, **kwargs)``, placed."""
        if OWN.depth or self._state not in ("recording", "frozen"):
            return make(*args, **kwargs)
        if self._recorder is not None:
            tensor: torch.Tensor = make(*args, **kwargs)
            write: Write = "alloc" if kind == "empty" else "out"
            self._recorder.memory(tensor, kind, write, (make, *args), kwargs)
            return tensor
        live, at = self._live, self._next
        if at < len(live):
            event = live[at]
            if event.quick is not None and event.call.kind == kind:
                tensor = event.quick(make, args, kwargs)
                if tensor is not MISS:
                    self._next = at + 1
                    return tensor
        return self._memory(kind, make, args, kwargs)

    def _memory(
        self, kind: str, make: Callable[..., torch.Tensor], args: Any, kwargs: Any
    ) -> torch.Tensor:
        """The long way."""
        self._usable()
        event = self._expect(None, (make, *args), kwargs, kind)
        self._run(event.before)
        self._check_claims(event)
        lent = next(iter(event.lent.values()), None)
        if lent is None:
            tensor = make(*args, **kwargs)
        else:
            if kind == "out":
                make(*args, **kwargs, out=lent.tensor)
            tensor = lent.give()
        self._run([*event.ready, *event.after])
        if event.quick is None:
            event.quick = quick_memory(event)
        return tensor

    # The end.

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._state == "released":
            return
        try:
            if error is None:
                self._usable()
                self._meet("leave the session")
            else:
                self._give_up(error)
        except SymmplanError as failure:
            if error is None:
                self._give_up(failure)
                raise
        finally:
            self.release()

    def _give_up(self, error: BaseException) -> None:
        """Peers may wait anywhere: in an op, on their device, or for this rank to record one."""
        self._faults.leave_by(error)
        self._faults.abort()

    def _let_go(self) -> None:
        self._stop_recording()
        self._faults.close()
        for library in self._kernels:
            library._destroy()
        self._kernels = []
        self._events, self._live, self._tail = [], [], []
        self.plan = self._captured = None
        self._next = 0
        if self._arena is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._arena.release()
            self._arena = None

    def release(self) -> None:
        """Give everything back; done when the context is left. Idempotent.

        Tensors that the program still holds keep their memory, which is ordinary from now on:
        symmplan's ops refuse it.

        Collective: no.
        """
        plan, captured = self.plan, self._captured
        self._let_go()
        self.plan, self._captured = plan, captured
        self._state = "released"
        if self in ACTIVE:
            ACTIVE.remove(self)

    def _usable(self) -> None:
        if self._state == "released":
            raise ReleasedError(
                "an eager session was used after it was left",
                fix="use it inside its with-block, or make a new one",
                group=self._group.name,
                rank=self._group.rank,
            )
        self._faults.usable()
