"""The process groups that a plan names, as this rank sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from symmplan import _compat as compat
from symmplan.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Group", "group_key", "resolve_groups"]


@frozen
class Group:
    """A process group.

    Attributes:
        name: What the plan calls it.
        torch_name: What torch calls it; equal to ``name`` unless the plan was made elsewhere.
        rank: This process's rank in it.
        size: How many ranks it has.
        store: The group's key-value store, None for a group of one without torch.distributed.
        process_group: Torch's group, None likewise.
    """

    name: str
    torch_name: str
    rank: int = 0
    size: int = 1
    store: Any = field(default=None, eq=False, repr=False)
    process_group: Any = field(default=None, eq=False, repr=False)


def group_key(group: str | Any) -> str:
    """The name of ``group``, which is a name or torch's group."""
    return group if isinstance(group, str) else compat.group_name(group)


def resolve_groups(
    names: Iterable[str], groups: Mapping[str, Any] | None = None
) -> dict[str, Group]:
    """Find the process group behind each name.

    Args:
        names: As in the plan: torch's group names, or ``"default"`` for the default group.
        groups: What is meant by a name that torch does not know.

    Returns:
        ``{name: Group}`` in the order of ``names``. Without torch.distributed, groups of one.

    Raises:
        BackendError: A name is unknown, or this rank is not in its group.
    """
    return {name: _resolve(name, groups or {}) for name in dict.fromkeys(names)}


def _resolve(name: str, groups: Mapping[str, Any]) -> Group:
    process_group = groups.get(name)
    if process_group is None:
        if not compat.has_process_groups():
            return Group(name, name)
        try:
            process_group = compat.group_by_name(compat.world_name() if name == "default" else name)
        except LookupError:
            raise BackendError(
                f"the plan names process group {name!r}, which torch does not know",
                expected="the name of a process group of this process",
                got=repr(name),
                fix="create the group first, or pass groups={name: process_group}",
                group=name,
            ) from None
    rank = process_group.rank()
    if rank < 0:
        raise BackendError(
            f"this rank is not in process group {name!r}",
            fix="realize a plan only on the ranks of its groups",
            group=name,
        )
    return Group(
        name=name,
        torch_name=compat.group_name(process_group),
        rank=rank,
        size=process_group.size(),
        store=compat.group_store(process_group),
        process_group=process_group,
    )
