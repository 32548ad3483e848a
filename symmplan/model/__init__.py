"""The vocabulary: what a program needs (`Problem`) and what was decided (`Plan`).

Pure Python and frozen: values flow through the stages, no stage mutates what it was given. Sizes,
offsets and alignments are bytes everywhere. Nothing here imports torch.

[Note: happens-before]
    A `Problem` is a list of operations. Operations of one *stream* run in the order in which they
    are listed; ``edges`` add the rest (events, waits of asynchronous work). Their transitive
    closure is *happens-before*. Two buffers may share bytes only if every access of one strictly
    happens-before the first access of the other.

[Note: peers count]
    Ranks run the same program, each at its own pace. An access with ``remote=True`` is one where
    ranks touch each other's bytes of the buffer, besides their own. Order on one rank says nothing
    about them. What does are facts of the *call*, which begins at its operation and ends at the
    operation that lists it in ``ends`` (the wait of asynchronous work), or else at once:

    ``synchronizes``  its end on a rank comes after its start on every rank of its group. So what
                   precedes the peers' start precedes what follows my end; what lies between a
                   start and its end is ordered with no peer.
    ``handshake``  it touches no symmetric byte, also none of this rank's own, before every rank of
                   its group has started it.
    ``release``    it ends, on any rank, when the accesses of all ranks are over.
    ``enters``     (of one access) peers touch a rank's bytes only after that rank has started.
    ``releases``   (of one access) and no more after that rank's end.

    All accesses of a call, own and peers', lie between its start and its end on the rank that
    makes them, at any time, in any order; what is not stated is not assumed. Two accesses of the
    same bytes of one rank, at least one of them a write, whoever makes them, need an order. Where
    the program has none the plan lists a `Barrier`, and whoever runs the plan must run it. A
    program repeats, so this holds from its end to its start, too.
"""

from __future__ import annotations

from symmplan.model.declared import (
    DEFAULT_ALIGN,
    PUSHES,
    Algorithm,
    AlgorithmName,
    OpSpec,
    Requirement,
)
from symmplan.model.plan import (
    Alternative,
    Barrier,
    Bound,
    Budget,
    Demotion,
    Placement,
    Plan,
    SegmentSpec,
)
from symmplan.model.problem import Access, Buffer, Operation, Problem, Unplanned

__all__ = [
    "DEFAULT_ALIGN",
    "PUSHES",
    "Access",
    "Algorithm",
    "AlgorithmName",
    "Alternative",
    "Barrier",
    "Bound",
    "Budget",
    "Buffer",
    "Demotion",
    "OpSpec",
    "Operation",
    "Placement",
    "Plan",
    "Problem",
    "Requirement",
    "SegmentSpec",
    "Unplanned",
]
