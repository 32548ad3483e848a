"""Programs that give their memory back for a while: whether all ranks can, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from symmplan.coordination.all_gather import all_gather_json
from symmplan.coordination.world import current
from symmplan.errors import RunError
from symmplan.memory.backends.windows import take_back
from symmplan.memory.beyond import counting
from symmplan.memory.cache import give_back_together
from symmplan.memory.meeting import device_hosts
from symmplan.memory.streams import synchronize
from symmplan.place import engines
from symmplan.report.format import size
from symmplan.report.log import LOG

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from symmplan.memory import Arena

#: Why memory cannot be given back: what is wrong, what was found, and what to do.
WhyNot: TypeAlias = "tuple[str, str, str] | None"


def all_may_sleep(why: WhyNot, groups: Mapping[str, Any], timeout: float) -> bool:
    """See that all ranks can give their memory back; False in a simulated world, which has none.

    Args:
        why: Why this rank cannot; None if it can.
        groups: ``{name: process group}`` of all ranks of the program.
        timeout: Seconds that ranks wait for each other.

    Raises:
        RunError: Some rank cannot; raised on all of them.

    Collective: yes, over those groups.
    """
    if current() is not None:
        return False
    for _ in range(3):  # in a mesh a rank hears of others through its peers
        said = all_gather_json("sleep", dict.fromkeys(groups, why), groups, timeout)
        why = next((x for of in said.values() for x in of if x), None)
    if why is not None:
        what, got, fix = why
        raise RunError(what, expected="memory that nobody uses", got=got, fix=fix)
    return True


def give_back(
    user: str,
    arenas: Sequence[Arena],
    groups: Mapping[str, Any],
    device: torch.device,
    timeout: float,
) -> None:
    """Give segments of a program that sleeps back to the driver, with all that is registered.

    So are symmplan's own communicators that no other program's segments are registered with.

    Args:
        user: The program, for people.
        arenas: Its segments, in one order on all ranks.
        groups: ``{name: process group}`` of those that met in them.
        device: Where they lie.
        timeout: Seconds that ranks wait for each other.

    Collective: yes, over those groups and their communicators for copy engines.
    """
    nbytes = sum(arena.segment_bytes for arena in arenas)
    synchronize(device)
    with counting("communicators", device):
        give_back_together(arenas, engines.with_known(groups), timeout)
        engines.end_unused(groups, timeout)
        device_hosts.end_unused(groups, timeout)
        # A driver has bytes back once the peers do not map them any more.
        all_gather_json("given back", dict.fromkeys(groups), groups, timeout)
    tell(user, nbytes, asleep=True)


def take_back_replaced(groups: Mapping[str, Any], device: torch.device, timeout: float) -> None:
    """Take back what is registered of segments that larger ones have replaced on all ranks.

    Args:
        groups: ``{name: process group}`` of those that met in them.
        device: Where they lie.
        timeout: Seconds that ranks wait for each other.

    Collective: as `give_back`.
    """
    synchronize(device)  # what was there may still be copied to the larger ones
    with counting("communicators", device):
        take_back(engines.with_known(groups), timeout)


def tell(user: str, nbytes: int, *, asleep: bool) -> None:
    """Log that a program's segments were given back, or that it has some again."""
    LOG.info("%s %s: %s of segments", user, "sleeps" if asleep else "is awake", size(nbytes))


def in_capture(who: str, got: str) -> WhyNot:
    """Why memory stays whose addresses a captured CUDA graph has.

    Args:
        who: Whose ``sleep()`` was called.
        got: The segment, and where it is.
    """
    what = f"{who}.sleep() was called, and a captured CUDA graph has addresses of the segments"
    return what, got, "keep it awake, or drop its graphs and remove or release it"
