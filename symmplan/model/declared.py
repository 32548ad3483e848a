"""What ops declare: `Requirement` and `OpSpec`."""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import frozen

__all__ = ["DEFAULT_ALIGN", "PUSHES", "Algorithm", "AlgorithmName", "OpSpec", "Requirement"]

#: The algorithms of a collective, see `Algorithm`.
AlgorithmName: TypeAlias = Literal[
    "ordinary", "symmetric", "copy engine", "push", "shared push", "two-level"
]
#: Those that copy a reduce-scatter's inputs into the peers' slots.
PUSHES: tuple[AlgorithmName, ...] = ("push", "shared push")

#: Alignment in bytes of a placement unless something asks for more: a vector store of the widest
#: kind (TMA) wants 256 between input and output, so this keeps every pair congruent.
DEFAULT_ALIGN = 256


@frozen
class Algorithm:
    """How a collective runs.

    Attributes:
        name: ``"ordinary"``: in ordinary memory. ``"symmetric"``: in its placement, through the
            program's own communicator. ``"copy engine"``: in its placement, without kernels.
            ``"push"``: a reduce-scatter whose inputs are copied into the peers' slots, of which
            each group has two. ``"shared push"``: the same into bytes that others have before and
            after, so the ranks meet before they push. ``"two-level"``: over several hosts, in its
            placement; through the process group from host to host, and in symmetric memory within
            each.
        reason: Why it stays in ordinary memory.
        fastest: Whether it stays there because no algorithm was measured to be faster.
    """

    name: AlgorithmName
    reason: str = ""
    fastest: bool = False


@frozen
class Requirement:
    """What an op declares of one of its arguments or results.

    Attributes:
        where: ``"name"`` of an argument, ``"return"`` or ``"return.0"``, ... of a result.
        align: Alignment of the placement in bytes, a power of two.
        signal_pad: Whether the op uses the signal pad of the segment that holds this tensor.
        enters: Peers touch a rank's bytes of it only after that rank has started the op. See
            [Note: peers count].
        releases: No peer touches a rank's bytes of it after the op has ended on that rank.
    """

    where: str
    align: int = DEFAULT_ALIGN
    signal_pad: bool = False
    enters: bool = False
    releases: bool = False

    @property
    def head(self) -> str:
        """Name of the argument, or ``"return"``."""
        return self.where.partition(".")[0]

    @property
    def index(self) -> int | None:
        """Of which of several results it is; None for an argument, and for all results."""
        number = self.where.partition(".")[2]
        return int(number) if number else None

    @property
    def of_result(self) -> bool:
        """Whether it is about what the op returns."""
        return self.head == "return"


@frozen
class OpSpec:
    """All that is declared of one op.

    Attributes:
        op: Qualified name with overload, such as ``"_c10d_functional::all_reduce.default"``.
        requirements: The arguments and results that must be symmetric, ordered as in the schema.
        group: Name of the schema argument that names the process group; None if there is none, and
            the op runs over the default group.
        handshake: No symmetric byte, also none of this rank's own, is touched before all ranks of
            the group have started the op. See [Note: peers count], also for the next two.
        release: The op (or its wait, if asynchronous) ends only after all ranks' accesses ended.
        synchronizes: Its end on a rank comes after its start on every rank of the group. Every op
            that handshakes or releases does.
        asynchronous: The op only starts the work; ``wait_tensor`` of its result ends it.
        out: Qualified name of the variant that writes its results into given tensors, if any.
        origin: Who declared it: ``"catalogue"``, ``"user"`` or ``"torch"`` (upstream's registry).
        fills: Pairs (argument, result): before the op is started the argument is copied into the
            result, where the op then works in place.
        wrong: Pairs (name, why it cannot be served) of what torch's registry says besides.
    """

    op: str
    requirements: tuple[Requirement, ...]
    group: str | None
    handshake: bool = False
    release: bool = False
    synchronizes: bool = False
    asynchronous: bool = False
    out: str | None = None
    origin: str = "user"
    fills: tuple[tuple[str, str], ...] = ()
    wrong: tuple[tuple[str, str], ...] = ()
