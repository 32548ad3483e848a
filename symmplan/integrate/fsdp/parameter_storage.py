"""Where an FSDP2 group's unsharded parameters live: their bytes in a segment, and their storages.

[Note: the same objects]
    Autograd accumulates gradients in the objects that were parameters when a graph was made, and
    FSDP2 keeps gradients there that are not reduced yet. So parameters move into a placement and
    out of it as the same objects, by ``.data``. Views of them that graphs have saved, or that the
    program keeps, stay on the placement's storages.

[Note: resharded parameters cannot be read]
    A placement stays readable when its module is resharded, and other modules' bytes lie there. So
    its storages have an address only while the module has its parameters: whoever reads a parameter
    or any view of it at another time gets an error, as in FSDP2, which frees its storages. While
    others need the bytes of a module that has its parameters, they are in a copy, and the address
    is that of the copy, for parameters and views alike.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmplan.coordination.own import own_work
from symmplan.device import device_of
from symmplan.memory import BACKENDS
from symmplan.memory.leased import lease_out
from symmplan.memory.meeting.calls import in_two_levels
from symmplan.memory.ops.one_sided import all_gather_parts_
from symmplan.memory.streams import off_default_stream, synchronize
from symmplan.torch_private import autograd, c10d, dispatch, fsdp2_in_place
from symmplan.torch_private.storages import Addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.integrate.fsdp.layout import Layout
    from symmplan.runtime.leases import Ledger

__all__ = ["ParameterStorage"]

#: What torch counts for the storage of a flat tensor, without what else is on it.
_OWN_USES = 2


class ParameterStorage:
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
        layout: The same.
        bound: Whether the parameters lie on the placement's storages.
        bytes: The placement's bytes.
        readable: Whether the parameters have addresses, or a copy.
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
        self.bytes = bytes_
        self._site = site
        self._group = group
        name = c10d.group_name(group)
        self._one_sided = BACKENDS[memory].collectives or in_two_levels(self.bytes, name)
        ranks, rank = group.size(), group.rank()
        self.layout = layout
        self._counts = layout.part_bytes
        # What gathers, once it is known; in memory whose backend has collectives of its own.
        self._run: Callable[[], None] | None = None
        self._outputs: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = []
        # The same bytes as storages of their own, with versions of their own: autograd must not
        # take a gather for a change of the parameter.
        self._storages: list[torch.Tensor] = []
        self.readable = self._has_addresses = False
        # A copy of the bytes, while others have them.
        self._copy: torch.Tensor | None = None
        for offset, dtype, count in zip(layout.offsets, layout.dtypes, layout.counts, strict=True):
            size = count * ranks * dtype.itemsize
            whole = bytes_[offset : offset + size].view(dtype)
            self._outputs.append(whole)
            self._parts.append(whole[rank * count : (rank + 1) * count])
            self._storages.append(lease_out(whole))
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, dtype in enumerate(layout.dtypes):
            by_dtype.setdefault(dtype, []).append(i)
        # Those of a type, in one kernel each, and their numbers.
        self._casts = [([self._parts[i] for i in at], at) for at in by_dtype.values()]
        reason = f"FSDP module {site!r} was resharded: its parameters cannot be read"
        self._addresses = Addresses(self._storages, layout.offsets, reason)
        self._addresses.take()
        # Who keeps a view of parameters longer than their bytes.
        weakref.finalize(self, self._addresses.take).atexit = False
        self._alone = self._in_use()  # how often if there are no views
        # FSDP2's own tensors, without bytes: to go back there takes no memory that it would not.
        self._own: list[fsdp2_in_place.Emptied | None] = []

    def overlaps(self, other: ParameterStorage) -> bool:
        """Whether both have some of the same bytes."""
        return self.begin < other.end and other.begin < self.end and self.users == other.users

    def fill(self, shards: Sequence[torch.Tensor]) -> None:
        """Cast shards into this rank's parts, those of a type in one kernel where torch has it."""
        if len(self._casts) == 1:
            dispatch.copy_each(self._parts, [*shards])
            return
        for parts, at in self._casts:
            dispatch.copy_each(parts, [shards[i] for i in at])

    def gather(self) -> None:
        """Fill all parameters from every rank's part; on the current stream.

        Collective: yes.
        """
        with own_work:
            if self._one_sided:
                if self._run is None:
                    name, size = c10d.group_name(self._group), self._group.size()
                    given = self.bytes, self.layout.offsets, self._counts, size, name
                    self._run = all_gather_parts_(*given, what=self._site)
                self._run()
                return
            outputs, parts = self._outputs, self._parts
            if not self.layout.one_dtype:
                outputs, parts = ([t.view(torch.uint8) for t in of] for of in (outputs, parts))
            with off_default_stream(self.bytes.device):
                if len(outputs) == 1:
                    dist.all_gather_into_tensor(outputs[0], parts[0], group=self._group)
                else:
                    c10d.all_gather_coalesced(outputs, parts, self._group)

    def give_addresses(self) -> None:
        """Let the parameters and all views of them be read, where their bytes are.

        See [Note: resharded parameters cannot be read].
        """
        self._addresses.give((self.bytes if self._copy is None else self._copy).data_ptr())
        self.readable = self._has_addresses = True

    def take_addresses(self) -> None:
        """Let each access to the parameters and to all views of them be an error."""
        if self._has_addresses:
            self._addresses.take()
        self.readable = self._has_addresses = False
        self._copy = None

    def copy_aside(self) -> None:
        """Copy the bytes, on the current stream, and let the parameters be in the copy."""
        with torch.inference_mode(mode=False), torch.no_grad():
            self._copy = _copied(self.bytes)
        self.readable = True
        if self._has_addresses:
            self.give_addresses()

    def move_in(self, parameters: Sequence[Any]) -> None:
        """Let FSDP2's parameters lie on the placement's storages.

        If graphs have views of FSDP2's own storages, the parameters stay there, with the values.

        Args:
            parameters: FSDP2's.
        """
        self.give_addresses()
        if self.bound:
            return
        if _held(parameters):
            self._copy_out(parameters)
            return
        views = self._in_use() - self._alone
        with torch.inference_mode(mode=False), torch.no_grad():
            self._own = [fsdp2_in_place.emptied(parameter) for parameter in parameters]
            for parameter, storages in zip(parameters, self._each(self._storages), strict=True):
                fsdp2_in_place.give_storages(parameter, storages)
        self.bound = True
        self._alone = self._in_use() - views

    def finish(self, parameters: Sequence[Any]) -> None:
        """Let the layout's ``own`` parameters, which gather by themselves, see what was gathered.

        Args:
            parameters: FSDP2's, whose bytes are there.
        """
        own = [p for p in parameters if fsdp2_in_place.has_own_gather(p)]
        views = self._in_use() - self._alone
        with torch.inference_mode(mode=False), torch.no_grad():
            for parameter in own:
                fsdp2_in_place.finish(parameter)
        self._alone = self._in_use() - views

    def move_out(self, parameters: Sequence[Any], *, filled: bool) -> None:
        """Give the parameters storages of their own for good, which FSDP2 frees and fills.

        A graph that has saved views raises in its backward pass, as after any change.

        Args:
            parameters: FSDP2's.
            filled: Whether their values are in use.
        """
        if not self.bound:
            self.take_addresses()
            return
        synchronize(self.bytes.device)
        views = self._in_use() - self._alone
        with torch.inference_mode(mode=False), torch.no_grad():
            each = zip(parameters, self._each(self._storages), self._own, strict=True)
            for parameter, storages, own in each:
                outputs, known = own or ([torch.empty_like(s) for s in storages], [])
                if filled:
                    for output in outputs:
                        output.untyped_storage().resize_(output.nbytes)
                fsdp2_in_place.take_back(parameter, (outputs, known))
                if views:
                    torch.autograd.graph.increment_version(fsdp2_in_place.unsharded(parameter))
                if not filled:
                    parameter.free_unsharded_param()
                    continue
                for output, storage in zip(outputs, storages, strict=True):
                    with autograd.same_version(output):
                        output.copy_(storage)
        self.take_addresses()
        self._own.clear()
        self.bound = False
        self._alone = self._in_use() - views

    @property
    def viewed(self) -> bool:
        """Whether anybody has views of these bytes, as a graph does until its backward pass."""
        return self._in_use() != self._alone

    def _in_use(self) -> int:
        """How many tensors and views refer to the parameters' storages."""
        return sum(
            dispatch.storage_use_count(storage.untyped_storage()._cdata)
            for storage in self._storages
        )

    def _copy_out(self, parameters: Sequence[Any]) -> None:
        """Fill the parameters where FSDP2 put them; on this rank alone."""
        for parameter in parameters:
            parameter.alloc_all_gather_outputs()
        owns = [own for parameter in parameters for own in fsdp2_in_place.outputs_of(parameter)]
        for own, storage in zip(owns, self._storages, strict=True):
            with (
                torch.inference_mode(own.is_inference()),
                torch.no_grad(),
                autograd.same_version(own),
            ):
                own.copy_(storage)

    def _each(self, parts: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """The parts of each parameter."""
        ends = itertools.accumulate(self.layout.parts)
        return [parts[end - n : end] for end, n in zip(ends, self.layout.parts, strict=True)]


def _copied(bytes_: torch.Tensor) -> torch.Tensor:
    """A copy that the device can read: in the host's pinned memory where the device is full."""
    try:
        return bytes_.clone()
    except torch.OutOfMemoryError:
        pins = device_of(bytes_.device).pins_memory
        return torch.empty_like(bytes_, device="cpu", pin_memory=pins).copy_(bytes_)


def _held(parameters: Sequence[Any]) -> bool:
    """Whether anybody else refers to the storages that FSDP2 made, as a graph does."""
    for parameter in parameters:
        if fsdp2_in_place.unsharded(parameter) is None:
            continue
        tensors = fsdp2_in_place.tensors_of(parameter)
        for output in fsdp2_in_place.outputs_of(parameter):
            uses = _OWN_USES + len(fsdp2_in_place.lie_in(tensors, output))
            if dispatch.storage_use_count(output.untyped_storage()._cdata) > uses:
                return True
    return False
