"""Expert parallelism for models that have all experts of a layer in one module.

Transformers' mixtures of experts do (Mixtral, DeepSeek, Qwen and others): an ``experts`` module has
the weights of all experts, stacked along their first dimension, and is called with tokens, and for
each token which experts it goes to and with which weights. `split_experts` leaves each rank its
part of the experts, and sends tokens where their experts are.

[Note: no rows]
    A rank to which no token goes still takes part in the exchanges of the backward, and in FSDP2's
    reduction of its experts' gradients. So there its experts get one row of zeros, which does not
    go back; what comes of it are gradients of zeros.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from symmplan.errors import CaptureError
from symmplan.integrate.moe.experts import expert_parallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmplan.integrate.moe.dispatcher import ExpertParallel

__all__ = ["is_experts", "split_experts"]

_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


def split_experts(
    model: nn.Module, group: Any = None, *, max_tokens: int, padded: bool = False, **options: Any
) -> ExpertParallel:
    """Spread the experts of all layers over the ranks of a group.

    Each rank keeps the experts from ``rank * n / ranks`` on, as parameters of the same names. Do
    it before the model is sharded or compiled, and before the optimizer is made. On the meta device
    it works, too. What a layer computes stays the same. A token's parts from several experts are
    summed as transformers' ``grouped_mm`` does, so they may differ in the last bit from what its
    ``eager`` experts give.

    The gradient of an expert is the sum over the tokens of all ranks of the group. Where losses are
    means over the tokens of a rank, divide it by the number of ranks, as FSDP2's
    ``set_gradient_divide_factor`` does.

    Args:
        model: Has modules that `is_experts`; all ranks the same.
        group: Torch's process group of the ranks that share the experts; the default one if None.
        max_tokens: As for `symmplan.expert_parallel`: with a capacity factor,
            ``int(factor * tokens * top_k)``, where a rank has so many tokens in a batch.
        padded: Let experts compute on ``max_tokens`` rows, so that the host does not wait for the
            counts; see ``rows`` of `ExpertParallel.routes`. Then a batch has at most
            ``max_tokens / top_k`` tokens, and more rows for a rank than that are an error.
        **options: Others of `symmplan.expert_parallel`.

    Returns:
        What moves the rows of all layers; its ``release()`` gives the memory back.

    Raises:
        CaptureError: The model has no such modules, or a number of experts that cannot be divided.
        OptionError, BackendError: As `symmplan.expert_parallel`.

    Collective: no; each call of the model is, and its backward.
    """
    found = [module for module in model.modules() if is_experts(module)]
    if not found:
        raise CaptureError(
            "split_experts found no experts",
            expected=f"modules with num_experts, a forward({', '.join(_ARGUMENTS)}) and parameters "
            "whose first dimension is num_experts",
            got=type(model).__name__,
            fix="use symmplan.expert_parallel in the model's own layers",
        )
    via = expert_parallel(group, max_tokens=max_tokens, **options)
    every = [int(module.num_experts) for module in found]  # type: ignore[arg-type]
    wrong = next((count for count in every if count % via.ranks), None)
    if wrong is not None:
        via.release()
        raise CaptureError(
            f"{wrong} experts cannot be divided by {via.ranks} ranks",
            expected=f"a multiple of {via.ranks} experts in each layer",
            got=f"{wrong} experts",
            fix="use a group of fewer ranks",
        )
    run = _runs(via, padded)
    for module in found:
        _split(module, via, run)
    return via


def is_experts(module: nn.Module) -> bool:
    """Whether a module has all experts of a layer, and is called as transformers' are."""
    count, parameters = getattr(module, "num_experts", None), list(module.parameters())
    if not isinstance(count, int) or not parameters:
        return False
    names = [*inspect.signature(module.forward).parameters]
    return names[:3] == _ARGUMENTS and all(p.dim() and len(p) == count for p in parameters)


def _runs(via: ExpertParallel, padded: bool) -> Callable[..., torch.Tensor]:
    """What runs the experts of all ranks; a function, which a copy of the model has, too.

    Args:
        via: What moves the rows.
        padded: See `split_experts`.
    """

    def run(
        experts: Callable[..., torch.Tensor],
        count: int,
        tokens: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """What the experts of all ranks make of tokens.

        Args:
            experts: Those of this rank.
            count: How many these are.
            tokens: ``(tokens, width)``
            index: ``(tokens, top_k)``: to which experts of all each goes.
            weights: The same: and with which weight.

        Collective: yes, and so is its backward.
        """
        number, top_k = index.shape
        ids = index.reshape(-1)
        order = ids.argsort(stable=True)  # by expert, and so by rank
        counts = torch.zeros(via.ranks, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, ids // count, torch.ones_like(ids))
        more = {"rows": number * top_k} if padded else {}
        routes = via.routes(counts, **more)
        which = via.exchange(ids[order] % count, routes)
        inside = via.dispatch(tokens.index_select(0, order // top_k), routes)
        rows = len(inside)
        if not rows:  # see [Note: no rows]
            inside = nn.functional.pad(inside, (0, 0, 0, 1))
            which = which.new_zeros(1)
        made = experts(inside, which.unsqueeze(1), weights.new_ones(len(inside), 1))
        outside = via.combine(made[:rows], routes)
        back = torch.zeros_like(outside).index_copy(0, order, outside)
        weighted = back.view(number, top_k, -1) * weights.unsqueeze(-1)
        return weighted.sum(1).to(tokens.dtype)

    return run


class _SplitExperts:
    """What a class of experts becomes on a rank that has some of them."""

    _symmplan_run: Callable[..., torch.Tensor]
    num_experts: int

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """What the original class computes, over all ranks. Collective: yes, also its backward."""
        here: Any = super()
        return self._symmplan_run(
            here.forward, self.num_experts, hidden_states, top_k_index, top_k_weights
        )


def _split(module: Any, via: ExpertParallel, run: Callable[..., torch.Tensor]) -> None:
    """Leave a rank its part of the experts of a module."""
    count = module.num_experts // via.ranks
    mine = slice(via.rank * count, (via.rank + 1) * count)
    for owner in module.modules():
        for name, parameter in [*owner.named_parameters(recurse=False)]:
            part = parameter.detach()[mine].clone()
            setattr(owner, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    module.num_experts = count
    module._symmplan_run = run
    kind = type(module)
    module.__class__ = type(f"Split{kind.__name__}", (_SplitExperts, kind), {})
