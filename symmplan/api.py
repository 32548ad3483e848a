"""`symmplan.plan`: any program in, a checked plan out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan.errors import OptionError
from symmplan.model import Plan, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx
    from torch.export import ExportedProgram

__all__ = ["plan"]


def plan(
    program: fx.Graph | fx.GraphModule | ExportedProgram | Problem,
    example_inputs: Sequence[Any] | None = None,
    *,
    capacity: int | str | None = None,
    default_group: str | None = None,
) -> Plan:
    """Assign every declared tensor of a program an offset in shared symmetric segments.

    Args:
        program: An ``fx.Graph``, a ``GraphModule``, an ``ExportedProgram`` or a `Problem`.
        example_inputs: Inputs from which shapes are derived, on fake tensors, if the graph's nodes
            have no shapes. Only for graphs.
        capacity: Most bytes of all segments together, as a number or as text such as
            ``"40GiB"``; None for no limit.
        default_group: Name of the process group of declared ops that name none; the world if None.

    Returns:
        A verified plan. The same program gives the same plan on every machine.

    Raises:
        CaptureError: The program is of another kind, or has no sizes.
        CapacityError: The buffers do not fit into ``capacity``.
        OptionError: ``capacity`` is not a number of bytes, or ``default_group`` is not a name.
        MissingSeamError: This torch lacks a name that captures need.

    Collective: no.

    >>> import symmplan
    >>> problem = symmplan.Problem.from_intervals([("a", 0, 2, 64), ("b", 2, 4, 64)])
    >>> symmplan.plan(problem).peak_bytes
    64
    """
    from symmplan.planner import plan as plan_problem
    from symmplan.planner.budget import bytes_of
    from symmplan.report.log import log_plan

    nbytes = bytes_of(capacity)
    if default_group is not None and not isinstance(default_group, str):
        raise OptionError(
            f"default_group is {default_group!r}",
            expected="the name of a process group, or None for the world",
            got=type(default_group).__name__,
            fix="pass group.group_name",
        )
    if not isinstance(program, Problem):
        from symmplan.torch_private.table import require

        require("capture")
        from symmplan.capture import capture_fx

        captured = capture_fx(program, example_inputs, default_group=default_group)
        program = captured.problem
    made = plan_problem(program, capacity=nbytes)
    made.verify()
    log_plan("symmplan.plan", made)
    return made
