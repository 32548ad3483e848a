"""What ranks tell each other before they plan.

[Note: the latest drop counts]
    Ranks run the same collectives in the same order, but when a buffer's last reference goes may
    differ: a thread or a cycle of references may hold it a little longer on one of them. The plan
    must not depend on that, so a buffer counts as live until its latest drop on any rank.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from symmplan._compat import group_name
from symmplan.memory.exchange import Exchange, was_told
from symmplan.memory.groups import resolve_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from symmplan.capture.fsdp import Recording

__all__ = ["everywhere", "leaders", "merged", "tell", "telling"]


def leaders(groups: Mapping[str, Any]) -> dict[str, str]:
    """For each group the largest one that holds it: its ranks all make the same plan.

    Args:
        groups: ``{name: process group}`` in the order of first use.
    """
    ranks = {name: frozenset(dist.get_process_group_ranks(g)) for name, g in groups.items()}
    names = sorted(groups, key=lambda name: -len(ranks[name]))  # stable: ties in order of use
    return {name: next(n for n in names if ranks[n] >= ranks[name]) for name in groups}


def tell(
    what: str, payload: Mapping[str, Any], groups: Mapping[str, Any], timeout: float
) -> dict[str, list[Any]]:
    """Tell the ranks of some groups something, and hear what they say.

    Args:
        what: Name of the exchange, for messages.
        payload: ``{name of a group: plain data}``.
        groups: ``{name: process group}``.
        timeout: Seconds that ranks wait for each other.

    Returns:
        ``{name of the group: what each rank said}``; None for what is no JSON.

    Collective: yes, over the groups of ``payload``.
    """
    exchange = Exchange(resolve_groups(payload, groups), timeout)
    try:
        texts = exchange.round(what, {n: json.dumps(p).encode() for n, p in payload.items()})
        exchange.finish()
    except BaseException as error:
        exchange.fail(error)
        raise
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
    said = tell(what, {name: list(mine)}, {name: group}, timeout)[name]
    return [all(isinstance(s, list) and s[i] is True for s in said) for i in range(len(mine))]


@contextlib.contextmanager
def telling(groups: Mapping[str, Any], timeout: float) -> Iterator[None]:
    """What fails inside on one rank alone fails on its peers, too, when they next wait for it.

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


def merged(
    recordings: Sequence[Recording], groups: Mapping[str, Any], timeout: float
) -> list[Recording]:
    """The same recordings with the latest drops of all ranks. See [Note: the latest drop counts].

    Where ranks recorded other collectives, theirs are not looked at: their plans will differ, and
    the comparison of plans says how.

    Collective: yes, over those groups.
    """
    mine = [recording.drops() for recording in recordings]
    names = dict.fromkeys(leaders(groups).values())
    answers = tell("drops", dict.fromkeys(names, mine), groups, timeout)
    result = mine
    for said in (drops for texts in answers.values() for drops in texts):
        if not _alike(said, mine):
            continue
        result = [
            [None if a is None or b is None else max(a, b) for a, b in zip(x, y, strict=True)]
            for x, y in zip(result, said, strict=True)
        ]
    return [r.with_drops(drops) for r, drops in zip(recordings, result, strict=True)]


def _alike(said: Any, mine: list[list[int | None]]) -> bool:
    return (
        isinstance(said, list)
        and [len(x) if isinstance(x, list) else -1 for x in said] == [len(x) for x in mine]
        and all(d is None or type(d) is int for x in said for d in x)
    )


def _read(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
