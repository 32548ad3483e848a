"""Unsharded parameters that live in their placements: nothing is copied in or out.

FSDP2 casts shards into a flat tensor, copies that into the all-gather's input, gathers rank after
rank, and copies the result out into parameters. Here a parameter's whole placement is its storage:
shards are cast straight into this rank's parts of it, and one coalesced gather fills the rest.

[Note: the seam]
    FSDP2's public hooks hand out flat buffers, so methods of its parameter groups are replaced,
    as attributes of the objects: ``unshard``, ``wait_for_unshard`` and ``_to_sharded`` of a group,
    ``free_unsharded_param`` of its parameters. Where any of what they use is missing, or a group
    does what they do not (see `layout_of`), FSDP2's own methods stay and gathers are flat.

[Note: one address]
    Autograd saves views of an unsharded parameter in forward and reads them in backward, after it
    was resharded and gathered again. So all gathers of a group lie at one offset, whatever the
    order in which the program uses it, and a later plan does not move it.

[Note: released late]
    FSDP2 reshards a module before it unshards the next. If the next one took the bytes over, its
    gather would wait until the module's kernels ended. So in the plan a gather's bytes are in use
    until the next gather was started, unless that had been started ahead of time.

[Note: a gather ahead of its time]
    A gather that a program did not do ahead of time while it was recorded may find its bytes in
    use. If it is a prefetch, it is left out: FSDP2 asks again when it needs the parameters. If it
    is needed now, prefetches give way that nobody has used. Else the module leaves: from now on
    its gathers are flat, which the next plan knows.
    Only where a graph still has parameters at the old address it cannot, and raises.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from symmplan import _compat
from symmplan.errors import RunError
from symmplan.integrate.fsdp_bytes import Tenant, lend
from symmplan.integrate.fsdp_layout import Gathered, Layout, layout_of
from symmplan.memory.own import own_work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.capture.fsdp import Key
    from symmplan.integrate.fsdp_bytes import Bytes
    from symmplan.integrate.fsdp_runtime import Runtime

__all__ = ["Direct", "Home"]


#: What torch counts for a storage that a flat tensor and the parameter on it share.
_OWN_USES = 3


class Home:
    """Where a group's parameters live.

    Args:
        layout: How they lie.
        bytes_: The bytes of their placement.
        users: Who uses the segment's bytes.
        begin: Offset of the placement in the segment, in bytes.
        group: The process group that gathers.
        memory: Name of the memory backend.
    """

    def __init__(
        self,
        layout: Layout,
        bytes_: torch.Tensor,
        users: Bytes,
        begin: int,
        group: dist.ProcessGroup,
        memory: str,
    ) -> None:
        self.users = users
        self.begin, self.end = begin, begin + layout.nbytes
        self.group = group
        self.memory = memory
        ranks, rank = group.size(), group.rank()
        self._whole = bytes_
        self._offsets = list(layout.offsets)
        self._counts = [count * layout.dtype.itemsize for count in layout.counts]
        self.outputs: list[torch.Tensor] = []
        self.parts: list[torch.Tensor] = []
        #: The same bytes as storages of their own, with versions of their own: autograd must not
        #: take a gather for a change of the parameter.
        self.storages: list[torch.Tensor] = []
        for offset, count in zip(layout.offsets, layout.counts, strict=True):
            size = count * ranks * layout.dtype.itemsize
            whole = bytes_[offset : offset + size].view(layout.dtype)
            self.outputs.append(whole)
            self.parts.append(whole[rank * count : (rank + 1) * count])
            self.storages.append(lend(whole, lambda: None))

    @own_work
    def gather(self) -> Any:
        """Fill all parameters from every rank's part; on the current stream.

        Collective: yes.
        """
        if self.memory == "shm":
            name, size = _compat.group_name(self.group), self.group.size()
            torch.ops.symmplan.all_gather_parts_(
                self._whole, self._offsets, self._counts, size, name
            )
        elif len(self.outputs) == 1:
            dist.all_gather_into_tensor(self.outputs[0], self.parts[0], group=self.group)
        else:
            _compat.all_gather_coalesced(self.outputs, self.parts, self.group)


class Direct:
    """An FSDP2 parameter group whose parameters may live in a placement.

    Args:
        runtime: Of the model.
        site: Name of the module in the model.
        group: FSDP2's parameter group.
    """

    def __init__(self, runtime: Runtime, site: str, group: Any) -> None:
        self.site = site
        self.reason = ""
        self._runtime = runtime
        self._group = group
        self._layout: Layout | None = None
        self._home: Home | None = None
        self._bound: Home | None = None
        self._tenant: Tenant | None = None
        self._looked = False
        self._put_off = False
        self._alone = 0
        self._unshard: Callable[..., None] = group.unshard
        self._wait: Callable[[], None] = group.wait_for_unshard
        self._reshard: Callable[[], None] = group._to_sharded
        group.unshard = self.unshard
        group.wait_for_unshard = self.wait_for_unshard
        group._to_sharded = self.to_sharded

    @property
    def layout(self) -> Layout | None:
        """How the parameters would lie in a placement; None if they cannot."""
        return self._layout

    def settle(self, home: Home | None) -> None:
        """From now on the parameters live there; None: where FSDP2 puts them."""
        self._home = home

    @property
    def settled(self) -> bool:
        """Whether the parameters live in a placement."""
        return self._home is not None

    # What FSDP2 calls.

    def unshard(self, async_op: bool = False) -> None:
        """Start to gather, if that was not done yet.

        Collective: yes.
        """
        group = self._group
        if (
            group._all_gather_result is not None
            or group.is_unsharded
            or (not group.unshard_in_backward and group._training_state.name == "PRE_BACKWARD")
        ):
            return
        if not self._looked:
            self._look()
        if self._layout is None:
            self._unshard(async_op)
            return
        key = self._key()
        self._runtime.arrive(key, group.device)
        if self._home is None:
            self._unshard(async_op)
            return
        self._put_off = not self._room(self._home, needed=False)
        if not self._put_off:
            self._start(key, self._home, async_op=async_op)

    def wait_for_unshard(self) -> None:
        """Wait until the parameters are there, and let the module have them."""
        group, home = self._group, self._home
        result = group._all_gather_result
        if home is None or (result is not None and not isinstance(result, Gathered)):
            self._wait()
            return
        if result is None:
            if group.is_unsharded or not self._put_off:
                return
            self._late(home)
            result = group._all_gather_result
            if not isinstance(result, Gathered):
                self._wait()
                return
        _compat.fsdp_release_gather(group)
        if result.all_gather_event is not None:
            torch.cuda.current_stream().wait_event(result.all_gather_event)
        if self._bound is not home:
            if self._held():
                self._copy_out(home)
            else:
                self._bind(home)
        group._to_unsharded()
        group._all_gather_result = None

    def to_sharded(self) -> None:
        """The module is done with the parameters."""
        group = self._group
        was = group.is_sharded
        self._reshard()
        if was:
            return
        self._runtime.released(self.site)
        if self._tenant is not None:
            self._tenant.drop()
            self._tenant = None

    def remove(self) -> None:
        """Give FSDP2 its own methods back, and its parameters storages of their own.

        Collective: no.
        """
        group = self._group
        if self._bound is not None:
            group._to_sharded()
        self._unbind()
        for name in ("unshard", "wait_for_unshard", "_to_sharded"):
            group.__dict__.pop(name, None)
        self._home = None

    # How it is done.

    def _look(self) -> None:
        self._looked = True
        found = layout_of(self._group)
        if isinstance(found, Layout):
            self._layout = found
            self._runtime.layouts[self.site] = found
        else:
            self.reason = found

    def _key(self) -> Key:
        assert self._layout is not None
        return self._layout.key(self.site, backward=_compat.in_backward())

    def _late(self, home: Home) -> None:
        """Gather now what was put off."""
        self._put_off = False
        if self._room(home, needed=True):
            self._start(self._key(), home, async_op=False)
            return
        if self._bound is not None and self._in_use() != self._alone:
            raise RunError(
                f"FSDP module {self.site!r} needs its parameters while others are in their bytes "
                f"[{home.begin}, {home.end}), and a graph still refers to these",
                expected="modules that were unsharded one after the other when the first step was "
                "recorded to be so until their backward passes are done",
                got=f"bytes in use in {'backward' if _compat.in_backward() else 'forward'}",
                fix="call handle.remove() and symmplan.fsdp.apply(model) again before the program "
                "changes",
                module=self.site,
            )
        self._leave()
        self._unshard(False)

    def _room(self, home: Home, *, needed: bool) -> bool:
        """Whether the bytes are free. If ``needed``, gathers ahead of their time give way."""
        holders = home.users.holders(home.begin, home.end)
        if not all(t.owner is not None and t.owner.gives_way(needed=needed) for t in holders):
            return False
        for tenant in holders:
            tenant.owner.give_way()
        return True

    def gives_way(self, *, needed: bool) -> bool:
        """Whether nobody has used what was gathered, nor will before it can be gathered again."""
        pending = self._group._all_gather_result is not None
        # FSDP2 forgets a prefetch that missed its target when the backward pass ends.
        return self._group.is_sharded and (needed or not pending)

    def give_way(self) -> None:
        """Let go of what was gathered; it is gathered again when it is needed."""
        assert self._tenant is not None
        if self._group._all_gather_result is not None:
            self._group._all_gather_result = None
            self._put_off = True
        self._runtime.released(self.site)
        self._tenant.drop()
        self._tenant = None

    def _leave(self) -> None:
        """FSDP2's own gathers from now on."""
        self._unbind()
        self._home = self._layout = None
        self.reason = "other modules' parameters were needed at the same time"
        self._runtime.left(self.site)

    def _in_use(self) -> int:
        """How many tensors and views refer to the parameters' storages."""
        assert self._home is not None
        return sum(
            _compat.storage_use_count(storage.untyped_storage()._cdata)
            for storage in self._home.storages
        )

    def _start(self, key: Key, home: Home, *, async_op: bool) -> None:
        group = self._group
        shards = [p._sharded_param_data for p in group.fsdp_params]
        cuda = home.outputs[0].is_cuda
        with torch.no_grad(), torch.profiler.record_function(f"FSDP::all_gather ({self.site})"):
            if not cuda:
                self._tenant = Tenant(owner=weakref.proxy(self))
                home.users.take(home.begin, home.end, self._tenant)
                _fill(home.parts, shards)
                home.gather()
                group._all_gather_result = Gathered()
            else:
                copies, gathers = group.comm_ctx.get_all_gather_streams(
                    async_op, group._training_state
                )
                # Dropped when the module is done, which its own kernels are on this stream.
                self._tenant = Tenant(torch.cuda.current_stream(), owner=weakref.proxy(self))
                with torch.cuda.stream(copies):
                    home.users.take(home.begin, home.end, self._tenant)
                    _fill(home.parts, shards)
                gathers.wait_stream(copies)
                with torch.cuda.stream(gathers):
                    home.gather()
                    event = gathers.record_event()
                group._all_gather_result = Gathered(event)
                self._tenant.after(event)
        self._runtime.gathered(key, _compat.group_name(group._all_gather_process_group))

    def _held(self) -> bool:
        """Whether anybody else refers to the parameters' own storages, as a graph does."""
        return any(
            hasattr(p, "_unsharded_param")
            and _compat.storage_use_count(output.untyped_storage()._cdata) > _OWN_USES
            for p in self._group.fsdp_params
            for output in p.all_gather_outputs
        )

    def _copy_out(self, home: Home) -> None:
        """Fill the parameters where FSDP2 put them; on this rank alone."""
        for parameter, output in zip(self._group.fsdp_params, home.outputs, strict=True):
            parameter.alloc_all_gather_outputs()
            own = parameter.all_gather_outputs[0]
            with torch.no_grad(), _compat.same_version(own):
                own.copy_(output)

    def _bind(self, home: Home) -> None:
        """Make the parameters views of their placements.

        They stay the same objects where there are some: a graph may accumulate gradients in them.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            for parameter, storage in zip(self._group.fsdp_params, home.storages, strict=True):
                parameter.all_gather_outputs = [storage]
                parameter.free_unsharded_param = _nothing
                old = getattr(parameter, "_unsharded_param", None)
                old = getattr(old, "_local_tensor", old)  # of a DTensor
                if old is None or old.is_inference():
                    parameter.__dict__.pop("_unsharded_param", None)
                    parameter.init_unsharded_param()
                else:
                    size, stride = parameter._orig_size, parameter._contiguous_orig_stride
                    old.data = torch.as_strided(storage, size, stride)
        self._bound = home
        self._alone = self._in_use()

    def _unbind(self) -> None:
        """Forget the parameters' storages; FSDP2 makes new ones when it gathers next."""
        for parameter in self._group.fsdp_params:
            parameter.__dict__.pop("free_unsharded_param", None)
            parameter.__dict__.pop("_unsharded_param", None)
            parameter.all_gather_outputs = []
        self._bound = None


def _fill(parts: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
    """Cast shards into their parts, in one kernel where torch has it."""
    torch._foreach_copy_(list(parts), list(shards))


def _nothing() -> None:
    """The bytes belong to the plan."""
