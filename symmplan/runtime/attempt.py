"""If one rank cannot have symmetric memory, all ranks do without it.

[Note: together or not at all]
    One rank may get memory and another may not: its device or ``/dev/shm`` is full, or its driver
    refuses to share. A rank that fails tells its peers, which wait for it at some point of the
    attempt. Then every rank says how its attempt ended. If it failed on one of them, all ranks free
    what they have, and the program runs in torch's own way from then on.

    Errors of programs stay errors: different plans, ranks that do not come and ranks that are gone
    raise on all ranks. So do faults of symmplan itself.
"""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import asdict, evolve, frozen

from symmplan.coordination.exchange import Exchange
from symmplan.coordination.groups import resolve_groups
from symmplan.errors import BackendError, PeerLostError, PeerTimeoutError, SymmplanError
from symmplan.torch_private.c10d import world

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_Made = TypeVar("_Made")

#: What want of memory looks like where it is no error of symmplan's own.
WANT: tuple[type[BaseException], ...] = (MemoryError, OSError, RuntimeError)
#: Seconds that a rank waits for its peers before it raises what nothing makes up for.
_PATIENCE = 10.0
#: Peers that do not come are not asked again.
_AT_ONCE = (PeerLostError, PeerTimeoutError)

#: What helps where nothing better is known.
FIX = "see why memory cannot be had or shared there; symmplan doctor shows what a machine can do"


@frozen
class Refusal:
    """Why a program runs in torch's own way, as plain data that ranks exchange.

    Attributes:
        what: Which rank failed, with what.
        fix: What would help.
        fatal: Whether the error is raised, because it is no lack of memory.
        heard: Whether the rank failed only because a peer did.
        first: Whether this rank is the one that warns.
    """

    what: str
    fix: str = FIX
    fatal: bool = False
    heard: bool = False
    first: bool = False

    @property
    def reason(self) -> str:
        """The cause in a few words."""
        return f"no symmetric memory: {self.what}"

    @staticmethod
    def read(data: Any) -> Refusal | None:
        """Read what a rank posted: the fields, or None.

        Raises:
            TypeError, KeyError: It is neither.
        """
        if data is None:
            return None
        what, fix = str(data["what"]), str(data["fix"])
        return Refusal(what, fix, bool(data["fatal"]), bool(data["heard"]))


def attempt(
    make: Callable[[], _Made],
    groups: Mapping[str, Any],
    timeout: float,
    *,
    undo: Callable[[_Made], None],
) -> tuple[_Made | None, Refusal | None]:
    """Make something on all ranks, or on none. See [Note: together or not at all].

    Args:
        make: Makes it. If it raises, it has freed what it made.
        groups: ``{name: process group}`` of all who take part.
        timeout: Seconds that ranks wait for each other.
        undo: Gives it back, unless it is None.

    Returns:
        What was made, and None; or why it cannot be.

    Raises:
        SymmplanError: ``make`` raised it, and it is no lack of memory.

    Collective: yes, over those groups.
    """
    members = resolve_groups(groups, groups)
    made: _Made | None = None
    failed: BaseException | None = None
    try:
        made = make()
    except BaseException as error:  # noqa: BLE001 (raised again below)
        failed = error
        # Also who was told by a peer: others may have passed that, and wait further on.
        Exchange(members, timeout).fail(error)
    refusal = None if failed is None else failure(failed)
    wait = timeout
    if refusal is not None and refusal.fatal:
        wait = min(timeout, _PATIENCE)
    # Apart: whoever failed has missed exchanges that its peers have begun.
    ending = Exchange(members, wait, apart="endings")
    try:
        if isinstance(failed, _AT_ONCE) or not isinstance(failed, Exception | None):
            raise failed  # noqa: TRY301 (told below)
        ending.level()
        refusal = spread(ending, refusal)
        if refusal is not None and refusal.fatal:
            if failed is not None:
                raise failed  # noqa: TRY301 (told below)
            ending.round("raised", b"")  # by whoever failed
        ending.finish()
    except BaseException as error:  # noqa: BLE001 (raised again, or what was there before)
        ending.fail(error)
        if made is not None:
            undo(made)
        raise (error if failed is None else failed) from None
    if refusal is None:
        return made, None
    if made is not None:
        undo(made)
    return None, evolve(refusal, first=all(g.rank == 0 for g in members.values()))


def spread(exchange: Exchange, mine: Refusal | None) -> Refusal | None:
    """The gravest failure of any rank; ranks that meet through others hear it in a later round.

    Args:
        exchange: Of all who take part.
        mine: What this rank says; None if nothing failed.

    Collective: yes, over the exchange's groups.
    """
    for turn in range(3):
        own = json.dumps(None if mine is None else asdict(mine))
        said = exchange.round(f"ended {turn}", own.encode())
        heard = (Refusal.read(json.loads(text)) for of in said.values() for text in of)
        told = [refusal for refusal in heard if refusal is not None]
        mine = min(told, key=lambda r: (not r.fatal, r.heard), default=mine)
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


def failure(error: BaseException) -> Refusal:
    """What happened on this rank, and what would help."""
    if isinstance(error, SymmplanError) and "failed_rank" in error.fields:
        return Refusal("a peer failed", heard=True)
    what, fix, wants = f"{type(error).__name__}: {error}", None, WANT
    if isinstance(error, SymmplanError):
        what, fix, wants = error.what, error.fix, (BackendError,)
    fatal = not isinstance(error, wants)
    return Refusal(f"rank {world()[0]}: {what.splitlines()[0]}", fix or FIX, fatal)
