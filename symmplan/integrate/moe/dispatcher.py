"""What `symmplan.expert_parallel` makes: dispatch and combine of experts, in one segment.

How many rows go where is known only when the program runs, so the segment has room for a worst case
that is declared. It belongs to nobody for longer than a call: rows come in, and are taken out. So
all layers, forward and backward, share it.

[Note: rows are pushed]
    All ranks have the same `Routes`, so each knows where in its peers' memory its rows belong and
    copies them there itself: in shared memory with the processor, on devices with copy engines,
    which take no multiprocessor from the experts' products. Then the ranks meet, and each takes
    out what has come. Two slots take turns: who pushes for call k + 2 has met its peers in call
    k + 1, and they came to that after they had emptied the slot of call k.

[Note: overflow]
    What decides whether a call fits is the most that any rank gets, which stands in the routes.
    So all ranks find alike, without another word, that it does not, and plan again for more.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.own import own_work
from symmplan.errors import BackendError, ReleasedError, RunError
from symmplan.integrate.moe.routes import Routes, assumed_routes, exchange_routes
from symmplan.memory.calls import REFUSED, note
from symmplan.memory.kernels import copy_bytes
from symmplan.memory.streams import synchronize
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.report.log import LOG
from symmplan.runtime.choice import Choice
from symmplan.runtime.clock import at_once
from symmplan.runtime.executor import executor
from symmplan.runtime.prepare import Preparation, checked_plan
from symmplan.runtime.stats import Stats
from symmplan.runtime.trials import measure_there
from symmplan.torch_private import compilers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from symmplan.memory import Arena
    from symmplan.memory.segment import Rendezvous
    from symmplan.model import AlgorithmName, Plan
    from symmplan.runtime.options import Options

__all__ = ["ExpertParallel"]

_SLOTS = ("slot 0", "slot 1")


class ExpertParallel:
    """Dispatch and combine over one group. Made by `symmplan.expert_parallel`; a context manager.

    All ranks make the same calls in the same order, with rows of one shape and type. Where a peer
    does not, in shared memory every rank raises a `RunError`.
    """

    def __init__(self, group: str, device: torch.device, options: Options, max_tokens: int) -> None:
        self._groups = resolve_groups([group])
        self._group = self._groups[group]
        self._device = device
        self._options = options
        self._rows = max_tokens
        self._row = 0  # bytes of the largest row so far
        self._preparation = Preparation(options, "symmplan.expert_parallel", "expert parallel")
        self._arena: Arena | None = None
        self._released = False
        #: ``{bytes of a row: how rows of that size move}``.
        self._algorithms: dict[int, AlgorithmName] = {}
        self._choices: list[Choice] = []
        self._turn = 0
        self._last: Any = None  # on devices: the end of the last call
        self._executor = executor(
            lambda: [self.plan], self._let_go, lambda row: self._algorithms.get(row, "ordinary")
        )
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return (
            f"<symmplan.expert_parallel: {self._group.size} ranks, at most {self._rows} rows, "
            f"{self.stats.segment_bytes} bytes>"
        )

    @property
    def plan(self) -> Plan | None:
        """The plan of the segment; None while there is none."""
        return None if self._arena is None else self._arena.plan

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What was measured, for each size of a row."""
        return tuple(self._choices)

    @property
    def max_tokens(self) -> int:
        """Rows that a rank may get in one call before all ranks plan again."""
        return self._rows

    @property
    def stats(self) -> Stats:
        """See `Stats`; a call is one dispatch or combine, or the backward of one."""
        plan, counts = self.plan, dict[str, Any](self._counts)
        return Stats(
            plans=int(plan is not None),
            placed=0 if plan is None else len(_SLOTS),
            segment_bytes=0 if self._arena is None else self._arena.segment_bytes,
            lower_bound_bytes=0 if plan is None else plan.lower_bound_bytes,
            unshared_bytes=0 if plan is None else plan.unshared_bytes,
            reasons=tuple(self._reasons.most_common()),
            **counts,
        )

    @compilers.outside_graphs
    def routes(self, counts: torch.Tensor | Sequence[int]) -> Routes:
        """Tell all ranks how many rows go where.

        It takes the place of the exchange of splits that such a program has before its first
        ``all_to_all_single``. On a device the host waits for it.

        Args:
            counts: How many rows this rank sends to each rank of the group, in their order.

        Raises:
            AgreementError: Ranks were given different options; raised on every rank.
            BackendError: No rank can have the memory that was asked for by name.
            RunError: A rank's counts are negative, or not one for each rank; raised on every rank.

        Collective: yes.
        """
        self._usable()
        if not self._executor.serves:
            return assumed_routes(counts, self._group, self._rows)
        arena = self._arena if self._device.type == "cpu" else None
        meeting = None if arena is None else _meeting(arena, self._group.name)
        return exchange_routes(counts, self._group, self._device, meeting)

    @compilers.outside_graphs
    def dispatch(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Send rows to the ranks of their experts.

        Args:
            rows: Sorted by rank: the first ``routes.sent[0]`` along dimension 0 are for rank 0.
            routes: What `routes` gave.

        Returns:
            The rows that are for this rank, ``routes.received[r]`` of rank ``r``, in their order.
            Its backward combines gradients.

        Raises:
            RunError: The rows are not those of the routes, or ranks make different calls.
            PeerTimeoutError, PeerLostError: A rank did not come.

        Collective: yes, and so is its backward.
        """
        return _Exchange.apply(rows, self, routes)  # type: ignore[no-any-return,no-untyped-call]

    @compilers.outside_graphs
    def combine(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Send rows back, in the order in which `dispatch` gave them.

        Returns:
            The rows in the order in which this rank dispatched them. Its backward dispatches
            gradients.

        Raises:
            RunError: The rows are not those of the routes, or ranks make different calls.
            PeerTimeoutError, PeerLostError: A rank did not come.

        Collective: yes, and so is its backward.
        """
        return _Exchange.apply(rows, self, routes.back)  # type: ignore[no-any-return,no-untyped-call]

    @own_work
    def exchange(self, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
        """As `dispatch`; autograd does not follow it.

        Collective: yes.
        """
        self._usable()
        self._check(rows, routes)
        rows = rows.resolve_conj().resolve_neg().contiguous()
        count = routes.arrive(rows.shape[0])
        result = rows.new_empty((count, *rows.shape[1:]))
        row = math.prod(rows.shape[1:]) * rows.element_size()
        placed = self._algorithm(rows, row, routes) != "ordinary"
        self._counts["served" if placed else "plain"] += 1
        if not placed:
            self._reasons.update(filter(None, [self._preparation.reason]))
        nbytes = max(count, rows.shape[0]) * row
        with self._executor.call(row, "all_to_all", nbytes, self._group.name):
            if self._executor.serves and placed:
                self._pushed(result, rows, row, routes)
            elif self._executor.serves:
                _ordinary(result, rows, routes, self._group.process_group)
        return result

    def _check(self, rows: torch.Tensor, routes: Routes) -> None:
        fits = len(routes.table) == self._group.size and rows.dim()
        fits = fits and routes.takes(rows.shape[0]) and rows.device == self._device
        if fits:
            return
        if self._arena is not None and not self._released:
            self._refuse(self._arena)
        raise RunError(
            f"rows of shape {tuple(rows.shape)} on {rows.device} are not those of the routes",
            expected=f"{sum(routes.sent)} rows along dimension 0, on {self._device}",
            got=f"{rows.shape[0] if rows.dim() else 0} rows on {rows.device}",
            fix="pass the rows that were counted, or count them again",
            **self._group.here,
        )

    def _refuse(self, arena: Arena) -> None:
        """Let the peers' call fail, too, where ranks can tell each other."""
        self._turn += 1
        try:
            _meeting(arena, self._group.name).enter(REFUSED)
        except RunError:
            return

    def _algorithm(self, rows: torch.Tensor, row: int, routes: Routes) -> AlgorithmName:
        """How this call moves its rows; all ranks find the same."""
        algorithm = self._algorithms.get(row)
        if algorithm == "ordinary" or not row:
            return "ordinary"
        if self._arena is None or routes.most * row > self._room(self._arena):
            self._replan(row, routes.most)
            algorithm = None if algorithm is None else self._algorithms.get(row)
        if self._arena is None:
            return "ordinary"
        if algorithm is None:
            algorithm = self._algorithms[row] = self._chosen(self._arena, rows, row)
            if all(w == "ordinary" for w in self._algorithms.values()):
                self._let_go()
        return algorithm

    def _room(self, arena: Arena) -> int:
        return arena.plan.placements[_SLOTS[0]].nbytes

    def _replan(self, row: int, most: int) -> None:
        """Make room for this call. See [Note: overflow]. Collective: yes."""
        refused = self._preparation.refusal is not None
        if refused or self._options.chosen(self._device) == "ordinary":
            self._algorithms[row] = "ordinary"
            return
        before = self._rows
        if most > self._rows:
            self._rows = 1 << (most - 1).bit_length()
            LOG.warning(
                "a call outgrew its plan: a rank gets %s rows, planned were up to %s; all ranks "
                "plan again, for up to %s",
                *(most, before, self._rows),
            )
        self._row = max(self._row, row)
        if self._arena is not None:
            self._let_go()
            self._counts["replans"] += 1
        self._arena = self._obtained(self._rows * self._row)
        if self._arena is None:
            self._algorithms = dict.fromkeys((*self._algorithms, row), "ordinary")
        self._turn = 0

    def _obtained(self, nbytes: int) -> Arena | None:
        """Two slots of so many bytes that all ranks can reach; None if some rank cannot have them.

        Collective: yes.
        """
        group, preparation = self._group, self._preparation
        groups = {group.name: group.process_group}
        plan = _plan(nbytes, group.name, self._options.effort)

        def reach(arena: Arena) -> None:
            try:
                _meeting(arena, group.name).peers  # noqa: B018
            except BackendError as error:
                raise BackendError(
                    error.what,
                    fix="put the ranks that share experts on one host, with devices that reach "
                    "each other",
                    **group.here,
                ) from error

        def make() -> tuple[Arena, int] | None:
            if preparation.refusal is not None:
                return None
            return preparation.obtain(plan, self._device, groups, reach)

        made = preparation.attempt(make, groups, lambda made: made[0].give_back())
        if made is None:
            return None
        preparation.log(plan)
        self._counts["rendezvous"] += made[1]
        return made[0]

    def _chosen(self, arena: Arena, rows: torch.Tensor, row: int) -> AlgorithmName:
        """How rows of that size move. Collective: yes, if that is measured."""
        choose = self._options.chosen(self._device)
        if choose != "measure":
            return "push"
        group, preparation = self._group, self._preparation
        part = max(1, self._rows // group.size)
        even = Routes(((part,) * group.size,) * group.size, group.rank)
        if even.most * row > self._room(arena):
            return "ordinary"

        def measured() -> Choice | None:
            if preparation.refusal is not None:
                return None
            sample = rows.new_zeros((part * group.size, *rows.shape[1:]))
            into = torch.empty_like(sample)
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
                {
                    "ordinary": at_once(lambda: _ordinary(into, sample, even, group.process_group)),
                    "push": at_once(lambda: self._pushed(into, sample, row, even)),
                },
                group.process_group,
                self._device,
                self._options.timeout,
            )

        choice = preparation.attempt(measured, {group.name: group.process_group})
        if choice is None:  # some rank cannot have the memory to measure: none uses any
            self._algorithms = dict.fromkeys(self._algorithms, "ordinary")
            return "ordinary"
        self._choices.append(choice)
        return choice.algorithm

    def _pushed(self, result: torch.Tensor, rows: torch.Tensor, row: int, routes: Routes) -> None:
        """Move rows through the segment. See [Note: rows are pushed]."""
        arena, rank, size = self._arena, self._group.rank, self._group.size
        assert arena is not None
        slot = arena.plan.placements[_SLOTS[self._turn & 1]]
        self._turn += 1
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        if stream is not None and self._last is not None:
            stream.wait_event(self._last)  # calls may come on different streams
        meeting = _meeting(arena, self._group.name)
        sent = routes.sent
        for peer in (*range(rank + 1, size), *range(rank)):
            begin, count = sum(sent[:peer]), sent[peer]
            if count:
                start = slot.offset + routes.begins(peer) * row
                copy_bytes(meeting.peers[peer], start, rows[begin : begin + count], count * row)
        begin, own = sum(sent[:rank]), sum(routes.received[:rank])
        result[own : own + sent[rank]] = rows[begin : begin + sent[rank]]
        if stream is None:
            kind = f"{rows.dtype} {row} {routes.table}"
            meeting.enter(note("all_to_all_single_out", kind, out_offset=slot.offset))
        else:
            meeting.barrier()
        here = arena.segments[slot.segment].tensor[slot.offset :]
        there = here[: result.shape[0] * row].view(rows.dtype).view(result.shape)
        result[:own] = there[:own]
        result[own + sent[rank] :] = there[own + sent[rank] :]
        if stream is not None:
            self._last = stream.record_event()

    def _usable(self) -> None:
        """See that it can be used.

        Collective: the first time; the ranks agree on their options.
        """
        self._group.require_own()
        if self._released:
            raise ReleasedError(
                "symmplan.expert_parallel was used after its release",
                expected="an object whose with-block has not ended",
                got="one whose memory is given back",
                fix="make a new one",
                **self._group.here,
            )
        if not self._preparation.memory:
            groups = {self._group.name: self._group.process_group}
            self._preparation.agree(self._device, groups, max_tokens=self._rows)

    def _let_go(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            synchronize(self._device)
            arena.give_back()

    def release(self) -> None:
        """Give the segment back. Idempotent.

        Collective: no; but peers that still exchange rows would wait in vain.
        """
        if not self._released and not self._group.forked and self._executor.serves:
            self._let_go()
        self._released = True


class _Exchange(torch.autograd.Function):
    """Rows there; gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, via: ExpertParallel, routes: Routes) -> torch.Tensor:
        ctx.via, ctx.back = via, routes.back
        return via.exchange(rows, routes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Exchange.apply(gradient, ctx.via, ctx.back), None, None  # type: ignore[no-untyped-call]


def _ordinary(result: torch.Tensor, rows: torch.Tensor, routes: Routes, group: Any) -> None:
    dist.all_to_all_single(result, rows, routes.received, routes.sent, group=group)


def _plan(nbytes: int, group: str, effort: Literal["fast", "optimal"]) -> Plan:
    """Two slots that are in use at the same time."""
    problem = Problem(
        buffers=tuple(Buffer(name, nbytes, group) for name in _SLOTS),
        operations=(Operation("exchange", op="symmplan.expert_parallel"),),
        accesses=tuple(Access("exchange", name, write=True) for name in _SLOTS),
    )
    return checked_plan(problem, effort)


def _meeting(arena: Arena, group: str) -> Rendezvous:
    return arena.segments[arena.plan.placements[_SLOTS[0]].segment].meeting(group)
