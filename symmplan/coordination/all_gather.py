"""Values that all ranks gather while they decide something together."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from symmplan.coordination.exchange import Exchange, was_told
from symmplan.coordination.groups import resolve_groups
from symmplan.torch_private.c10d import group_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from symmplan.coordination.exchange import PlanningWatch

__all__ = ["all_agree", "all_gather_json", "everywhere", "leaders", "least", "telling"]


def leaders(groups: Mapping[str, Any]) -> dict[str, str]:
    """For each group the largest one that holds it: its ranks all make the same plan.

    Args:
        groups: ``{name: process group}`` in the order of first use.
    """
    ranks = {name: frozenset(dist.get_process_group_ranks(g)) for name, g in groups.items()}
    names = sorted(groups, key=lambda name: -len(ranks[name]))  # stable: ties in order of use
    return {name: next(n for n in names if ranks[n] >= ranks[name]) for name in groups}


def all_gather_json(
    what: str,
    payload: Mapping[str, Any],
    groups: Mapping[str, Any],
    timeout: float,
    watch: PlanningWatch | None = None,
) -> dict[str, list[Any]]:
    """Tell the ranks of some groups something, and hear what they say.

    Args:
        what: Name of the exchange, for messages.
        payload: ``{name of a group: plain data}``.
        groups: ``{name: process group}``.
        timeout: Seconds that ranks wait for each other.
        watch: As for `Exchange`.

    Returns:
        ``{name of the group: what each rank said}``; None for what is no JSON.

    Collective: yes, over the groups of ``payload``.
    """
    with Exchange(resolve_groups(payload, groups), timeout, watch) as exchange:
        texts = exchange.round(what, {n: json.dumps(p).encode() for n, p in payload.items()})
    return {name: [_read(text) for text in answers] for name, answers in texts.items()}


def everywhere(what: str, mine: Sequence[bool], group: Any, timeout: float) -> list[bool]:
    """For each of some conditions whether it holds on all ranks.

    Args:
        what: Name of the exchange, for messages.
        mine: Whether they hold on this rank.
        group: The process group.
        timeout: Seconds that ranks wait for each other.

    Collective: yes, over ``group``.
    """
    name = group_name(group)
    said = all_gather_json(what, {name: list(mine)}, {name: group}, timeout)[name]
    return [all(isinstance(s, list) and s[i] is True for s in said) for i in range(len(mine))]


def all_agree(what: str, mine: Any, groups: Mapping[str, Any], timeout: float) -> bool:
    """Whether all ranks of some groups, and of what these meet, say the same, and nothing empty.

    Each rank asks its peers, and then twice whether theirs agree: in a mesh that is everybody.

    Args:
        what: Name of the exchange, for messages.
        mine: Plain data.
        groups: ``{name: process group}``.
        timeout: Seconds that ranks wait for each other.

    Collective: yes, over those groups.
    """
    for _ in range(3):
        said = all_gather_json(what, dict.fromkeys(groups, mine), groups, timeout)
        mine = bool(mine) and all(x == mine for of in said.values() for x in of)
    return bool(mine)


def least(
    what: str, mine: Sequence[int], groups: Mapping[str, Any], timeout: float
) -> tuple[int, ...]:
    """Of some numbers the least that the ranks of some groups say, and of what these meet.

    As many as all of them have. Asked as often as in `all_agree`.

    Args:
        what: Name of the exchange, for messages.
        mine: What this rank says.
        groups: ``{name: process group}``.
        timeout: Seconds that ranks wait for each other.

    Collective: yes, over those groups.
    """
    for _ in range(3):
        said = all_gather_json(what, {name: list(mine) for name in groups}, groups, timeout)
        told = [x for of in said.values() for x in of if isinstance(x, list)]
        mine = [min(each) for each in zip(mine, *told, strict=False)]
    return tuple(mine)


@contextlib.contextmanager
def telling(groups: Mapping[str, Any], timeout: float) -> Iterator[None]:
    """An error inside on one rank becomes an error on its peers when they next wait for it.

    Args:
        groups: ``{name: process group}``.
        timeout: Seconds that ranks wait for each other.
    """
    try:
        yield
    except BaseException as error:
        if not was_told(error):
            names = dict.fromkeys(leaders(groups).values())
            Exchange(resolve_groups(names, groups), timeout).fail(error)
        raise


def _read(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
