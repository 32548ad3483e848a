"""What users hold of a program: its memory and its peers are those of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from symmplan.coordination.all_gather import all_gather_json
from symmplan.coordination.world import current
from symmplan.errors import OneProcessError, RunError
from symmplan.report.format import size
from symmplan.report.log import LOG

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import SupportsIndex

    from typing_extensions import Self

#: Why memory cannot be given back: what is wrong, what was found, and what to do.
WhyNot: TypeAlias = "tuple[str, str, str] | None"


class OfOneProcess:
    """Base of objects that cannot be pickled. A deep copy of what has one shares it."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise OneProcessError(
            f"{self!r} cannot be pickled",
            expected="plain values, such as its plan (plan.to_json()) or its stats",
            got=f"an object of type {type(self).__name__}, with memory and peers of its process",
            fix="leave it out of what is saved or sent, and make one in each process",
        )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


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
