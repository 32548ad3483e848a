"""Errors in a group's store, and sessions: what fails in one is not read in the next.

Errors travel from rank to rank as plain data, which is never unpickled.

[Note: keys of a session]
    Ranks number their exchanges, each for itself. After an error their numbers may differ, and the
    error's text may be under a key that some rank reads later. So all that a session's ranks
    exchange among themselves uses keys of that session alone. Ranks enter sessions of a group
    equally often, and the session's number is part of each key, also in the stores of other groups.
    What they exchange with ranks outside of the session uses the keys that it would use without
    one. A session that is planned again gets new keys. A rank that leaves by an error posts it for
    the whole session, so that its peers find it wherever they wait.

    A rank posts which session it is in. A peer that waits for it outside that session, or in an
    earlier one, gets an error immediately.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

from symmplan import errors
from symmplan.errors import AgreementError, RunError, SymmplanError
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.coordination.groups import Group

__all__ = [
    "SessionKeys",
    "current_keys",
    "enter_session",
    "in_other_session",
    "keys_of_calls",
    "post_error",
    "posted_error",
    "wrong_session",
]

_POLL = 0.02  # seconds

#: Fields of errors that say which ranks they are about.
_ABOUT = ("failed_rank", "lost_rank", "missing", "ranks")
#: What each error has beside its own fields.
_GIVEN = ("what", "expected", "got", "fix", "group", "rank", "failed_rank", "fields")


class SessionKeys:
    """The part of the stores in which the ranks of a session exchange. Made by `enter_session`."""

    def __init__(self, group: Group, number: int) -> None:
        self.group = group
        self.number = number
        self._prefix = _of_session(group, number)
        self._part = 0

    @property
    def prefix(self) -> str:
        """The prefix of keys until `renew`."""
        return f"{self._prefix}/{self._part}"

    def renew(self) -> None:
        """Exchange below other keys from now on.

        Collective: yes, in that all ranks must do it. It does not wait for peers.
        """
        self._part += 1

    def fail(self, error: BaseException) -> None:
        """End the session with ``error`` for whoever waits in it; the first one stays.

        Never raises.
        """
        if self.group.size > 1:
            post_error(self.group, f"{self._prefix}/error", error)

    def failure(self) -> SymmplanError | None:
        """The error by which a rank left the session.

        Raises:
            RuntimeError: Of the store.
        """
        return posted_error(self.group, f"{self._prefix}/error") if self.group.size > 1 else None

    def ring(self, error: BaseException) -> None:
        """Tell the others of ``error`` outside of any exchange. Never raises.

        The first error of any rank stays, until the keys are renewed. Neither this nor `heard` does
        anything in a group of one rank, or in a process that was forked from a rank.
        """
        if self._silent:
            return
        with contextlib.suppress(Exception):  # the store may be what failed
            store, key = self.group.store, f"{self.prefix}/alarm"
            if store.add(f"{key}/rung", 1) == 1:
                store.set(key, json.dumps(_as_data(error, self.group.rank)))

    def heard(self, patience: float = 0.0) -> SymmplanError | None:
        """The error of a peer's `ring`; None if there was none within ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while not self._silent:
            try:
                error = posted_error(self.group, f"{self.prefix}/alarm")
            except Exception:  # noqa: BLE001 (the store may be what failed)
                return None
            if error is not None or time.monotonic() >= deadline:
                return error
            time.sleep(_POLL)
        return None

    @property
    def _silent(self) -> bool:
        return self.group.size == 1 or self.group.forked

    def leave(self) -> None:
        """The session is over on this rank. Never raises."""
        if PROCESS.session_keys is self:
            PROCESS.session_keys = None
        if self.group.size > 1:
            with contextlib.suppress(Exception):  # the store may be what failed
                store, key = self.group.store, f"{self._prefix}/meanwhile"
                store.set(f"symmplan/in session/{self.group.rank}", "0")
                if store.check([key]):
                    _count_to(self.group, "calls", int(store.get(key)))


def current_keys() -> SessionKeys | None:
    """Of the session that this process is in, None outside."""
    keys: SessionKeys | None = PROCESS.session_keys
    return keys


def enter_session(group: Group) -> SessionKeys:
    """This rank begins its next session with ``group``. See [Note: keys of a session].

    Collective: yes, in that every rank must enter equally many. It does not wait for peers.
    """
    number = 0
    if group.size > 1:
        number = group.store.add(f"symmplan/sessions/{group.rank}", 1)
        group.store.set(f"symmplan/in session/{group.rank}", str(number))
    keys = PROCESS.session_keys = SessionKeys(group, number)
    return keys


def in_other_session(group: Group, ranks: Sequence[int]) -> int | None:
    """The first of ``ranks`` that is in a session of ``group`` which this rank has not entered.

    Raises:
        RuntimeError: Of the store.
    """
    for rank in ranks:
        theirs = _where(group, rank)
        if theirs and theirs > group.store.add(f"symmplan/sessions/{group.rank}", 0):
            return rank
    return None


def wrong_session(group: Group, rank: int, exchange: int) -> AgreementError:
    """The error about what `in_other_session` found in the exchange of that number.

    Outside of any session ``rank`` is told. Its session then counts as one of this rank's, and the
    exchange as one of those in the session, so that all count alike afterwards.
    """
    theirs = _where(group, rank)
    keys = current_keys()
    mine = "outside of any" if keys is None else f"in session {keys.number}"
    error = AgreementError(
        f"rank {rank} has entered an eager session that rank {group.rank} has not",
        expected="all ranks in the same session, or all outside",
        got=f"session {theirs} of the group (rank {rank}), {mine} (rank {group.rank})",
        fix="enter and leave sessions at the same places of the program on every rank",
        **group.here,
        ranks=(group.rank, rank),
    )
    if keys is None:
        session = _of_session(group, theirs)
        with contextlib.suppress(Exception):  # there is an error to tell of
            group.store.set(f"{session}/meanwhile", str(exchange))
            _count_to(group, "sessions", theirs)
        post_error(group, f"{session}/error", error)
    return error


def _count_to(group: Group, what: str, number: int) -> None:
    """Go on counting after ``number``."""
    key = f"symmplan/{what}/{group.rank}"
    group.store.add(key, max(0, number - group.store.add(key, 0)))


def _where(group: Group, rank: int) -> int:
    """The session of ``group`` that a rank is in; 0 outside."""
    key = f"symmplan/in session/{rank}"
    text = bytes(group.store.get(key)) if group.store.check([key]) else b""
    return int(text) if text.isdigit() else 0


def _of_session(group: Group, number: int) -> str:
    return f"symmplan/session {group.torch_name}.{number}"


def keys_of_calls(group: Group) -> str:
    """What the keys of a group's exchanges begin with; equal on its ranks.

    They are the session's if all ranks of the group are in it: others know nothing of it.
    """
    keys = current_keys()
    within = keys is not None and {*group.ranks} <= {*keys.group.ranks}
    return keys.prefix if keys is not None and within else "symmplan"


def post_error(group: Group, key: str, error: BaseException) -> None:
    """Leave ``error`` under ``key`` in the group's store, unless one lies there. Never raises."""
    with contextlib.suppress(Exception):  # the store may be what failed
        if not group.forked and not group.store.check([key]):
            group.store.set(key, json.dumps(_as_data(error, group.rank)))


def posted_error(group: Group, key: str) -> SymmplanError | None:
    """The error that a peer left under ``key``, if one did.

    Raises:
        RuntimeError: Of the store.
    """
    if not group.store.check([key]):
        return None
    return _from_data(bytes(group.store.get(key)), group)


def _as_data(error: BaseException, rank: int) -> dict[str, Any]:
    """An error of this rank as plain values."""
    if not isinstance(error, SymmplanError):
        what = f"{type(error).__name__}: {error}"
        fix = f"mend what raised on rank {rank}, whose traceback says where"
        return {"rank": rank, "kind": RunError.__name__, "what": what, "fix": fix}
    return {
        "rank": _failed_rank(error, rank),
        "group": error.group,
        "kind": type(error).__name__,
        "what": error.what,
        "expected": None if error.expected is None else str(error.expected),
        "got": None if error.got is None else str(error.got),
        "fix": error.fix,
        "fields": {k: v for k, v in error.fields.items() if _is_plain(v)},
    }


def _from_data(text: bytes, group: Group) -> SymmplanError:
    """The error that a peer posted as plain data; only known classes are made of it."""
    try:
        data = json.loads(text)
        failed = int(data["rank"])
        kind, what = str(data["kind"]), str(data["what"])
        where = str(data.get("group") or group.name)
        fields = data.get("fields") or {}
        about = any(fields.get(name) is not None for name in _ABOUT)
        plain = {
            str(k): _tupled(v)
            for k, v in fields.items()
            if _is_plain(v) and str(k).isidentifier() and not str(k).startswith("_")
            if k not in _GIVEN
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return RunError(
            "a peer failed and its message cannot be read",
            fix="look at the peers' own errors; run the same version of symmplan on every rank",
            group=group.name,
        )
    known = getattr(errors, kind, RunError) if kind in errors.__all__ else RunError
    if not about:
        what = f"rank {failed} failed: {what}"
    # Ranks have other numbers in other groups.
    if where not in (group.name, group.torch_name) and "numbers_of" not in plain:
        what = f"{what}, by the numbers of group {where!r}"
        plain["numbers_of"] = where
    result: SymmplanError = known(
        what,
        expected=data.get("expected"),
        got=data.get("got"),
        fix=data.get("fix"),
        **group.here,
        failed_rank=failed,
        **plain,
    )
    return result


def _failed_rank(error: SymmplanError, rank: int) -> Any:
    """Which rank is at fault: who waits for one that does not come is not."""
    missing = error.fields.get("missing") or (rank,)
    lost = error.fields.get("lost_rank")
    return error.fields.get("failed_rank", missing[0] if lost is None else lost)


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, (str, int, float, bool))


def _tupled(value: Any) -> Any:
    """JSON has lists where errors have tuples."""
    return tuple(_tupled(v) for v in value) if isinstance(value, list) else value
