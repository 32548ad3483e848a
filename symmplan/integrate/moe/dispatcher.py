"""What `symmplan.expert_parallel` makes: dispatch and combine of experts, in one segment.

How many rows go where is known only when the program runs, so the segment has room for a worst case
that is declared. It belongs to nobody for longer than a call: rows come in, and are taken out. So
all layers, forward and backward, share it.

[Note: one after the other]
    There is one slot for what comes in, so an exchange that was started ends before the next one
    starts. Its start and its end may be on different streams, and captured in CUDA graphs.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.own import own_work
from symmplan.device import device_of
from symmplan.errors import OptionError, ReleasedError
from symmplan.integrate.moe.checks import check_rows, check_types
from symmplan.integrate.moe.exchanges import RowExchange
from symmplan.integrate.moe.pending import Pending, differentiable, pending
from symmplan.integrate.moe.routes import (
    PaddedRoutes,
    Routes,
    assumed_routes,
    counts_of,
    exchange_routes,
)
from symmplan.integrate.moe.slot import RowSlot
from symmplan.memory.beyond import beyond_segments
from symmplan.memory.streams import behind, queued_on, synchronize
from symmplan.runtime.executor import executor
from symmplan.runtime.handles import OfOneProcess
from symmplan.runtime.options import whole
from symmplan.runtime.stats import Stats
from symmplan.torch_private import compilers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from typing_extensions import Self

    from symmplan.choose.choice import Choice
    from symmplan.errors import SymmplanError
    from symmplan.memory.streams import Queued
    from symmplan.model import Plan
    from symmplan.runtime.options import Options

__all__ = ["ExpertParallel"]


class ExpertParallel(OfOneProcess):
    """Dispatch and combine over one group. Made by `symmplan.expert_parallel`; a context manager.

    All ranks must make the same calls in the same order, with rows of one shape and type. In shared
    memory every rank raises a `RunError` if one rank does not.
    """

    def __init__(self, group: str, device: torch.device, options: Options, max_tokens: int) -> None:
        self._groups = resolve_groups([group])
        self._group = self._groups[group]
        self._device = device
        self._slot = RowSlot(self._group, device, options, max_tokens)
        self._released = False
        #: What was started and not yet waited for; see [Note: one after the other].
        self._open: RowExchange | None = None
        self._side: Any = None
        self._last: Queued | None = None  # the last start or end
        self._executor = executor(lambda: [self.plan], self._slot.let_go, self._slot.known)
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._fault: SymmplanError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.release()
        if kind is None:
            self._raise_fault()

    def __repr__(self) -> str:
        return (
            f"<symmplan.expert_parallel: {self._group.size} ranks, at most {self.max_tokens} rows, "
            f"{self.stats.segment_bytes} bytes>"
        )

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._group.rank

    @property
    def ranks(self) -> int:
        """How many ranks the group has."""
        return self._group.size

    @property
    def plan(self) -> Plan | None:
        """The plan of the segment; None while there is none."""
        return None if self._slot.arena is None else self._slot.arena.plan

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What was measured, for each size of a row."""
        return tuple(self._slot.choices)

    @property
    def max_tokens(self) -> int:
        """The most rows that a rank may receive in one call without a new plan."""
        return self._slot.rows

    @property
    def stats(self) -> Stats:
        """See `Stats`; a call is one dispatch or combine, or the backward of one."""
        plan, arena = self.plan, self._slot.arena
        counts = dict[str, Any](self._counts + self._slot.counts) | beyond_segments()
        return Stats(
            plans=int(plan is not None),
            placed=0 if plan is None else len(plan.placements),
            segment_bytes=0 if arena is None else arena.segment_bytes,
            lower_bound_bytes=0 if plan is None else plan.lower_bound_bytes,
            unshared_bytes=0 if plan is None else plan.unshared_bytes,
            reasons=tuple(self._reasons.most_common()),
            **counts,
        )

    @overload
    def routes(self, counts: torch.Tensor | Sequence[int]) -> Routes: ...

    @overload
    def routes(self, counts: torch.Tensor | Sequence[int], *, rows: int) -> PaddedRoutes: ...

    @compilers.outside_graphs
    def routes(
        self, counts: torch.Tensor | Sequence[int], *, rows: int | None = None
    ) -> Routes | PaddedRoutes:
        """Exchange how many rows each rank sends to each other rank.

        This replaces the exchange of splits before an ``all_to_all_single``. On a device the host
        waits for the result, unless ``rows`` is given. With ``rows``, `dispatch` returns
        ``max_tokens`` rows and `combine` returns ``rows`` rows, padded with zeros. So the host
        knows all shapes, and a CUDA graph can capture the calls if kernels move the rows (see
        `symmplan.expert_parallel`). If a rank would then receive more than ``max_tokens`` rows,
        nothing is written, and every rank raises in its next call of a method, such as `check`.

        Args:
            counts: How many rows this rank sends to each rank of the group, in their order.
            rows: How many rows this rank sends, or more, up to ``max_tokens``. Either all ranks
                pass ``rows``, or none does.

        Raises:
            AgreementError: Ranks were given different options; raised on every rank.
            BackendError: The memory backend that was asked for by name serves no rank.
            OptionError: ``rows`` is not an integer up to ``max_tokens``.
            RunError: A rank's counts are negative, or not one for each rank; raised on every rank.

        Collective: yes.
        """
        self._usable()
        slot, group = self._slot, self._group
        stream = behind(self._last, device_of(self._device))
        if rows is None:
            if not self._executor.serves:
                return assumed_routes(counts, group, slot.rows)
            made = exchange_routes(counts, group, self._device, self._meeting())
            self._met()
            assert isinstance(made, Routes)
            return made
        whole("rows", rows, 0)
        if rows > slot.rows:
            raise OptionError(
                f"rows is {rows}, and max_tokens is {slot.rows}",
                expected="rows= of at most max_tokens=, because combine returns that many",
                got=f"{rows} rows",
                fix=f"pass max_tokens={rows} or more",
            )
        on_host: list[Routes] = []
        if not self._executor.serves:
            table = torch.zeros(group.size, group.size + 1, dtype=torch.int64, device=self._device)
        elif slot.kernels is not None:
            table = slot.kernels.table(counts_of(counts, group, self._device), rows)
            self._last = queued_on(stream, device_of(self._device))
        else:
            said = exchange_routes(counts, group, self._device, self._meeting(), rows)
            self._met()
            if isinstance(said, Routes):
                slot.check_fits(said, slot.rows)
                on_host.append(said)
            table = said.on_device(self._device) if isinstance(said, Routes) else said
        return PaddedRoutes(table, group.rank, rows, slot.rows, host=on_host)

    @overload
    def dispatch(
        self,
        rows: torch.Tensor,
        routes: Routes | PaddedRoutes,
        *,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def dispatch(
        self, rows: torch.Tensor, routes: Routes | PaddedRoutes, *, async_op: Literal[True]
    ) -> Pending: ...

    @compilers.outside_graphs
    def dispatch(
        self, rows: torch.Tensor, routes: Routes | PaddedRoutes, *, async_op: bool = False
    ) -> torch.Tensor | Pending:
        """Send rows to the ranks of their experts.

        Args:
            rows: Sorted by rank: the first ``routes.sent[0]`` along dimension 0 are for rank 0.
            routes: The result of `routes`.
            async_op: Only start the exchange, and return a `Pending`. Work before its ``wait``
                overlaps with the exchange, such as a shared expert; so do their backwards.

        Returns:
            The rows for this rank, sorted by rank; ``routes.received[r]`` of them from rank ``r``.
            The backward combines gradients.

        Raises:
            RunError: The rows are not those of the routes, or ranks make different calls.
            PeerTimeoutError, PeerLostError: A rank did not come.

        Collective: yes, and so is its backward.
        """
        check_types(self._slot, rows, routes)
        return (pending if async_op else differentiable)(rows, self, routes)

    @overload
    def combine(
        self,
        rows: torch.Tensor,
        routes: Routes | PaddedRoutes,
        *,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def combine(
        self, rows: torch.Tensor, routes: Routes | PaddedRoutes, *, async_op: Literal[True]
    ) -> Pending: ...

    @compilers.outside_graphs
    def combine(
        self, rows: torch.Tensor, routes: Routes | PaddedRoutes, *, async_op: bool = False
    ) -> torch.Tensor | Pending:
        """Send rows back to the ranks that dispatched them.

        Args:
            rows: One for each row that `dispatch` returned, in the same order.
            routes: The routes of that dispatch.
            async_op: As for `dispatch`.

        Returns:
            The rows in the order in which this rank dispatched them. The backward dispatches
            gradients.

        Raises:
            RunError: The rows are not those of the routes, or ranks make different calls.
            PeerTimeoutError, PeerLostError: A rank did not come.

        Collective: yes, and so is its backward.
        """
        check_types(self._slot, rows, routes)
        return (pending if async_op else differentiable)(rows, self, routes.back)

    def exchange(self, rows: torch.Tensor, routes: Routes | PaddedRoutes) -> torch.Tensor:
        """Like `dispatch`, but without autograd.

        Collective: yes.
        """
        started = self.start(rows, routes, apart=False)
        result = started.result
        assert result is not None
        self.end(started)
        return result

    @own_work
    def start(
        self, rows: torch.Tensor, routes: Routes | PaddedRoutes, *, apart: bool = True
    ) -> RowExchange:
        """Start an `exchange`, after what was started before has ended.

        Args:
            rows: As for `exchange`.
            routes: The same.
            apart: Whether other work is to run until `end`.

        Collective: yes.
        """
        if self._open is not None:
            self.end(self._open)
        self._usable()
        check_rows(self, self._slot, rows, routes)
        rows = rows.resolve_conj().resolve_neg().contiguous()
        count = routes.arrive(rows.shape[0])
        result = rows.new_empty((count, *rows.shape[1:]))
        row = math.prod(rows.shape[1:]) * rows.element_size()
        algorithm = self._slot.algorithm(rows, row, routes)
        placed = algorithm != "ordinary"
        self._counts["served" if placed else "plain"] += 1
        if not placed:
            self._reasons.update(filter(None, [self._slot.preparation.reason]))
        nbytes = max(count, rows.shape[0]) * row
        started = RowExchange(routes, None, result, rows)
        with self._executor.call(row, "all_to_all", nbytes, self._group.name):
            if self._executor.serves:
                there = device_of(self._device)
                started.stream = there.current_stream()
                with self._apart() if apart else contextlib.nullcontext():
                    stream = behind(self._last, there)  # calls may come on different streams
                    take = self._slot.start(algorithm, result, rows, routes, apart=apart)
                    self._last = queued_on(stream, there)
                self._open, started.take = started, take
        return started

    @own_work
    def end(self, exchange: RowExchange) -> None:
        """Let the current stream wait for the result of `start`; may be called again.

        Collective: yes, the first time.
        """
        take, exchange.take = exchange.take, None
        if take is not None:
            self._open = None
            there = device_of(self._device)
            stream = behind(self._last, there)
            take()
            exchange.ended = self._last = queued_on(stream, there)
            if stream != exchange.stream:  # of which the allocator hears
                for tensor in (exchange.rows, exchange.result):
                    assert tensor is not None
                    there.record_stream(tensor, stream)
        else:
            behind(exchange.ended, device_of(self._device))
        exchange.rows = exchange.result = None

    def check(self) -> None:
        """Wait for the device, and raise errors of calls that only the device knows.

        Programs that replay CUDA graphs need this. In other programs the next call raises them.

        Raises:
            RunError: A rank received more than ``max_tokens`` rows, or its counts were wrong.
            PeerTimeoutError: A rank did not arrive.

        Collective: no.
        """
        synchronize(self._device)
        self._raise_fault()

    def _apart(self) -> AbstractContextManager[Any]:
        """The stream on which exchanges run beside the program's work, behind the current one."""
        there = device_of(self._device)
        if self._side is not None:
            self._side.wait_stream(there.current_stream())
        return there.on_stream(self._side)

    def _meeting(self) -> Any:
        """Where CPU ranks tell each other numbers; None if they cannot."""
        pushes = self._slot.pushes
        accelerated = device_of(self._device).is_accelerator
        return None if pushes is None or accelerated else pushes.meeting

    def _met(self) -> None:
        """All ranks have met, on the current stream."""
        if self._slot.pushes is not None and self._open is None:
            self._slot.pushes.met = True

    def _usable(self) -> None:
        """See that it can be used.

        Collective: the first time; the ranks agree on their options.
        """
        self._group.require_own()
        if self._released:
            raise ReleasedError(
                "symmplan.expert_parallel was used after its release",
                expected="an object whose with block has not ended",
                got="one whose memory is given back",
                fix="make a new one",
                **self._group.here,
            )
        self._raise_fault()
        preparation = self._slot.preparation
        if not preparation.memory:
            groups = {self._group.name: self._group.process_group}
            preparation.agree(self._device, groups, max_tokens=self._slot.rows)
            self._side = device_of(self._device).new_stream()  # before graphs are captured

    def _raise_fault(self) -> None:
        """Raise what is wrong for good. The host waits for nothing."""
        slot = self._slot
        found = self._fault or slot.fault
        if found is None and slot.kernels is not None:
            found = slot.kernels.fault()
        if found is not None:
            self._fault = found
            raise found.with_traceback(None)

    @property
    def asleep(self) -> bool:
        """Whether `sleep` has given the segment back, and nothing has taken one since."""
        return self._slot.asleep

    @compilers.outside_graphs
    def sleep(self) -> None:
        """Give the segment, if any, back to the driver until `wake`, or until rows move again.

        Nothing is measured again then, and the plan is the same.

        Raises:
            RunError: On some rank an exchange is under way, or a captured CUDA graph has addresses
                of the segment. Raised on all of them, and nothing has changed.

        Collective: yes.
        """
        self._usable()
        self._slot.sleep(started=self._open is not None)

    @compilers.outside_graphs
    def wake(self) -> None:
        """Obtain the segment again, as the next call would. Collective: yes, if it was asleep."""
        self._usable()
        self._slot.wake()

    def release(self) -> None:
        """Release the segment. Idempotent. Collective: no, but peers that move rows time out."""
        if not self._released and not self._group.forked and self._executor.serves:
            self._slot.let_go()
        self._open = None
        self._released = True
