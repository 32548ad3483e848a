"""`symmplan.expert_parallel`: the rows of a mixture of experts in planned symmetric memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan.integrate.moe.dispatcher import ExpertParallel
from symmplan.runtime.options import Options, here, whole
from symmplan.torch_private.table import require

if TYPE_CHECKING:
    import torch

    from symmplan.choose.choice import Choose
    from symmplan.memory.backends import MemoryName

__all__ = ["expert_parallel"]


def expert_parallel(
    group: Any = None,
    memory: MemoryName = "auto",
    *,
    max_tokens: int,
    choose: Choose = "auto",
    device: torch.device | str | None = None,
    timeout: float = 300.0,
) -> ExpertParallel:
    """Dispatch and combine of a mixture of experts whose ranks have different experts.

    One object serves all layers: they share one segment, as large as the worst case.

    Args:
        group: Torch's process group of the ranks that share the experts; the default one if None.
        memory: Name of a memory backend.
        max_tokens: The most rows that a rank receives in one call, equal on all ranks. With a
            capacity factor: ``int(factor * rows_that_a_rank_sends)``. If a rank receives more, all
            ranks plan again, the logger ``symmplan`` warns, and ``stats.replans`` counts it. With
            ``routes(..., rows=...)`` this is an error, because the host does not know the counts.
        choose: How rows move. ``"ordinary"``: by torch's ``all_to_all_single``. ``"symmetric"``: by
            kernels that write into the peers' memory, on devices with Triton. ``"push"``: by copies
            into the peers' memory; so do all other algorithms, and ``"symmetric"`` without Triton.
            ``"measure"``: by the fastest in the worst case, on all ranks, or by kernels if the host
            does not know the routes. ``"auto"``: measured on devices and over several hosts, else
            ``"symmetric"``. ``Path("choices.json")``: by a tuning table, as ``symmplan bench comm``
            writes it.
        device: Where rows lie; the current CUDA device if the group has NCCL, else the CPU.
        timeout: Seconds that ranks wait for each other before they raise.

    Raises:
        OptionError: ``max_tokens`` is not a positive integer, ``timeout`` is not a number of
            seconds, or there is no such memory backend, algorithm or device.
        CaptureError: There is no process group.
        BackendError: ``memory`` serves no tensors on the device.
        MissingSeamError: This torch lacks a name that the dispatch needs.

    Collective: no; `ExpertParallel`'s methods are.

    Example::

        experts = symmplan.expert_parallel(max_tokens=int(1.5 * tokens))
        routes = experts.routes(counts)  # rows for each rank
        inside = experts.dispatch(rows, routes)  # rows sorted by rank
        outside = experts.combine(expert(inside), routes)
    """
    whole("max_tokens", max_tokens)
    options = Options(memory=memory, choose=choose, timeout=timeout)
    require("experts")
    name, where = here("symmplan.expert_parallel", group, device)
    options.check_device(where)
    return ExpertParallel(name, where, options, int(max_tokens))
