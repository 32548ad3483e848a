"""Ranks compare their plans before anything is registered.

Every rank posts the plan's fingerprint, a hash that does not depend on what groups are called.
Where they differ, the first rank of the group and the first that differs from it post their whole
plans, and every rank of the group raises the same error about the first difference.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

from attrs import asdict

from symmplan.errors import AgreementError, BackendError
from symmplan.memory.difference import first_difference
from symmplan.memory.exchange import Exchange
from symmplan.memory.groups import resolve_groups
from symmplan.memory.process import ProcessIdentity, this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from symmplan.memory.groups import Group
    from symmplan.model import Plan

__all__ = ["agree", "compare_notes"]

#: A plan's text may not be larger than this in bytes: what a peer says is bounded.
_LARGEST_PLAN = 1 << 30


def agree(
    plan: Plan,
    groups: Mapping[str, Any] | None = None,
    timeout: float = 300.0,
    *,
    watch: Callable[[], None] | None = None,
) -> None:
    """Check that all ranks of all groups of ``plan`` hold the same plan.

    Args:
        plan: This rank's plan.
        groups: ``{name in the plan: process group}`` for names that torch does not know. Groups
            that this rank's plan does not use take part all the same.
        timeout: Seconds that each wait for the peers may take.
        watch: Called now and then while this rank waits; what it raises is raised on every rank
            that takes part.

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
        raise AgreementError(
            f"rank {rank} sent something that is no note of this version of symmplan",
            fix="run the same version of symmplan on every rank",
            **group.here,
            ranks=(group.rank, rank),
        ) from error


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
