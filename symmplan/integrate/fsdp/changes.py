"""Whether the shards of a module have changed since they were gathered.

[Note: versions of shards]
    A tensor's version grows with what is written to it, but optimizers that write to many DTensors
    in one call (``foreach``, ``fused``) leave their versions as they were. So steps of optimizers
    are counted, too: of those that have DTensors, as a rank alone may have another. What is written
    past all of these (through ``.data``, or by a program's own calls of ``torch._foreach_*``)
    between a module's gather and its use is not seen.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from symmplan.memory.streams import capture_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim.optimizer import Optimizer

__all__ = ["State", "count_steps", "state_of"]

#: Equal for shards that hold the same.
State = tuple[int, ...]

_steps = [0]


@functools.cache
def count_steps() -> None:
    """From now on steps of optimizers are counted. See [Note: versions of shards]."""

    def count(optimizer: Optimizer, *_: object) -> None:
        groups = optimizer.param_groups
        _steps[0] += any(isinstance(p, DTensor) for group in groups for p in group["params"])

    register_optimizer_step_post_hook(count)


def state_of(parameters: Sequence[Any], *, cuda: bool) -> State | None:
    """The state of FSDP2's parameters' shards; None if it cannot be told.

    Args:
        parameters: FSDP2's.
        cuda: Whether they lie on a device; then it counts which CUDA graph is being captured.
    """
    found = [_steps[0], capture_of() if cuda else 0]
    for parameter in parameters:
        shard = parameter.sharded_param
        local = getattr(shard, "_local_tensor", shard)
        if local.is_inference() or shard.is_inference():
            return None
        found += (id(local), local._version, shard._version)
    return tuple(found)
