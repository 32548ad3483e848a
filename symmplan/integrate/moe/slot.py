"""The memory of `symmplan.expert_parallel`, and which algorithm moves rows through it.

[Note: overflow]
    What decides whether a call fits is the most that any rank gets, which stands in the routes.
    So all ranks find alike, without another word, that it does not, and plan again for more. Where
    only the device knows the routes, its kernels find that, write nothing, and stop for good; the
    host of each rank raises when it next comes by. See [Note: faults] in
    `symmplan.integrate.moe.rows_kernel`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from symmplan.choose.choice import Choice
from symmplan.choose.clock import at_once
from symmplan.choose.trials import measure_there
from symmplan.coordination.all_gather import all_agree
from symmplan.coordination.world import current
from symmplan.device import device_of
from symmplan.errors import BackendError, RunError
from symmplan.integrate.moe.device_rows import DeviceRows, has_kernels, signals_nbytes
from symmplan.integrate.moe.exchanges import RowPushes, plain
from symmplan.integrate.moe.host_rows import HostRows
from symmplan.integrate.moe.routes import PaddedRoutes, Routes
from symmplan.memory.held import keep
from symmplan.memory.kernels import as_bytes
from symmplan.memory.meeting.topology import served
from symmplan.memory.streams import synchronize
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.report.log import LOG
from symmplan.runtime.attempt import Refusal
from symmplan.runtime.prepare import Preparation, checked_plan
from symmplan.runtime.sleep import all_may_sleep, give_back, in_capture, take_back_replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from symmplan.coordination.groups import Group
    from symmplan.errors import SymmplanError
    from symmplan.memory import Arena
    from symmplan.model import AlgorithmName, Plan
    from symmplan.runtime.options import Options
    from symmplan.runtime.sleep import WhyNot

__all__ = ["RowSlot"]

_ROWS, _SIGNALS = "rows", "signals"
#: How many rows the host lets kernels move where it has looked at the routes itself.
_CHECKED = 2**31 - 1
#: What helps where a memory backend does not reach the ranks.
_REACHED = (
    "share experts within one host, or between equally many ranks of each host, at least two; "
    'devices of several hosts need memory="cuda"'
)


class RowSlot:
    """Where the rows of one group come in.

    Args:
        group: The ranks.
        device: Where their rows lie.
        options: How they move.
        rows: How many a rank may get in a call.

    Attributes:
        group: The same.
        device: The same.
        rows: The same, as last planned.
        preparation: Its way to memory.
        arena: The memory; None while there is none.
        pushes: What copies rows there.
        kernels: What runs the kernels; None where there are none.
        choices: What was measured, for each size of a row.
        counts: Rendezvous and plans, as `Stats` counts them.
        asleep: Whether the memory was given back until the next call.
        fault: What is wrong for good: a call did not fit, or kernels found something in memory that
            was given back since.
    """

    def __init__(self, group: Group, device: torch.device, options: Options, rows: int) -> None:
        self.group, self.device, self._options = group, device, options
        self.rows = rows
        self._row = 0  # bytes of the largest row so far
        self.preparation = Preparation(options, "symmplan.expert_parallel", "expert parallel")
        self.arena: Arena | None = None
        self.pushes: RowPushes | None = None
        self.kernels: DeviceRows | None = None
        self._levels: Collection[str] = ()  # its group, if two levels serve that
        #: ``{bytes of a row and whether routes are padded: how such rows move}``.
        self._algorithms: dict[tuple[int, bool], AlgorithmName] = {}
        self.choices: list[Choice] = []
        self.counts: Counter[str] = Counter()
        self.fault: SymmplanError | None = None
        self.asleep = False
        self._captured = False
        #: Former memory of which CUDA graphs have addresses.
        self._behind: list[Arena] = []

    def known(self, row: int) -> AlgorithmName:
        """How rows of so many bytes move where that was decided, else ``"ordinary"``."""
        found = (self._algorithms.get((row, padded)) for padded in (True, False))
        return next(filter(None, found), "ordinary")

    def algorithm(
        self, rows: torch.Tensor, row: int, routes: Routes | PaddedRoutes
    ) -> AlgorithmName:
        """How a call moves its rows, of ``row`` bytes each; all ranks find the same.

        Collective: yes, where there is no such call yet, or it needs more memory.
        """
        key = (row, isinstance(routes, PaddedRoutes))
        algorithm = self._algorithms.get(key)
        if self.pushes is not None and (algorithm is None or not row):
            self.pushes.compare(row)  # a rank that alone comes to that is heard by its peers
        if algorithm == "ordinary" or not row:
            return "ordinary"
        if self.arena is None or routes.most * row > self._room(self.arena):
            self._replan(key, routes.most)
            algorithm = None if algorithm is None else self._algorithms.get(key)
        if self.arena is None:
            return "ordinary"
        if algorithm is None:
            algorithm = self._algorithms[key] = self._chosen(self.arena, rows, key)
            if all(a == "ordinary" for a in self._algorithms.values()):
                self.let_go()
        return algorithm

    def start(
        self,
        algorithm: AlgorithmName,
        result: torch.Tensor,
        rows: torch.Tensor,
        routes: Routes | PaddedRoutes,
        *,
        apart: bool,
    ) -> Callable[[], Any]:
        """Start to move rows; what is returned ends that.

        Args:
            algorithm: How.
            result: Where they go.
            rows: What is sent.
            routes: Who sends what to whom.
            apart: Whether the end comes later.

        Collective: yes, and what is returned, too.
        """
        if algorithm == "symmetric":
            assert self.kernels is not None
            assert self.arena is not None
            if device_of(self.device).is_capturing():
                keep(self.arena)
                self._captured = True
            room = routes.most if isinstance(routes, PaddedRoutes) else _CHECKED
            return self.kernels.push(result, rows, routes, room, apart=apart)
        if algorithm == "ordinary":
            begin = plain(self.group.process_group, apart=apart)
        else:
            assert self.pushes is not None
            begin = self.pushes.start
        if isinstance(routes, Routes):
            return begin(result, rows, routes)
        known = routes.on_host(self.group)
        self.check_fits(known, routes.most)
        there = sum(known.received)
        take = begin(result[:there], rows[: sum(known.sent)], known)

        def padded() -> None:
            take()
            result[there:].zero_()

        return padded

    def check_fits(self, routes: Routes, room: int) -> None:
        """Refuse padded routes by which a rank gets more rows than there is room for, for good.

        Raises:
            RunError: They are such; raised on every rank.
        """
        if routes.most > room:
            self.fault = RunError(
                f"a call outgrew its plan: a rank gets {routes.most} rows",
                expected=f"at most max_tokens={room} rows, as rows= were given",
                got=f"{routes.most} rows",
                fix=f"pass max_tokens={routes.most} or more, or leave rows= out",
                **self.group.here,
            )
            raise self.fault

    def refuse(
        self, what: str, expected: str, got: str, fix: str, *, alone: bool = False
    ) -> NoReturn:
        """Raise an error of a call with wrong arguments.

        Args:
            what: Of the error.
            expected: The same.
            got: The same.
            fix: The same.
            alone: Whether the peers' call went on; else it fails, too, where it can.

        Raises:
            RunError: Always.
        """
        if self.pushes is not None and not alone:
            with contextlib.suppress(RunError):
                self.pushes.refuse()
        raise RunError(what, expected=expected, got=got, fix=fix, **self.group.here)

    def sleep(self, *, started: bool) -> None:
        """Give the memory back to the driver until the next call.

        Args:
            started: Whether an exchange is under way on this rank.

        Raises:
            RunError: One is, or a captured CUDA graph has addresses, on some rank; raised on all.

        Collective: yes, if there is any.
        """
        if self.arena is None:
            return
        groups = {self.group.name: self.group.process_group}
        timeout = self._options.timeout
        why: WhyNot = None
        if started:
            why = (
                "experts.sleep() was called while an exchange is under way",
                "one that was started and not waited for",
                "call wait() of what dispatch or combine returned first",
            )
        elif self._captured:
            name, segment = next(iter(self.arena.segments.items()))
            why = in_capture("experts", f"segment {name!r} at {segment.address:#x}")
        if not all_may_sleep(why, groups, timeout):
            return
        arena, self.arena, self.asleep = self._left(), None, True
        give_back(self.preparation.user, [arena], groups, self.device, timeout)
        self.counts["sleeps"] += 1

    def wake(self) -> None:
        """Have memory as before. Collective: yes, if it was given back."""
        if self.asleep:
            self._have()

    def let_go(self, *, replaced: bool = False) -> None:
        """Give the memory back.

        Args:
            replaced: Whether all ranks will have other memory at once. Then this stays if a CUDA
                graph has addresses there, and nobody else gets it until it is let go for good.
        """
        if self.arena is not None:
            arena, self.arena = self._left(), None
            if replaced and self._captured:
                self._behind.append(arena)
                self._captured = False
            else:
                arena.give_back(together=replaced)
        if not replaced:
            for arena in self._behind:
                arena.give_back()
            self._behind.clear()

    def _left(self) -> Arena:
        """The memory, without what works in it."""
        assert self.arena is not None
        synchronize(self.device)
        if self.kernels is not None:
            self.fault = self.fault or self.kernels.fault()
        self.pushes = self.kernels = None
        return self.arena

    def _room(self, arena: Arena) -> int:
        return arena.plan.placements[_ROWS].nbytes

    def _replan(self, key: tuple[int, bool], most: int) -> None:
        """Make room for this call. See [Note: overflow]. Collective: yes."""
        refused = self.preparation.refusal is not None
        if refused or self._options.chosen(self.device) == "ordinary":
            self._algorithms[key] = "ordinary"
            return
        before = self.rows
        if most > self.rows:
            self.rows = 1 << (most - 1).bit_length()
            LOG.warning(
                "a call outgrew its plan: a rank gets %s rows, planned were up to %s; all ranks "
                "plan again, for up to %s",
                *(most, before, self.rows),
            )
        self._row = max(self._row, key[0])
        if self.arena is not None:
            self.let_go(replaced=True)
            groups = {self.group.name: self.group.process_group}
            take_back_replaced(groups, self.device, self._options.timeout)
            self.counts["replans"] += 1
        self._have(key)

    def _have(self, *keys: tuple[int, bool]) -> None:
        """Have memory for so many rows, or move all rows without it. Collective: yes."""
        self.asleep = False
        self.arena = self._obtained(self.rows * self._row)
        if self.arena is None:
            self._algorithms = dict.fromkeys((*self._algorithms, *keys), "ordinary")

    def _obtained(self, nbytes: int) -> Arena | None:
        """So many bytes that all ranks can reach; None if some rank cannot have them.

        Collective: yes.
        """
        group, preparation = self.group, self.preparation
        groups = {group.name: group.process_group}
        plan = _plan(nbytes, group)
        kernels = False
        memory, timeout = preparation.memory, self._options.timeout
        if preparation.refusal is None:  # its memory may reach the ranks in no way
            self._levels, unserved = served(groups, memory, self.device, timeout)
            for why in unserved.values():
                preparation.refuse(Refusal(why, _REACHED, first=group.rank == 0))
        if preparation.refusal is None:  # a rank without Triton asks, too
            mine = has_kernels(self.device)
            kernels = all_agree("kernels", mine, groups, timeout)

        def meet(arena: Arena) -> None:
            slot, signals = (arena.plan.placements[name] for name in (_ROWS, _SIGNALS))
            meeting = arena.segments[slot.segment].meeting(group.name)
            try:
                meeting.near_peers  # noqa: B018
            except BackendError as error:
                raise BackendError(
                    error.what,
                    fix="put the ranks that share experts on one host, with peer access "
                    "between their devices",
                    **group.here,
                ) from error
            if meeting.levels is not None:
                self.pushes = HostRows(meeting.levels, slot, group)
                return
            self.pushes = RowPushes(meeting, slot, group)
            if kernels:
                self.kernels = DeviceRows(meeting, slot, signals, group, self.device, timeout)

        made = preparation.obtain_together(plan, self.device, groups, meet)
        if made is None:
            self.pushes = self.kernels = None
            return None
        preparation.log(plan)
        self.counts["rendezvous"] += made[1]
        return made[0]

    def _chosen(self, arena: Arena, rows: torch.Tensor, key: tuple[int, bool]) -> AlgorithmName:
        """How rows of that size move. Collective: yes, if that is measured."""
        choose = self._options.chosen(self.device)
        row, padded = key
        chosen = choose in ("measure", "table")
        if self.kernels is not None and (choose == "symmetric" or (padded and chosen)):
            return "symmetric"  # by the others the host would have to wait for padded routes
        inside: AlgorithmName = "push"
        if self._levels:
            inside = "two-level"
            if self._options.choose == "auto" and current() is None:
                choose = "measure"  # a network may be as fast
        group = self.group
        part = max(1, self.rows // group.size)
        if choose == "table":
            return self._tabled(part * group.size * row, inside)
        if choose != "measure":
            return inside
        even = Routes(((part,) * group.size,) * group.size, group.rank)
        if even.most * row > self._room(arena):
            return "ordinary"
        choice = self._measured(rows, even, inside)
        if choice is None:  # some rank cannot have the memory to measure: none uses any
            self._algorithms = dict.fromkeys(self._algorithms, "ordinary")
            return "ordinary"
        self.choices.append(choice)
        return choice.algorithm

    def _tabled(self, nbytes: int, inside: AlgorithmName) -> AlgorithmName:
        """How rows of so many bytes move by a table; if no row fits, in symmetric memory."""
        table, levels = self._options.table, inside == "two-level"
        found = None
        if table is not None:
            found = table.algorithm("all_to_all", self.group.size, nbytes, levels=levels)
        if found == "ordinary" or (found == "symmetric" and self.kernels is not None):
            return found
        return inside

    def _measured(self, rows: torch.Tensor, even: Routes, inside: AlgorithmName) -> Choice | None:
        """What is fastest for such rows, where all ranks send as many to each. Collective: yes."""
        group, preparation = self.group, self.preparation

        def measured() -> Choice | None:
            if preparation.refusal is not None:
                return None
            sample = rows.new_empty((sum(even.sent), *rows.shape[1:]))
            chance = torch.Generator(sample.device).manual_seed(0)
            as_bytes(sample).random_(generator=chance)  # what is equal may move together
            into = torch.empty_like(sample)
            names: list[AlgorithmName] = ["ordinary", inside]
            names += ["symmetric"] if self.kernels is not None else []

            def act(name: AlgorithmName) -> None:
                self.start(name, into, sample, even, apart=False)()

            return measure_there(
                Choice(
                    op="all_to_all",
                    nbytes=sample.numel() * sample.element_size(),
                    dtype=str(rows.dtype).removeprefix("torch."),
                    group=group.name,
                    ranks=group.size,
                    seconds={},
                    algorithm="ordinary",
                    copied_out=True,
                ),
                {name: at_once(lambda name=name: act(name)) for name in names},  # type: ignore[misc]
                group.process_group,
                self.device,
                self._options.timeout,
            )

        return preparation.attempt(measured, {group.name: group.process_group})


def _plan(nbytes: int, group: Group) -> Plan:
    """Rows that come in, and signals, which are in use at the same time."""
    sizes = {_ROWS: nbytes, _SIGNALS: signals_nbytes(group.size)}
    problem = Problem(
        buffers=tuple(Buffer(name, size, group.name) for name, size in sizes.items()),
        operations=(Operation("exchange", op="symmplan.expert_parallel"),),
        accesses=tuple(Access("exchange", name, write=True) for name in sizes),
    )
    return checked_plan(problem)
