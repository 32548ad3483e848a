"""Errors on their way from rank to rank: plain data, never unpickled."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from symmplan import errors
from symmplan.errors import RunError, SymmplanError

if TYPE_CHECKING:
    from symmplan.memory.groups import Group

__all__ = ["error_as_data", "post_error", "posted_error"]

#: Ranks have other numbers in other groups.
_OF_GROUP = ", by the numbers of group "


def post_error(group: Group, key: str, error: BaseException) -> None:
    """Leave ``error`` under ``key`` in the group's store, unless one lies there. Never raises."""
    if group.forked:
        return
    try:
        if not group.store.check([key]):
            group.store.set(key, json.dumps(error_as_data(error, group.rank)))
    except Exception:  # noqa: BLE001 (the store may be what failed)
        return


def posted_error(group: Group, key: str) -> SymmplanError | None:
    """The error that a peer left under ``key``, if one did.

    Raises:
        RuntimeError: Of the store.
    """
    if not group.store.check([key]):
        return None
    return _from_data(bytes(group.store.get(key)), group)


def error_as_data(error: BaseException, rank: int) -> dict[str, Any]:
    """An error of this rank as plain values."""
    if not isinstance(error, SymmplanError):
        what = f"{type(error).__name__}: {error}"
        return {"rank": rank, "kind": RunError.__name__, "what": what}
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
    """What a peer says is data: only known classes, only plain values."""
    try:
        data = json.loads(text)
        failed = int(data["rank"])
        kind, what = str(data["kind"]), str(data["what"])
        where = str(data.get("group") or group.name)
        fields = data.get("fields") or {}
        plain = {
            str(k): _tupled(v)
            for k, v in fields.items()
            if _is_plain(v) and str(k).isidentifier() and not str(k).startswith("_")
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return RunError("a peer failed and its message cannot be read", group=group.name)
    for taken in ("what", "expected", "got", "fix", "group", "rank", "failed_rank", "fields"):
        plain.pop(taken, None)
    known = getattr(errors, kind, RunError) if kind in errors.__all__ else RunError
    if not what.startswith("rank "):
        what = f"rank {failed} failed: {what}"
    if where not in (group.name, group.torch_name) and _OF_GROUP not in what:
        what = f"{what}{_OF_GROUP}{where!r}"
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
