"""Transfers between hosts: the upper of the two levels of a group on several hosts.

[Note: two levels]
    A group on several hosts, with the same number of ranks on each, is served in two levels. Its
    segments have one rendezvous per host, among the ranks of that host. Between hosts each rank
    exchanges bytes with its *counterparts*, the ranks with the same position on the other hosts,
    through a separate process group. The counterparts pass the bytes on within their hosts. So
    every byte crosses the network once per host, and all ranks of a host take part.

    Collectives keep the facts that the memory model relies on. Only ranks of the same host touch a
    rank's bytes, and they meet on entry and on exit. A rank ends only after all others have begun,
    because it needs bytes from every other host, and a counterpart sends these only after it has
    met all ranks of its own host.

[Note: who waits]
    A rank that waits for a counterpart also watches the ranks of its own host, as in a barrier: a
    peer that has ended or failed ends the wait. A rank that fails writes the reason into the
    group's store, where all ranks look that wait long, and closes its connections.
"""

from __future__ import annotations

import json
import threading
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from symmplan.coordination.exchange import processes_of
from symmplan.coordination.groups import listed
from symmplan.coordination.sessions import post_error, posted_error
from symmplan.errors import PeerLostError, RunError
from symmplan.memory.kernels import as_bytes
from symmplan.memory.meeting.control import Meeting, wait_until
from symmplan.process import PROCESS
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.coordination.exchange import Exchange
    from symmplan.coordination.groups import Group

__all__ = ["Counterparts", "HostsMeeting", "connections_of", "counterparts_of", "hosts_of"]

_END_PERIOD = 0.1


class Counterparts:
    """A rank's connections with its counterparts.

    Args:
        group: The group on several hosts.
        ranks: The counterparts, this rank among them, in an order that is the same on all.
        number: The how-many-th that these ranks make.
        timeout: Seconds that they wait for each other.

    Attributes:
        ranks: The same.
        number: The same.

    Collective: yes, over ``ranks``.
    """

    def __init__(self, group: Group, ranks: Sequence[int], number: int, timeout: float) -> None:
        self.ranks = tuple(ranks)
        self.number = number
        self._group = group
        self._key = f"symmplan/counterparts/{number}"
        prefix, place = f"{self._key}/{self.ranks[0]}", self.ranks.index(group.rank)
        size = len(self.ranks)
        self._connections: Any = c10d.gloo_group(group.store, prefix, place, size, timeout)
        self._pending: list[Any] = []

    @property
    def closed(self) -> bool:
        """Whether it can no longer be used."""
        return self._connections is None

    def fail(self, error: BaseException) -> None:
        """Tell all ranks of all hosts why this one gives up."""
        post_error(self._group, f"{self._key}/error", error)

    def look(self) -> None:
        """Raise what another rank gave up for.

        Raises:
            SymmplanError: It.
            PeerLostError: The store did not answer.
        """
        try:
            error = posted_error(self._group, f"{self._key}/error")
        except RuntimeError as failed:
            raise self._lost(str(failed).splitlines()[0]) from None
        if error is not None:
            raise error

    def close(self, _: Sequence[int] = ()) -> None:
        """Close the connections, which counterparts notice."""
        connections, self._connections = self._connections, None
        if connections is not None and self._pending:
            threading.Thread(target=_end, args=([connections], self._pending), daemon=True).start()

    def gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor) -> Any:
        """Start to gather each counterpart's bytes; returns a work for `wait`. Collective."""
        flat = [as_bytes(x) for x in outputs]
        return self._started(c10d.start_all_gather(flat, as_bytes(source), self._open))

    def exchange(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        received: Sequence[int] = (),
        sent: Sequence[int] = (),
    ) -> Any:
        """Start to send a part to each counterpart; returns a work for `wait`.

        Args:
            output: Where parts come.
            source: What is sent.
            received: Bytes of each part that comes; empty if all parts are equally large.
            sent: Bytes of each part of ``source``; the same.

        Collective: yes, over the counterparts.
        """
        parts: dict[str, Any] = {"received": received, "sent": sent}
        return self._started(
            c10d.start_all_to_all(as_bytes(output), as_bytes(source), self._open, **parts)
        )

    def meet(self) -> Any:
        """Start to meet the counterparts; returns a work for `wait`. Collective."""
        word = torch.zeros(1, dtype=torch.uint8)
        return self.gather([torch.empty_like(word) for _ in self.ranks], word)

    def wait(self, work: Any, look: Callable[[], None], timeout: float) -> None:
        """Wait for what was started.

        Args:
            work: What it is.
            look: Called now and then; what it raises ends the wait.
            timeout: Seconds that it may take.

        Raises:
            PeerLostError: A counterpart ended.
            PeerTimeoutError: They did not come within the timeout.
            SymmplanError: What ``look`` raises.
        """
        where = "for ranks of other hosts"
        if not wait_until(work.is_completed, look, timeout):
            raise self._group.timed_out(self._others, where, timeout)
        self._pending.remove(work)
        try:
            work.wait()
        except RuntimeError as error:
            if "Timed out" in str(error):
                raise self._group.timed_out(self._others, where, timeout) from None
            look()
            raise self._lost(str(error).splitlines()[0]) from None

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self.ranks if rank != self._group.rank]

    @property
    def _open(self) -> Any:
        if self._connections is None:
            raise self._lost("they were closed")
        return self._connections

    def _started(self, work: Any) -> Any:
        self._pending.append(work)  # with its tensors, which it must not outlive
        return work

    def _lost(self, said: str) -> PeerLostError:
        others = self._others
        return PeerLostError(
            f"the connections with rank {listed(others)} of other hosts are lost: {said}",
            fix="find out why a rank there ended or raised an error; its own output says more",
            **self._group.here,
            lost_rank=others[0] if len(others) == 1 else None,
        )


class HostsMeeting(Meeting):
    """The meeting of a group on several hosts: of the ranks of this host, joined to the others.

    Args:
        given: Of `Meeting`.
        counterparts: Connections with the counterparts.
        options: Of `Meeting`.
    """

    def __init__(self, *given: Any, counterparts: Counterparts, **options: Any) -> None:
        super().__init__(*given, **options)
        self.counterparts = counterparts
        self._break = self._on_failure
        self._on_failure = self._fail

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each counterpart's host, in the order of the counterparts."""
        return hosts_of(self.group, self.counterparts.ranks)

    def free_words(self) -> list[list[int]]:
        """See `Rendezvous.free_words`: of all ranks of all hosts.

        Collective: yes, over the counterparts.
        """
        near = torch.tensor(super().free_words())
        found = torch.empty((len(self.hosts), *near.shape), dtype=near.dtype)
        self.wait(self.counterparts.gather(list(found), near))
        words = dict(zip(sum(self.hosts, ()), found.flatten(0, 1).tolist(), strict=True))
        return [words[rank] for rank in range(self.group.size)]

    def barrier(self, timeout: float | None = None) -> None:
        """See `Rendezvous.barrier`."""
        self._meet(timeout)
        self.wait(self.counterparts.meet())
        self._meet(timeout)

    def enter(self, call: bytes, free: Sequence[int] = (), site: str = "") -> None:
        """See `Rendezvous.enter`: of the ranks of this host alone."""
        try:
            super().enter(call, free, site)
        except RunError as error:  # other hosts may see no difference, and wait
            self._on_failure(error, [])
            raise

    def refuse(self, call: bytes) -> None:
        """See `Rendezvous.refuse`."""
        super().refuse(call)
        self.counterparts.close()

    def leave(self) -> None:
        """See `Rendezvous.leave`. Ranks of other hosts have not touched any bytes."""
        self._meet()

    def told(self) -> list[tuple[int, ...]]:
        """See `Rendezvous.told`; zeros of ranks of other hosts, which are not seen."""
        found = super().told()
        seen = dict(zip(self.near, found, strict=bool(found)))
        none = tuple(0 for _ in found[0]) if found else ()
        return [seen.get(rank, none) for rank in range(self.group.size)] if found else []

    def _fail(self, error: BaseException, because: Sequence[int]) -> None:
        self.counterparts.fail(error)
        self._break(error, because)

    def _look_for_the_dead(self) -> None:
        self.counterparts.look()  # what the first rank gave up for says more than that one did
        super()._look_for_the_dead()

    def wait(self, work: Any) -> None:
        """Wait for what was started with the counterparts.

        Raises:
            SymmplanError: As `Counterparts.wait`.
        """
        try:
            self.counterparts.wait(work, self._look_for_the_dead, self._timeout)
        except BaseException as error:
            self._on_failure(error, self._because)
            raise


def counterparts_of(hosts: Sequence[str], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks of a rank's host, and those of the same number on each host, itself among both.

    Args:
        hosts: Of each rank of the group.
        rank: Which.

    >>> counterparts_of(["a", "b", "a", "b"], 2)
    ((0, 2), (2, 3))
    """
    there: dict[str, list[int]] = {}
    for r, host in enumerate(hosts):
        there.setdefault(host, []).append(r)
    near = there[hosts[rank]]
    number = near.index(rank)
    return tuple(near), tuple(ranks[number] for ranks in there.values() if number < len(ranks))


def hosts_of(group: Group, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of the host of each of some ranks of a group whose ranks have met."""
    of = [process.host for process in processes_of(group.process_group)]
    return tuple(counterparts_of(of, rank)[0] for rank in ranks)


def connections_of(
    group: Group, ranks: Sequence[int], exchange: Exchange, phase: str, timeout: float
) -> Counterparts:
    """A rank's connections with its counterparts: made once for a group, and again once closed.

    Args:
        group: The group.
        ranks: The counterparts.
        exchange: Among all ranks of the group.
        phase: Name of a round of it.
        timeout: Seconds that ranks wait for each other.

    Raises:
        PeerLostError: Counterparts cannot be reached.

    Collective: yes, over the group.
    """
    found: Counterparts | None = PROCESS.counterparts.get(group.process_group)
    mine = [0 if found is None else found.number, found is not None and not found.closed]
    said = exchange.round(phase, json.dumps(mine).encode(), groups=[group.name])[group.name]
    theirs = [json.loads(text) for text in said]
    if found is not None and all(open_ for _, open_ in theirs):
        return found
    number = 1 + max(number for number, _ in theirs)
    try:
        made = Counterparts(group, ranks, number, timeout)
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {listed(ranks)} cannot connect: {str(error).splitlines()[0]}",
            fix="check that the hosts reach each other over the interface that "
            "GLOO_SOCKET_IFNAME names",
            **group.here,
            lost_rank=None,
        ) from error
    PROCESS.counterparts[group.process_group] = made
    return made


def _end(connections: list[Any], pending: Sequence[Any]) -> None:
    """Let go of connections once nothing goes on there: before, that would stop the process."""
    while not all(work.is_completed() for work in pending):
        time.sleep(_END_PERIOD)
    connections.clear()
