"""Where an FSDP2 group's unsharded parameters live: their bytes in a segment, and their storages.

[Note: the same objects]
    Autograd accumulates gradients in the objects that were parameters when a graph was made, and
    FSDP2 keeps gradients there that are not reduced yet. So parameters move into a placement and
    out of it as the same objects, by ``.data``; what cannot move is a view that a graph has saved.

[Note: gathered once]
    A module that is released in forward leaves its parameters in their bytes. If nobody has come
    there by its backward pass, as with the last modules of a forward pass, what forward gathered is
    what backward would gather, unless a shard has changed: then all is gathered again, on all
    ranks, as they run the same program.

    No bytes lose their order by a gather that does not run. Whoever comes to these next is written
    by its peers in a collective that enters: none of them touches this rank's bytes before this
    rank has started it, which is after the parameters' last use. And pushes, which do not enter,
    are ordered by meetings of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmplan.memory import BACKENDS
from symmplan.memory.ops import all_gather_parts_
from symmplan.memory.own import own_work
from symmplan.memory.streams import off_default_stream
from symmplan.place.loans import lend
from symmplan.torch_private import autograd, c10d, dispatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.integrate.fsdp.changes import State
    from symmplan.integrate.fsdp.layout import Layout
    from symmplan.place.loans import Ledger

__all__ = ["Home"]

#: What torch counts for a storage that a flat tensor and the parameter on it share.
_OWN_USES = 3


class Home:
    """Where a group's parameters live.

    Args:
        site: Name of the module in the model.
        layout: How they lie.
        bytes_: The bytes of their placement.
        users: Who uses the segment's bytes.
        begin: Offset of the placement in the segment, in bytes.
        group: The process group that gathers.
        memory: Name of the memory backend.

    Attributes:
        bound: Whether the parameters are views of these bytes.
    """

    def __init__(
        self,
        site: str,
        layout: Layout,
        bytes_: torch.Tensor,
        users: Ledger,
        begin: int,
        group: dist.ProcessGroup,
        memory: str,
    ) -> None:
        self.users = users
        self.begin, self.end = begin, begin + layout.nbytes
        self.bound = False
        self._site = site
        self._group = group
        self._memory = memory
        self._alone = 0
        self._of: State | None = None
        ranks, rank = group.size(), group.rank()
        self._whole = bytes_
        self._offsets = list(layout.offsets)
        self._counts = [count * layout.dtype.itemsize for count in layout.counts]
        self._outputs: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = []
        # The same bytes as storages of their own, with versions of their own: autograd must not
        # take a gather for a change of the parameter.
        self._storages: list[torch.Tensor] = []
        for offset, count in zip(layout.offsets, layout.counts, strict=True):
            size = count * ranks * layout.dtype.itemsize
            whole = bytes_[offset : offset + size].view(layout.dtype)
            self._outputs.append(whole)
            self._parts.append(whole[rank * count : (rank + 1) * count])
            self._storages.append(lend(whole, lambda: None))

    @property
    def is_cuda(self) -> bool:
        """Whether it lies on a device."""
        return self._whole.is_cuda

    def fill(self, shards: Sequence[torch.Tensor]) -> None:
        """Cast shards into this rank's parts, in one kernel where torch has it."""
        torch._foreach_copy_(self._parts, list(shards))

    @own_work
    def gather(self) -> None:
        """Fill all parameters from every rank's part; on the current stream.

        Collective: yes.
        """
        if BACKENDS[self._memory].collectives:
            name, size = c10d.group_name(self._group), self._group.size()
            all_gather_parts_(self._whole, self._offsets, self._counts, size, name, what=self._site)
            return
        with off_default_stream(self._whole.device):
            if len(self._outputs) == 1:
                dist.all_gather_into_tensor(self._outputs[0], self._parts[0], group=self._group)
            else:
                c10d.all_gather_coalesced(self._outputs, self._parts, self._group)

    def keep(self, parameters: Sequence[Any], shards: State | None) -> None:
        """The parameters are in use, gathered from shards in this state.

        See [Note: gathered once].

        Args:
            parameters: FSDP2's.
            shards: None if what was gathered is not to be relied on later.
        """
        self._of = None if shards is None else (*shards, *_versions(parameters))
        if shards is not None:
            self.users.keep(self._site, self.begin, self.end)

    def has(self, parameters: Sequence[Any], shards: State | None) -> bool:
        """Whether they are still there, and the shards in this state."""
        return (
            shards is not None
            and self.users.keeps(self._site)
            and self._of == (*shards, *_versions(parameters))
        )

    def move_in(self, parameters: Sequence[Any]) -> None:
        """Let FSDP2's parameters be views of these bytes, or of copies if a graph has views.

        Args:
            parameters: FSDP2's.
        """
        if self.bound:
            return
        if _held(parameters):
            self._copy_out(parameters)
            return
        with torch.inference_mode(mode=False), torch.no_grad():
            for parameter, storage in zip(parameters, self._storages, strict=True):
                parameter.all_gather_outputs = [storage]
                parameter.free_unsharded_param = _nothing
                old = _local(parameter)
                if old is None or old.is_inference():
                    parameter.__dict__.pop("_unsharded_param", None)
                    parameter.init_unsharded_param()
                else:
                    size, stride = parameter._orig_size, parameter._contiguous_orig_stride
                    old.data = torch.as_strided(storage, size, stride)
        self.bound = True
        self._alone = self._in_use()

    def move_out(self, parameters: Sequence[Any], *, filled: bool) -> None:
        """Give the parameters storages of their own, which FSDP2 frees and fills from now on.

        A graph that has saved views of them raises in its backward pass, as after any change.

        Args:
            parameters: FSDP2's.
            filled: Whether their values are in use.
        """
        if not self.bound:
            return
        if self.is_cuda:
            torch.cuda.synchronize(self._whole.device)
        viewed = self.viewed
        with torch.inference_mode(mode=False), torch.no_grad():
            for parameter, storage in zip(parameters, self._storages, strict=True):
                parameter.__dict__.pop("free_unsharded_param", None)
                own = torch.empty_like(storage)
                parameter.all_gather_outputs = [own]
                old = _local(parameter)
                size, stride = parameter._orig_size, parameter._contiguous_orig_stride
                old.data = torch.as_strided(own, size, stride)
                if viewed:
                    torch.autograd.graph.increment_version(old)
                if filled:
                    own.copy_(storage)
                else:
                    parameter.free_unsharded_param()
        self.bound = False

    @property
    def viewed(self) -> bool:
        """Whether anybody has views of the parameters, as a graph does until its backward pass."""
        return self.bound and self._in_use() != self._alone

    def _in_use(self) -> int:
        """How many tensors and views refer to the parameters' storages."""
        return sum(
            dispatch.storage_use_count(storage.untyped_storage()._cdata)
            for storage in self._storages
        )

    def _copy_out(self, parameters: Sequence[Any]) -> None:
        """Fill the parameters where FSDP2 put them; on this rank alone."""
        for parameter, output in zip(parameters, self._outputs, strict=True):
            parameter.alloc_all_gather_outputs()
            own = parameter.all_gather_outputs[0]
            with torch.no_grad(), autograd.same_version(own):
                own.copy_(output)


def _held(parameters: Sequence[Any]) -> bool:
    """Whether anybody else refers to the storages that FSDP2 made, as a graph does."""
    return any(
        hasattr(p, "_unsharded_param")
        and dispatch.storage_use_count(output.untyped_storage()._cdata) > _OWN_USES
        for p in parameters
        for output in p.all_gather_outputs
    )


def _local(parameter: Any) -> Any:
    """The unsharded parameter's own tensor; None before the first gather."""
    old = getattr(parameter, "_unsharded_param", None)
    return getattr(old, "_local_tensor", old)  # of a DTensor


def _versions(parameters: Sequence[Any]) -> list[int]:
    """What changes when somebody writes to an unsharded parameter; none before the first gather."""
    found = [_local(p) for p in parameters]
    return [-1 if p is None or p.is_inference() else p._version for p in found]


def _nothing() -> None:
    """The bytes belong to the plan."""
