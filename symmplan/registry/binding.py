"""From a call of an op to its arguments by name and the name of its process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan.errors import CaptureError
from symmplan.registry import _upstream
from symmplan.registry.schema import schema_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch._ops import OpOverload

    from symmplan.model import OpSpec

__all__ = ["bind_arguments", "resolve_group_name"]


def bind_arguments(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments of a call by name, in the order of the schema, defaults filled in.

    Collective: no.

    Args:
        op: The op called.
        args: Positional arguments; nodes of a graph are as good as values.
        kwargs: Arguments by name.

    Raises:
        CaptureError: The call does not fit the schema.
    """
    schema = schema_of(op)
    positional = [a for a in schema.arguments if not a.kwarg_only]
    problem = None
    if len(args) > len(positional):
        problem = f"at most {len(positional)} positional arguments", f"{len(args)}"
    bound = {a.name: value for a, value in zip(positional, args, strict=False)}
    for name in kwargs:
        if name in bound:
            problem = "each argument once", f"{name!r} by position and by name"
        elif schema.argument(name) is None:
            problem = f"arguments {[a.name for a in schema.arguments]}", f"{name!r}"
    result = {}
    for argument in schema.arguments:
        if argument.name in bound:
            result[argument.name] = bound[argument.name]
        elif argument.name in kwargs:
            result[argument.name] = kwargs[argument.name]
        elif argument.has_default:
            result[argument.name] = argument.default
        else:
            problem = problem or (f"a value for {argument.name!r}", "none")
    if problem is not None:
        raise CaptureError(
            f"a call of {schema.op} does not fit its schema",
            expected=problem[0],
            got=problem[1],
            fix=f"call it as {schema.text}",
            op=schema.op,
        )
    return result


def resolve_group_name(
    spec: OpSpec, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Name of the process group of a call.

    The value of the declared group argument may be the group's name, a ``ProcessGroup``, a boxed
    one, a graph node that stands for either, or None for the default group.

    Collective: no.

    Args:
        spec: What is declared of ``op``.
        op: The op called.
        args: Its positional arguments.
        kwargs: Its arguments by name.

    Raises:
        CaptureError: The call does not fit the schema, or no group name can be read from it.
    """
    given = bind_arguments(op, args, kwargs)[spec.group]
    value = _value_of(given)
    if value is None:
        value = _upstream.default_group_name()
    name = value if isinstance(value, str) else _name_of(value)
    if name:
        return name
    raise CaptureError(
        f"argument {spec.group!r} of {spec.op} names no process group",
        expected="a group name or a ProcessGroup"
        + ("" if given is not None else "; None means the default group, and there is none"),
        got=f"{given!r}",
        fix="initialise the process group first"
        if given is None
        else "pass the group itself, or its name",
        op=spec.op,
        where=spec.group,
    )


def _value_of(given: Any) -> Any:
    """The value behind a graph node, or ``given`` itself."""
    from torch.fx import Node

    if not isinstance(given, Node):
        return given
    if given.op == "get_attr":
        value: Any = given.graph.owning_module
        for part in str(given.target).split("."):
            value = getattr(value, part, None)
        return value if value is not None else given
    for key in ("val", "example_value"):
        if given.meta.get(key) is not None:
            return given.meta[key]
    return given


def _name_of(value: Any) -> str | None:
    try:
        name = getattr(_upstream.process_group_of(value), "group_name", None)
    except RuntimeError:  # a group that was destroyed has no name any more
        return None
    return name if isinstance(name, str) else None
