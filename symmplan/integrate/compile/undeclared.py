"""Ops of a graph that run over process groups and have no declaration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmplan.capture.graphs import called, hidden_calls
from symmplan.process import PROCESS
from symmplan.registry.inventory import describe_op
from symmplan.registry.schema import schema_of
from symmplan.report.log import LOG
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from torch import fx

    from symmplan.torch_private.ops import OpOverload

#: As torch's own registry wants the argument to be called that names a group.
_ASKED = "group_name"


def tell_undeclared(module: fx.GraphModule) -> None:
    """Say once of each such op, in the log, what would place its tensors.

    Collective: no.
    """
    calls = [(node, called(node)) for node in module.graph.nodes]
    calls += [(node, overload) for node, overload, _ in hidden_calls(module.graph, module)]
    for node, op in calls:
        if op is None or op in PROCESS.undeclared:
            continue
        found = _group_of(op, node)
        if found is not None:
            PROCESS.undeclared.add(op)
            LOG.warning("%s", _told(op, *found))


def _group_of(op: OpOverload, node: fx.Node) -> tuple[str, str] | None:
    """The argument that names a group, and the name; None where there is none, or it is declared.

    An argument names a group if torch has one of that name, or if it is called as torch's own
    registry asks: then torch need not know the group.
    """
    given = dict(node.kwargs)  # also of an op that is inside of another, which has the arguments
    if called(node) is op:
        given.update(zip((a.name for a in schema_of(op).arguments), node.args, strict=False))
    names = {name: value for name, value in given.items() if isinstance(value, str)}
    entry = describe_op(op) if names else None
    if entry is None or entry.known or entry.spec is not None:
        return None
    found = [n for n, value in names.items() if n == _ASKED or _is_group(value)]
    return (found[0], names[found[0]]) if found else None


def _is_group(name: str) -> bool:
    try:
        c10d.group_by_name(name)
    except LookupError:
        return False
    return True


def _told(op: OpOverload, argument: str, group: str) -> str:
    schema = schema_of(op)
    tensors = [a.name for a in schema.arguments if a.tensor]
    tensors += ["return"] if any(r.tensor for r in schema.results) else []
    names = ", ".join(f'"{name}"' for name in tensors)
    fix = f'symmplan.register_symm_mem_args("{schema.name}", [{names}], group="{argument}")'
    known = "" if _is_group(group) else f"; torch must know its group {group!r}, too"
    return (
        f"{schema.name} runs over a process group (its argument {argument!r}) and is not declared: "
        "its tensors stay in ordinary memory. If it reads or writes its peers' memory, this places "
        f"them: {fix}{known}"
    )
