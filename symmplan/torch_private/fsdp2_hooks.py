"""FSDP2's hooks of a module, which Dynamo must not trace.

FSDP2 wraps the function of such a hook by `torch.compiler.disable` anew in each call, which makes
about seventy Python calls. Wrapped once, it is the same function to its caller, and to Dynamo.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

from symmplan.torch_private.fsdp2 import param_groups
from symmplan.torch_private.table.fsdp2 import FSDP_HOOKS

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

#: Those that are called by name, of a module's state and of its parameter groups.
_OF_STATE = "_pre_backward", "_root_post_backward_final_callback"
_OF_GROUP = "pre_backward", "post_backward"
#: Those that a module has in tables.
_LISTED = "_pre_forward", "_post_forward"


def wrap_once(module: Any) -> Callable[[], None]:
    """Wrap the hooks of an ``FSDPModule`` once for all calls; returns what undoes that."""
    undo: list[tuple[MutableMapping[Any, Any], Any, Any, Any]] = []
    if FSDP_HOOKS.missing() or not getattr(torch._dynamo.config, "skip_fsdp_hooks", True):
        return lambda: None
    state = module._get_fsdp_state()

    def put(where: MutableMapping[Any, Any], key: Any, hook: Any) -> None:
        wrapped = _wrapped(hook)
        if wrapped is not None:
            undo.append((where, key, where.get(key), wrapped))
            where[key] = wrapped

    called = [(state, name) for name in _OF_STATE]
    called += [(group, name) for group in param_groups(module) for name in _OF_GROUP]
    for owner, name in called:
        put(vars(owner), name, getattr(owner, name))
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "__self__", None) is state and hook.__name__ in _LISTED:
                put(hooks, key, hook)

    def put_back() -> None:
        for where, key, before, ours in undo:
            if where.get(key) is not ours:  # somebody else's by now
                continue
            if before is None:
                del where[key]
            else:
                where[key] = before

    return put_back


def _wrapped(hook: Any) -> Any:
    """A hook that is wrapped already; None if this is not one that FSDP2 wraps in each call."""
    outer = getattr(hook, "__func__", None)
    code, inner = getattr(outer, "__code__", None), getattr(outer, "__wrapped__", None)
    if inner is None or code is None or code.co_freevars != ("func",):
        return None
    if not {"_dynamo", "disable"} <= {*code.co_names}:
        return None
    disabled = torch.compiler.disable(inner, reason="a hook of FSDP2")
    return types.MethodType(disabled, hook.__self__)
