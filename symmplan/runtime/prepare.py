"""From a captured program to memory in which all ranks agree and meet, for every integration.

[Note: the lifecycle]
    Every program of every integration takes the same steps: its ranks agree on their options,
    choose how each collective runs (`symmplan.choose.chooser`), agree on a budget, plan within it
    and verify, agree on the plan, obtain memory, rendezvous, and log the plan. This file has these
    steps, and what happens if one of them fails on one rank. An integration decides *when* each
    step is taken, what the problem is, and what it does with the memory.

[Note: options are agreed first]
    A rank's options decide which exchanges, measurements and collectives symmplan makes on it. So
    before any of these the ranks of a program compare their options and memory backends. If they
    differ, every rank raises the same error. If a rank cannot set up the backend, all ranks do
    without it. In the same exchange they tell each other what the topology of their groups is,
    because the backend may depend on it; see [Note: two levels by default].

    Each integration compares options when its program first plans for a group, which happens
    equally often on all ranks. It does not ask whether the options are new to the process, because
    they may be new on one rank alone.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from attrs import asdict, define, evolve, field

from symmplan.coordination.agreement import no_note
from symmplan.coordination.exchange import Exchange
from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.world import current
from symmplan.errors import AgreementError
from symmplan.memory import cache, resolve_backend
from symmplan.memory.backends.resolve import agree_on_levels
from symmplan.memory.beyond import beyond_segments
from symmplan.memory.cache import cached_bytes
from symmplan.memory.device_memory import device_memory, empty_cache
from symmplan.memory.meeting import topology
from symmplan.memory.room import agreed_room
from symmplan.planner import plan as plan_problem
from symmplan.report.log import log_plan
from symmplan.runtime.attempt import Refusal, attempt, failure, spread, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    import torch

    from symmplan.capture import Captured
    from symmplan.coordination.exchange import PlanningWatch
    from symmplan.coordination.groups import Group
    from symmplan.memory import Arena
    from symmplan.memory.room import Room, Usage
    from symmplan.model import Plan, Problem
    from symmplan.runtime.options import Options

_Made = TypeVar("_Made")


def _nothing(_: Any) -> None:
    """There is nothing to do."""


@define(eq=False)
class Preparation:
    """How one program gets its memory. See [Note: the lifecycle].

    Args:
        options: This rank's options.
        who: Name of the program, for warnings.
        user: Name of the program, for `symmplan.segments` and the log.

    Attributes:
        refusal: Why its plans place nothing; None if they may.
        memory: Name of the memory backend that was last agreed on; empty before.
        device: Where its tensors lay when that was agreed on; None before.
        at_once: Bytes that may be taken before torch's allocator has given back what it cached.
        keeps_cache: Whether torch's allocator keeps its cache when memory is obtained.
        slack: As in `symmplan.memory.room.Room`, as it was last agreed on.
    """

    options: Options
    who: str
    user: str
    refusal: Refusal | None = field(init=False, default=None)
    memory: str = field(init=False, default="")
    device: torch.device | None = field(init=False, default=None)
    at_once: int = field(init=False, default=sys.maxsize)
    keeps_cache: bool = field(init=False, default=False)
    slack: tuple[int, ...] = field(init=False, default=())
    _agreed: WeakSet[Any] = field(init=False, factory=WeakSet)

    @property
    def reason(self) -> str:
        """Why nothing is placed, in short; empty if that need not be."""
        return "" if self.refusal is None else self.refusal.reason

    def refuse(self, refusal: Refusal) -> None:
        """Place nothing from now on. A warning on one rank says so, once."""
        if self.refusal is None:
            warn(refusal, self.who)
        self.refusal = refusal

    def agree(
        self,
        device: torch.device,
        groups: Mapping[str, Any],
        watch: Callable[[Mapping[str, Any]], AbstractContextManager[PlanningWatch | None]]
        | None = None,
        *,
        sums: bool = False,
        **more: Any,
    ) -> str:
        """Name of the memory backend, where all ranks were given the same options.

        See [Note: options are agreed first].

        Args:
            device: Where this rank's tensors lie.
            groups: ``{name: process group}``, None for one of this process alone.
            watch: Given the groups that are asked, a context while they are, in which it is seen
                whether the peers will come.
            sums: As for `symmplan.memory.resolve_backend`.
            more: Options that only the caller has, by name, as plain data.

        Returns:
            The name; any, where there is a `refusal`.

        Raises:
            AgreementError: Options differ; raised on every rank. ``option`` is the first that does,
                ``ranks`` two that differ, ``values`` what these were given.
            BackendError: The backend that was asked for by name serves no rank.
            PeerTimeoutError, PeerLostError: A rank did not come.

        Collective: yes, over the groups that did not agree before.
        """
        options, members = self.options, resolve_groups(groups, groups)
        given = {**options.agreed(device), **{name: (x, x) for name, x in more.items()}}
        new = {n: g for n, g in groups.items() if g is not None and g not in self._agreed}
        if current() is not None:  # its ranks were given what this one was
            new = {}
        asked = {n: members[n] for n in new}
        with (
            watch(new) if new and watch is not None else nullcontext() as look,
            Exchange(asked, options.timeout, look) as exchange,
        ):
            _compare_all(exchange, given, new, device)
            levels = agree_on_levels(exchange, asked, members, device)
            memory: str = options.memory
            refusal, failed = self.refusal, None
            try:
                memory = resolve_backend(memory, device, members, levels=levels, sums=sums).name
            except (RuntimeError, OSError) as error:
                failed, refusal = error, self.refusal or failure(error)
            given = {"memory": (memory if refusal is None else "", options.memory)}
            refusal = _hear(exchange, {"options": given, "refusal": refusal}, failed)
        self._agreed.update(new.values())
        self.memory, self.device = memory if refusal is None else "auto", device
        if refusal is not None:
            first = all(members[name].rank == 0 for name in new)
            self.refuse(self.refusal or evolve(refusal, first=first))
        return self.memory

    def attempt(
        self,
        make: Callable[[], _Made],
        groups: Mapping[str, Any],
        undo: Callable[[Any], None] = _nothing,
    ) -> _Made:
        """Call ``make`` on all ranks. See [Note: together or not at all].

        If some rank cannot have memory of its device, all ranks return what torch's allocator has
        cached to the driver, and call ``make`` once more. If some rank cannot have memory even so,
        there is a `refusal` from then on, and all ranks call ``make`` again, which then asks for no
        memory.

        Args:
            make: Makes the result. If it raises, it has freed what it made.
            groups: ``{name: process group}`` of all who take part.
            undo: Gives it back, unless it is None.

        Raises:
            SymmplanError: ``make`` raised it, and it is no lack of memory.

        Collective: yes, over those groups, if there is no `refusal` before; and as ``make``.
        """
        if self.refusal is None:
            made, refusal = attempt(make, groups, self.options.timeout, undo=undo)
            if refusal is not None and self._emptied():
                made, refusal = attempt(make, groups, self.options.timeout, undo=undo)
            if refusal is None:
                return made  # type: ignore[return-value]
            self.refuse(refusal)
        return make()

    def _emptied(self) -> bool:
        """Return what torch's allocator has cached to the driver; whether it caches there."""
        device = self.device
        if device is None or device_memory(device) is None:
            return False
        empty_cache(device)
        return True

    def room(
        self,
        memory: str,
        device: torch.device,
        groups: Mapping[str, Any],
        *,
        held: int = 0,
        besides: int = 0,
        stays: int = 0,
        usage: Usage | None = None,
        below: bool = False,
        reserve: int = 0,
    ) -> Room:
        """Bytes that a plan may take; equal on all ranks.

        Args:
            memory: Name of the memory backend.
            device: Where the segments will lie.
            groups: ``{name: process group}``.
            held: Bytes that are held for the plan already.
            besides: Bytes that other plans of the same budget hold, which are counted with it.
            stays: Bytes of the budget that stay taken and are not counted with it.
            usage: As for `symmplan.memory.room.room_on`.
            below: The same.
            reserve: The same.

        Collective: yes, over those groups.
        """
        given = self.options.capacity
        room = agreed_room(
            None if given is None else max(0, given - stays),
            max(held, cached_bytes(device)),
            groups,
            memory=memory,
            device=device,
            timeout=self.options.timeout,
            besides=besides,
            usage=usage,
            below=below,
            reserve=reserve,
        )
        self.at_once, self.slack = room.at_once, room.slack
        return room

    def plan(self, captured: Captured) -> Plan:
        """A plan of a captured program, verified. Collective: no."""
        return checked_plan(captured.problem)

    def obtain(
        self,
        plan: Plan,
        device: torch.device,
        groups: Mapping[str, Any],
        meet: Callable[[Arena], object] = _nothing,
        *,
        memory: str = "",
        user: str = "",
    ) -> tuple[Arena, int]:
        """Memory for a plan on which all ranks agree, and how many rendezvous that took.

        Args:
            plan: The plan.
            device: Where it lies.
            groups: As for `symmplan.memory.cache.obtain`.
            meet: Meets others in it; what it raises is raised, and the memory given back.
            memory: Name of the memory backend, if not of what was last agreed on.
            user: The user of the memory, if not the program.

        Raises:
            AgreementError, BackendError, PeerTimeoutError: As `symmplan.memory.realize`.

        Collective: yes, over those groups.
        """
        if plan.peak_bytes > self.at_once and not self.keeps_cache:
            empty_cache(device)
        self.at_once = sys.maxsize  # once
        arena, new = cache.obtain(
            plan,
            groups,
            memory=memory or self.memory,
            device=device,
            timeout=self.options.timeout,
            debug=self.options.debug is True,
            user=user or self.user,
        )
        before = 0 if new else arena.rendezvous
        try:
            meet(arena)
        except BaseException:
            arena.give_back()
            raise
        return arena, arena.rendezvous - before

    def obtain_together(
        self,
        plan: Plan,
        device: torch.device,
        groups: Mapping[str, Any],
        meet: Callable[[Arena], object] = _nothing,
        **more: str,
    ) -> tuple[Arena, int] | None:
        """`obtain` on all ranks or on none; None where there is a `refusal` then.

        ``more`` are its other arguments. See [Note: together or not at all].

        Collective: yes, over those groups.
        """

        def make() -> tuple[Arena, int] | None:
            if self.refusal is not None:
                return None
            return self.obtain(plan, device, groups, meet, **more)

        return self.attempt(make, groups, lambda made: made[0].give_back())

    def log(self, plan: Plan, algorithms: Iterable[str] = (), what: str = "") -> None:
        """Say what was planned; ``what`` if that is a part of the user's. Collective: no."""
        log_plan(what or self.user, plan, algorithms, beyond_segments()["beyond_segments"])


def checked_plan(problem: Problem) -> Plan:
    """A plan that other code has verified."""
    plan = plan_problem(problem)
    plan.verify()
    return plan


def _compare_all(
    exchange: Exchange, given: Mapping[str, Any], groups: Mapping[str, Any], device: torch.device
) -> None:
    """Compare all options but the backend, and learn the topology of the groups.

    Raises:
        AgreementError: Options differ.

    Collective: yes, a round of ``exchange``.
    """
    facts = topology.facts_of(device) if groups else {}
    said = _said(exchange, "options", {"options": given, "refusal": None, "facts": facts})
    of_ranks = {name: [note["facts"] for note in notes] for name, notes in said.items()}
    topology.learn(of_ranks, groups, device)


def _hear(exchange: Exchange, mine: dict[str, Any], failed: Exception | None) -> Refusal | None:
    """Why all ranks do without symmetric memory; None if they need not.

    Args:
        exchange: Of all who take part.
        mine: Which backend this rank has and was given, as an option, and its refusal.
        failed: Why it has no backend.

    Raises:
        AgreementError: Ranks were given different backends.
        Exception: ``failed``, if it was asked for by name and serves no rank.

    Collective: yes, over the exchange's groups.
    """
    notes = [note for of in _said(exchange, "memory", mine).values() for note in of] or [mine]
    by_name = mine["options"]["memory"][1] != "auto"
    if failed is not None and by_name and not any(map(_memory_of, notes)):
        raise failed
    refusals = [note["refusal"] for note in notes if note["refusal"] is not None]
    return spread(exchange, refusals[0] if refusals else _apart(notes))


def _said(
    exchange: Exchange, phase: str, mine: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each group says.

    Raises:
        AgreementError: Options differ.

    Collective: yes, a round of ``exchange``.
    """
    said = {}
    text = json.dumps(mine, default=asdict).encode()
    for name, texts in exchange.round(phase, text).items():
        group = exchange.groups[name]
        said[name] = [_read(text, group, rank) for rank, text in enumerate(texts)]
        _compare(said[name], group)
    return said


def _compare(notes: list[dict[str, Any]], group: Group) -> None:
    """Raise if the ranks of a group were given different options."""
    given = [note["options"] for note in notes]
    for option in dict.fromkeys(name for of in given for name in of):
        values = [of.get(option, (None, None)) for of in given]
        if option == "memory" and len({asked for _, asked in values}) == 1:
            continue  # who has another all the same cannot have that: no error of the program's
        other = next((i for i, value in enumerate(values) if value[0] != values[0][0]), None)
        if other is None:
            continue
        what, fix = _difference(option, other)
        told = [f"{option}={values[rank][1]!r} (rank {rank})" for rank in (0, other)]
        raise AgreementError(
            what,
            expected=told[0],
            got=told[1],
            fix=fix,
            **group.here,
            ranks=(0, other),
            option=option,
            values=(values[0][1], values[other][1]),
        )


def _difference(option: str, other: int) -> tuple[str, str]:
    """The error if rank ``other`` has another value of an option than rank 0."""
    if option == "device":
        what = f"ranks 0 and {other} have their tensors on different kinds of devices"
        return what, "use one kind on every rank"
    if option == "table":
        what = f"ranks 0 and {other} read different tuning tables"
        return what, "give all ranks the same file"
    what = f"ranks 0 and {other} were given different {option}="
    return what, f"pass the same {option}= on every rank"


def _apart(notes: list[dict[str, Any]]) -> Refusal | None:
    """The error if ranks with the same ``memory=`` have different backends, or None."""
    names = {*map(_memory_of, notes)}
    if len(names) == 1:
        return None
    return Refusal(f"ranks have different memory backends: {' and '.join(sorted(names))}")


def _memory_of(note: dict[str, Any]) -> str:
    """The backend that a rank has; empty if none."""
    return str(note["options"]["memory"][0])


def _read(text: bytes, group: Group, rank: int) -> dict[str, Any]:
    """What a rank said."""
    try:
        note = json.loads(text)
        options = {str(name): tuple(pair) for name, pair in note["options"].items()}
        refusal = Refusal.read(note["refusal"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise no_note(group, rank) from error
    return {**note, "options": {"memory": ("", ""), **options}, "refusal": refusal}
