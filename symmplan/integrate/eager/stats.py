"""What an eager session did, and what its copies are for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen
from torch._ops import OpOverload

from symmplan.capture.producers import out_overload

if TYPE_CHECKING:
    from symmplan.capture.eager import Recorder
    from symmplan.capture.sites import Captured

__all__ = ["Copy", "Stats", "copies_of"]


@frozen
class Stats:
    """What a session did.

    Attributes:
        rendezvous: (segment, group) pairs rendezvoused; does not grow after a freeze.
        placed: Declared tensors that live in symmetric memory; ``staged + bound``.
        staged: Those of them that are copied in or out.
        bound: Those of them that are produced or used where they lie.
        segment_bytes: Bytes of symmetric memory on this rank.
        lower_bound_bytes: Proven minimum of those bytes.
        iterations: Iterations that ended, the recorded ones included.
        served: Calls that ran in placements.
        copies: Copies into and out of placements so far.
        copied: What is copied in every iteration, why, and the line that would avoid it.
    """

    rendezvous: int = 0
    placed: int = 0
    staged: int = 0
    bound: int = 0
    segment_bytes: int = 0
    lower_bound_bytes: int = 0
    iterations: int = 0
    served: int = 0
    copies: int = 0
    copied: tuple[Copy, ...] = ()


@frozen
class Copy:
    """A declared tensor that is copied, and what would avoid it.

    Attributes:
        op: Qualified name of the op.
        where: The argument or result.
        buffer: Name of the buffer.
        nbytes: How much is copied.
        reason: Why.
        line: Where to change the program, ``"file:line"``.
        fix: What to write there.
    """

    op: str
    where: str
    buffer: str
    nbytes: int
    reason: str
    line: str
    fix: str


def copies_of(captured: Captured, recorder: Recorder) -> tuple[Copy, ...]:
    """Every staged tensor, with the line that would avoid the copy."""
    buffers = {b.name: b for b in captured.problem.buffers}
    found = []
    for site in captured.sites:
        if site.how != "stage" or site.buffer is None:
            continue
        producer = site.source if site.source in recorder.lines else site.node
        fix = "drop it, or what was made of it, before session.step()"
        if site.kind == "argument" and "producer" in site.reason:
            target = getattr(site.source, "target", None)
            what = str(target).removeprefix("aten.").split(".")[0]
            fix = "let an op that takes out= write it, in memory from symmplan.empty"
            if what.startswith(("empty", "new_empty")):
                fix = "allocate it with symmplan.empty"
            elif isinstance(target, OpOverload) and out_overload(target) is not None:
                fix = f"write symmplan.out(torch.{what}, ...) where it is made"
        elif site.kind == "argument":
            fix = "make it in the iteration, in memory from symmplan.empty"
        found.append(
            Copy(
                captured.specs[site.node].op,
                site.where,
                site.buffer,
                buffers[site.buffer].nbytes,
                site.reason,
                recorder.lines.get(producer, ""),
                fix,
            )
        )
    return tuple(found)
