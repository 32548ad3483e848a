"""How far each rank is: who plans a new graph while its peers run an old one.

[Note: a rank that plans alone]
    A rank may get a smaller batch than its peers and compile for it alone. If its new plan looks to
    its peers like one that was agreed before, the rank runs with it, and the peers need not know.
    Otherwise this rank waits for peers that do not plan, and they wait for it in a collective.

    So each rank publishes two counts for each process group, in words that peers can read (see
    `symmplan.memory.segment.Rendezvous.tell`): how many runs of planned graphs it has begun, and
    for which run it last planned. Ranks run the same program, so their counts are equal at the same
    place in it. A rank that has begun the run for which a peer plans, and has not planned for it,
    is running an old graph in its place. Both sides look at the counts: the planning rank while it
    waits for the others, the running rank when a run begins and while it waits in a barrier.

    A graph may be planned over several groups. A rank announces its planning in all of them before
    it says so in any: a peer that is told in one group counts alike in the others, too.

    The exchange in which ranks wait for all to plan does not use up one of the group's sequence
    numbers. It is named after the run that is planned for. So an exchange that one rank makes alone
    does no harm to the group.

[Note: epoch counters]
    CPU ranks of one host share their segments' control words. There these counts lie beside the
    counters of the barriers, and a rank that waits in a barrier looks at them. On devices the host
    waits in CUDA, if at all, so the counts have a place of their own: the epoch counters, a small
    piece of the host's shared memory. Ranks look there when a run begins, before anything is
    launched, and while they wait for an agreement. Groups of several hosts have none, because a
    look at their store in each run would cost a round trip.

    Backends that are tenants of one segment (see [Note: tenants] in `symmplan.runtime.tenants`)
    count apart, so only the first to come speaks there.

    If all collectives of a group were measured to be faster in ordinary memory, there are no
    segments either, and a rank that runs such a graph waits in the process group, if at all. These
    groups get epoch counters, too, so that a rank that plans alone learns of it before its timeout.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from attrs import define, field

from symmplan.coordination.all_gather import all_gather_json
from symmplan.coordination.exchange import PlanningWatch, count_in_store, processes_of
from symmplan.coordination.groups import resolve_groups
from symmplan.errors import AgreementError, SymmplanError
from symmplan.memory import realize
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.planner import plan as plan_problem
from symmplan.process import PROCESS
from symmplan.report.log import LOG
from symmplan.runtime.attempt import WANT
from symmplan.torch_private.compilers import takes_a_list

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from symmplan.coordination.groups import Group
    from symmplan.memory.arena import Arena
    from symmplan.memory.segment import Rendezvous

#: What it looks like where memory to see peers in cannot be had.
_UNHAD: tuple[type[BaseException], ...] = (SymmplanError, *WANT)

#: Which of the words says for which run a rank last planned.
_PLANNED = 1
#: More often than this nobody waits for all to plan for one run.
_MOST_WAITS = 1 << 16


@define(eq=False)
class _Counts:
    """The counts that this rank publishes to one process group.

    Attributes:
        series: Which of the group's series of runs this is, counted from 1 when it first plans.
        runs: How many runs of planned graphs it has begun.
        planned: Which run it last planned for, counted from 1, and the how-many-th wait for all
            to plan for that: ``run * _MOST_WAITS + wait``.
        announced: The same, before it has told all groups.
        failed: The last of these that ended by an error.
        heard: The last of a peer's that this rank was told of instead of taking part.
        epoch_counters: Where it says so.
        made: Counters that lie in no segment of a plan.
    """

    series: int = 0
    runs: int = 0
    planned: int = 0
    announced: int = 0
    failed: int = 0
    heard: int = 0
    epoch_counters: list[Rendezvous] = field(factory=list)
    made: Arena | None = None

    @property
    def wait(self) -> str:
        """Name of the exchange in which it waits for all to plan."""
        run, wait = divmod(self.planned, _MOST_WAITS)
        return f"series {self.series}, run {run}, wait {wait}"

    @property
    def known(self) -> int:
        """The last planning that it took part in, or was told of."""
        return max(self.planned, self.heard)

    def say(self, epoch_counters: Iterable[Rendezvous]) -> None:
        """Say so in some epoch counters."""
        for counters in epoch_counters:
            # In this order: who sees a number sees what came before it.
            counters.tell((self.failed, self.planned, self.announced, self.runs))

    def said(self) -> Iterator[tuple[Group, int, tuple[int, ...]]]:
        """``(group, rank, (failed, planned, announced, runs))`` of all ranks, as they say."""
        for counters in self.epoch_counters:
            for rank, words in enumerate(counters.told()):
                yield counters.group, rank, words


@define(eq=False)
class Progress:
    """How far the ranks of one backend's groups are. See [Note: a rank that plans alone].

    Attributes:
        timeout: Seconds that ranks wait for each other.
    """

    timeout: float
    _counts: WeakKeyDictionary[Any, _Counts] = field(init=False, factory=WeakKeyDictionary)

    def add(self, arena: Arena) -> None:
        """Graphs will run in this arena: peers can be seen from now on.

        Collective: yes, over its groups, the first time for each.
        """
        self._add(arena)
        for counters in _met(arena):
            counts = self._of(counters.group.process_group)
            if counts.made is None and counters not in counts.epoch_counters:
                self._make_counters(counters.group)

    def _make_counters(self, group: Group) -> None:
        counts = self._of(group.process_group)
        counts.made = _make(group, self.timeout)
        if counts.made is not None:
            self._add(counts.made)

    def _add(self, arena: Arena) -> None:
        for counters in _met(arena):
            if not counters.told():
                continue
            counters.watch(self.look)
            if PROCESS.speakers.setdefault(counters, weakref.ref(self))() is self:
                counts = self._of(counters.group.process_group)
                counts.epoch_counters.append(counters)
                counts.say([counters])

    def remove(self, arena: Arena) -> None:
        """The arena is about to be released."""
        for counters in _met(arena):
            counters.unwatch(self.look)
            counts = self._of(counters.group.process_group)
            if counters in counts.epoch_counters:
                counts.epoch_counters.remove(counters)

    def release(self) -> None:
        """Nothing runs any more. Collective: no."""
        for counts in self._counts.values():
            if counts.made is not None:
                self.remove(counts.made)
                counts.made.release()
        self._counts.clear()

    def run(self, groups: Iterable[Any]) -> None:
        """A run of a graph over these process groups begins, whose plan was agreed before.

        Raises:
            AgreementError: A peer plans a new graph for it, and nobody would see that later on.
        """
        began = [self._of(group) for group in groups]
        for counts in began:  # in all groups before one may raise
            counts.runs += 1
            counts.say(counts.epoch_counters[:1])
        for counts in began:
            if counts.made is not None:
                self._look(counts)

    def seen(
        self, compiled: Callable[[list[Any]], Any], names: Collection[str], asked: Collection[str]
    ) -> Callable[[list[Any]], Any]:
        """Compiled code whose runs peers see, also in groups where it has nothing in segments.

        Args:
            compiled: The code.
            names: Those groups.
            asked: Those of which all ranks have just waited for each other.

        Collective: when it first runs, over the groups of ``asked``.
        """
        if not names:
            return compiled
        groups = resolve_groups(names)
        members = [group for name, group in groups.items() if name in asked]
        running = [weakref.ref(group.process_group) for group in groups.values()]

        def run(args: list[Any]) -> Any:
            while members:
                if not self._of(members[-1].process_group).epoch_counters:
                    self._make_counters(members[-1])
                members.pop()
            self.run(group for ref in running if (group := ref()) is not None)
            return compiled(args)

        return takes_a_list(run)

    def look(self) -> None:
        """Raise an `AgreementError` if a peer plans a new graph while this rank runs an old one."""
        for counts in list(self._counts.values()):
            self._look(counts)

    def _look(self, counts: _Counts) -> None:
        if all(m.most_told(_PLANNED) <= counts.known for m in counts.epoch_counters):
            return
        for group, rank, (failed, planned, *_) in counts.said():
            if any(counts.known < of < _end(counts.runs) for of in (failed, planned)):
                self._hear()
                raise _differ(group, planning=rank, running=group.rank)

    @contextlib.contextmanager
    def planning(self, groups: Mapping[str, Any]) -> Iterator[PlanningWatch]:
        """Begin to plan for this rank's next run, waiting for all ranks of the groups.

        Yields:
            A function for one exchange, which raises an `AgreementError` if a peer runs an old
            graph.
        """
        members = resolve_groups(groups, groups)
        mine = {n: self._of(group) for n, group in groups.items() if group is not None}
        for name, counts in mine.items():
            counts.series = counts.series or count_in_store(members[name], "series")
            counts.announced = max(counts.planned, (counts.runs + 1) * _MOST_WAITS) + 1
            counts.say(counts.epoch_counters)
        for counts in mine.values():
            counts.planned = counts.announced
            counts.say(counts.epoch_counters)
        named = {name: counts.wait for name, counts in mine.items()}
        try:
            yield PlanningWatch(functools.partial(_look_for_runners, mine.values()), named)
        except BaseException:
            for counts in mine.values():
                counts.runs, counts.failed = counts.planned // _MOST_WAITS, counts.planned
                counts.say(counts.epoch_counters)
            raise

    def gather(
        self,
        groups: Mapping[str, Any],
        asked: list[str] | None = None,
        told: Mapping[str, Any] | None = None,
    ) -> dict[str, list[Any]]:
        """Wait until all ranks of the groups, ``{name: process group}``, have come to plan.

        Their names are added to ``asked``. Returns what each rank told, plain data for each group.

        Raises:
            AgreementError: A peer runs an old graph instead.
            PeerTimeoutError, PeerLostError: A peer did not come.

        Collective: yes, over those groups.
        """
        with self.planning(groups) as watch:
            mine = dict.fromkeys(groups) if told is None else told
            said = all_gather_json("planning", mine, groups, self.timeout, watch)
        if asked is not None:
            asked += groups
        return said

    def _of(self, group: Any) -> _Counts:
        counts: _Counts = self._counts.setdefault(group, _Counts())
        return counts

    def _hear(self) -> None:
        """This rank is told, once, of what peers plan, and counts the runs that these plan for."""
        for counts in self._counts.values():
            # In other groups peers may plan for a run that has not begun here.
            for end in (_end(counts.runs), _end(counts.runs + 1)):
                plannings = [of for *_, words in counts.said() for of in words[:-1] if of < end]
                if max(plannings, default=0) > counts.known:
                    counts.heard = max(plannings)
                    counts.runs = max(counts.runs, counts.heard // _MOST_WAITS)
                    counts.say(counts.epoch_counters)
                    break


def _end(run: int) -> int:
    """A bound above all numbers of planning for a run and for earlier ones."""
    return (run + 1) * _MOST_WAITS


def _look_for_runners(mine: Iterable[_Counts]) -> None:
    for counts in mine:
        for group, rank, (_, planned, _, runs) in counts.said():
            if _end(runs) > counts.planned > planned:
                raise _differ(group, planning=group.rank, running=rank)


def _met(arena: Arena) -> list[Rendezvous]:
    met = {id(r): r for s in arena.segments.values() for r in s.rendezvous.values()}
    return [r for r in met.values() if r.group.size > 1]


def _make(group: Group, timeout: float) -> Arena | None:
    """Epoch counters for a group whose segments have none; None where its hosts are several.

    Collective: yes.
    """
    ranks = processes_of(group.process_group)
    if len({(p.host, p.namespace) for p in ranks}) != 1:
        return None
    problem = Problem(
        buffers=(Buffer("epochs", 64, group.name),),
        operations=(Operation("look"),),
        accesses=(Access("look", "epochs"),),
    )
    plan, groups = plan_problem(problem), {group.name: group.process_group}
    try:
        return realize(plan, memory="shm", groups=groups, timeout=timeout, user="epoch counters")
    except _UNHAD as error:  # on all ranks; the program needs none
        LOG.info("no shared memory to see peers in: %s", error)
        return None


def _differ(group: Group, *, planning: int, running: int) -> AgreementError:
    return AgreementError(
        f"rank {planning} is planning a new graph, rank {running} is running an old one",
        expected="the same plan on all ranks, or one that was agreed before",
        got=f"a new plan on rank {planning} alone",
        fix="give declared tensors the same sizes on every rank (drop or pad the last batch), "
        "or declare a bound with torch._dynamo.mark_dynamic(x, dim, max=...); if an all-to-all "
        "has other sizes, compile with symmplan.backend(choose='ordinary')",
        group=group.name,
        rank=group.rank,
        ranks=(planning, running),
        planning=planning,
        running=running,
    )
