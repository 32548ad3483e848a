"""The first difference between two plans' JSON, in words.

It works on whatever JSON a plan has, not on a `Plan`: the other rank may run another version, and
reading its text as a plan would verify it first, while all that is wanted is where the texts part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Difference", "first_difference"]

#: What a plan is made of, causes before consequences: a buffer of another size moves offsets.
_ORDER = (
    *("format", "version", "problem", "buffers", "operations", "accesses", "edges"),
    *("together", "apart", "shared_groups", "segments", "placements", "barriers"),
)
#: Names of process groups differ over a mesh; their order of appearance does not.
_GROUP_KEYS = frozenset({"group", "groups", "shared_groups"})
#: For people, or proofs: takes no part in the fingerprint.
_IGNORED = frozenset({"unplanned", "bounds", "effort", "optimal", "lower_bound_bytes"})
_PEOPLE = frozenset({"op", "where", "dtype", "shape"})
_ABSENT = "nothing"


@frozen
class Difference:
    """Where two plans part."""

    where: str  # for people: the thing and its field
    path: str  # the same for machines, such as ``"problem.buffers[x].nbytes"``
    op: str  # qualified name of the op concerned, or empty
    buffer: str  # name of the buffer concerned, or empty
    values: tuple[Any, Any]  # the two values


def first_difference(left: Any, right: Any) -> Difference:
    """Compare the parsed JSON of two plans, causes before consequences."""
    if not isinstance(left, dict) or not isinstance(right, dict):
        return Difference("their texts cannot be read", "", "", "", ("?", "?"))
    found = next(_differences(_relabelled(left, {}), _relabelled(right, {}), ()), None)
    if found is None:
        why = "their texts are equal, so the fingerprints were made by different versions"
        return Difference(why, "", "", "", ("?", "?"))
    path, values = found
    buffer, op = _about(left, path, values)
    subject = f"buffer {buffer!r}" if buffer else ".".join(path[:-1]).replace(".[", "[")
    if op:
        subject += f" of {op}"
    text = ".".join(path).replace(".[", "[")
    return Difference(f"{subject}, {path[-1]}", text, op, buffer, values)


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


def _differences(
    left: Any, right: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], tuple[Any, Any]]]:
    """Yield ``(path, values)`` of all, causes before consequences."""
    if isinstance(left, dict) and isinstance(right, dict):
        labels = {key: key for key in sorted({*left, *right} - _PEOPLE, key=_rank)}
    elif isinstance(left, list) and isinstance(right, list):
        left, right = _keyed(left), _keyed(right)
        labels = {key: f"[{key}]" for key in (*left, *right)}
    else:
        if left != right or type(left) is not type(right):
            yield path, (left, right)
        return
    for key, label in labels.items():
        values = (left.get(key, _ABSENT), right.get(key, _ABSENT))
        yield from _differences(*values, (*path, label))


def _keyed(items: list[Any]) -> dict[str, Any]:
    """The items by name where they have one, by position otherwise."""
    if all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in items):
        return {item["name"]: item for item in items}
    return {str(index): item for index, item in enumerate(items)}


def _about(plan: dict[str, Any], path: tuple[str, ...], values: tuple[Any, Any]) -> tuple[str, str]:
    """Buffer and op that a path is about, as far as it says."""
    node: Any = plan
    buffer = op = ""
    for key in path:
        if key.startswith("["):
            named = _keyed(node) if isinstance(node, list) else {}
            node = named.get(key[1:-1])
            if node is None and "buffers" in path:
                buffer = key[1:-1]
        else:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict):
            op = str(node.get("op") or op)
            buffer = str(node.get("buffer") or buffer)
            if "buffers" in path and isinstance(node.get("name"), str):
                buffer = node["name"]
    if "placements" in path and path.index("placements") + 1 < len(path):
        buffer = path[path.index("placements") + 1].strip("[]")
    if not op:
        op = next((str(v["op"]) for v in values if isinstance(v, dict) and v.get("op")), "")
    if buffer and not op:
        buffers = (plan.get("problem") or {}).get("buffers")
        if isinstance(buffers, list):
            op = str(_keyed(buffers).get(buffer, {}).get("op") or "")
    return buffer, op
