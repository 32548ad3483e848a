"""The objects that FSDP2 calls: one all-gather and one reduce-scatter for each of its modules.

FSDP2 asks such an object for a buffer (`allocate`), fills it, and calls the object. It asks a
reduce-scatter's object twice, for the input and for the output. FSDP2's default objects allocate
ordinary memory and run the collectives of the process group.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, Literal

from symmplan.capture.fsdp_recording import Key
from symmplan.coordination.own import own_work
from symmplan.integrate.fsdp.ops import gathers, scatters
from symmplan.torch_private import autograd, fsdp2, fsdp2_in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    import torch.distributed as dist

    from symmplan.integrate.fsdp.push import Pushes
    from symmplan.integrate.fsdp.serve import Runtime
    from symmplan.integrate.fsdp.slots import Slot

__all__ = ["PlannedAllGather", "PlannedReduceScatter"]

_GatherBase, _ScatterBase = fsdp2.comm_bases()


class _Planned:
    """The common part of both objects.

    Args:
        runtime: Of the model.
        site: Name of the module in the model.
        plain: What FSDP2 used before.
    """

    _kind: Literal["all_gather", "reduce_scatter"]

    def __init__(self, runtime: Runtime, site: str, plain: Any) -> None:
        self._runtime = runtime
        self._site = site
        self._plain = plain
        self._slot: Slot | None = None
        self._keys: dict[Any, Key] = {}
        # The buffer of a collective that runs as without a plan, held weakly.
        self._plain_buffer: Any = None

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The buffer of the next collective, of ``size`` elements."""
        key = self._key(tuple(size), dtype)
        self._plain_buffer = None
        if self._runtime.runs_plainly(key, device):
            buffer = self._plain.allocate(size, dtype=dtype, device=device)
            self._plain_buffer = weakref.ref(buffer)
            return buffer  # type: ignore[no-any-return]
        tensor, self._slot = self._runtime.open(
            key, dtype, device, lambda: self._plain.allocate(size, dtype=dtype, device=device)
        )
        buffer = tensor.view(tuple(size))
        if self._slot.pushed:
            self._slot.watch(buffer)
        if self._kind == "reduce_scatter":
            fsdp2.take_copy_in(buffer, self._slot.accept)
        return buffer

    def _key(self, size: tuple[int, ...], dtype: torch.dtype) -> Key:
        """By what the next collective is recognised."""
        backward = autograd.graph_task() != autograd.NO_TASK
        key = self._keys.get((size, dtype, backward))
        if key is None:
            numel, name = math.prod(map(int, size)), str(dtype).removeprefix("torch.")
            key = Key(self._site, self._kind, numel, name, backward)
            self._keys[size, dtype, backward] = key
        return key

    def _runs_plainly(self) -> bool:
        """Whether the collective that is called now runs as without a plan; asked once."""
        buffer, self._plain_buffer = self._plain_buffer, None
        return buffer is not None


class PlannedAllGather(_Planned, _GatherBase):  # type: ignore[valid-type, misc]
    """An FSDP module's all-gather, whose output lies where the plan says."""

    _kind = "all_gather"

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather every rank's ``input_tensor`` into ``output_tensor``.

        Collective: yes.
        """
        slot, self._slot = self._slot, None

        def plain(base: torch.Tensor) -> Any:
            return self._plain(
                output_tensor=base,
                input_tensor=_part(input_tensor, output_tensor, base),
                group=group,
                async_op=async_op,
            )

        if self._runs_plainly():
            with own_work:
                return plain(output_tensor)
        return self._runtime.run(
            slot,
            output_tensor,
            group,
            lambda target, over: gathers(
                self._runtime.memory.name,
                self._plain,
                target,
                _part(input_tensor, output_tensor, target),
                over,
                async_op=async_op,
                site=self._site,
            ),
            plain,
            result=True,
        )


class PlannedReduceScatter(_Planned, _ScatterBase):  # type: ignore[valid-type, misc]
    """An FSDP module's reduce-scatter, whose input lies where the plan says.

    Its output becomes the sharded gradient, which lives until ``zero_grad``: ordinary memory.

    [Note: the stream of gradients]
        FSDP2 allocates the output on the stream that reduces. The program's stream has a use for
        its blocks, see [Note: blocks of gradients] in `symmplan.capture.fsdp_reserved`. So where
        sums become gradients as they are, the output is allocated with the input: on the program's
        stream, before FSDP2's stream waits for that. The program's waits for the sums before
        gradients are used and freed. The output is allocated as FSDP2 does where they may be freed
        before: by hooks behind their accumulation, by offloading, or in a backward pass that is not
        the last one.

    Args:
        runtime: Of the model.
        site: Name of the module in the model.
        plain: What FSDP2 used before.
        group: FSDP2's parameter group.
    """

    _kind = "reduce_scatter"

    def __init__(self, runtime: Runtime, site: str, plain: Any, group: Any) -> None:
        super().__init__(runtime, site, plain)
        self._group = group
        # The gradients to which what is reduced is added; None if FSDP2 does that.
        self._added: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The input of the next reduce-scatter, then its output, of ``size`` elements."""
        if self._plain_buffer is not None and self._plain_buffer() is not None:  # it has its input
            return self._plain.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]
        slot = self._slot
        # An input that is gone before the output was asked for belongs to a step that failed.
        if slot is not None and slot.served == 1 and slot.held:
            slot.served = 2
            self._added = None
            if slot.pushed:  # sums are in their final type
                final = fsdp2.dtype_of_gradients(self._group)
                # Gradients that were not pushed yet are added by FSDP2.
                if final is not None and slot.send is None:
                    self._added = fsdp2.gradients_at(self._group, math.prod(size), final)
                dtype = final or dtype
            if self._added is not None:
                return self._added
            output, slot.output = slot.output, None
            if output is not None and (output.dtype, output.shape) == (dtype, (*size,)):
                return output
            return self._plain.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]
        buffer = super().allocate(size, dtype=dtype, device=device)
        if self._runtime.gradients_move:
            self._allocate_output(buffer)
        return buffer

    def _allocate_output(self, buffer: torch.Tensor) -> None:
        """See [Note: the stream of gradients]."""
        slot, group = self._slot, self._group
        final = fsdp2.dtype_of_gradients(group)
        if slot is not None and slot.pushed and final is not None and fsdp2.become_gradients(group):
            size = (buffer.numel() // fsdp2_in_place.group_of(group).size(),)
            slot.output = self._plain.allocate(size, dtype=final, device=buffer.device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce every rank's ``input_tensor``; this rank's part goes to ``output_tensor``.

        Collective: yes.
        """
        slot, self._slot = self._slot, None
        added, self._added = self._added, None

        def plain(base: torch.Tensor) -> Any:
            return self._plain(
                output_tensor=output_tensor,
                input_tensor=base,
                group=group,
                op=op,
                async_op=async_op,
            )

        if self._runs_plainly():
            with own_work:
                return plain(input_tensor)

        def otherwise(gradients: Sequence[torch.Tensor]) -> None:
            size, dtype, device = input_tensor.shape, input_tensor.dtype, input_tensor.device
            flat = self._plain.allocate(size, dtype=dtype, device=device)
            fsdp2.copy_in(gradients, flat, group.size())
            total = output_tensor
            if added is not None or total.dtype != dtype:
                total = output_tensor.new_empty(output_tensor.shape, dtype=dtype)
            self._plain(output_tensor=total, input_tensor=flat, group=group, op=op, async_op=False)
            if added is not None:
                added.add_(total.to(added.dtype))
            elif total is not output_tensor:
                output_tensor.copy_(total)

        def reduced(
            target: torch.Tensor,
            over: dist.ProcessGroup,
            pushes: Pushes | None = None,
        ) -> Callable[[], Any] | None:
            if pushes is not None:
                add = added is not None
                return pushes.reduce(output_tensor, op, input_tensor.dtype, otherwise, add=add)
            return scatters(
                self._runtime.memory.name,
                self._plain,
                output_tensor,
                target,
                over,
                op,
                async_op=async_op,
                site=self._site,
            )

        work = self._runtime.run(
            slot,
            input_tensor,
            group,
            reduced,
            plain,
            result=False,
        )
        if added is not None:
            fsdp2.added_to(self._group)
        return work


def _part(part: torch.Tensor, whole: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """``part`` of ``whole``, as a part of ``base``, which has the same bytes; else itself."""
    if base is whole:
        return part
    begin = part.data_ptr() - whole.data_ptr()
    if not 0 <= begin < whole.numel() * whole.element_size():
        return part
    begin //= part.element_size()
    return base.view(-1)[begin : begin + part.numel()].view(part.shape)
