"""torchtitan's expert parallelism, with its rows in planned symmetric memory.

torchtitan sends rows by two ``all_to_all_single`` in each layer, in methods of a token dispatcher
that may be overridden. `plan_experts` overrides them where a model has such dispatchers, after it
was parallelized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan.errors import CaptureError
from symmplan.integrate.moe.experts import expert_parallel
from symmplan.trainers.versions import require_tested

require_tested("torchtitan")

from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher  # noqa: E402

if TYPE_CHECKING:
    import torch
    from torch import nn

    from symmplan.integrate.moe.dispatcher import ExpertParallel
    from symmplan.integrate.moe.routes import Routes

__all__ = ["plan_experts"]


class _Rows:
    """What takes the place of a dispatcher's exchanges; the combine follows its dispatch."""

    def __init__(self, via: ExpertParallel) -> None:
        self._via = via
        self._routes: Routes | None = None

    def dispatch(
        self,
        rows: torch.Tensor,
        group: Any,  # noqa: ARG002 (torchtitan's arguments)
        output_splits: list[int],  # noqa: ARG002
        input_splits: list[int],
    ) -> torch.Tensor:
        """Rows to their experts. Collective: yes, and so is its backward."""
        self._routes = self._via.routes(input_splits)
        return self._via.dispatch(rows, self._routes)

    def combine(
        self,
        rows: torch.Tensor,
        group: Any,  # noqa: ARG002
        input_splits: list[int],  # noqa: ARG002
        output_splits: list[int],  # noqa: ARG002
    ) -> torch.Tensor:
        """Rows back. Collective: yes, and so is its backward."""
        assert self._routes is not None
        return self._via.combine(rows, self._routes)


def plan_experts(model: nn.Module, *, max_tokens: int, **options: Any) -> ExpertParallel:
    """Let the experts of a parallelized model of torchtitan exchange rows through symmplan.

    Args:
        model: A part of torchtitan's model, whose dispatchers know their mesh.
        max_tokens: As for `symmplan.expert_parallel`: rows that a rank gets in a layer. Where more
            come, all ranks plan again.
        **options: Others of `symmplan.expert_parallel`.

    Returns:
        What moves the rows of all layers; its ``release()`` gives the memory back.

    Raises:
        CaptureError: The model has no dispatchers of torchtitan's all-to-all kind, or these do not
            know a mesh: expert parallelism is off, or another ``comm_backend`` is chosen.
        ModuleNotFoundError, TrainerVersionError: torchtitan is not there in the version tested.

    Collective: no; each call of the model is, and its backward.
    """
    found: list[Any] = [
        dispatcher
        for module in model.modules()
        if isinstance(
            dispatcher := getattr(module, "token_dispatcher", None), AllToAllTokenDispatcher
        )
        and dispatcher.ep_mesh is not None
    ]
    if not found:
        raise CaptureError(
            "plan_experts found no experts that torchtitan distributes over ranks",
            expected="modules with an AllToAllTokenDispatcher that has a mesh",
            got=type(model).__name__,
            fix="set expert_parallel_degree, and call plan_experts after torchtitan has "
            "parallelized the model",
        )
    via = expert_parallel(found[0].ep_mesh.get_group(), max_tokens=max_tokens, **options)
    for dispatcher in found:
        rows = _Rows(via)
        dispatcher._dispatch_token_exchange = rows.dispatch
        dispatcher._combine_token_exchange = rows.combine
    return via
