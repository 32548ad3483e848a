"""From a captured program to memory that all ranks have agreed on and met in: the one way there.

[Note: the lifecycle]
    Every program of every integration goes the same way: its ranks agree on their options, choose
    how each collective runs (`symmplan.place.chooser`), agree on a room, plan within it and verify,
    agree on the plan, obtain memory, meet there, and say so in the log. The steps are written here,
    and how a step ends that fails on one rank. An integration says *when* each is taken, what the
    problem is, and what it does with the memory.

[Note: options are agreed first]
    What a rank was asked to do decides which exchanges, measurements and collectives of ours it
    makes. So before any of them the ranks of a program tell each other what they were given, and
    what serves their memory. Where that differs each of them raises the same error. A backend that
    some rank cannot set up is done without on all.

    Each integration agrees when its program first plans for a group, as often on all ranks: not
    when options are new to a process, which those of one rank may be and those of its peers not.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar
from weakref import WeakSet

from attrs import define, field

from symmplan.errors import AgreementError
from symmplan.memory import resolve_backend
from symmplan.memory.exchange import Exchange
from symmplan.memory.groups import resolve_groups
from symmplan.memory.room import agreed_room
from symmplan.memory.simulated import current
from symmplan.memory.spares import give_back, obtain, spare_bytes
from symmplan.place.attempt import FIX, Refusal, attempt, failure, spread, warn
from symmplan.planner import plan as plan_problem
from symmplan.report.log import log_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    import torch

    from symmplan.memory import Arena
    from symmplan.memory.groups import Group
    from symmplan.model import Plan, Problem
    from symmplan.place.options import Options

    #: See `agree_on_options`.
    _Watch: TypeAlias = AbstractContextManager[Callable[[], None] | None]

__all__ = ["Preparation", "agree_on_options", "checked_plan"]

_Made = TypeVar("_Made")


def _nothing(_: Any) -> None:
    """There is nothing to do."""


@define(eq=False)
class Preparation:
    """How one program gets its memory. See [Note: the lifecycle].

    Args:
        options: What this rank was given.
        who: Whose program it is, for warnings.
        user: The same for `symmplan.segments` and the log.

    Attributes:
        refusal: Why its plans place nothing; None if they need not.
        memory: Name of the memory backend that was last agreed on; empty before.
    """

    options: Options
    who: str
    user: str
    refusal: Refusal | None = field(init=False, default=None)
    memory: str = field(init=False, default="")
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
        watch: Callable[[Mapping[str, Any]], _Watch] | None = None,
        **more: Any,
    ) -> str:
        """Name of the memory backend, where all ranks were given the same options.

        Args and errors as `agree_on_options`. It may be any name where there is a `refusal`.

        Collective: yes, over the groups that did not agree before.
        """
        new = {n: g for n, g in groups.items() if g is not None and g not in self._agreed}
        self.memory, refusal = agree_on_options(
            self.options,
            device,
            groups,
            among=new,
            refusal=self.refusal,
            watch=watch if new else None,
            **more,
        )
        self._agreed.update(new.values())
        if refusal is not None:
            self.refuse(refusal)
        return self.memory

    def attempt(
        self,
        make: Callable[[], _Made],
        groups: Mapping[str, Any],
        undo: Callable[[_Made], None] = _nothing,
    ) -> _Made:
        """What ``make`` gives on all ranks. See [Note: together or not at all].

        Where memory cannot be had on some rank there is a `refusal` from then on, and ``make`` is
        called again, which then asks for none and is not collective.

        Args:
            make: Makes it. What it has made when it raises, it has given back.
            groups: ``{name: process group}`` of all who take part.
            undo: Gives it back.

        Raises:
            SymmplanError: As ``make``, where that is no want of memory.

        Collective: yes, over those groups, if there is no `refusal`.
        """
        if self.refusal is None:
            made, refusal = attempt(make, groups, self.options.timeout, undo=undo)
            if refusal is None:
                return made  # type: ignore[return-value]
            self.refuse(refusal)
        return make()

    def room(
        self,
        memory: str,
        device: torch.device,
        groups: Mapping[str, Any],
        *,
        held: int = 0,
        besides: int = 0,
        stays: int = 0,
    ) -> int:
        """Bytes that a plan may take; equal on all ranks.

        Args:
            memory: Name of the memory backend.
            device: Where the segments will lie.
            groups: ``{name: process group}``.
            held: Bytes that are held for the plan already.
            besides: Bytes that other plans of the same budget hold, which are counted with it.
            stays: Bytes of the budget that stay taken and are not counted with it.

        Collective: yes, over those groups.
        """
        given = self.options.capacity
        return agreed_room(
            None if given is None else max(0, given - stays),
            max(held, spare_bytes(device)),
            groups,
            memory=memory,
            device=device,
            timeout=self.options.timeout,
            besides=besides,
        )

    def obtain(
        self,
        plan: Plan,
        device: torch.device,
        groups: Mapping[str, Any],
        meet: Callable[[Arena], object] = _nothing,
    ) -> tuple[Arena, int]:
        """Memory for a plan on which all ranks agree, and how many rendezvous that took.

        Args:
            plan: The plan.
            device: Where it lies.
            groups: As for `symmplan.memory.spares.obtain`.
            meet: Meets others in it; what it raises is raised, and the memory given back.

        Raises:
            AgreementError, BackendError, PeerTimeoutError: As `symmplan.memory.realize`.

        Collective: yes, over those groups.
        """
        arena, new = obtain(
            plan,
            groups,
            memory=self.options.memory,
            device=device,
            timeout=self.options.timeout,
            debug=self.options.debug is True,
            user=self.user,
        )
        before = 0 if new else arena.rendezvous
        try:
            meet(arena)
        except BaseException:
            give_back([arena])
            raise
        return arena, arena.rendezvous - before

    def log(self, plan: Plan, ways: Iterable[str] = (), what: str = "") -> None:
        """Say what was planned; ``what`` if that is a part of the user's. Collective: no."""
        log_plan(what or self.user, plan, ways)


def checked_plan(problem: Problem, effort: Literal["fast", "optimal"]) -> Plan:
    """A plan that other code has verified."""
    plan = plan_problem(problem, effort=effort)
    plan.verify()
    return plan


def agree_on_options(
    options: Options,
    device: torch.device,
    groups: Mapping[str, Any],
    *,
    among: Mapping[str, Any] | None = None,
    refusal: Refusal | None = None,
    watch: Callable[[Mapping[str, Any]], _Watch] | None = None,
    **more: Any,
) -> tuple[str, Refusal | None]:
    """Check that all ranks were given the same options. See [Note: options are agreed first].

    Args:
        options: This rank's.
        device: Where its tensors lie.
        groups: ``{name: process group}`` of the program, None for one of this process alone.
        among: Those of them whose ranks are asked; all of them if None.
        refusal: Why this rank does without symmetric memory already.
        watch: Given the groups that are asked, a context while they are, which gives what looks
            whether the peers will come.
        more: Options that only the caller has, by name, as plain data.

    Returns:
        Name of the memory backend, and None; or any name, and why all ranks do without.

    Raises:
        AgreementError: Options differ; raised on every rank. ``option`` is the first that does,
            ``ranks`` two that differ, ``values`` what these were given.
        BackendError: The backend that was asked for by name serves no rank.
        PeerTimeoutError, PeerLostError: A rank did not come.

    Collective: yes, over ``among``.
    """
    asked = {n: g for n, g in (groups if among is None else among).items() if g is not None}
    members = resolve_groups(groups, groups)
    memory = options.memory
    failed: RuntimeError | OSError | None = None
    try:
        memory = resolve_backend(memory, device, members).name
    except (RuntimeError, OSError) as error:
        failed = error
    if current() is not None:
        return memory, refusal
    mine = {
        "options": {**options.agreed(device), **{name: (x, x) for name, x in more.items()}},
        "memory": "" if failed or refusal else memory,
        "asked": options.memory,
        "why": "" if failed is None else failure(failed),
    }
    if refusal is not None:
        mine["why"] = f"{refusal.what}\n{refusal.fix}"
    with (
        nullcontext() if watch is None else watch(asked) as look,
        Exchange(resolve_groups(asked, asked), options.timeout, look) as exchange,
    ):
        said = {
            name: [_read(text, exchange.groups[name], rank) for rank, text in enumerate(texts)]
            for name, texts in exchange.round("options", json.dumps(mine).encode()).items()
        }
        for name, notes in said.items():
            _compare(notes, exchange.groups[name])
        theirs = [note for notes in said.values() for note in notes] or [mine]
        if failed is not None and options.memory != "auto" and not any(n["memory"] for n in theirs):
            raise failed
        why = spread(exchange, next((n["why"] for n in theirs if n["why"]), "") or _apart(theirs))
    if not why:
        return memory, None
    what, _, fix = why.partition("\n")
    first = all(group.rank == 0 for group in exchange.groups.values())
    return "auto", refusal or Refusal(what, fix or FIX, first)


def _compare(notes: list[dict[str, Any]], group: Group) -> None:
    """Raise if the ranks of a group were given different options."""
    asked = [{**n["options"], "memory": (n["memory"] or n["asked"], n["asked"])} for n in notes]
    same = all(n["asked"] == notes[0]["asked"] for n in notes)
    for option in dict.fromkeys(name for of in asked for name in of):
        if option == "memory" and same:
            continue  # who has another all the same cannot have that: no error of the program's
        values = [of.get(option, (None, None)) for of in asked]
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
    """That rank ``other`` has another value of an option than rank 0, and what would help."""
    if option == "device":
        what = f"ranks 0 and {other} have their tensors on different kinds of devices"
        return what, "use one kind on every rank"
    if option == "table":
        what = f"ranks 0 and {other} read different tables of choices"
        return what, "give all ranks the same file"
    what = f"ranks 0 and {other} were given different {option}="
    return what, f"pass the same {option}= on every rank"


def _apart(notes: list[dict[str, Any]]) -> str:
    """That ranks which were asked for the same memory have different backends; else empty."""
    names = list(dict.fromkeys(note["memory"] for note in notes))
    if len(names) == 1:
        return ""
    return f"ranks have different memory backends: {' and '.join(sorted(names))}"


def _read(text: bytes, group: Group, rank: int) -> dict[str, Any]:
    try:
        note = json.loads(text)
        return {
            "options": {str(name): tuple(pair) for name, pair in note["options"].items()},
            **{key: str(note[key]) for key in ("memory", "asked", "why")},
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise AgreementError(
            f"rank {rank} sent something that is no note of this version of symmplan",
            fix="run the same version of symmplan on every rank",
            **group.here,
            ranks=(group.rank, rank),
        ) from error
