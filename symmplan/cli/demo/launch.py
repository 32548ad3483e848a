"""Start the demo's ranks, watch them, and end all of them whatever happens.

[Note: whose error]
    When one rank ends, the others notice: in a barrier, or because gloo loses a connection. Those
    are consequences. Told first is a rank that died of a signal, then an error of a rank that is
    not about its peers, by time; the others are listed behind it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define

from symmplan.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["run_ranks"]

#: Seconds that the other ranks get to say what they saw when one of them has ended.
_GRACE = 5.0
#: Seconds after which a line says that what was begun goes on.
_HEARTBEAT = 10.0
#: Errors that are about a peer, and so are hardly the cause.
_CONSEQUENCES = {"PeerLostError", "PeerTimeoutError", "DistBackendError"}


class _Progress:
    """What the ranks are doing, on stderr: one line rewritten on a terminal, else one per mark."""

    def __init__(self) -> None:
        self._live, self._open = sys.stderr.isatty(), False
        self._begin = self._since = self._last = time.monotonic()
        self._where = ""

    def line(self, text: str) -> None:
        """A line that stays."""
        self.close()
        print(text, file=sys.stderr, flush=True)

    def mark(self, where: str) -> None:
        """The ranks are at ``where``."""
        self._since = time.monotonic()
        self._where = where
        self._show(where)

    def beat(self) -> None:
        """Nothing new: say now and then that it goes on, so that a long wait is not a silence."""
        now = time.monotonic()
        if self._where and now - self._last >= (1.0 if self._live else _HEARTBEAT):
            self._show(f"{self._where} ({now - self._since:.0f} s so far)")

    def _show(self, what: str) -> None:
        self._last = time.monotonic()
        text = f"{self._last - self._begin:5.1f} s  {what}"
        if not self._live:
            self.line(text)
            return
        self._open = True
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line that is being rewritten."""
        if self._open:
            print(file=sys.stderr, flush=True)
            self._open = False


@define(eq=False)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    pipe: int
    log: Path
    buffer: bytes = b""
    mark: str = "start"
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    def failure(self) -> str | None:
        """What went wrong, or None: it said so, or it ended without a word."""
        if self.error is not None:
            return f"failed at: {self.mark}: {self.error['error']}"
        code = self.process.poll()
        if code is None or self.result is not None:
            return None
        how = f"exited with code {code}"
        if code < 0:
            known = {number.value: number.name for number in signal.Signals}
            how = f"was killed by {known.get(-code, f'signal {-code}')}"
        return f"{how} at: {self.mark}"


def run_ranks(setup: dict[str, Any], *, world: int, timeout: float) -> list[dict[str, Any]]:
    """Start ``world`` ranks, wait for all of them, return their results in the order of ranks.

    Args:
        setup: What every rank is told, besides its rank.
        world: How many ranks.
        timeout: Seconds for all together.

    Raises:
        DemoError: A rank failed or died, or the time is over. All ranks have ended then.
    """
    with tempfile.TemporaryDirectory(prefix="symmplan-ranks-") as folder, _ending_on_signals():
        ranks: list[_Rank] = []
        progress = _Progress()
        try:
            for rank in range(world):
                # One by one: what was started must be ended if the next cannot be.
                ranks.append(_start(setup, rank, world, Path(folder), timeout))  # noqa: PERF401
            progress.mark(f"start {world} ranks")
            _watch(ranks, time.monotonic() + timeout, progress)
            _raise_if_failed(ranks, timeout)
            return [rank.result for rank in ranks if rank.result is not None]
        finally:
            _end(ranks)
            progress.close()


def _start(setup: dict[str, Any], rank: int, world: int, folder: Path, timeout: float) -> _Rank:
    ours, theirs = os.pipe()
    described = {
        **setup,
        "rank": rank,
        "world": world,
        "store": str(folder / "store"),
        "timeout": timeout,
        "pipe": theirs,
        "parent": os.getpid(),
    }
    environment = {
        "GLOO_SOCKET_IFNAME": "lo",  # nothing leaves the machine, and no host's name is looked up
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # its pool would outlive a rank that is killed
        "PYTHONUNBUFFERED": "1",
        **os.environ,
    }
    log = folder / f"rank{rank}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "symmplan.cli.demo.worker", json.dumps(described)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=(theirs,),
            env=environment,
            # Ctrl-C is for the parent, which ends the ranks; and it can end theirs, too.
            start_new_session=True,
        )
    os.close(theirs)
    return _Rank(rank, process, ours, log)


def _watch(ranks: list[_Rank], deadline: float, progress: _Progress) -> None:
    """Read what the ranks say until all have ended, or one has failed and its grace is over."""
    talking: dict[Any, _Rank] = {rank.pipe: rank for rank in ranks}
    while talking and (left := deadline - time.monotonic()) > 0:
        progress.beat()
        for pipe in wait([*talking], min(left, 0.2)):
            if not _read(talking[pipe], progress):
                talking.pop(pipe).process.wait()  # its end of the pipe closes when it ends
        if any(rank.failure() for rank in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE)


def _read(rank: _Rank, progress: _Progress) -> bool:
    """Take in what ``rank`` said; False once it can say no more."""
    data = os.read(rank.pipe, 1 << 20)
    *lines, rank.buffer = (rank.buffer + data).split(b"\n")
    for line in lines:
        message = json.loads(line)
        if "mark" in message:
            rank.mark = message["mark"]
            if rank.rank == 0:  # the ranks run in step: one speaks for all
                progress.mark(rank.mark)
        elif "result" in message:
            rank.result = message["result"]
        else:
            rank.error = message
    return bool(data)


def _raise_if_failed(ranks: list[_Rank], timeout: float) -> None:
    failed = sorted((rank for rank in ranks if rank.failure()), key=_order)
    if failed:
        first, *others = failed
        error = first.error or {}
        raise DemoError(
            f"rank {first.rank} (pid {first.process.pid}) {first.failure()}",
            expected=error.get("expected"),
            got=error.get("got"),
            fix=error.get("fix") or _advice(first),
            others=tuple(f"rank {rank.rank} {rank.failure()}" for rank in others),
            failed_rank=first.rank,
            at=first.mark,
            traceback=error.get("traceback", ""),
        )
    late = [rank for rank in ranks if rank.result is None]
    if late:
        raise DemoError(
            f"not finished after {timeout:g} s",
            expected=f"{len(ranks)} ranks that finish",
            got="; ".join(f"rank {rank.rank} at: {rank.mark}" for rank in late),
            fix="give it more time: --timeout SECONDS",
            timeout=timeout,
        )


def _order(rank: _Rank) -> tuple[int, float]:
    """See [Note: whose error]."""
    if rank.error is None:
        return (0, 0.0)
    text = rank.error["error"]
    about_peers = _CONSEQUENCES.intersection(rank.error["kinds"]) or "onnection" in text
    return (2 if about_peers else 1, float(rank.error["at"]))


def _advice(rank: _Rank) -> str:
    if rank.error is not None:
        return "run with --debug to see the traceback of the rank"
    said = rank.log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
    if not said:
        return "run it again; SIGKILL may mean no memory"
    return "see what it said last: " + "\n    ".join(said)


def _end(ranks: list[_Rank]) -> None:
    """End every rank and what it started, and wait until they are gone."""
    for rank in ranks:
        # The whole session of the rank: a compiler that it started must not go on either.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
        os.close(rank.pipe)


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, so that `_end` runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
