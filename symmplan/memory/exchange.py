"""All ranks of some groups exchange bytes through the groups' stores; all get them, or an error.

[Note: rounds]
    Everything collective in `symmplan.memory` happens in *rounds*. In a round every rank posts one
    value to each of its groups, and only then waits for the others, so the order in which ranks
    see their groups cannot deadlock. A rank that fails posts its error instead; whoever waits in
    any of its groups raises it too, and by failing hands it on to *its* other groups. A rank that
    gives up waiting counts as failed, so that one that comes late does not wait for it.

    Rounds that belong together share a sequence number, which each rank counts in the store
    itself: process groups may be destroyed and made again on the same store. Each rank also posts
    which round it began with, so that ranks in different calls do not wait for each other in vain.
    Sessions have numbers of their own; see [Note: keys of a session].

Only JSON and raw bytes travel. Nothing read from a peer is unpickled.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from symmplan.errors import AgreementError, PeerLostError, PeerTimeoutError, SymmplanError
from symmplan.memory.process import ProcessIdentity, is_gone
from symmplan.memory.relay import error_from_data, post_error
from symmplan.memory.sessions import current_keys, in_other_session, keys_of_calls, wrong_session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from symmplan.memory.groups import Group

__all__ = ["Exchange", "processes_of", "was_told"]

_SHORTEST_POLL = 0.0002
_LONGEST_POLL = 0.02
_LIVENESS_PERIOD = 0.05

#: Process group -> its ranks' processes. A group that is made again is another object.
_KNOWN: WeakKeyDictionary[Any, tuple[ProcessIdentity, ...]] = WeakKeyDictionary()


class Exchange:
    """A series of rounds over groups. See [Note: rounds].

    Args:
        groups: Every group that takes part; groups of one rank cost nothing.
        timeout: Seconds that each round may take.
        watch: Called now and then while a round waits; what it raises ends the wait.

    Raises:
        RunError: This process was forked from a rank.

    Collective: yes, over every group.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        timeout: float,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self.groups = dict(groups)
        self.timeout = timeout
        self._watch = watch
        # Known from the first exchange on; rounds then notice when a process ends.
        self._processes: dict[str, Sequence[ProcessIdentity]] = {}
        for name, group in groups.items():
            known = _KNOWN.get(group.process_group) if group.size > 1 else None
            if known is not None:
                self._processes[name] = known
        self._phases: dict[str, list[str]] = {name: [] for name in groups}
        self._failed = False
        self._prefix: dict[str, str] = {}
        keys = keys_of_calls()
        for name, group in self.groups.items():
            group.require_own()
            if group.size > 1:
                with _StoreErrors(group):
                    count = group.store.add(f"{keys}/calls/{group.rank}", 1)
                self._prefix[name] = f"{keys}/{count}"

    def know(self, name: str, processes: Sequence[ProcessIdentity]) -> None:
        """Remember which processes are the ranks of group ``name``, now and in later exchanges."""
        group = self.groups[name]
        if group.size > 1:
            self._processes[name] = _KNOWN[group.process_group] = tuple(processes)

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
        answers: dict[str, list[bytes]] = {}
        waiting = []
        for name in names:
            if self.groups[name].size == 1:
                answers[name] = [mine[name]]
            else:
                self._post(name, phase, mine[name])
                waiting.append(name)
        deadline = time.monotonic() + self.timeout
        pause = _SHORTEST_POLL
        next_look = time.monotonic() + _LIVENESS_PERIOD
        while waiting:
            now = time.monotonic()
            thorough = now >= next_look
            for name in tuple(waiting):
                if self._is_full(name, phase) or (thorough and self._is_complete(name, phase)):
                    answers[name] = self._values(name, phase)
                    waiting.remove(name)
            if not waiting:
                break
            if thorough:
                if self._watch is not None:
                    self._watch()
                next_look = now + _LIVENESS_PERIOD
            if now >= deadline and self._gives_up(waiting[0], phase):
                raise self._timed_out(waiting[0], phase)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL)
        return {name: answers[name] for name in names}

    def fail(self, error: BaseException) -> None:
        """Tell everyone that this rank failed with ``error``. Never raises."""
        with contextlib.suppress(AttributeError):
            error._symmplan_told = True  # type: ignore[attr-defined]
        if self._failed:
            return
        self._failed = True
        for name, prefix in self._prefix.items():
            post_error(self.groups[name], f"{prefix}/error", error)

    def finish(self) -> None:
        """Remove what this exchange left in the stores. Call it after the last round.

        The last rank of a group to come here does it: nobody reads any more.
        """
        for name, prefix in self._prefix.items():
            group = self.groups[name]
            try:
                if group.store.add(f"{prefix}/left", 1) < group.size:
                    continue
                for phase in self._phases[name]:
                    for last in ("count", "full", *range(group.size)):
                        group.store.delete_key(f"{prefix}/{phase}/{last}")
                for rank in range(group.size):
                    group.store.delete_key(f"{prefix}/began/{rank}")
                group.store.delete_key(f"{prefix}/left")
            except Exception:  # noqa: BLE001, S112 (not every store can delete)
                continue

    def _post(self, name: str, phase: str, payload: bytes) -> None:
        group, prefix = self.groups[name], self._prefix[name]
        self._phases[name].append(phase)
        with _StoreErrors(group):
            if len(self._phases[name]) == 1:
                group.store.set(f"{prefix}/began/{group.rank}", phase)
            group.store.set(f"{prefix}/{phase}/{group.rank}", payload)
            if group.store.add(f"{prefix}/{phase}/count", 1) == group.size:
                group.store.set(f"{prefix}/{phase}/full", b"1")

    def _is_full(self, name: str, phase: str) -> bool:
        """Whether the last rank has posted, by its own word. Raises what a peer failed with."""
        group, prefix = self.groups[name], self._prefix[name]
        with _StoreErrors(group):
            if group.store.check([f"{prefix}/{phase}/full"]):
                return True
            if group.store.check([f"{prefix}/error"]):
                failure = bytes(group.store.get(f"{prefix}/error"))
                raise error_from_data(failure, group)
        return False

    def _is_complete(self, name: str, phase: str) -> bool:
        """The same by looking for each rank's value: the last rank may have ended before its word.

        Raises:
            PeerLostError: A rank's value is missing and its process is, too.
            AgreementError: A rank is in another call or session.
            SymmplanError: A rank left the session by an error.
        """
        missing = self._missing(name, phase)
        group, processes = self.groups[name], self._processes.get(name, ())
        if missing:
            self._require_same_call(name, missing)
            self._require_same_session(name, phase, missing)
        for rank in missing if processes else ():
            if is_gone(processes[rank]):
                raise PeerLostError(
                    f"rank {rank} (process {processes[rank].pid}) ended during {phase!r}",
                    fix="see why that process ended; its own output says more",
                    group=group.name,
                    rank=group.rank,
                    lost_rank=rank,
                    phase=phase,
                )
        return not missing and self._count(name, phase) <= group.size

    def _count(self, name: str, phase: str) -> int:
        """How many ranks have posted; more than there are, once one gave up."""
        group, prefix = self.groups[name], self._prefix[name]
        with _StoreErrors(group):
            return int(group.store.add(f"{prefix}/{phase}/count", 0))

    def _require_same_call(self, name: str, missing: list[int]) -> None:
        group, prefix = self.groups[name], self._prefix[name]
        mine = self._phases[name][0]
        for rank in missing:
            key = f"{prefix}/began/{rank}"
            with _StoreErrors(group):
                theirs = str(group.store.get(key), "utf-8") if group.store.check([key]) else mine
            if theirs != mine:
                raise AgreementError(
                    f"ranks {group.rank} and {rank} make different calls at the same time",
                    expected=f"{mine!r} (rank {group.rank})",
                    got=f"{theirs!r} (rank {rank})",
                    fix="run the same program with the same shapes on every rank of the group",
                    group=group.name,
                    rank=group.rank,
                    ranks=(group.rank, rank),
                )

    def _require_same_session(self, name: str, phase: str, missing: list[int]) -> None:
        group, session = self.groups[name], current_keys()
        with _StoreErrors(group):
            failure = None if session is None else session.failure()
            elsewhere = in_other_session(group, missing)
        if failure is not None:
            raise failure
        # Whoever entered it since may have posted here before.
        if elsewhere is not None and elsewhere in self._missing(name, phase):
            raise wrong_session(group, elsewhere, int(self._prefix[name].rpartition("/")[2]))

    def _values(self, name: str, phase: str) -> list[bytes]:
        group, prefix = self.groups[name], self._prefix[name]
        keys = [f"{prefix}/{phase}/{rank}" for rank in range(group.size)]
        with _StoreErrors(group):
            return [bytes(group.store.get(key)) for key in keys]

    def _missing(self, name: str, phase: str) -> list[int]:
        group, prefix = self.groups[name], self._prefix[name]
        with _StoreErrors(group):
            return [
                rank
                for rank in range(group.size)
                if not group.store.check([f"{prefix}/{phase}/{rank}"])
            ]

    def _gives_up(self, name: str, phase: str) -> bool:
        """Whether the round will not be complete any more; False if it has been after all."""
        group, prefix = self.groups[name], self._prefix[name]
        with _StoreErrors(group):
            # In one step, so that whoever comes last either completes the round or sees that.
            count = group.store.add(f"{prefix}/{phase}/count", group.size)
            return int(count) < 2 * group.size

    def _timed_out(self, name: str, phase: str) -> PeerTimeoutError:
        group = self.groups[name]
        missing = self._missing(name, phase)
        return PeerTimeoutError(
            f"rank {_list(missing)} did not come: rank {group.rank} waited {self.timeout:g} s "
            f"in {phase!r}",
            expected=f"all {group.size} ranks of the group",
            got=f"{group.size - len(missing)}",
            fix="check that every rank of the group makes the same call, or raise timeout=",
            group=group.name,
            rank=group.rank,
            missing=tuple(missing),
            phase=phase,
            timeout=self.timeout,
        )


def processes_of(process_group: Any) -> tuple[ProcessIdentity, ...]:
    """The ranks' processes, in order; empty before the group's first exchange of plans."""
    return _KNOWN.get(process_group, ())


def was_told(error: BaseException) -> bool:
    """Whether `Exchange.fail` was called with ``error``."""
    return getattr(error, "_symmplan_told", False)


class _StoreErrors:
    """Turns the store's own errors, of many types, into one that names the group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SymmplanError) or not isinstance(error, (RuntimeError, OSError)):
            return
        raise PeerLostError(
            f"the group's store does not answer: {str(error).splitlines()[0]}",
            fix="see why the process that hosts the store ended",
            group=self._group.name,
            rank=self._group.rank,
            lost_rank=None,
        ) from error


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(r) for r in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"
