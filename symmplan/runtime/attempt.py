"""What cannot be had on one rank is done without on all.

[Note: together or not at all]
    Memory may be had on one rank and not on another: a device or ``/dev/shm`` is full there, or its
    driver refuses to share. Whoever fails tells its peers, who wait for it somewhere on the way,
    and then all say how it ended, also those whose attempt was good. If it failed anywhere, all
    give back what they have, and the program runs in torch's own way from then on.

    That is no way out for errors in programs: ranks that made different plans, that did not come or
    that are gone raise, as does what is wrong with symmplan itself.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import frozen

from symmplan.coordination.exchange import Exchange
from symmplan.coordination.groups import resolve_groups
from symmplan.errors import BackendError, PeerLostError, PeerTimeoutError, SymmplanError
from symmplan.torch_private.c10d import world

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["FIX", "Refusal", "attempt", "failure", "spread", "warn"]

_Made = TypeVar("_Made")

#: What a rank says that failed because a peer did.
_PEERS = "a peer failed"
#: How what a rank says begins if nothing makes up for it.
_FATAL = "!"
#: What want of memory looks like where it is no error of symmplan's own.
_WANT = (MemoryError, OSError, RuntimeError)
#: Seconds that a rank waits for its peers before it raises what nothing makes up for.
_PATIENCE = 10.0
#: Peers that do not come are not asked again.
_AT_ONCE = (PeerLostError, PeerTimeoutError)

#: What helps where nothing better is known.
FIX = "see why memory cannot be had or shared there; symmplan doctor shows what a machine can do"


@frozen
class Refusal:
    """Why a program runs in torch's own way.

    Attributes:
        what: Which rank failed, with what.
        fix: What would help.
        first: Whether this rank is the one to say so.
    """

    what: str
    fix: str
    first: bool

    @property
    def reason(self) -> str:
        """The same in short."""
        return f"no symmetric memory: {self.what}"


def attempt(
    make: Callable[[], _Made],
    groups: Mapping[str, Any],
    timeout: float,
    *,
    undo: Callable[[_Made], None],
) -> tuple[_Made, None] | tuple[None, Refusal]:
    """Make something on all ranks, or on none. See [Note: together or not at all].

    Args:
        make: Makes it. What it has made when it raises, it has given back.
        groups: ``{name: process group}`` of all who take part.
        timeout: Seconds that ranks wait for each other.
        undo: Gives it back.

    Returns:
        What was made, or why it cannot be.

    Raises:
        SymmplanError: As ``make``, where that is no want of memory.

    Collective: yes, over those groups.
    """
    members = resolve_groups(groups, groups)
    made: list[_Made] = []
    failed: BaseException | None = None
    try:
        made.append(make())
    except BaseException as error:  # noqa: BLE001 (raised again below)
        failed = error
        # Also who was told by a peer: others may have passed that, and wait further on.
        Exchange(members, timeout).fail(error)
    said = "" if failed is None else failure(failed)
    # Apart: whoever failed has missed exchanges that its peers have begun.
    wait = min(timeout, _PATIENCE) if said.startswith(_FATAL) else timeout
    ending = Exchange(members, wait, apart="endings")
    try:
        if isinstance(failed, _AT_ONCE) or not isinstance(failed, Exception | None):
            raise failed  # noqa: TRY301 (told below)
        ending.level()
        said = spread(ending, said)
        if said.startswith(_FATAL):
            if failed is not None:
                raise failed  # noqa: TRY301 (told below)
            ending.round("raised", b"")  # by whoever failed
        ending.finish()
    except BaseException as error:  # noqa: BLE001 (raised again, or what was there before)
        ending.fail(error)
        for each in made:
            undo(each)
        raise (error if failed is None else failed) from None
    if not said:
        return made[0], None
    for each in made:
        undo(each)
    what, _, fix = said.partition("\n")
    return None, Refusal(what, fix or FIX, all(g.rank == 0 for g in members.values()))


def spread(exchange: Exchange, mine: str) -> str:
    """Who failed with what; those that meet through others hear it in a later round.

    Args:
        exchange: Of all who take part.
        mine: What this rank says, as `failure` puts it; empty if nothing failed.

    Collective: yes, over the exchange's groups.
    """
    for turn in range(3):
        said = exchange.round(f"ended {turn}", mine.encode())
        texts = [text.decode(errors="replace") for of in said.values() for text in of]
        told = sorted(filter(None, texts), key=lambda t: (not t.startswith(_FATAL), t == _PEERS))
        mine = told[0] if told else mine
    return mine


def warn(refusal: Refusal, who: str) -> None:
    """Say once, on the first rank of its group, that a program runs in torch's own way, and why."""
    if refusal.first:
        warnings.warn(
            f"{who} runs in torch's own way, without symmetric memory: {refusal.what}\n"
            f"  fix: {refusal.fix}",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_peers(error: BaseException) -> bool:
    return isinstance(error, SymmplanError) and "failed_rank" in error.fields


def failure(error: BaseException) -> str:
    """Two lines: what happened on which rank, and what would help."""
    if _is_peers(error):
        return _PEERS
    what, fix, fatal = f"{type(error).__name__}: {error}", None, ""
    if isinstance(error, SymmplanError):
        what, fix = error.what, error.fix
    wants = (BackendError,) if isinstance(error, SymmplanError) else _WANT
    if not isinstance(error, wants):
        fatal = _FATAL
    return f"{fatal}rank {world()[0]}: {what.splitlines()[0]}\n{fix or FIX}"
