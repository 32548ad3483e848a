"""The algorithm by which a collective runs: ruled by the user, or measured, alike on all ranks.

Symmetric memory is not always faster: without NVLink multicast a symmetric reduce-scatter is slower
than the ordinary one, small all-gathers gain nothing, and a copy into or out of a placement may
cost more than the collective saves. The cost of a collective is more than its own time: its kernels
take multiprocessors from the program's kernels, while copy engines take none. So on devices each
kind, size and group of collective is timed by every algorithm, beside matrix products; see [Note:
what is timed] in `symmplan.choose.clock`.

If several algorithms are about equally fast, the cheapest is chosen: first the one that takes fewer
multiprocessors, if the program computes at the same time, then the one with fewer symmetric bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from attrs import field, frozen

from symmplan.memory.backends.torch_symm import SPLIT_WORDS
from symmplan.model import AlgorithmName

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

_Word: TypeAlias = Literal["auto", "measure", "placed", AlgorithmName]
CHOOSE: tuple[str, ...] = get_args(_Word)
#: How algorithms are chosen. The name of an algorithm is meant for all collectives that have it; a
#: path is that of a table, see `symmplan.choose.tuning_table`, and may also be a text that ends
#: with ``.json``.
Choose: TypeAlias = "_Word | os.PathLike[str]"

#: Why a collective is ordinary that would be faster in symmetric memory, where there is a budget.
DEMOTED = "it was demoted by the budget of symmetric bytes"
#: Why, where there is none.
NO_ROOM = (
    "there was no room for it: the device, or /dev/shm on the CPU, is nearly full, or the device "
    "would be fuller than without symmplan; capacity= sets another limit"
)

#: Algorithms whose times are in this ratio are about as fast.
ALIKE = 0.97
#: Seconds that a collective in symmetric memory is taken to cost a program on devices besides,
#: unless the plan is known to have no barriers for it: in front of bytes that are used again the
#: ranks meet, and the later one holds up the others.
MEETING = 10e-6


@frozen
class Choice:
    """The measured times of one kind and size of collective, and its algorithm.

    Attributes:
        op: The collective: an op's qualified name, or ``"all_gather"`` or ``"reduce_scatter"`` of
            FSDP2.
        nbytes: Bytes of its inputs on one rank; for FSDP2, of the all-gather's output or the
            reduce-scatter's input.
        dtype: Element type.
        group: Name of the process group.
        ranks: How many ranks it has.
        seconds: ``{algorithm: time of the slowest rank}``, copies included. Large collectives are
            measured on a part, and the times are scaled.
        algorithm: The algorithm that was chosen: ``"ordinary"``, ``"symmetric"``,
            ``"copy engine"``, ``"push"`` or ``"two-level"``.
        copied_in: Whether its inputs must be copied into placements.
        copied_out: Whether its results must be copied out of them.
        beside: Floating-point operations of the matrix products that overlap with it, as the next
            power of two; 0 if there are none or if they are not known.
        ruled: Why a rule decided its algorithm; empty if it was measured.
    """

    op: str
    nbytes: int
    dtype: str
    group: str
    ranks: int
    seconds: Mapping[str, float] = field(hash=False)
    algorithm: AlgorithmName
    copied_in: bool = False
    copied_out: bool = False
    beside: int = 0
    ruled: str = ""

    @property
    def placed(self) -> bool:
        """Whether it runs in symmetric memory."""
        return self.algorithm != "ordinary"

    @property
    def reason(self) -> str:
        """Why it stays in ordinary memory, empty if it does not."""
        if self.placed:
            return ""
        if self.ruled:
            return self.ruled
        others = [seconds for algorithm, seconds in self.seconds.items() if algorithm != "ordinary"]
        if not others:
            return SPLIT_WORDS
        copies = [w for w, b in (("in", self.copied_in), ("out", self.copied_out)) if b]
        under = f", copied {' and '.join(copies)}" if copies else ""
        return (
            f"symmetric memory was not clearly faster: {min(others) * 1e6:.0f} us{under}, "
            f"against {self.seconds['ordinary'] * 1e6:.0f} us in torch's own way"
        )


def fastest(
    seconds: Mapping[str, float], *, kernels: bool, beside: bool, barriers: bool = True
) -> AlgorithmName:
    """The algorithm to choose: among the fastest, the one that otherwise costs least.

    Args:
        seconds: ``{algorithm: time}``. Where ``kernels`` and ``barriers``, algorithms in symmetric
            memory are charged `MEETING`.
        kernels: Whether ordinary collectives are kernels on the device that computes.
        beside: Whether anything computes meanwhile.
        barriers: Whether the program's plan may have barriers for it.
    """
    inside: tuple[AlgorithmName, ...] = ("symmetric", "two-level")
    algorithms: tuple[AlgorithmName, ...] = (*inside, "ordinary", "push", "copy engine")
    if kernels:
        algorithms = ("ordinary", "push", "copy engine", *inside)
    if kernels and beside:
        algorithms = ("push", "copy engine", "ordinary", *inside)
    if kernels and barriers:
        seconds = {w: s + MEETING * (w != "ordinary") for w, s in seconds.items()}
    enough = min(seconds.values()) / ALIKE
    return next(w for w in algorithms if seconds.get(w, float("inf")) <= enough)
