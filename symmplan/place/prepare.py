"""From a program to memory that all ranks have agreed on.

[Note: options are agreed first]
    What a rank was asked to do decides which exchanges, measurements and collectives of ours it
    makes. So before any of them the ranks of a program tell each other what they were given, and
    what serves their memory. Where that differs each of them raises the same error. A backend that
    some rank cannot set up is done without on all.

    Each integration agrees when its program first plans for a group, as often on all ranks: not
    when options are new to a process, which those of one rank may be and those of its peers not.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from symmplan.errors import AgreementError
from symmplan.memory import resolve_backend
from symmplan.memory.exchange import Exchange
from symmplan.memory.groups import resolve_groups
from symmplan.memory.simulated import current
from symmplan.place.attempt import FIX, Refusal, failure, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import torch

    from symmplan.memory.groups import Group
    from symmplan.place.options import Options

    #: See `agree_on_options`.
    _Watch: TypeAlias = AbstractContextManager[Callable[[], None] | None]

__all__ = ["agree_on_options"]


def agree_on_options(
    options: Options,
    device: torch.device,
    groups: Mapping[str, Any],
    *,
    among: Mapping[str, Any] | None = None,
    refusal: Refusal | None = None,
    watch: Callable[[Mapping[str, Any]], _Watch] | None = None,
    **more: Any,
) -> tuple[str, Refusal | None]:
    """Check that all ranks were given the same options. See [Note: options are agreed first].

    Args:
        options: This rank's.
        device: Where its tensors lie.
        groups: ``{name: process group}`` of the program, None for one of this process alone.
        among: Those of them whose ranks are asked; all of them if None.
        refusal: Why this rank does without symmetric memory already.
        watch: Given the groups that are asked, a context while they are, which gives what looks
            whether the peers will come.
        more: Options that only the caller has, by name, as plain data.

    Returns:
        Name of the memory backend, and None; or any name, and why all ranks do without.

    Raises:
        AgreementError: Options differ; raised on every rank. ``option`` is the first that does,
            ``ranks`` two that differ, ``values`` what these were given.
        BackendError: The backend that was asked for by name serves no rank.
        PeerTimeoutError, PeerLostError: A rank did not come.

    Collective: yes, over ``among``.
    """
    asked = {n: g for n, g in (groups if among is None else among).items() if g is not None}
    members = resolve_groups(groups, groups)
    memory = options.memory
    failed: RuntimeError | OSError | None = None
    try:
        memory = resolve_backend(memory, device, members).name
    except (RuntimeError, OSError) as error:
        failed = error
    if current() is not None:
        return memory, refusal
    mine = {
        "options": {**options.agreed(device), **{name: (x, x) for name, x in more.items()}},
        "memory": "" if failed or refusal else memory,
        "asked": options.memory,
        "why": "" if failed is None else failure(failed),
    }
    if refusal is not None:
        mine["why"] = f"{refusal.what}\n{refusal.fix}"
    with (
        nullcontext() if watch is None else watch(asked) as look,
        Exchange(resolve_groups(asked, asked), options.timeout, look) as exchange,
    ):
        said = {
            name: [_read(text, exchange.groups[name], rank) for rank, text in enumerate(texts)]
            for name, texts in exchange.round("options", json.dumps(mine).encode()).items()
        }
        for name, notes in said.items():
            _compare(notes, exchange.groups[name])
        theirs = [note for notes in said.values() for note in notes] or [mine]
        if failed is not None and options.memory != "auto" and not any(n["memory"] for n in theirs):
            raise failed
        why = spread(exchange, next((n["why"] for n in theirs if n["why"]), "") or _apart(theirs))
    if not why:
        return memory, None
    what, _, fix = why.partition("\n")
    first = all(group.rank == 0 for group in exchange.groups.values())
    return "auto", refusal or Refusal(what, fix or FIX, first)


def _compare(notes: list[dict[str, Any]], group: Group) -> None:
    """Raise if the ranks of a group were given different options."""
    asked = [{**n["options"], "memory": (n["memory"] or n["asked"], n["asked"])} for n in notes]
    same = all(n["asked"] == notes[0]["asked"] for n in notes)
    for option in dict.fromkeys(name for of in asked for name in of):
        if option == "memory" and same:
            continue  # who has another all the same cannot have that: no error of the program's
        values = [of.get(option, (None, None)) for of in asked]
        other = next((i for i, value in enumerate(values) if value[0] != values[0][0]), None)
        if other is None:
            continue
        what, fix = _difference(option, other)
        told = [f"{option}={values[rank][1]!r} (rank {rank})" for rank in (0, other)]
        raise AgreementError(
            what,
            expected=told[0],
            got=told[1],
            fix=fix,
            **group.here,
            ranks=(0, other),
            option=option,
            values=(values[0][1], values[other][1]),
        )


def _difference(option: str, other: int) -> tuple[str, str]:
    """That rank ``other`` has another value of an option than rank 0, and what would help."""
    if option == "device":
        what = f"ranks 0 and {other} have their tensors on different kinds of devices"
        return what, "use one kind on every rank"
    if option == "table":
        what = f"ranks 0 and {other} read different tables of choices"
        return what, "give all ranks the same file"
    what = f"ranks 0 and {other} were given different {option}="
    return what, f"pass the same {option}= on every rank"


def _apart(notes: list[dict[str, Any]]) -> str:
    """That ranks which were asked for the same memory have different backends; else empty."""
    names = list(dict.fromkeys(note["memory"] for note in notes))
    if len(names) == 1:
        return ""
    return f"ranks have different memory backends: {' and '.join(sorted(names))}"


def _read(text: bytes, group: Group, rank: int) -> dict[str, Any]:
    try:
        note = json.loads(text)
        return {
            "options": {str(name): tuple(pair) for name, pair in note["options"].items()},
            **{key: str(note[key]) for key in ("memory", "asked", "why")},
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise AgreementError(
            f"rank {rank} sent something that is no note of this version of symmplan",
            fix="run the same version of symmplan on every rank",
            **group.here,
            ranks=(group.rank, rank),
        ) from error
