"""Times algorithms by which a collective can run, on all ranks together.

[Note: what is timed]
    On a device two things run at the same time, on two streams: the collective, several times if it
    is small, and as many matrix products as overlap with it in the program, but not many more than
    hide it. If that number is not known, the products take as long as the ordinary algorithm alone.
    The measured span begins with the first of the two and ends with the last. An algorithm that is
    slower by itself makes the span longer, and so does one that slows the products down, each by
    its cost in such a program. All ranks begin together, after an all-reduce. Before the all-reduce
    other products run, for longer than the host needs to queue the measured work, so that the host
    is ahead of the device. On the CPU the products run between the collective's start and its end.

[Note: a rank that fails meanwhile]
    If a peer does not join a collective of a process group on the CPU, only the group's own timeout
    ends it, which is half an hour by default. So on the CPU the collectives run in a separate
    thread. The thread that waits for it checks whether a peer has failed, as the host of a device
    does. A rank that fails has missed collectives that its peers have begun, so the program
    cannot use the group any more. That is an error on all ranks, even if the reason is a lack of
    memory.

Rounds of the algorithms alternate. The time of a round is that of its slowest rank, and the result
is the median.
"""

from __future__ import annotations

import contextlib
import queue
import statistics
import threading
import time
from collections import deque
from concurrent import futures
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmplan.coordination.exchange import Exchange
from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.own import own_work
from symmplan.device import device_of, kind_of
from symmplan.errors import PeerTimeoutError, RunError, SymmplanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    #: Runs a collective: starts it, calls what it is given, waits for it.
    Act = Callable[[Callable[[], None]], Any]
    #: What a thread is to run; None for no more.
    _Work = queue.SimpleQueue[tuple[futures.Future[float], Callable[[], float]] | None]

_WARM_UP = 2
_REPETITIONS = 7
_MOST_PRODUCTS = 256
#: Products that take longer than this many times the collective hide it, and more change nothing.
_HIDDEN = 3.0
#: How many times as long as the host queued so far it may queue now and still be ahead.
_AHEAD = 2.0
#: Seconds after which who waits for a collective looks whether a peer has failed.
_LOOK = 0.1


class Clock:
    """Times collectives on the CPU, beside matrix products.

    Attributes:
        often: How often a small collective is repeated at most.
    """

    often = 1
    _rows = 256
    _dtype = torch.float32

    def __init__(self, device: torch.device, timeout: float) -> None:
        self._timeout = timeout
        self._look: Callable[[], None] = _nothing
        # Runs what it is given in a thread of its own, while there are peers.
        self._work: _Work | None = None
        # The program's own random numbers must not change, and zeros take less power.
        generator = torch.Generator(device).manual_seed(0)
        self._a, self._b, self._out = (
            torch.empty((self._rows, self._rows), dtype=self._dtype, device=device).normal_(
                generator=generator
            )
            for _ in range(3)
        )

    @classmethod
    def nbytes(cls) -> int:
        """Bytes that its matrices take."""
        return 3 * cls._rows**2 * cls._dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of one matrix product."""
        return 2 * self._rows**3

    @contextlib.contextmanager
    def together(self, groups: Mapping[str, Any]) -> Iterator[None]:
        """Collectives that are timed inside end on all ranks, or fail on all of them.

        See [Note: a rank that fails meanwhile].

        Args:
            groups: ``{name: process group}`` of who takes part.

        Raises:
            PeerTimeoutError: A collective did not end in time.
            SymmplanError: A rank failed.

        Collective: yes, over those groups.
        """
        with Exchange(resolve_groups(groups, groups), self._timeout) as exchange:
            self._look = exchange.look
            self._begin()
            try:
                yield
                exchange.round("timed", b"")
            except SymmplanError:
                raise
            except Exception as error:
                raise RunError(
                    f"a collective failed while it was measured: {type(error).__name__}: {error}",
                    fix="correct the cause, or choose without a measurement: choose='placed' or "
                    "'ordinary'",
                ) from error
            finally:
                self._end()
                self._look = _nothing

    def _begin(self) -> None:
        self._work = queue.SimpleQueue()
        # A daemon: one that waits for a peer that failed must not hold up the end of the process.
        threading.Thread(target=_run, args=(self._work,), daemon=True).start()

    def _end(self) -> None:
        if self._work is not None:
            self._work.put(None)
        self._work = None

    def product(self) -> float:
        """Seconds of one matrix product."""
        return min(self._timed(lambda: self._multiply(8)) / 8 for _ in range(_WARM_UP + 1))

    def span(
        self,
        act: Act,
        times: int,
        products: int,
        group: Any,  # noqa: ARG002
    ) -> float:
        """Seconds until ``act``, so often, and the products are done.

        Collective: yes, over ``group``; ``times`` must be the same on all ranks.
        """

        def both() -> None:
            act(lambda: self._multiply(products))
            for _ in range(times - 1):
                act(_nothing)

        return self._timed(both)

    def _multiply(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._a, self._b, out=self._out)

    def _timed(self, work: Callable[[], None]) -> float:
        def timed() -> float:
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin

        if self._work is None:
            return timed()
        future: futures.Future[float] = futures.Future()
        self._work.put((future, timed))
        deadline = time.monotonic() + self._timeout
        while not futures.wait([future], _LOOK).done:
            self._waits(deadline)
        if future.exception() is not None:
            self._look()  # a peer's failure may be the reason
        return future.result()

    def _waits(self, deadline: float) -> None:
        """Raise if the wait cannot succeed."""
        self._look()
        if time.monotonic() > deadline:
            raise PeerTimeoutError(
                f"a collective that was measured did not end in {self._timeout:g} s",
                fix="find out why a peer failed, or increase timeout=",
                timeout=self._timeout,
            )


class _DeviceClock(Clock):
    """Times calls on an accelerator, by events. See [Note: what is timed]."""

    often = 16
    _rows = 4096
    _dtype = torch.bfloat16

    def __init__(self, device: torch.device, timeout: float) -> None:
        super().__init__(device, timeout)
        self._there = device_of(device)
        self._products = self._there.current_stream()
        self._side = self._there.new_stream()
        self._token = torch.zeros(1, device=device)
        #: Seconds that the host took to queue what was timed: of each algorithm, at least.
        self._queueing: deque[float] = deque(maxlen=8)
        self._one = self.product()

    def _begin(self) -> None:
        """The host does not wait while it queues collectives."""

    def span(
        self,
        act: Act,
        times: int,
        products: int,
        group: Any,
    ) -> float:
        def both() -> None:
            self._side.wait_stream(self._products)
            with self._there.on_stream(self._side):
                for _ in range(times):
                    act(_nothing)
            self._multiply(products)
            self._products.wait_stream(self._side)

        # While these run the host queues what is timed. Ranks may need more or fewer.
        ahead = _AHEAD * max(self._queueing) / max(self._one, 1e-9)
        self._multiply(min(_MOST_PRODUCTS, 2 + times + round(ahead)))
        dist.all_reduce(self._token, group=group)
        return self._timed(both)

    def _timed(self, work: Callable[[], None]) -> float:
        before, after = (self._there.event(timed=True) for _ in range(2))
        begin = time.perf_counter()
        before.record(self._products)
        work()
        after.record(self._products)
        self._queueing.append(time.perf_counter() - begin)
        # A host that waits in CUDA for a peer that failed would wait until NCCL ends the process.
        deadline = time.monotonic() + self._timeout
        look = time.monotonic() + _LOOK
        while not after.query():
            if time.monotonic() > look:
                self._waits(deadline)
                look = time.monotonic() + _LOOK
            time.sleep(1e-5)
        return float(before.elapsed_time(after)) / 1e3


def clock_of(device: torch.device, timeout: float) -> Clock:
    """A clock for collectives on ``device``; a span may take ``timeout`` seconds there."""
    return (_DeviceClock if kind_of(device).is_accelerator else Clock)(device, timeout)


def clock_bytes(device: torch.device) -> int:
    """Bytes that a clock takes on ``device``."""
    return (_DeviceClock if kind_of(device).is_accelerator else Clock).nbytes()


def at_once(act: Callable[[], Any]) -> Act:
    """A function that runs a collective on its stream and waits for it immediately."""

    def run(beside: Callable[[], None]) -> None:
        act()
        beside()

    return run


@own_work
def seconds_of(
    clock: Clock,
    acts: Mapping[str, Act],
    group: Any,
    nbytes: int,
    *,
    beside: float | None,
    enough: int,
) -> dict[str, float]:
    """Seconds of one collective by each algorithm, on this rank.

    Args:
        clock: Of the device.
        acts: ``{algorithm: function that runs it}``; the first is torch's own way.
        group: The process group.
        nbytes: Size of the collective; equal on all ranks.
        beside: Floating-point operations of matrix products that run at the same time; None if
            that is not known.
        enough: A collective of fewer bytes is repeated until the sum reaches this, but not too
            often.

    Collective: yes, over ``group``.
    """
    times = min(clock.often, -(-enough // max(1, nbytes)))  # not by time: equal on all ranks
    products = 0
    if beside is None or beside:
        own = next(iter(acts.values()))
        alone = min(clock.span(own, times, 0, group) for _ in range(_WARM_UP + 1))
        as_long = alone / max(clock.product(), 1e-9)
        wanted = as_long
        if beside is not None:
            wanted = min(times * beside / clock.flops, _HIDDEN * as_long)
        # May differ between ranks: one that works longer is waited for.
        products = min(_MOST_PRODUCTS, max(1, round(wanted)))
    runs: dict[str, list[float]] = {algorithm: [] for algorithm in acts}
    for repetition in range(_WARM_UP + _REPETITIONS):
        for algorithm, act in acts.items():
            seconds = clock.span(act, times, products, group)
            if repetition >= _WARM_UP:
                runs[algorithm].append(seconds)
    return {algorithm: statistics.median(seconds) / times for algorithm, seconds in runs.items()}


def _nothing() -> None:
    """No work beside the collective."""


@own_work
def _run(work: _Work) -> None:
    """The loop of a clock's thread."""
    while (given := work.get()) is not None:
        future, act = given
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 (raised by who waits)
            future.set_exception(error)
