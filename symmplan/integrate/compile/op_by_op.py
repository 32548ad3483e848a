"""``inner="eager"``: the rewritten graphs run op by op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan.integrate.compile.refresh import fake_mode_of, refresh_values
from symmplan.integrate.compile.running import noted, with_segments
from symmplan.place.watching import run_by_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from symmplan.integrate.compile.unit import Unit

__all__ = ["compile_eager"]


def compile_eager(
    module: fx.GraphModule, example_inputs: Sequence[Any], unit: Unit | None
) -> Callable[..., Any]:
    """Split and rewrite one Dynamo graph; nothing is fused, every op is called as it stands.

    Args:
        module: The graph.
        example_inputs: Its inputs.
        unit: Where its plan is kept, or None if it declares nothing.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiler(part: str) -> Callable[..., Any]:
        def compile_part(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            mode = fake_mode_of(inputs)
            rewritten = None
            if unit is not None and unit.declares(gm):
                _unfold_mutations(gm, inputs, mode)
                rewritten = unit.rewrite(gm, part, mode)
            elif unit is not None:
                unit.cross(gm, part)
            gm.recompile()
            watched = unit is not None and unit.watches
            run = run_by_nodes(gm) if watched else make_boxed_func(gm)
            if unit is None:
                return run
            if rewritten is None:
                return noted(run, unit, part)
            return with_segments(run, unit, rewritten)

        return compile_part

    # Both parts share one set of segments, so both must be known before the first run.
    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            partition_fn=min_cut_rematerialization_partition,
        )(module, example_inputs)
    return compiled


def _unfold_mutations(gm: fx.GraphModule, inputs: Sequence[Any], fake_mode: Any) -> None:
    """Turn functionalized custom ops back into copies and the ops themselves, to be captured."""
    from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
    from torch._inductor.virtualized import V

    with V.set_fake_mode(fake_mode):
        decompose_auto_functionalized(gm.graph)
    refresh_values(gm, inputs, fake_mode)
