"""An op's schema as plain values, the ways to point at an op, and the arguments of its calls."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import frozen

from symmplan.errors import CaptureError, DeclarationError, UnknownOpError, closest
from symmplan.torch_private import torch_registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from symmplan.model import OpSpec
    from symmplan.torch_private.ops import OpOverload, OpOverloadPacket

#: What names an op: ``"ns::name"``, ``"ns::name.overload"``, an ``OpOverload``, an
#: ``OpOverloadPacket``, or what ``torch.library.custom_op`` returns.
OpRef: TypeAlias = Any


@frozen
class Argument:
    """One argument of an op.

    Attributes:
        name: As in the schema.
        type: As in the schema, for people.
        tensor: Whether it holds tensors: one, an optional one, or (nested) lists of them.
        group: Whether its type can carry a process group: a name, a group object or anything.
        written: Whether the op changes it.
        kwarg_only: Whether it can only be given by name.
        has_default: Whether it may be left out.
        default: Its value then.
    """

    name: str
    type: str
    tensor: bool
    group: bool
    written: bool
    kwarg_only: bool
    has_default: bool
    default: Any = None


@frozen
class Result:
    """One result of an op; ``tensor`` as for `Argument`."""

    index: int
    type: str
    tensor: bool


@frozen
class Schema:
    """What an op takes and gives.

    Attributes:
        name: Qualified name, such as ``"aten::add"``.
        overload: Of which overload.
        arguments: In order.
        results: In order.
        text: The schema as torch prints it.
    """

    name: str
    overload: str
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    text: str

    @property
    def op(self) -> str:
        """Both, such as ``"aten::add.Tensor"``."""
        return f"{self.name}.{self.overload}"

    def argument(self, name: str) -> Argument | None:
        """The argument of that name, if any."""
        return next((a for a in self.arguments if a.name == name), None)


def qualified_name(op: OpOverload) -> str:
    """Name with overload, ``".default"`` included (``OpOverload.name()`` leaves that one out)."""
    schema = torch_registry.raw_schema(op)
    return f"{schema.name}.{schema.overload_name or 'default'}"


@functools.lru_cache(maxsize=4096)
def schema_of(op: OpOverload) -> Schema:
    """Read the schema of ``op``; cached per op object, so that a redefined op is read afresh."""
    schema = torch_registry.raw_schema(op)
    return Schema(
        name=schema.name,
        overload=schema.overload_name or "default",
        arguments=tuple(
            Argument(
                name=a.name,
                type=str(a.real_type),
                tensor=_holds_tensors(a.type),
                group=_can_carry_group(a.type),
                written=a.alias_info is not None and bool(a.alias_info.is_write),
                kwarg_only=a.kwarg_only,
                has_default=a.has_default_value(),
                default=a.default_value if a.has_default_value() else None,
            )
            for a in schema.arguments
        ),
        results=tuple(
            Result(index=i, type=str(r.type), tensor=_holds_tensors(r.type))
            for i, r in enumerate(schema.returns)
        ),
        text=str(schema),
    )


def _holds_tensors(kind: Any) -> bool:
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    return bool(kind.kind() == "TensorType")


def _can_carry_group(kind: Any) -> bool:
    if kind.kind() == "OptionalType":
        kind = kind.getElementType()
    if kind.kind() == "ClassType":
        return str(kind).rsplit(".", 1)[-1] == "ProcessGroup"
    return kind.kind() in ("StringType", "AnyType", "PyObjectType")


def resolve(ref: OpRef) -> tuple[OpOverload, ...]:
    """The overloads that ``ref`` points at: one, or all of a name without overload.

    Raises:
        DeclarationError: ``ref`` is of no known kind, or no such op is defined (yet).
    """
    if isinstance(ref, str):
        return _by_name(ref)
    overload = torch_registry.as_overload(ref)
    if overload is not None:
        return (overload,)
    packet = torch_registry.as_packet(ref)
    if packet is not None:
        return _overloads(packet)
    raise DeclarationError(
        f"{_show(ref)} is not an op",
        expected='a name like "mylib::foo", an OpOverload, an OpOverloadPacket or the result of '
        "torch.library.custom_op",
        got=type(ref).__name__,
        fix="put symm_args above torch.library.custom_op, not below it"
        if callable(ref)
        else "pass the op's qualified name",
        op=_show(ref),
    )


def is_defined(name: str) -> bool:
    """Whether this process has an op of that qualified name."""
    try:
        resolve(name)
    except DeclarationError:
        return False
    return True


def _show(ref: object) -> str:
    return getattr(ref, "__qualname__", None) or repr(ref)


def _overloads(packet: OpOverloadPacket) -> tuple[OpOverload, ...]:
    return tuple(getattr(packet, name) for name in packet.overloads())


def _by_name(name: str) -> tuple[OpOverload, ...]:
    namespace, colons, rest = name.partition("::")
    base, dot, overload = rest.partition(".")
    parts = [namespace, base, *([overload] if dot else [])]
    if not (colons and all(part.isidentifier() for part in parts)):
        raise UnknownOpError(
            f"{name!r} is not a qualified op name",
            expected='"namespace::name" or "namespace::name.overload"',
            got=repr(name),
            fix="write the name as it is registered, with its namespace and two colons",
            op=name,
        )
    packet = _packet(namespace, base)
    if packet is None and torch_registry.define_distributed_ops():
        packet = _packet(namespace, base)  # one of torch's own that was not imported yet
    if packet is None:
        raise _unknown_op(name, namespace, base)
    if not overload:
        return _overloads(packet)
    existing = tuple(packet.overloads())
    if overload not in existing:
        raise UnknownOpError(
            f"{namespace}::{base} has no overload {overload!r}",
            expected=f"one of {', '.join(existing)}",
            got=repr(overload),
            fix=suggestion(overload, existing) or f"name one of them, or {namespace}::{base} alone",
            op=name,
            existing=existing,
        )
    return (getattr(packet, overload),)


def _packet(namespace: str, base: str) -> OpOverloadPacket | None:
    import torch

    return torch_registry.as_packet(getattr(getattr(torch.ops, namespace), base, None))


def _unknown_op(name: str, namespace: str, base: str) -> UnknownOpError:
    existing = sorted({n.partition(".")[0] for n in torch_registry.op_names()})
    same = [n for n in existing if n.startswith(f"{namespace}::")]
    if same:  # compare without the namespace: being equal, it would make everything look close
        close = closest(base, [n.partition("::")[2] for n in same])
        guess = f"{namespace}::{close}" if close else None
    else:
        guess = closest(f"{namespace}::{base}", existing)
    return UnknownOpError(
        f"no op named {namespace}::{base} is defined",
        expected=f"one of the {len(same)} ops of namespace {namespace!r}"
        if same
        else f"a namespace that has ops; {namespace!r} has none",
        got=repr(name),
        fix=(f"did you mean {guess!r}? If not, " if guess else "")
        + f"import or define {namespace}::{base} first",
        op=name,
        existing=tuple(same),
    )


def suggestion(given: str, existing: Iterable[str]) -> str | None:
    """``"did you mean ...?"`` when something close exists."""
    close = closest(given, existing)
    return f"did you mean {close!r}?" if close else None


def bind_arguments(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments of a call by name, in the order of the schema, defaults filled in.

    Nodes of a graph are as good as values. Collective: no.

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
    spec: OpSpec,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    default: str | None = None,
) -> str:
    """Name of the process group of a call.

    The value of the declared group argument may be the group's name, a ``ProcessGroup``, a boxed
    one, a graph node that stands for either, or None for the default group. Ops without such an
    argument run over the default group, too. That is ``default``, or the world.

    Collective: no.

    Raises:
        CaptureError: The call does not fit the schema, or no group name can be read from it.
    """
    given = None if spec.group is None else bind_arguments(op, args, kwargs)[spec.group]
    value = _value_of(given)
    if value is None:
        value = default or torch_registry.default_group_name()
    name = value if isinstance(value, str) else _name_of(value)
    if name:
        return name
    raise CaptureError(
        f"{spec.op} runs over the default process group, and there is none"
        if spec.group is None
        else f"argument {spec.group!r} of {spec.op} names no process group",
        expected="a group name or a ProcessGroup"
        + ("" if given is not None else "; None means the default group, and there is none"),
        got=f"{given!r}",
        fix="initialise the process group first, or name one with default_group="
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
        name = getattr(torch_registry.process_group_of(value), "group_name", None)
    except RuntimeError:  # a group that was destroyed has no name any more
        return None
    return name if isinstance(name, str) else None
