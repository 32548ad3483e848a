"""What the copies of an eager session are for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._ops import OpOverload

from symmplan.capture.producers import out_overload
from symmplan.place.stats import Copy

if TYPE_CHECKING:
    from symmplan.capture.eager import Recorder
    from symmplan.capture.sites import Captured

__all__ = ["copies_of"]


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
