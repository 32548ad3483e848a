"""Is a placed program carried out: each barrier and copy once, in happens-before order?

``lowered`` is a list of what runs, in order: ``("barrier", group)`` or the name of an operation.
What is expected comes from the plan and the problem, not from the instructions.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch
    from typing_extensions import Self

    from symmplan.capture import Captured
    from symmplan.model import Barrier

#: What an operation of a placed call does.
_OF_CALLS = ("launch", "copy in", "copy out", "copy back")


def check(
    captured: Captured,
    barriers: Sequence[Barrier],
    lowered: Sequence[Any],
    apart: Collection[str] | None = None,
) -> None:
    """Fail if ``lowered`` is not what the plan wants.

    Args:
        captured: The program.
        barriers: Those of the plan.
        lowered: What runs.
        apart: Operations that run when something is waited for; None if ``lowered`` has all there
            is, also when dead placements are overwritten.
    """
    kinds = _OF_CALLS if apart is not None else (*_OF_CALLS, "poison")
    names = [o.name for o in captured.problem.operations]
    wanted = {n for n in names if n in captured.steps and captured.steps[n].kind in kinds}
    wanted.difference_update(apart or ())
    ran = [x for x in lowered if x in wanted]
    assert ran == [n for n in names if n in wanted]
    place = {name: i for i, name in enumerate(lowered) if name in wanted}
    due = [b for b in barriers if b.before not in (apart or ())]
    due.sort(key=lambda b: names.index(b.before))  # stable
    met = [i for i, x in enumerate(lowered) if not isinstance(x, str)]
    assert [lowered[i][1] for i in met] == [b.group for b in due]
    for at, barrier in zip(met, due, strict=True):
        end = names.index(barrier.before)
        before = [place[n] for n in names[:end] if n in place]
        behind = [place[n] for n in names[end:] if n in place]
        assert max(before, default=-1) < at < min(behind, default=len(lowered)), barrier


def of_graph(module: torch.fx.GraphModule) -> list[Any]:
    """What a rewritten graph runs."""
    import torch

    found: list[Any] = []
    for node in module.graph.nodes:
        if node.target is torch.ops.symmplan.barrier_.default:
            found.append(("barrier", node.args[1]))
        found += node.meta.get("operations", ())
    return found


class Tracing(contextlib.AbstractContextManager["Tracing"]):
    """Writes down what frozen eager sessions run; to be entered before they are frozen.

    Attributes:
        ran: As ``lowered``.
    """

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self._due: dict[str, list[Any]] = {}

    def __enter__(self) -> Self:
        from symmplan.integrate.eager.build import _Barrier
        from symmplan.integrate.eager.calls import EagerMachine

        self._undo = EagerMachine.doing, _Barrier.__call__
        doing, barrier = self._undo

        def traced_doing(machine: Any, operation: str) -> None:
            self._due[operation] = list(machine.event.due.get(operation, ()))
            doing(machine, operation)
            machine.do(lambda: self.ran.extend([operation] if operation not in self.ran else []))

        def traced_barrier(act: Any) -> None:
            self.ran.append(act)
            barrier(act)

        EagerMachine.doing, _Barrier.__call__ = traced_doing, traced_barrier
        return self

    def __exit__(self, *error: object) -> None:
        from symmplan.integrate.eager.build import _Barrier
        from symmplan.integrate.eager.calls import EagerMachine

        EagerMachine.doing, _Barrier.__call__ = self._undo

    def check(self, session: Any, iteration: Callable[[], object]) -> None:
        """Fail if a frozen eager session on one stream does not run what its plan wants.

        Args:
            session: The session.
            iteration: Runs one, with its `step`.
        """
        session.wake()  # what is looked at is there
        frozen = session._frozen
        apart = set()
        at_waits = set()
        for event in frozen.events:
            names = {name for _, name in event.copied_at_waits()}
            if event.placed is not None and event.form and event.pends:
                names |= {event.placed.copy("copy back", s) for s in event.placed.staged}
            apart |= names
            for name in names:
                at_waits |= {id(act) for act in self._due.get(name, event.due.get(name, ()))}
        self.ran.clear()
        iteration()
        ran = [x for x in self.ran if isinstance(x, str) or id(x) not in at_waits]
        lowered = [x if isinstance(x, str) else ("barrier", x.group) for x in ran]
        check(frozen.captured, frozen.plan.barriers, lowered, apart)
