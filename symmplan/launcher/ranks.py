"""Start N real processes on this machine and run functions in them: the launcher of local ranks.

    def work(rank, world_size, n):       # at the top of a module: ranks import it by name
        mark("half of it is done")
        return plain_data

    with RankPool(3) as pool:            # the processes and their process group are kept
        outcomes = pool.outcomes(work, 5)
        pool.start(work, 6); pool.kill(1); outcomes = pool.collect()

    run_ranks(work, 2, 5)                # once: the values, or RanksFailedError

Every rank has a process group whose store lives in the parent, so that any rank may be killed.
Ranks that do not finish in time are killed, and their stacks are told. Each rank leads a session:
what it started ends with it. Nothing survives the parent.

[Note: whose error]
    When one rank ends, the others notice: in a barrier, or because gloo loses a connection. Those
    are consequences. Told first is a rank that died of a signal, then an error of a rank that is
    not about its peers, by time; the others are listed behind it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import frozen

from symmplan.errors import RanksFailedError
from symmplan.launcher.rank_process import Life, RankError, mark, serve
from symmplan.report.progress import ProgressLine

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from typing_extensions import Self

__all__ = ["RankError", "RankOutcome", "RankPool", "mark", "raise_if_failed", "run_ranks"]
__all__ += ["cause_first", "run_shown"]

#: Errors that are about a peer, and so are hardly the cause.
_CONSEQUENCES = {"PeerLostError", "PeerTimeoutError", "DistBackendError"}
#: Seconds that an idle rank gets to end by itself, and that a late one gets to write its stacks.
_TO_END, _TO_WRITE = 5.0, 0.3
#: Seconds that processes without a first call get to start and meet, however busy the machine is.
_TO_START = 300.0


@frozen
class RankOutcome:
    """What became of one rank: a value, an error, a death, or nothing in time.

    Attributes:
        rank: Which.
        pid: Of its process.
        value: What it returned.
        error: What it raised.
        exitcode: How it died without a word; negative is a signal.
        hung: Where it was when its time was over, as stacks.
        stack: What it wrote before it died: stacks, and what it printed if it was told to be quiet.
        at: Its last mark.
        seconds: How long it took.
    """

    rank: int
    pid: int = 0
    value: Any = None
    error: RankError | None = None
    exitcode: int | None = None
    hung: str | None = None
    stack: str = ""
    at: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it returned."""
        return self.error is None and self.exitcode is None and self.hung is None

    def describe(self) -> str:
        """All that is known of what went wrong."""
        if self.error is not None:
            return f"rank {self.rank} raised:\n{self.error.traceback}"
        if self.hung is not None:
            return f"rank {self.rank} did not finish in time; it was at:\n{self.hung}"
        return f"rank {self.rank} exited with {self.exitcode}\n{self.stack}".rstrip()

    def __str__(self) -> str:
        if self.error is not None:
            how = f"failed at: {self.at}: {self.error.root.headline}"
        elif self.hung is not None:
            how = f"was still at: {self.at}"
        elif self.exitcode is not None and self.exitcode < 0:
            known = {number.value: number.name for number in signal.Signals}
            how = f"was killed by {known.get(-self.exitcode, f'signal {-self.exitcode}')}"
            how += f" at: {self.at}"
        else:
            how = f"exited with code {self.exitcode} at: {self.at}"
        return f"rank {self.rank} (pid {self.pid}) {how}"


class RankPool:
    """N processes that keep their process group between calls.

    Args:
        world_size: How many.
        call: A function and its arguments, for ranks that begin with it; `collect` gets what comes
            of it. By default ranks have met when the pool is made.
        method: How processes are started, as multiprocessing calls it. Forked ranks know what this
            process knows, also of functions without a name.
        timeout: Seconds that one call may take. Starting counts only for ranks that begin with a
            call.
        grace: Seconds that the others get when a rank has failed; None: all that is left.
        progress: Is told the marks of rank 0, which speaks for all, and that time goes by.
        life: Settings of the ranks, as fields of `symmplan.launcher.rank_process.Life`.

    Attributes:
        seconds_to_start: How long starting and meeting took; 0 for ranks that begin with a call.
    """

    def __init__(
        self,
        world_size: int,
        *,
        call: tuple[Any, ...] | None = None,
        method: Literal["spawn", "fork", "forkserver"] = "forkserver",
        timeout: float = 60.0,
        grace: float | None = None,
        progress: ProgressLine | None = None,
        **life: Any,
    ) -> None:
        self.world_size, self.timeout = world_size, timeout
        self._grace, self._progress = grace, progress
        self._folder = tempfile.TemporaryDirectory(prefix="symmplan-ranks-")
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._marks = ["start"] * world_size
        self._pending: set[int] = set()
        self._dead: dict[int, RankOutcome] = {}
        self._began = time.monotonic()
        self._store: object = None
        self.seconds_to_start = 0.0
        try:
            self._launch(method, Life(**life, forked=method == "fork"), call)
            if call is None:
                limit = max(timeout, _TO_START)
                raise_if_failed(self.collect(timeout=limit), limit)
                self.seconds_to_start = time.monotonic() - self._began
        except BaseException:
            self.close()
            raise

    def _launch(self, method: str, life: Life, call: tuple[Any, ...] | None) -> None:
        context: Any = multiprocessing.get_context(method)
        # What is forked finds objects by name as well as without one.
        first = call if call is None or life.forked else pickle.dumps(call)
        with _no_garbage() if life.forked else contextlib.nullcontext():
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                self._connections.append(ours)
                args = (theirs, rank, self.world_size, life, self._log(rank), first)
                process = context.Process(target=serve, args=args, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
        self._pending = set(range(self.world_size))
        if self._progress is not None:
            self._progress.mark(f"start {self.world_size} ranks")
        # Only now, when nobody who is forked inherits its threads, and while ranks import torch.
        port = self._make_store(life) if life.init is not None else 0
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(port)

    def _make_store(self, life: Life) -> int:
        import torch.distributed as dist

        network: Any = dist  # whose stores have no types
        store = network.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = None if life.rank0_store else store
        return int(store.port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return [process.pid for process in self._processes]

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> list[RankOutcome]:
        """Call ``fn(rank, world_size, *args)`` on every rank; what became of each."""
        self.start(fn, *args)
        return self.collect(timeout=timeout)

    def start(self, fn: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None) -> None:
        """Only start ``fn`` (on ``ranks``, default all that live); `collect` gets the outcomes."""
        message = pickle.dumps((fn, *args))
        self._began = time.monotonic()
        if ranks is None:
            ranks = range(self.world_size)
        for rank in ranks:
            if rank in self._dead:
                continue
            self._pending.add(rank)
            with contextlib.suppress(OSError):  # it is dying: collect() reports that
                self._connections[rank].send_bytes(message)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        os.kill(self._processes[rank].pid, number)

    def collect(
        self, timeout: float | None = None, ranks: Collection[int] | None = None
    ) -> list[RankOutcome]:
        """Wait for all pending ranks. One that exceeds the timeout is killed and told as hung.

        Args:
            timeout: Seconds since `start`, if not those of the pool.
            ranks: Wait for these only; the others stay pending.

        Returns:
            The outcomes of the ranks that were pending or are dead, by rank.
        """
        asked = set(range(self.world_size) if ranks is None else ranks)
        deadline = self._began + (self.timeout if timeout is None else timeout)
        done: dict[int, RankOutcome] = {}
        while pending := self._pending & asked:
            left = deadline - time.monotonic()
            if left <= 0:
                done.update(self._give_up(pending))
                break
            for rank in self._ready(pending, left):
                outcome = self._receive(rank)
                if outcome is None:
                    continue
                self._pending.discard(rank)
                done[rank] = outcome
                if not outcome.ok and self._grace is not None:
                    deadline = min(deadline, time.monotonic() + self._grace)
        return [o for _, o in sorted({**self._dead, **done}.items())]

    def close(self) -> None:
        """End all ranks and what they started."""
        for rank, connection in enumerate(self._connections):
            if rank in self._pending:
                self._end(rank)
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
            connection.close()
        for rank, process in enumerate(self._processes):
            process.join(_TO_END)
            self._end(rank)
            process.join()
            process.close()
        self._connections, self._processes, self._store = [], [], None
        self._folder.cleanup()

    def _ready(self, pending: set[int], left: float) -> list[int]:
        """Those that say something, or have died; none after a while, if somebody is told so."""
        if self._progress is not None:
            self._progress.beat()
            left = min(left, 0.2)
        by_connection = {self._connections[rank]: rank for rank in sorted(pending)}
        return [by_connection[c] for c in wait([*by_connection], left)]  # type: ignore[index]

    def _receive(self, rank: int) -> RankOutcome | None:
        """What became of a rank; None if it only said where it is."""
        try:
            # From a process that this one started.
            kind, told = pickle.loads(self._connections[rank].recv_bytes())  # noqa: S301
        except (EOFError, OSError):
            self._processes[rank].join(10.0)
            code = self._processes[rank].exitcode
            stack = self._written(rank)
            self._dead[rank] = self._outcome(
                rank, exitcode=255 if code is None else code, stack=stack
            )
            return self._dead[rank]
        if kind != "mark":
            return self._outcome(rank, **{kind: told})
        self._marks[rank], part = told
        if rank == 0 and self._progress is not None:
            self._progress.mark(self._marks[rank], part)
        return None

    def _give_up(self, pending: set[int]) -> dict[int, RankOutcome]:
        for rank in pending:
            with contextlib.suppress(OSError):
                self.kill(rank, signal.SIGUSR1)  # faulthandler writes the stacks
        time.sleep(_TO_WRITE)
        for rank in sorted(pending):
            self._dead[rank] = self._outcome(rank, hung=self._written(rank) or "(no stack)")
            self._end(rank)
        self._pending -= pending
        return self._dead

    def _outcome(self, rank: int, **found: Any) -> RankOutcome:
        seconds = time.monotonic() - self._began
        pid = self._processes[rank].pid
        return RankOutcome(rank, pid=pid, at=self._marks[rank], seconds=seconds, **found)

    def _end(self, rank: int) -> None:
        """Kill a rank and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes[rank].pid, signal.SIGKILL)
        self._processes[rank].kill()

    def _log(self, rank: int) -> str:
        return str(Path(self._folder.name) / f"rank{rank}")

    def _written(self, rank: int) -> str:
        try:
            return Path(self._log(rank)).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:  # it did not come so far
            return ""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **options: Any
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` in new processes; the values, by rank.

    Args:
        fn: Defined at the top of a module; returns plain data.
        world_size: How many.
        args: Plain data.
        timeout: Seconds for everything.
        options: Of `RankPool`.

    Raises:
        RanksFailedError: A rank failed or died, or the time is over. All ranks have ended then.
    """
    with RankPool(world_size, call=(fn, *args), timeout=timeout, **options) as pool:
        outcomes = pool.collect()
    raise_if_failed(outcomes, timeout)
    return [outcome.value for outcome in outcomes]


def run_shown(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float, **options: Any
) -> list[Any]:
    """`run_ranks` for a command: with progress on stderr, and ranks that are told to be quiet.

    Ranks are new processes; when one has failed, the others get a moment to say what they saw.
    """
    with contextlib.closing(ProgressLine()) as progress:
        more = {"method": "spawn", "quiet": True, "grace": _TO_END, "progress": progress}
        return run_ranks(fn, world_size, *args, timeout=timeout, **more, **options)


def raise_if_failed(outcomes: Sequence[RankOutcome], timeout: float) -> None:
    """For ranks all of which should have returned; see [Note: whose error].

    Raises:
        RanksFailedError: One did not.
    """
    failed = sorted((outcome for outcome in outcomes if not outcome.ok), key=cause_first)
    if not failed:
        return
    codes = tuple(outcome.exitcode for outcome in outcomes)
    first, *others = failed
    if first.hung is not None:
        raise RanksFailedError(
            f"they did not finish within {timeout:g} s",
            expected=f"{len(outcomes)} ranks that finish",
            got="; ".join(f"rank {outcome.rank} at: {outcome.at}" for outcome in failed),
            fix="increase the time limit: --timeout SECONDS",
            traceback="\n".join(outcome.describe() for outcome in failed),
            exit_codes=codes,
            timeout=timeout,
        )
    told = first.error.root.fields if first.error is not None else {}
    raise RanksFailedError(
        str(first),
        expected=told.get("expected"),
        got=told.get("got"),
        fix=told.get("fix") or _advice(first),
        others=tuple(map(str, others)),
        failed_rank=first.rank,
        at=first.at,
        traceback=first.describe(),
        exit_codes=codes,
    )


def cause_first(outcome: RankOutcome) -> tuple[int, float]:
    """The order in which failures are told; see [Note: whose error]."""
    if outcome.error is None:
        return (0 if outcome.hung is None else 3, 0.0)
    error = outcome.error.root
    about_peers = _CONSEQUENCES.intersection(error.kinds) or "onnection" in error.text
    return (2 if about_peers else 1, outcome.error.time)


def _advice(outcome: RankOutcome) -> str:
    if outcome.error is not None:
        return "run with --debug to see the traceback of the rank"
    said = outcome.stack.splitlines()[-5:]
    if not said:
        return "run it again; SIGKILL may mean no memory"
    return "see what it said last: " + "\n    ".join(said)


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """A forked child must not collect its parent's garbage before it has put that aside."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the child makes no threads
            yield
    finally:
        if collects:
            gc.enable()
