"""An eager program: its first iteration is recorded and planned, later ones follow the plan."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import evolve

from symmplan.capture.eager import threads_of_program
from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.own import in_own_work
from symmplan.coordination.sessions import SessionKeys, enter_session
from symmplan.device import device_of
from symmplan.errors import RunError, SessionError
from symmplan.integrate.eager.calls import settle
from symmplan.integrate.eager.faults import LEFT, NOT_ENTERED, Faults, misused
from symmplan.integrate.eager.kernels import Cursor, follow, install
from symmplan.integrate.eager.recording import IterationRecording
from symmplan.integrate.eager.schedule import counted, perform
from symmplan.integrate.eager.settings import Settings, meet
from symmplan.integrate.eager.sleep import sleep
from symmplan.integrate.eager.streams import Roles, streams_of
from symmplan.integrate.eager.turns import Turns
from symmplan.memory.beyond import beyond_segments
from symmplan.process import PROCESS
from symmplan.report.log import LOG
from symmplan.runtime.executor import executor
from symmplan.runtime.handles import OfOneProcess
from symmplan.runtime.observe import Checked, check, checking, launching
from symmplan.runtime.stats import Stats
from symmplan.torch_private import c10d
from symmplan.torch_private.compilers import outside_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from symmplan.choose.choice import Choice
    from symmplan.integrate.eager.exchanged import Sizes
    from symmplan.integrate.eager.frozen import Frozen
    from symmplan.integrate.eager.schedule import Event
    from symmplan.model import Plan
    from symmplan.runtime.options import Options
    from symmplan.runtime.stats import Copy


class Session(OfOneProcess):
    """An eager program whose declared ops run in planned placements. Made by `symmplan.eager`."""

    def __init__(self, group: Any, device: torch.device, options: Options) -> None:
        name = c10d.world_name() if group is None else c10d.group_name(group)
        groups = resolve_groups([name])
        self._settings = Settings(groups, device, streams_of(device), options)
        self._state: Literal["new", "recording", "frozen", "released"] = "new"
        self._recording: IterationRecording | None = None
        self._recorded: IterationRecording | None = None  # the last
        self._frozen: Frozen | None = None
        self._serving = contextlib.ExitStack()  # ends what catches the program's calls
        self._cursor: Cursor | None = None  # once there is a plan
        #: What `stats` counts up to the last `step`.
        self._counts: Counter[str] = Counter()
        self._checked = Checked()
        self._executor = executor(self._plans, self._end)
        self._device = device if self._executor.serves else torch.device("cpu")
        self._there = device_of(self._device)
        #: Whether the thread that asks is one of the program: none before the session is entered.
        self._is_program: Callable[[], bool] = lambda: False
        self._keys: SessionKeys | None = None  # in the group's store, once the session is entered
        self._faults = Faults(SessionKeys(groups[name], 0), self._stop_serving)
        self._turns = Turns(self._settings)

    def __repr__(self) -> str:
        state = "failed" if self._faults.failed else self._state
        return f"<symmplan.eager session: {state}, {len(self._events)} calls planned>"

    @property
    def planned(self) -> bool:
        """Whether an iteration has been planned, so that there is a `plan`."""
        return self._frozen is not None

    @property
    def plan(self) -> Plan:
        """The plan, also after the session.

        Raises:
            RunError: There is none: no iteration was planned yet, see `planned`.
        """
        if self._frozen is None:
            raise RunError(
                "session.plan was asked for before there is a plan",
                expected="a plan, made from a recorded iteration",
                got=repr(self),
                fix="call session.step() first; session.planned says whether there is a plan",
            )
        return self._frozen.plan

    def _plans(self) -> list[Plan]:
        return [] if self._frozen is None else [self._turns.simulated(self._frozen)]

    @property
    @outside_graphs
    def stats(self) -> Stats:
        """See `Stats`."""
        frozen = self._frozen
        counts = dict[str, Any](self._counts + counted(self._made)) | beyond_segments()
        given = counts, self._counts["iterations"], self._checked.missed
        return Stats(**counts) if frozen is None else frozen.stats(*given)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The measured times of the recorded iteration's collectives, and their algorithms."""
        return () if self._frozen is None else self._frozen.choices

    @property
    def copies(self) -> tuple[Copy, ...]:
        """Every declared tensor that is copied, why, and the line that would avoid it."""
        return () if self._frozen is None else self._frozen.copies

    @property
    def _events(self) -> list[Event]:
        return [] if self._frozen is None else self._frozen.events

    @property
    def _made(self) -> list[Event]:
        """The planned calls that this iteration has made."""
        return [] if self._cursor is None else self._events[: self._cursor.at]

    @outside_graphs
    def __enter__(self) -> Self:
        with PROCESS.entering:
            if PROCESS.session is not None:
                raise SessionError(
                    "two eager sessions at a time",
                    expected="at most one in a process",
                    got="one inside another, or one in another thread",
                    fix="leave the first session before you enter the next",
                )
            if self._state != "new":
                raise misused(self._settings.group, *LEFT)
            PROCESS.session, self._state = self, "recording"
        try:
            self._keys = enter_session(self._settings.group)
            self._is_program = threads_of_program()
            self._faults = Faults(self._keys, self._stop_serving)
            self._record()
        except BaseException as error:
            if self._keys is not None:
                self._keys.fail(error)
            self.release()
            raise
        return self

    def _record(self, before: Sequence[Sizes] | None = None) -> None:
        self._state = "recording"
        given = self._settings, self._turns, self._is_program, self._faults.telling
        self._recorded = self._recording = IterationRecording(*given, before)

    @outside_graphs
    def step(self) -> None:
        """End an iteration. The first one is planned here, and its memory rendezvoused.

        If it has all-to-alls of unequal parts, the second one is. On a device, the streams on which
        declared calls ran wait for each other.

        Raises:
            AgreementError: Ranks recorded different programs; raised on every rank.
            RunError: The iteration made fewer calls than planned.
            SessionError: The call is not inside the session's with-block.

        Collective: yes. But once there is a plan, ranks wait for each other only if the plan has a
        barrier there, or if the session lies in segments of FSDP2, which has these between
        iterations.
        """
        self._usable()
        if self._recording is not None:
            with self._faults.telling():
                self._freeze(self._recording)
            self._counts["iterations"] += 1
            return
        self.wake()
        frozen, cursor = self._frozen, self._cursor
        assert frozen is not None
        if cursor is not None:  # else nothing is served, nor compared with what was recorded
            self._end_iteration(frozen, cursor)
        self._counts["iterations"] += 1

    def _end_iteration(self, frozen: Frozen, cursor: Cursor) -> None:
        self._faults.expect_end(frozen.events, cursor)
        cursor.roles.join()
        with self._faults.guarded():
            perform(frozen.tail)
            self._turns.end_iteration()
        cursor.roles.part()
        self._counts += counted(frozen.events)
        cursor.begin(cursor.first if PROCESS.owners_ran else self._serve)

    def _freeze(self, recording: IterationRecording) -> None:
        self._recording = None
        if recording.end(once=not self._executor.serves):
            self._record(recording.sizes)
            return
        frozen = recording.freeze()
        recorded = sum(e.call.kind == "op" for e in frozen.events)
        self._counts += Counter(rendezvous=frozen.rendezvous, recorded=recorded)
        if not recorded:
            LOG.warning("nothing is in symmetric memory: %s", self._settings.own_groups.why_none)
        self._frozen, self._state = frozen, "frozen"
        if not self._executor.serves:
            return
        waited = functools.partial(frozen.waited, self._faults) if frozen.leaving else None
        self._cursor = Cursor(
            self._serve_first, waited, Roles(self._settings.streams), self._is_program
        )
        install(self._cursor, self._settings.own_groups, self._serving)
        races = frozen.arena.races is not None
        follow(self._serving, recording.op_by_op, self._settings.options.timeout if races else 0.0)

    @outside_graphs
    def check(self, iteration: Callable[[], Any]) -> Checked:
        """Run an iteration under torch's profiler, and compare what ran with the plan.

        Args:
            iteration: An iteration of the program, up to its `step` or with it.

        Returns:
            The planned and the observed algorithm of each collective. ``stats.disengaged`` lists
            those that did not run as planned.

        Raises:
            RunError: There is no plan yet, or another check is going on.
            ReleasedError: The session was left.

        Collective: as ``iteration``.
        """
        self._usable()
        self._checked = check(iteration, self._settings.device if self._frozen else None)
        return self._checked

    @property
    def asleep(self) -> bool:
        """Whether it has no memory until the next call, as FSDP2 or the session itself sleeps."""
        return self._frozen is not None and self._frozen.asleep

    @outside_graphs
    def sleep(self) -> None:
        """Give the memory back to the driver until `wake`, or until the next call.

        Call it between iterations, on all ranks. Without a plan, and while asleep, it does nothing.

        Raises:
            RunError: On some rank the program is in an iteration, holds a tensor of a placement, or
                has captured an iteration. Raised on all of them, and nothing has changed.

        Collective: yes.
        """
        self._usable()
        if self._frozen is not None and self._cursor is not None and not self.asleep:
            sleep(self._settings, self._frozen, self._cursor)
            self._counts["sleeps"] += 1
            self._cursor.serve = self._cursor.first

    @outside_graphs
    def wake(self) -> None:
        """Obtain the memory of the same plan again, as the next call would. Idempotent.

        If a rank cannot have it, the next iteration is recorded anew. Collective: yes, if asleep.
        """
        self._usable()
        if self._frozen is None or not self._frozen.asleep:
            return
        assert self._recorded is not None
        with self._faults.telling():
            rendezvous = self._recorded.obtain_again(self._frozen)
        if rendezvous is None:
            self.replan()
        elif self._cursor is not None:
            self._counts["rendezvous"] += rendezvous

    def _serve_first(
        self, op: Any, keys: Any, args: Any, kwargs: Any, said: Any, kind: str = "op"
    ) -> Any:
        """Make the first call of an iteration, or of a turn, for which the session wakes."""
        assert self._frozen is not None
        assert self._cursor is not None
        self._usable()
        with self._faults.telling():
            self._turns.follow(self._frozen)
        self.wake()
        if self._recording is not None:
            recorded = self._recording.memory
            return recorded(kind, args[0], args[1:], kwargs) if op is None else op(*args, **kwargs)
        with self._faults.guarded():
            self._turns.begin(self._frozen, self._cursor)
        self._cursor.serve = self._serve
        return self._serve(op, keys, args, kwargs, said, kind)

    @outside_graphs
    def replan(self) -> None:
        """Drop the plan; the next iteration is recorded and planned.

        After an error that every rank has raised, this lets the session go on. It cannot if a rank
        was waiting for its device, because the group's communicators have ended then.

        Collective: yes.
        """
        keys = self._entered()
        self._let_go()
        self._frozen = None
        meet(self._settings, "session.replan()")
        keys.renew()
        self._faults = Faults(keys, self._stop_serving)
        self._record()

    def _serve(
        self, op: Any, keys: Any, args: Any, kwargs: Any, said: Any, kind: str = "op"
    ) -> Any:
        """Make a scheduled call: ``said`` says what it does, ``keys`` to which kernels."""
        if self._faults.failed or self._settings.group.forked:
            self._usable()
        assert self._cursor is not None
        assert self._frozen is not None
        if not self._cursor.at and self._there.is_accelerator:
            self._frozen.in_graph |= self._there.is_capturing()
        event = self._faults.expect(self._events, self._cursor, op, said, kwargs, kind)
        thread = PROCESS.thread
        thread.own_work += 1
        try:  # as `guarded` does, whose cost every call would feel
            run = event.run or settle(event, self._faults)
            if not checking():
                result = run(args, kwargs, keys)
            else:
                with launching(event.expected and evolve(event.expected)):
                    result = run(args, kwargs, keys)
        except BaseException as error:
            self._faults.found(error)
            raise
        finally:
            thread.own_work -= 1
        self._cursor.at += 1
        return result

    def _stop_serving(self, error: BaseException) -> None:
        """At the first failure, here or elsewhere."""
        self._turns.fail(error)
        if self._frozen is not None:
            for segment in self._frozen.arena.segments.values():
                segment.health.break_(error)

    def _memory(
        self,
        kind: Literal["empty", "out"],
        make: Callable[..., torch.Tensor],
        args: Any,
        kwargs: Any,
    ) -> torch.Tensor:
        """The result of `placed.empty` and `placed.out`: ``make(*args, **kwargs)``, placed."""
        if in_own_work() or not self._is_program() or self._state not in ("recording", "frozen"):
            return make(*args, **kwargs)
        if self._recording is not None:
            return self._recording.memory(kind, make, args, kwargs)
        if self._cursor is None:  # nothing is served
            return make(*args, **kwargs)
        given = make, *args
        serve = self._cursor.serve or self._serve
        return serve(None, None, given, kwargs, given, kind)  # type: ignore[no-any-return]

    @outside_graphs
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._state == "released" or self._settings.group.forked:
            self.release()
            return
        error = error or self._faults.told  # who caught an error has heard of it
        try:
            if error is None:
                self._usable()
                if self._state == "recording" and not self._counts["iterations"]:
                    LOG.warning(
                        "nothing was planned: session.step() never came: no iteration ended"
                    )
                meet(self._settings, "leave the session")
                self._turns.end_iteration()
            else:
                self._faults.give_up(error)
        except BaseException as failure:
            if error is None:
                self._faults.give_up(failure)
            raise
        finally:
            self.release()

    def _let_go(self) -> None:
        self._turns.drop()
        self._forget()
        if self._frozen is not None:
            self._frozen.let_go(self._device, failed=self._faults.failed)

    def _forget(self) -> None:
        """Stop serving calls. Collective: no."""
        if self._recording is not None:
            self._recording.stop()
            self._recording = None
        self._serving.close()
        self._counts += counted(self._made)
        self._cursor = None
        if self._recorded is not None:
            self._recorded.leave()
            self._recorded = None

    @outside_graphs
    def release(self) -> None:
        """Free all memory of the session. Leaving the with-block calls this. Idempotent.

        Tensors that the program still holds keep their memory, but symmplan's ops refuse them from
        now on.

        Collective: no.
        """
        forked = self._settings.group.forked
        if forked or not self._executor.serves:
            self._forget()
        else:
            self._let_go()
        if self._frozen is not None:
            self._frozen.forget()
        self._state = "released"
        if self._keys is not None and not forked:
            self._keys.leave()
        if PROCESS.session is self:
            PROCESS.session = None

    def _end(self) -> None:
        """The world in which nothing runs ends, and with it a session that was not left."""
        self.release()
        self._let_go()

    def _entered(self) -> SessionKeys:
        if self._keys is None or self._state == "released":
            wrong = LEFT if self._state == "released" else NOT_ENTERED
            raise misused(self._settings.group, *wrong)
        return self._keys

    def _usable(self) -> None:
        self._entered()
        self._settings.group.require_own()
        self._faults.usable()
