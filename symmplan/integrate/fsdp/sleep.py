"""A model's segments are given back for a while, and then the same plan has others.

[Note: sleep]
    Between steps FSDP2 has its shards, and nobody needs the segments. So they can be given back to
    the driver, with what NCCL and peers have of them, while another program uses the device. The
    plan stays, and all ranks obtain its memory again when they wake, or come to the next
    collective: one rendezvous for each segment and group. Nothing is recorded, measured or planned.

    Communicators of symmplan's own end, too, once nobody's segments are registered with them, and
    are made again: see [Note: own communicators] in `symmplan.place.engines`. What the program's
    own communicator has set up for its first registration stays as long as that lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan.coordination.own import own_work
from symmplan.errors import RunError
from symmplan.runtime.sleep import all_may_sleep, in_capture, tell
from symmplan.torch_private import autograd

if TYPE_CHECKING:
    from symmplan.integrate.fsdp.segments import Memory
    from symmplan.runtime.sleep import WhyNot

__all__ = ["sleep", "wake"]


@own_work
def sleep(runtime: Any) -> None:
    """Give the memory of a model's plan back. See [Note: sleep].

    Args:
        runtime: The model's `symmplan.integrate.fsdp.serve.Runtime`.

    Raises:
        RunError: It is in use on some rank; raised on all of them, and nothing has changed.

    Collective: yes, over all groups that have met in its segments, if there is any.
    """
    memory, planning = runtime.memory, runtime.planning
    if runtime.asleep or memory.arena is None:
        return
    if not all_may_sleep(_why_not(runtime), memory.met, runtime.options.timeout):
        return
    runtime.recorder.release_all()
    runtime.asleep = True
    planning.sleep()
    runtime.recorder.rest()
    runtime.counts["sleeps"] += 1


@own_work
def wake(runtime: Any) -> None:
    """Obtain the memory of a model's plan again.

    If a rank cannot have it any more, FSDP2 runs in torch's own way on all ranks from then on.

    Args:
        runtime: The model's `symmplan.integrate.fsdp.serve.Runtime`.

    Raises:
        RunError: A CUDA graph is being captured.

    Collective: yes, over all groups of the model, if it was given back.
    """
    if not runtime.asleep:
        return
    memory: Memory = runtime.memory
    assert memory.facade is not None
    if memory.facade.is_capturing():
        raise RunError(
            "a CUDA graph is being captured while FSDP2's segments are given back",
            expected="segments whose addresses the graph can have",
            got="a handle that is asleep",
            fix="call handle.wake() before the capture",
        )
    made = runtime.planning.wake()
    if made is not None:
        runtime.schedule = made
    runtime.asleep = False
    runtime.begin_stretch()
    tell(memory.preparation.user, memory.segment_bytes, asleep=False)


def _why_not(runtime: Any) -> WhyNot:
    """Why a model cannot sleep now on this rank."""
    memory: Memory = runtime.memory
    assert memory.arena is not None
    name, segment = next(iter(memory.arena.segments.items()), ("", None))
    if memory.capture and segment is not None:
        return in_capture("handle", f"segment {name!r} at {segment.address:#x}")
    tenant = memory.turns
    if tenant is not None and tenant.busy:
        return (
            "handle.sleep() was called in an iteration of a session that lies in FSDP2's segments",
            tenant.user,
            "call it behind session.step()",
        )
    mine = {memory.arena.user} | ({tenant.user} if tenant is not None else set())
    others = [user for user in memory.arena.tenants if user not in mine]
    if others:
        return (
            "handle.sleep() was called while others have bytes of FSDP2's segments",
            others[0],
            "let the compile backend sleep first, or release it",
        )
    if autograd.in_backward():
        return (
            "handle.sleep() was called inside a backward pass",
            "a backward pass that is running",
            "call it between steps",
        )
    viewed = next((u for u in runtime.planning.unshards if not u.can_leave()), None)
    if viewed is not None:
        return (
            f"handle.sleep() was called while parameters of FSDP module {viewed.site!r} are in use",
            "a graph, or a prefetch, that has them in the segments",
            "call it after backward(), or drop the results of the forward pass first",
        )
    return None
