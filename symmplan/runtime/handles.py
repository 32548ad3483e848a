"""What users hold of a program: its memory and its peers are those of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from symmplan.errors import OneProcessError

if TYPE_CHECKING:
    from typing import SupportsIndex

    from typing_extensions import Self


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
