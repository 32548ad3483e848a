"""Ranks compare their plans before anything is registered.

Every rank posts the plan's fingerprint, a hash that does not depend on what groups are called.
Where they differ, the first rank of the group and the first that differs from it post their whole
plans, and every rank of the group raises the same error about the first difference.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import asdict, frozen

from symmplan.coordination.exchange import Exchange
from symmplan.coordination.groups import ProcessIdentity, resolve_groups, this_process
from symmplan.errors import AgreementError, BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from symmplan.coordination.exchange import PlanningWatch
    from symmplan.coordination.groups import Group
    from symmplan.model import Plan

    #: Where in a plan's JSON: each key, and whether it is that of an item of a list.
    _Path: TypeAlias = tuple[tuple[str, bool], ...]

__all__ = ["agree", "compare_notes", "first_difference", "no_note"]

#: A plan's text may not be larger than this in bytes: what a peer says is bounded.
_LARGEST_PLAN = 1 << 30

#: What a plan is made of, causes before consequences: a buffer of another size moves offsets.
_ORDER = (
    *("format", "version", "problem", "buffers", "operations", "accesses", "edges"),
    *("together", "apart", "shared_groups", "segments", "placements", "barriers"),
)
#: Names of process groups differ over a mesh; their order of appearance does not.
_GROUP_KEYS = frozenset({"group", "groups", "shared_groups"})
#: For people, or proofs: takes no part in the fingerprint.
_IGNORED = frozenset({"unplanned", "bounds", "lower_bound_bytes", "budget"})
_PEOPLE = frozenset({"op", "where", "dtype", "shape"})
_ABSENT = "nothing"


def agree(
    plan: Plan,
    groups: Mapping[str, Any] | None = None,
    timeout: float = 300.0,
    *,
    watch: PlanningWatch | None = None,
) -> None:
    """Check that all ranks of all groups of ``plan`` hold the same plan.

    Args:
        plan: This rank's plan.
        groups: ``{name in the plan: process group}`` for names that torch does not know. Groups
            that this rank's plan does not use take part all the same.
        timeout: Seconds that each wait for the peers may take.
        watch: As for `symmplan.coordination.exchange.Exchange`; what it raises is raised on every
            rank that takes part.

    Raises:
        AgreementError: Plans differ. Raised on every rank of the group; ``ranks`` are two that
            differ, ``op``, ``buffer``, ``path`` and ``values`` say where.
        PeerTimeoutError: Ranks did not come within the timeout.

    Collective: yes, over every group of the plan and of ``groups``.
    """
    names = [group for spec in plan.segments for group in spec.groups]
    with Exchange(resolve_groups([*names, *(groups or ())], groups), timeout, watch) as exchange:
        compare_notes(plan, exchange, memory="")
        exchange.round("agreed", b"")


def compare_notes(plan: Plan, exchange: Exchange, *, memory: str) -> None:
    """The first rounds of an exchange: fingerprints, memory backends, processes.

    Collective: yes, over every group of ``exchange``.
    """
    note = {
        "fingerprint": plan.fingerprint,
        "memory": memory,
        "process": asdict(this_process()),
    }
    answers = exchange.round("hello", json.dumps(note).encode())
    for name, texts in answers.items():
        group = exchange.groups[name]
        notes = [_read(text, group, rank) for rank, text in enumerate(texts)]
        exchange.know(name, [n["process"] for n in notes])
        differs = _first_other([n["fingerprint"] for n in notes])
        if differs is not None:
            raise _disagreement(plan, exchange, group, (0, differs))
        differs = _first_other([n["memory"] for n in notes])
        if differs is not None:
            raise BackendError(
                f"ranks 0 and {differs} use different memory backends",
                expected=f"{notes[0]['memory']!r} (rank 0)",
                got=f"{notes[differs]['memory']!r} (rank {differs})",
                fix="pass the same memory= and the same kind of device on every rank",
                **group.here,
                ranks=(0, differs),
            )


def _first_other(values: list[str]) -> int | None:
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def _read(text: bytes, group: Group, rank: int) -> dict[str, Any]:
    try:
        note = json.loads(text)
        return {
            "fingerprint": str(note["fingerprint"]),
            "memory": str(note["memory"]),
            "process": ProcessIdentity(**note["process"]),
        }
    except (ValueError, TypeError, KeyError) as error:
        raise no_note(group, rank) from error


def no_note(group: Group, rank: int) -> AgreementError:
    """The error about a rank that sent what cannot be read."""
    return AgreementError(
        f"rank {rank} sent a message that is not from this version of symmplan",
        fix="run the same version of symmplan on every rank",
        **group.here,
        ranks=(group.rank, rank),
    )


def _disagreement(
    plan: Plan, exchange: Exchange, group: Group, ranks: tuple[int, int]
) -> AgreementError:
    """Fetch both plans and say where they part."""
    mine = zlib.compress(plan.to_json().encode()) if group.rank in ranks else b"-"
    texts = exchange.round("plans", mine, groups=[group.name])[group.name]
    difference = first_difference(*(_unpack(texts[rank]) for rank in ranks))
    return AgreementError(
        f"ranks {ranks[0]} and {ranks[1]} made different plans: {difference.where}",
        expected=f"{difference.values[0]} (rank {ranks[0]})",
        got=f"{difference.values[1]} (rank {ranks[1]})",
        fix="run the same program with the same shapes on every rank of the group",
        **group.here,
        ranks=ranks,
        op=difference.op,
        buffer=difference.buffer,
        path=difference.path,
        values=difference.values,
    )


def _unpack(data: bytes) -> Any:
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, _LARGEST_PLAN)
        return json.loads(text)
    except (zlib.error, ValueError):
        return None


@frozen
class Difference:
    """Where two plans part."""

    where: str  # for people: the thing and its field
    path: str  # the same for machines, such as ``"problem.buffers[x].nbytes"``
    op: str  # qualified name of the op concerned, or empty
    buffer: str  # name of the buffer concerned, or empty
    values: tuple[Any, Any]  # the two values


def first_difference(left: Any, right: Any) -> Difference:
    """Compare the parsed JSON of two plans, causes before consequences.

    It works on whatever JSON a plan has, not on a `Plan`: the other rank may run another version,
    and reading its text as a plan would verify it first, while all that is wanted is where they
    part.
    """
    if not isinstance(left, dict) or not isinstance(right, dict):
        return Difference("their texts cannot be read", "", "", "", ("?", "?"))
    found = next(_differences(_relabelled(left, {}), _relabelled(right, {}), ()), None)
    if found is None:
        why = "their texts are equal, so the fingerprints were made by different versions"
        return Difference(why, "", "", "", ("?", "?"))
    path, values = found
    buffer, op = _about(left, path, values)
    subject = f"buffer {buffer!r}" if buffer else _text(path[:-1])
    if op:
        subject += f" of {op}"
    return Difference(f"{subject}, {_text(path[-1:])}", _text(path), op, buffer, values)


def _text(path: _Path) -> str:
    """A path for people and machines, such as ``"problem.buffers[x].nbytes"``."""
    steps = (f"[{key}]" if in_list else f".{key}" for key, in_list in path)
    return "".join(steps).removeprefix(".")


def _relabelled(value: Any, labels: dict[str, str], *, is_group: bool = False) -> Any:
    if isinstance(value, dict):
        return {
            key: _relabelled(value[key], labels, is_group=key in _GROUP_KEYS)
            for key in sorted(value, key=_rank)
            if key not in _IGNORED
        }
    if isinstance(value, list):
        return [_relabelled(item, labels, is_group=is_group) for item in value]
    if is_group and isinstance(value, str):
        return labels.setdefault(value, f"group {len(labels)}")
    return value


def _rank(key: str) -> tuple[int, str]:
    return (_ORDER.index(key) if key in _ORDER else len(_ORDER), key)


def _differences(left: Any, right: Any, path: _Path) -> Iterator[tuple[_Path, tuple[Any, Any]]]:
    """Yield ``(path, values)`` of all, causes before consequences."""
    in_list = isinstance(left, list) and isinstance(right, list)
    if in_list:
        left, right = _keyed(left), _keyed(right)
        keys = list(dict.fromkeys((*left, *right)))
    elif isinstance(left, dict) and isinstance(right, dict):
        keys = sorted({*left, *right} - _PEOPLE, key=_rank)
    else:
        if left != right or type(left) is not type(right):
            yield path, (left, right)
        return
    for key in keys:
        values = (left.get(key, _ABSENT), right.get(key, _ABSENT))
        yield from _differences(*values, (*path, (key, in_list)))


def _keyed(items: list[Any]) -> dict[str, Any]:
    """The items by name where they have one, by position otherwise."""
    if all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in items):
        return {item["name"]: item for item in items}
    return {str(index): item for index, item in enumerate(items)}


def _about(plan: dict[str, Any], path: _Path, values: tuple[Any, Any]) -> tuple[str, str]:
    """Buffer and op that a path is about, as far as it says."""
    node: Any = plan
    buffer = op = table = ""
    for key, in_list in path:
        if in_list:
            named = _keyed(node) if isinstance(node, list) else {}
            node = named.get(key)
            if node is None and table == "buffers":
                buffer = key
        else:
            node = node.get(key) if isinstance(node, dict) else None
            if table == "placements":
                buffer = key
            table = key
        if isinstance(node, dict):
            op = str(node.get("op") or op)
            buffer = str(node.get("buffer") or buffer)
            if in_list and table == "buffers" and isinstance(node.get("name"), str):
                buffer = node["name"]
    if not op:
        op = next((str(v["op"]) for v in values if isinstance(v, dict) and v.get("op")), "")
    if buffer and not op:
        buffers = (plan.get("problem") or {}).get("buffers")
        if isinstance(buffers, list):
            op = str(_keyed(buffers).get(buffer, {}).get("op") or "")
    return buffer, op
