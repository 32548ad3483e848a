"""Ranks of some groups exchange bytes through the groups' stores; all get them, or an error.

[Note: rounds]
    Everything collective in `symmplan.memory` happens in *rounds*. In a round every rank posts one
    value to each of its groups, and only then waits for the others, so the order in which ranks see
    their groups cannot deadlock. A rank that fails posts its error instead. Ranks that wait in any
    of its groups raise it, too, and thereby pass it on to *their* other groups. A rank that gives
    up waiting counts as failed, so that a late rank does not wait for it.

    Rounds that belong together share a sequence number, which each rank counts in the store
    itself: process groups may be destroyed and made again on the same store. Each rank also posts
    which round it began with, so that ranks in different calls do not wait until the timeout.
    Sessions have numbers of their own; see [Note: keys of a session].

Only JSON and raw bytes travel. Nothing read from a peer is unpickled.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from attrs import frozen

from symmplan.coordination.groups import ProcessIdentity, is_gone
from symmplan.coordination.sessions import (
    current_keys,
    in_other_session,
    keys_of_calls,
    post_error,
    posted_error,
    wrong_session,
)
from symmplan.coordination.world import current
from symmplan.errors import AgreementError, PeerLostError, SymmplanError
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from typing_extensions import Self

    from symmplan.coordination.groups import Group

__all__ = ["Exchange", "PlanningWatch", "count_in_store", "processes_of", "swapped", "was_told"]

_SHORTEST_POLL = 0.0002
_LONGEST_POLL = 0.02
_LIVENESS_PERIOD = 0.05


@frozen
class PlanningWatch:
    """For an exchange to which peers may not come.

    Attributes:
        look: Called now and then while a round waits; what it raises ends the wait.
        named: ``{name of a group: name}`` of the exchange where it takes no number of the group's,
            so that who makes it alone counts as its peers do. No other of the group has that name.
    """

    look: Callable[[], None]
    named: Mapping[str, str]


class Exchange:
    """A series of rounds over groups. See [Note: rounds].

    Also a context manager: leaving it finishes the exchange, by an error fails it.

    Args:
        groups: Every group that takes part; groups of one rank cost nothing.
        timeout: Seconds that each round may take.
        watch: Whether the peers will come, and what the exchange is called in each group.
        apart: Number this exchange apart from the others, under that name: ranks come to it also
            after exchanges that some of them did not make. See `level`.

    Raises:
        RunError: This process was forked from a rank.

    Collective: yes, over every group.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        timeout: float,
        watch: PlanningWatch | None = None,
        apart: str = "",
    ) -> None:
        self.groups = dict(groups)
        self._timeout = timeout
        self._watch = watch
        self._failed = False
        self._sides: dict[str, _Side] = {}
        for name, group in self.groups.items():
            group.require_own()
            if group.size > 1 and current() is None:
                with _store_errors(group):
                    named = "" if watch is None else watch.named.get(name, "")
                    self._sides[name] = _Side(group, apart, named)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
        else:
            self.fail(error)

    def know(self, name: str, processes: Sequence[ProcessIdentity]) -> None:
        """Remember which processes are a group's ranks, now and in later exchanges."""
        if name in self._sides:
            side = self._sides[name]
            side.processes = PROCESS.members[side.group.process_group] = tuple(processes)

    def level(self) -> None:
        """Count alike on all ranks from now on, whatever exchanges some of them did not make.

        Collective: yes, over every group; the first round of an exchange `apart`.
        """
        counts = {name: str(side.calls(0)).encode() for name, side in self._sides.items()}
        counts |= {name: b"0" for name in self.groups if name not in counts}
        for name, said in self.round("level", counts).items():
            if name in self._sides:
                with _store_errors(self.groups[name]):
                    most = max(int(text) for text in said if text.isdigit())
                    self._sides[name].calls(most - int(counts[name]))

    def round(
        self, phase: str, payload: bytes | Mapping[str, bytes], *, groups: Sequence[str] = ()
    ) -> dict[str, list[bytes]]:
        """Post ``payload``, wait for everyone, return ``{group: [each rank's bytes]}``.

        Args:
            phase: Name of the round, unique in this exchange.
            payload: This rank's bytes, or bytes for each group.
            groups: Names of the groups that take part; all by default.

        Raises:
            PeerTimeoutError: Ranks did not post within the timeout; ``missing`` names them.
            PeerLostError: A process ended, or the store did.
            SymmplanError: A rank failed; its error is raised here too, with ``failed_rank``.

        Collective: yes, over those groups.
        """
        names = list(groups) or list(self.groups)
        mine = payload if not isinstance(payload, bytes) else dict.fromkeys(names, payload)
        # Those of groups of one rank, or of ranks that are not there.
        answers = {name: [mine[name]] * self.groups[name].size for name in names}
        waiting = [name for name in names if name in self._sides]
        for name in waiting:
            with _store_errors(self.groups[name]):
                self._sides[name].post(phase, mine[name])
        deadline = time.monotonic() + self._timeout
        pause = _SHORTEST_POLL
        next_look = time.monotonic() + _LIVENESS_PERIOD
        while waiting:
            now = time.monotonic()
            thorough = now >= next_look
            for name in tuple(waiting):
                side = self._sides[name]
                with _store_errors(side.group):
                    if side.is_full(phase) or (thorough and side.is_complete(phase)):
                        answers[name] = side.values(phase)
                        waiting.remove(name)
            if not waiting:
                break
            if thorough:
                if self._watch is not None:
                    self._watch.look()
                next_look = now + _LIVENESS_PERIOD
            if now >= deadline:
                with _store_errors(self.groups[waiting[0]]):
                    self._sides[waiting[0]].give_up(phase, self._timeout)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL)
        return answers

    def look(self) -> None:
        """Raise a peer's error, before the round for which all others come, too.

        Raises:
            PeerLostError: A peer's process ended.
            SymmplanError: The peer's error, with ``failed_rank``.
        """
        for side in self._sides.values():
            with _store_errors(side.group):
                error = posted_error(side.group, f"{side.prefix}/error")
            if error is not None:
                raise error
            for rank, process in enumerate(side.processes):
                if is_gone(process):
                    raise side.group.ended(rank, process.pid, "meanwhile")

    def fail(self, error: BaseException) -> None:
        """Tell everyone that this rank failed with ``error``. Never raises."""
        with contextlib.suppress(AttributeError):
            error._symmplan_told = True  # type: ignore[attr-defined]
        if self._failed:
            return
        self._failed = True
        for side in self._sides.values():
            post_error(side.group, f"{side.prefix}/error", error)

    def finish(self) -> None:
        """Remove what this exchange left in the stores. Call it after the last round."""
        for side in self._sides.values():
            with contextlib.suppress(Exception):  # not every store can delete
                side.clean_up()


class _Side:
    """A group's side of an exchange: what its ranks post below one prefix of its store.

    All methods may raise what the store does.
    """

    def __init__(self, group: Group, apart: str, named: str) -> None:
        self.group = group
        # Known from the first exchange on; rounds then notice when a process ends.
        self.processes: Sequence[ProcessIdentity] = PROCESS.members.get(group.process_group, ())
        self._store = group.store
        self._keys = keys = keys_of_calls(group)
        counted = 0 if named else 1
        self._number = group.store.add(f"{keys}/{apart or 'calls'}/{group.rank}", counted)
        # Those that are apart have names, the others only a number.
        name = f"{apart} {self._number}" if apart else str(self._number)
        self.prefix = f"{keys}/{named or name}"
        self._phases: list[str] = []

    def calls(self, more: int) -> int:
        """How many exchanges that are not apart this rank has made, counting ``more``."""
        return int(self._store.add(f"{self._keys}/calls/{self.group.rank}", more))

    def post(self, phase: str, payload: bytes) -> None:
        self._phases.append(phase)
        if len(self._phases) == 1:
            self._store.set(f"{self.prefix}/began/{self.group.rank}", phase)
        self._store.set(f"{self.prefix}/{phase}/{self.group.rank}", payload)
        if self._add(phase, 1) == self.group.size:
            self._store.set(f"{self.prefix}/{phase}/full", b"1")

    def is_full(self, phase: str) -> bool:
        """Whether the last rank has posted, by its own word. Raises what a peer failed with."""
        full = [f"{self.prefix}/{phase}/full"]
        if self._store.check(full):
            return True
        error = posted_error(self.group, f"{self.prefix}/error")
        if error is None:
            return False
        # What a peer failed with behind the round is not what this rank finds in it.
        if self._store.check(full):
            return True
        raise error

    def is_complete(self, phase: str) -> bool:
        """Whether each rank's value is there. The last rank may have ended before it said so.

        Raises:
            PeerLostError: A rank's value is missing and its process is, too.
            AgreementError: A rank is in another call or session.
            SymmplanError: A rank left the session by an error.
        """
        missing = self._missing(phase)
        if missing:
            self._require_same_call(missing)
            self._require_same_session(phase, missing)
        if self.processes:
            for rank in missing:
                process = self.processes[rank]
                if is_gone(process):
                    raise self.group.ended(rank, process.pid, f"during {phase!r}", phase=phase)
        return not missing and self._add(phase, 0) <= self.group.size

    def values(self, phase: str) -> list[bytes]:
        """What each rank posted."""
        keys = [f"{self.prefix}/{phase}/{rank}" for rank in range(self.group.size)]
        return [bytes(value) for value in self._store.multi_get(keys)]  # in one request

    def give_up(self, phase: str, timeout: float) -> None:
        """Raise, unless the round has become complete after all.

        Raises:
            PeerTimeoutError: It will not be complete any more.
        """
        size = self.group.size
        # In one step, so that whoever comes last either completes the round or sees that.
        if self._add(phase, size) >= 2 * size:
            return
        missing = self._missing(phase)
        raise self.group.timed_out(missing, f"in {phase!r}", timeout, phase=phase)

    def clean_up(self) -> None:
        """Delete all keys. The last rank that comes here does it: no peer reads them any more."""
        ranks = range(self.group.size)
        if self._store.add(f"{self.prefix}/left", 1) < len(ranks):
            return
        left = [f"{phase}/{last}" for phase in self._phases for last in ("count", "full", *ranks)]
        for key in (*left, *(f"began/{rank}" for rank in ranks), "left"):
            self._store.delete_key(f"{self.prefix}/{key}")

    def _add(self, phase: str, ranks: int) -> int:
        """How many ranks have posted, and ``ranks`` more; more than there are, once one gave up."""
        return int(self._store.add(f"{self.prefix}/{phase}/count", ranks))

    def _missing(self, phase: str) -> list[int]:
        posted = (self._store.check([f"{self.prefix}/{phase}/{r}"]) for r in range(self.group.size))
        return [rank for rank, there in enumerate(posted) if not there]

    def _require_same_call(self, missing: list[int]) -> None:
        mine, group = self._phases[0], self.group
        for rank in missing:
            key = f"{self.prefix}/began/{rank}"
            theirs = str(self._store.get(key), "utf-8") if self._store.check([key]) else mine
            if theirs != mine:
                raise AgreementError(
                    f"ranks {group.rank} and {rank} make different calls at the same time",
                    expected=f"{mine!r} (rank {group.rank})",
                    got=f"{theirs!r} (rank {rank})",
                    fix="run the same program with the same shapes on every rank of the group",
                    **group.here,
                    ranks=(group.rank, rank),
                )

    def _require_same_session(self, phase: str, missing: list[int]) -> None:
        session = current_keys()
        failure = None if session is None else session.failure()
        elsewhere = in_other_session(self.group, missing)
        if failure is not None:
            raise failure
        # Whoever entered it since may have posted here before.
        if elsewhere is not None and elsewhere in self._missing(phase):
            raise wrong_session(self.group, elsewhere, self._number)


def count_in_store(group: Group, what: str) -> int:
    """How often this rank has counted ``what`` in a group's store, this time included.

    Raises:
        PeerLostError: The store does not answer.

    Collective: no; 0 in a group whose ranks are not there.
    """
    if group.size == 1 or current() is not None:
        return 0
    with _store_errors(group):
        return int(group.store.add(f"symmplan/{what}/{group.rank}", 1))


def swapped(group: Group, key: str, text: str, other: int, patience: float) -> str:
    """Post ``text`` for the peers, and read what rank ``other`` has posted.

    Args:
        group: Of both ranks.
        key: Equal on all ranks that post at the same time.
        text: For the peers.
        other: Whose text is wanted.
        patience: Seconds that this may take.

    Returns:
        That text; empty if there is none in time.

    Collective: yes, in that all ranks that post must have posted equally often.
    """
    deadline = time.monotonic() + patience
    with contextlib.suppress(Exception):  # an error is being told, which says more
        key = f"symmplan/{key}/{count_in_store(group, 'posted')}"
        group.store.set(f"{key}/{group.rank}", text)
        while time.monotonic() < deadline:
            if group.store.check([f"{key}/{other}"]):
                return str(group.store.get(f"{key}/{other}"), "utf-8")
            time.sleep(_LONGEST_POLL)
    return ""


def processes_of(process_group: Any) -> tuple[ProcessIdentity, ...]:
    """The ranks' processes, in order; empty before the group's first exchange of plans."""
    return PROCESS.members.get(process_group, ())


def was_told(error: BaseException) -> bool:
    """Whether `Exchange.fail` was called with ``error``."""
    return getattr(error, "_symmplan_told", False)


@contextlib.contextmanager
def _store_errors(group: Group) -> Iterator[None]:
    """Turn the store's own errors, of many types, into one that names the group."""
    try:
        yield
    except SymmplanError:
        raise
    except (RuntimeError, OSError) as error:
        raise PeerLostError(
            f"the group's store does not answer: {str(error).splitlines()[0]}",
            fix="find out why the process that hosts the store ended",
            **group.here,
            lost_rank=None,
        ) from error
