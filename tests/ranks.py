"""Start N real processes and run functions in them: what every multi-rank test stands on.

    from ranks import RankPool, run_ranks

    def work(rank, world_size, n):           # module level: ranks import it by name
        ...
        return plain_data

    assert run_ranks(work, 2, 5) == [...]     # one value per rank; RanksFailed if any rank failed

    with RankPool(3) as pool:                 # processes and their process group are kept
        pool.run(work, 5)
        outcomes = pool.outcomes(work, 6)     # never raises for what ranks do: look at .error
        pool.start(work, 7); pool.kill(1); outcomes = pool.collect()

    two = pool_of(2)                          # the same as a fixture, for all tests of a module

Every rank has a gloo process group (``init="gloo"``, ``None`` for none, or ``"nccl"``) whose store
lives in the parent, so that any rank may be killed. Nothing survives the parent: ranks die with it.
"""

# Test code: plainness first.
# ruff: noqa: PTH118, BLE001, SIM105, PLW2901, N818

from __future__ import annotations

import ctypes
import datetime as dt
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

import attrs
import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = ["torch.distributed", "symmplan.memory", "symmplan.planner.verify"]
_PRELOAD += ["pytest", "hypothesis.strategies", "numpy.ma"]  # what the files of tests import
if not torch.cuda.is_available():  # Inductor asks devices for their properties, and forks cannot
    _PRELOAD += ["symmplan.integrate.compile.backend", "symmplan.integrate.fsdp.apply"]
    _PRELOAD += ["symmplan.integrate.eager.session", "torch._inductor.compile_fx"]
_CONTEXT.set_forkserver_preload(_PRELOAD)


@attrs.frozen
class RankError:
    """An exception that a rank raised, as plain data.

    ``kinds`` are the names of its class and all base classes, ``fields`` its public attributes
    (those that pickle; the rest as text).
    """

    kinds: tuple[str, ...]
    text: str
    fields: dict
    traceback: str

    @property
    def kind(self) -> str:
        return self.kinds[0]


@attrs.frozen
class Outcome:
    """What became of one rank: a value, an error, or a death (``exitcode``, negative signal).

    ``stack`` is where it was when a fault of its memory killed it.
    """

    rank: int
    value: object = None
    error: RankError | None = None
    exitcode: int | None = None
    hung: str | None = None
    stack: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode is None and self.hung is None

    def describe(self) -> str:
        if self.error is not None:
            return f"rank {self.rank} raised:\n{self.error.traceback}"
        if self.hung is not None:
            return f"rank {self.rank} did not finish in time; it was at:\n{self.hung}"
        return f"rank {self.rank} exited with {self.exitcode}\n{self.stack}".rstrip()


class RanksFailed(AssertionError):
    """At least one rank did not return; ``outcomes`` has them all.

    ``call`` is what they were asked to do: of random tests, what comes after a rank's death fails,
    too, so that the smallest failing example may be any.
    """

    def __init__(self, outcomes: list[Outcome], call: str = "") -> None:
        self.outcomes = outcomes
        said = [o.describe() for o in outcomes if not o.ok]
        super().__init__("\n".join([*said, f"in {call}"] if call else said))


class RankPool:
    """N processes that keep their process group between calls.

    Args:
        world_size: How many.
        init: Backend of the default process group, or None to leave torch.distributed alone.
        timeout: Seconds that one call may take.
        env: Environment variables of the ranks.
        threads: Torch threads per rank.
        rank0_store: Let rank 0 host the store, as launchers do, instead of the parent.
    """

    def __init__(
        self, world_size, *, init="gloo", timeout=60.0, env=None, threads=1, rank0_store=False
    ):
        from torch.distributed import TCPStore

        self.world_size = world_size
        self.timeout = timeout
        self._store = None
        port = 0
        if init is not None and rank0_store:
            probe = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = probe.port
            del probe
        elif init is not None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        self._stacks = tempfile.TemporaryDirectory(prefix="ranks-")
        self._processes = []
        self._connections: list[Connection] = []
        self._pending: set[int] = set()
        self._dead: dict[int, Outcome] = {}
        self._failed = ""
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe()
            setup = {
                "rank": rank,
                "world_size": world_size,
                "init": init,
                "port": port,
                "host": rank0_store and rank == 0,
                "env": dict(env or {}),
                "threads": threads,
                "stack": self._stack_path(rank),
                "path": list(sys.path),
            }
            process = _CONTEXT.Process(target=_serve, args=(theirs, setup), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._pending = set(range(world_size))
        started = self.collect(timeout=max(timeout, 60.0))
        if not all(o.ok for o in started):
            self.close()
            raise RanksFailed(started)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes]

    def run(self, fn, *args, timeout=None) -> list:
        """Call ``fn(rank, world_size, *args)`` on every rank; its values, or RanksFailed."""
        first = not self._dead
        outcomes = self.outcomes(fn, *args, timeout=timeout)
        if not all(o.ok for o in outcomes):
            if first:
                self._failed = f"{fn.__qualname__}{args}"
            raise RanksFailed(outcomes, self._failed)
        return [o.value for o in outcomes]

    def outcomes(self, fn, *args, timeout=None) -> list[Outcome]:
        """The same, but errors and deaths are part of the answer."""
        self.start(fn, *args)
        return self.collect(timeout=timeout)

    def start(self, fn, *args, ranks=None) -> None:
        """Only start ``fn`` (on ``ranks``, default all that live); `collect` gets the outcomes."""
        message = pickle.dumps((fn, args))
        self._began = time.monotonic()
        for rank in range(self.world_size) if ranks is None else ranks:
            if rank in self._dead:
                continue
            self._pending.add(rank)
            try:
                self._connections[rank].send_bytes(message)
            except OSError:
                pass  # it is dying: collect() reports that

    def kill(self, rank, sig=signal.SIGKILL) -> None:
        os.kill(self._processes[rank].pid, sig)

    def collect(self, timeout=None) -> list[Outcome]:
        """Wait for all pending ranks. One that exceeds the timeout is killed and told as hung."""
        began = getattr(self, "_began", time.monotonic())
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        done: dict[int, Outcome] = {}
        while self._pending:
            by_connection = {self._connections[r]: r for r in sorted(self._pending)}
            ready = wait(list(by_connection), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in sorted(self._pending):
                    done[rank] = self._dead[rank] = self._hung(rank)
                self._pending.clear()
                break
            for connection in ready:
                rank = by_connection[connection]
                self._pending.discard(rank)
                done[rank] = self._receive(rank, time.monotonic() - began)
        for rank, outcome in self._dead.items():
            done.setdefault(rank, outcome)
        return [done[rank] for rank in sorted(done)]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._store = None
        self._stacks.cleanup()

    def _receive(self, rank, seconds) -> Outcome:
        try:
            kind, payload = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(10.0)
            code = self._processes[rank].exitcode
            stack = Path(self._stack_path(rank)).read_text() if code and code < 0 else ""
            self._dead[rank] = Outcome(rank, exitcode=code, stack=stack, seconds=seconds)
            return self._dead[rank]
        if kind == "value":
            return Outcome(rank, value=payload, seconds=seconds)
        return Outcome(rank, error=payload, seconds=seconds)

    def _hung(self, rank) -> Outcome:
        process = self._processes[rank]
        try:
            os.kill(process.pid, signal.SIGUSR1)  # faulthandler writes the stacks
            time.sleep(0.3)
        except OSError:
            pass
        stack = Path(self._stack_path(rank)).read_text() or "(no stack)"
        process.kill()
        process.join()
        return Outcome(rank, hung=stack)

    def _stack_path(self, rank) -> str:
        return os.path.join(self._stacks.name, f"rank{rank}")


def run_ranks(fn, world_size, *args, timeout=60.0, **pool) -> list:
    """Start ``world_size`` processes, call ``fn(rank, world_size, *args)``, return the values."""
    with RankPool(world_size, timeout=timeout, **pool) as ranks:
        return ranks.run(fn, *args)


def pool_of(*sizes, setup=None, teardown=None, **options):
    """A fixture: ranks that the tests of a module share; for several sizes one after the other.

    ``setup(rank, world_size)`` runs on each before the tests, ``teardown`` behind them; ``options``
    are those of `RankPool`.
    """
    import pytest

    @pytest.fixture(scope="module", params=sizes if len(sizes) > 1 else None)
    def ranks(request):
        with RankPool(getattr(request, "param", sizes[0]), **options) as pool:
            if setup is not None:
                pool.run(setup)
            yield pool
            if teardown is not None:
                pool.run(teardown)

    return ranks


def _serve(connection: Connection, setup: dict) -> None:
    """A rank's main loop."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the fork server
    os.environ.update(setup["env"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    sys.path[:] = setup["path"]
    stack = open(setup["stack"], "w")  # noqa: SIM115, PTH123 (open as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(file=stack, all_threads=True)
    rank, world_size = setup["rank"], setup["world_size"]
    try:
        _init(setup)
        answer = ("value", None)
    except BaseException as error:
        answer = ("error", _as_data(error))
    while True:
        try:
            connection.send_bytes(_pickled(answer))
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # the parent is done; destructors of process groups may hang
        try:
            fn, args = pickle.loads(message)
            answer = ("value", fn(rank, world_size, *args))
        except BaseException as error:
            answer = ("error", _as_data(error))


def _init(setup: dict) -> None:
    import torch

    torch.set_num_threads(setup["threads"])
    if setup["init"] is None:
        return
    import torch.distributed as dist

    if setup["init"] == "nccl":
        torch.cuda.set_device(setup["rank"])
    store = dist.TCPStore(
        "127.0.0.1",
        setup["port"],
        is_master=setup["host"],
        wait_for_workers=False,
        timeout=dt.timedelta(seconds=60),
    )
    dist.init_process_group(
        setup["init"],
        store=store,
        rank=setup["rank"],
        world_size=setup["world_size"],
        timeout=dt.timedelta(seconds=60),
    )


def _pickled(answer: tuple) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:
        return pickle.dumps(("error", _as_data(error)))


def _as_data(error: BaseException) -> RankError:
    fields = {}
    for name, value in vars(error).items():
        if name.startswith("_"):
            continue
        try:
            pickle.loads(pickle.dumps(value))
        except Exception:
            value = str(value)
        fields[name] = value
    return RankError(
        kinds=tuple(k.__name__ for k in type(error).__mro__),
        text=str(error),
        fields=fields,
        traceback="".join(traceback.format_exception(error)),
    )
