"""The life of one rank that `symmplan.launcher.ranks` started: it does what its parent says."""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve, field, frozen

from symmplan.errors import SymmplanError
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

__all__ = ["Life", "RankError", "mark", "root_of", "serve"]


@frozen(kw_only=True)
class Life:
    """The settings of all ranks of a pool.

    Attributes:
        init: Backend of the default process group, ``"gloo"`` or ``"nccl"`` (a device for each
            rank), or None to leave torch.distributed alone.
        group_timeout: Seconds that ranks wait for each other in torch's collectives.
        env: Environment variables.
        threads: Torch threads per rank.
        rank0_store: Let rank 0 host the store, as launchers do, instead of the parent.
        store_host: Where ranks find it.
        connect: Let NCCL connect immediately. Communicators that are made later are then split from
            the first one, which those with other options should not be.
        copy_engines: Let NCCL use no processors for what copy engines can do.
        one_device: With ``"nccl"``: all ranks have the first device. NCCL, which refuses two ranks
            of a host there, takes each for a host of its own; peers' memory is CUDA's.
        quiet: Keep what ranks print, for `symmplan.launcher.ranks.RankOutcome.stack`.
        forked: Whether they have the memory of the process that started them.
        enter: Called with its rank by each before all else, while it has one thread.
    """

    init: Literal["gloo", "nccl"] | None = "gloo"
    group_timeout: float = 60.0
    env: Mapping[str, str] = field(factory=dict)
    threads: int = 1
    rank0_store: bool = False
    store_host: str = "127.0.0.1"
    connect: bool = False
    copy_engines: bool = False
    one_device: bool = False
    quiet: bool = False
    forked: bool = False
    enter: Callable[[int], None] | None = None


@frozen
class RankError:
    """An exception that a rank raised, as plain data.

    Attributes:
        kinds: The names of its class and all base classes.
        text: Its message.
        fields: Its public attributes: those that pickle, the rest as text.
        traceback: Of it and of what caused it.
        where: ``"file:line"`` of the last line outside torch that it came through.
        time: When, in seconds of the machine's monotonic clock, so that ranks compare.
        cause: The error behind it that says most, if it is not this one: see `root_of`.
    """

    kinds: tuple[str, ...]
    text: str
    fields: dict[str, Any]
    traceback: str
    where: str
    time: float
    cause: RankError | None = None

    @property
    def kind(self) -> str:
        """The name of its class."""
        return self.kinds[0]

    @property
    def root(self) -> RankError:
        """The error that says most."""
        return self.cause or self

    @property
    def headline(self) -> str:
        """One line; a foreign message often needs its class, too."""
        line = self.text.strip().partition("\n")[0]
        return line if "SymmplanError" in self.kinds else f"{self.kind}: {line}"


def mark(where: str, part: float = 0.0) -> None:
    """Let the parent know what this rank does next; nothing in a process without process groups.

    Args:
        where: Note what this rank does now, for people.
        part: How much of all its work is done, from 0 to 1; 0 if that is not known.
    """
    if PROCESS.parent is not None:
        PROCESS.parent.send_bytes(pickle.dumps(("mark", (where, part))))


def root_of(error: BaseException) -> BaseException:
    """The error behind ``error`` that says most: torch.compile wraps what it meets.

    That is one of ours, or else the innermost that was wrapped.
    """
    seen: list[BaseException] = []
    this: BaseException | None = error
    while this is not None and this not in seen:
        if isinstance(this, SymmplanError):
            return this
        seen.append(this)
        this = getattr(this, "inner_exception", None) or this.__cause__ or this.__context__
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return error


def serve(
    connection: Connection, rank: int, world_size: int, life: Life, log: str, first: Any
) -> None:
    """Be a rank: meet the others, then do what the parent says until it is done."""
    _settle(connection, life, log)
    if life.enter is not None:
        life.enter(rank)
    try:
        answer = ("value", _begin(rank, world_size, life, connection.recv(), first))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent says it
        answer = ("error", _as_data(error))
    while True:
        try:
            connection.send_bytes(_pickled(answer))
            message = connection.recv_bytes()
        except (EOFError, OSError):
            message = b""
        if not message:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            # Not a return: tearing down process groups while a peer is dead may hang.
            os._exit(0)
        try:
            fn, *args = pickle.loads(message)  # noqa: S301 - from the parent
            answer = ("value", fn(rank, world_size, *args))
        except BaseException as error:  # noqa: BLE001
            answer = ("error", _as_data(error))


def _settle(connection: Connection, life: Life, log: str) -> None:
    """Die with the parent, in a session of one's own, and leave stacks where it finds them."""
    os.setsid()  # Ctrl-C is for the parent, which ends the ranks
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # it was gone before the line above
        os._exit(1)
    # Collections pass by what was imported before. Garbage of a parent that forks may be a server
    # whose end waits for threads, which are not here.
    gc.freeze()
    if life.forked:
        gc.enable()
    for number in (signal.SIGTERM, signal.SIGHUP):  # a forked rank has its parent's
        signal.signal(number, signal.SIG_DFL)
    os.environ.update(life.env)
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # nothing leaves the machine, no name is looked up
    file = open(log, "a", encoding="utf-8")  # noqa: SIM115, PTH123 - open as long as the process
    if life.quiet:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    faulthandler.enable(file=file, all_threads=True)
    PROCESS.parent = connection


def _begin(rank: int, world_size: int, life: Life, port: int, first: Any) -> Any:
    """Join the process group, then make the first call, if there is one."""
    mark("import torch")
    import torch

    call = pickle.loads(first) if isinstance(first, bytes) else first  # noqa: S301
    torch.set_num_threads(life.threads)
    if life.init is not None:
        mark("meet the other ranks")
        _meet(rank, world_size, life, port)
    if call is None:
        return None
    fn, *args = call
    return fn(rank, world_size, *args)


def _meet(rank: int, world_size: int, life: Life, port: int) -> None:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():  # forked from a rank of another group, whose threads are not here
        from symmplan.torch_private.c10d import forget_groups

        PROCESS.kept.append(forget_groups())
    more: dict[str, Any] = {}
    if life.init == "nccl":
        index = 0 if life.one_device else rank
        from symmplan.device import device_of

        device_of(torch.device("cuda", index)).set_current()
        if life.connect or life.one_device:
            more["device_id"] = torch.device("cuda", index)
        if life.one_device:
            host = {"NCCL_HOSTID": str(rank), "NCCL_IB_DISABLE": "1"}
            os.environ.update(host, TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
        if life.copy_engines:
            from symmplan.torch_private import nccl

            more["pg_options"] = nccl.copy_engine_options()
    timeout = dt.timedelta(seconds=life.group_timeout)
    master = life.rank0_store and rank == 0
    network: Any = dist  # whose stores have no types
    store = network.TCPStore(
        life.store_host, port, is_master=master, wait_for_workers=False, timeout=timeout
    )
    dist.init_process_group(
        life.init, store=store, rank=rank, world_size=world_size, timeout=timeout, **more
    )
    if life.one_device:
        dist.all_reduce(torch.ones(1, device="cuda"))
        del os.environ["NCCL_HOSTID"]  # which NCCL has read; all ranks are on this host


def _pickled(answer: tuple[str, Any]) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:  # noqa: BLE001
        return pickle.dumps(("error", _as_data(error)))


def _as_data(error: BaseException) -> RankError:
    """An exception for the parent, with the one behind it that says most."""
    found, root = _described(error), root_of(error)
    return found if root is error else evolve(found, cause=_described(root))


def _described(error: BaseException) -> RankError:
    fields = {}
    for name, value in vars(error).items():
        if name.startswith("_"):
            continue
        try:
            fields[name] = pickle.loads(pickle.dumps(value))  # noqa: S301
        except Exception:  # noqa: BLE001
            fields[name] = str(value)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    return RankError(
        kinds=tuple(kind.__name__ for kind in type(error).__mro__),
        text=str(error),
        fields=fields,
        traceback="".join(traceback.format_exception(error)),
        where=f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
        time=time.monotonic(),
    )
