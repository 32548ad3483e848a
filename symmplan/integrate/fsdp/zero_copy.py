"""Unsharded parameters that live in their placements: nothing is copied in or out.

FSDP2 casts shards into a flat tensor, copies that into the all-gather's input, gathers rank after
rank, and copies the result out into parameters. Here a parameter's placement is its storage: shards
are cast straight into this rank's parts of it, and one coalesced gather fills the rest.

[Note: the seam]
    FSDP2's public hooks hand out flat buffers; up to torch 2.15 a custom all-gather cannot choose
    how parameters lie. An upstream proposal (pytorch/pytorch#188276) would allow it. So symmplan
    replaces methods of FSDP2's parameter groups, as attributes of the objects: ``unshard``,
    ``wait_for_unshard`` and ``_to_sharded`` of a group, ``free_unsharded_param`` of its parameters.
    The class's own methods run, and gathers are flat, if this torch lacks a name that the
    replacements use, if a group needs something that they do not do (see `layout_of`), or if other
    code has replaced the methods on the class.

[Note: one address]
    Autograd saves views of an unsharded parameter in forward and reads them in backward, after it
    was resharded and gathered again. So all gathers of a group lie at one offset, whatever the
    order in which the program uses it, and a later plan does not move it.

[Note: somebody is in the bytes]
    Which gathers run, in what order and into which bytes, follows from FSDP2's calls and the plan,
    which are the same on all ranks. A program that keeps more modules unsharded than it did while
    it was recorded may find a gather's bytes in use. If FSDP2 asks for that gather ahead of time,
    it waits on all ranks until FSDP2 needs it; this follows from FSDP2's calls alone
    (`Runtime.crowding`). A gather that is needed now runs. On a rank where the bytes are in use,
    the parameters that lie there move to a copy, with all views of them, until their module is
    resharded. If somebody else is there and cannot move, the gathered parameters do.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from symmplan.coordination.all_gather import everywhere
from symmplan.device import device_of
from symmplan.integrate.fsdp.layout import Asked, Gathered, Layout, layout_of, shards_of
from symmplan.memory.streams import synchronize
from symmplan.process import PROCESS
from symmplan.runtime.leases import Lease, set_aside
from symmplan.runtime.observe import launching
from symmplan.torch_private import autograd, c10d, fsdp2, fsdp2_in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.capture.fsdp_recording import Key
    from symmplan.integrate.fsdp.parameter_storage import ParameterStorage

__all__ = ["ZeroCopyUnshard"]


class ZeroCopyUnshard:
    """An FSDP2 parameter group whose parameters may live in a placement.

    Args:
        runtime: The model's `symmplan.integrate.fsdp.serve.Runtime`.
        site: Name of the module in the model.
        group: FSDP2's parameter group.

    Attributes:
        site: The same.
        layout: How the parameters would lie in a placement; None if they cannot.
        storage: Where the parameters live; None: where FSDP2 puts them.
    """

    def __init__(self, runtime: Any, site: str, group: Any) -> None:
        self.site = site
        self._runtime = runtime
        self._group = group
        self._device = device_of(group.device)
        self.layout: Layout | None = None
        self.storage: ParameterStorage | None = None
        self._lease: Lease | None = None
        self._looked = False
        self._kept: Callable[[], None] | None = None
        self._keys: dict[bool, Key] = {}
        self._named: tuple[Any, str] = (None, "")  # FSDP2's group of the last gather, and its name
        self._shown = f"FSDP::all_gather ({site})"  # FSDP2's name for it
        own = (self.unshard, self.wait_for_unshard, self.to_sharded)
        self._methods = fsdp2_in_place.Methods(group, own)

    @property
    def parameters(self) -> list[Any]:
        """FSDP2's."""
        return list(self._group.fsdp_params)

    @property
    def group(self) -> str:
        """Name of the process group that gathers."""
        return c10d.group_name(fsdp2_in_place.group_of(self._group))

    def settle(self, storage: ParameterStorage | None, *, kept: bool) -> None:
        """From now on the parameters live there; None: where FSDP2 puts them.

        Args:
            storage: Where.
            kept: Whether FSDP2 is not to reshard them after forward.
        """
        self.storage = storage
        if kept and self._kept is None:
            self._kept = fsdp2.keep_after_forward(self._group)
        elif self._kept is not None and storage is None and not kept:
            self._kept()
            self._kept = None

    # What FSDP2 calls.

    def unshard(self, async_op: bool = False) -> None:
        """Start to gather, if that was not done yet.

        Collective: yes.
        """
        group = self._group
        if not self._looked:
            self._look()
        state, result = fsdp2_in_place.state_name(group), fsdp2_in_place.result_of(group)
        there = self.has_bytes or (state == "PRE_BACKWARD" and not group.unshard_in_backward)
        backward = autograd.graph_task() != autograd.NO_TASK
        reason = self._methods.why_own() if self.storage is not None and not there else ""
        if reason and not backward:
            over, timeout = fsdp2_in_place.group_of(group), self._runtime.options.timeout
            if everywhere("room", [self.can_leave()], over, timeout)[0]:
                self.leave(reason)
        if self.layout is None:
            self._methods.call_own(fsdp2_in_place.UNSHARD, async_op)
            return
        if there:
            return
        if result is not None:
            self.start_early()
            return
        key = self._keys.get(backward) or self.key(backward=backward)
        outside = not (backward or (state == "FORWARD" and torch.is_grad_enabled()))
        self._runtime.arrive(key, group.device, outside=outside)
        if self.storage is None:
            self._methods.call_own(fsdp2_in_place.UNSHARD, async_op)
            return
        streams = self._streams(async_op=async_op)
        others = self._runtime.crowding(self)
        if others:
            self._put_off(key, self.storage, streams, crowding=others, outside=outside)
        else:
            self._start(key, self.storage, streams)

    def start_early(self) -> bool:
        """Start a gather that was put off, if there is room now. Whether it need not wait more.

        Collective: yes.
        """
        asked = self.asked
        if asked is None or self.storage is None:
            return True
        if self._runtime.crowding(self):
            return False
        self._start(asked.key, self.storage, asked.streams, asked=asked)
        return True

    def wait_for_unshard(self) -> None:
        """Wait until the parameters are there, and let the module have them.

        Collective: where the gather was put off.
        """
        group, storage = self._group, self.storage
        result = fsdp2_in_place.result_of(group)
        if storage is not None and isinstance(result, Asked):
            key = self.key(backward=autograd.in_backward())
            others = self._runtime.crowding(self)
            self._start(key, storage, self._streams(async_op=False), others, result)
            result = fsdp2_in_place.result_of(group)
        if storage is None or not (result is None or isinstance(result, Gathered)):
            if storage is None and self._runtime.idle:
                self._methods.call_own(fsdp2_in_place.WAIT)
            else:
                runtime = self._runtime
                with runtime.memory.unsharding(*runtime.recorder.last(self.site)):
                    self._methods.call_own(fsdp2_in_place.WAIT)
            if not self._looked:
                self._look()
            return
        if result is None:
            in_backward = fsdp2_in_place.state_name(group) == "PRE_BACKWARD"
            if in_backward and group.is_unsharded:
                self._runtime.counts["reused"] += self._kept is not None
            return
        self._receive(result, storage)

    def _receive(self, gathered: Gathered, storage: ParameterStorage) -> None:
        """Let the module have what a gather has brought."""
        group = self._group
        fsdp2_in_place.release_gather(group)
        if gathered.all_gather_event is not None:
            self._device.current_stream().wait_event(gathered.all_gather_event)
        storage.move_in(group.fsdp_params)
        if storage.layout.own:
            storage.finish(group.fsdp_params)
        fsdp2_in_place.has_unsharded(group)

    def to_sharded(self) -> None:
        """The module is done with the parameters."""
        if self._runtime.idle:
            self._methods.call_own(fsdp2_in_place.TO_SHARDED)
            return
        group = self._group
        was = group.is_sharded
        if self._runtime.memory.program.looks:
            self._runtime.memory.look()
        self._methods.call_own(fsdp2_in_place.TO_SHARDED)
        if not was:
            self._let_go(after_forward=fsdp2_in_place.state_name(group) == "FORWARD")

    # What the runtime and other modules ask.

    def key(self, *, backward: bool) -> Key:
        """By what its gather is recognised."""
        key = self._keys.get(backward)
        if key is None:
            assert self.layout is not None
            key = self._keys[backward] = self.layout.key(self.site, backward=backward)
        return key

    @property
    def has_bytes(self) -> bool:
        """Whether FSDP2 has gathered the parameters, or begun to, and has not released them."""
        # FSDP2 forgets a prefetch that missed its target when the backward pass ends.
        group = self._group
        if group.is_unsharded:
            return True
        result = fsdp2_in_place.result_of(group)
        return not (result is None or isinstance(result, Asked))

    @property
    def has_gradients(self) -> bool:
        """Whether some parameter has a sharded gradient."""
        return fsdp2.has_gradients(self._group)

    @property
    def asked(self) -> Asked | None:
        """A gather that was put off, and that FSDP2 has not forgotten since."""
        result = fsdp2_in_place.result_of(self._group)
        return result if isinstance(result, Asked) else None

    @property
    def awaits_backward(self) -> bool:
        """Whether a graph that was not used yet has views of the parameters."""
        return self.storage is not None and self.storage.viewed and fsdp2.in_step(self._group)

    def can_leave(self) -> bool:
        """Whether the parameters can move to ordinary memory.

        They cannot if a graph has views of them, or while a gather runs. Another gather could not
        replace that one, because the shards may have changed.
        """
        begun = isinstance(fsdp2_in_place.result_of(self._group), Gathered)
        return self.storage is None or not (self.storage.viewed or begun)

    def step_aside(self) -> bool:
        """Let somebody else have the bytes, on this rank alone; whether that can be.

        See [Note: somebody is in the bytes].
        """
        group, storage = self._group, self.storage
        if storage is None or not self.has_bytes:
            self._drop()
            return True
        self._runtime.counts["copies"] += 1
        result = fsdp2_in_place.result_of(group)
        if result is not None and result.all_gather_event is not None:
            self._device.current_stream().wait_event(result.all_gather_event)
        synchronize(group.device)
        if group.is_sharded or storage.bound:
            storage.copy_aside()
        self._drop()
        return True

    def leave(self, reason: str) -> None:
        """FSDP2's own gathers from now on."""
        self.vacate()
        self.layout = None
        planning = self._runtime.planning
        planning.layouts.pop(self.site, None)
        planning.flat[self.site] = reason

    def vacate(self) -> None:
        """The parameters have memory of their own until the next plan."""
        self._move_out()
        self._let_go()

    def remove(self) -> None:
        """Give FSDP2 its own methods back, and its parameters storages of their own.

        What a gather has brought stays: another one could bring other values, because the shards
        may change meanwhile. So a gather that waits for room runs now, with the shards as they
        were, unless an error has ended the program's step: then FSDP2 forgets it.

        Collective: yes, if a gather waits for room.
        """
        result = fsdp2_in_place.result_of(self._group)
        if isinstance(result, Asked):
            if self.storage is None or sys.exc_info()[0] is not None:
                fsdp2_in_place.set_result(self._group, None)
            else:
                self.wait_for_unshard()
        elif isinstance(result, Gathered):
            if self.storage is None:
                fsdp2_in_place.set_result(self._group, None)
            else:
                self._receive(result, self.storage)
        self._move_out()
        self.settle(None, kept=False)
        self._methods.put_back()

    def _look(self) -> None:
        found = layout_of(self._group, self._methods)
        self._looked = found is not None
        planning = self._runtime.planning
        if isinstance(found, Layout):
            self._keys = {}
            self.layout = planning.layouts[self.site] = found
        elif found is not None:
            planning.flat[self.site] = found

    def _move_out(self) -> None:
        """Into memory of their own, for good."""
        if self.storage is not None:
            filled = self._group.is_unsharded
            self.storage.move_out(self._group.fsdp_params, filled=filled)
        self.storage = None

    def _let_go(self, *, after_forward: bool = False) -> None:
        """The module does not use its bytes any more."""
        if self.storage is not None:
            self.storage.take_addresses()
        self._drop()
        self._runtime.released(self.site, after_forward=after_forward)

    def _drop(self) -> None:
        """Free the bytes: their next user needs to wait only for work that is queued now."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.drop()

    # Gathering.

    def _streams(self, *, async_op: bool) -> tuple[Any, Any]:
        """Where shards are cast, and where they are gathered; Nones on the CPU."""
        if not self._device.is_accelerator:
            return None, None
        return fsdp2_in_place.gather_streams(self._group, async_op=async_op)

    def _put_off(
        self, key: Key, storage: ParameterStorage, streams: tuple[Any, Any], **more: Any
    ) -> None:
        """Let a gather wait for room, with the shards as FSDP2 would gather them now.

        ``more`` are the other attributes of `Asked`.
        """
        stream = streams[0]
        with torch.inference_mode(mode=False), torch.no_grad(), self._device.on_stream(stream):
            shards = [s.clone() for s in shards_of(self._group, storage.layout, self.site)]
            copied = None if stream is None else stream.record_event()
        asked = Asked(key=key, streams=streams, shards=shards, copied=copied, **more)
        fsdp2_in_place.set_result(self._group, asked)
        self._runtime.put_off(asked, self)

    def _start(
        self,
        key: Key,
        storage: ParameterStorage,
        streams: tuple[Any, Any],
        others: Sequence[str] = (),
        asked: Asked | None = None,
    ) -> None:
        """Gather into the placement.

        Args:
            key: The gather.
            storage: Where.
            streams: Where shards are cast, and where they are gathered.
            others: The modules that are to have bytes there.
            asked: What FSDP2 keeps of it if it had to wait.
        """
        runtime, group = self._runtime, self._group
        if runtime.memory.turns is not None:  # the gather may have waited for room until now
            runtime.memory.turns.end_turn()
        if storage.readable:  # by a prefetch that FSDP2 has forgotten since
            storage.take_addresses()
        _, stay = storage.users.give_room(storage.begin, storage.end)
        outside = runtime.gathering(self, key, others, asked)
        over = fsdp2_in_place.group_of(self._group)
        if over is not self._named[0]:
            self._named = over, c10d.group_name(over)
        runtime.recorder.begin(key, key.nbytes, self._named[1], outside=outside)
        if not stay:
            self._lease = Lease(stream=self._device.current_stream(), owner=weakref.proxy(self))
            event = self._fill(key, storage, streams, self._lease, asked)
            fsdp2_in_place.set_result(group, Gathered(event))
            return
        with set_aside(storage.bytes):
            self._fill(key, storage, streams, None, asked)
            synchronize(group.device)
            storage.copy_aside()
        fsdp2_in_place.set_result(group, Gathered())

    def _fill(
        self,
        key: Key,
        storage: ParameterStorage,
        streams: tuple[Any, Any],
        lease: Lease | None,
        asked: Asked | None,
    ) -> Any:
        """Gather behind whoever had the bytes before; on devices, an event behind that.

        ``lease`` is of the bytes; None if they are somebody else's, and the device is at rest. The
        other arguments are those of `_start`.
        """
        shards, copied = (None, None) if asked is None else (asked.shards, asked.copied)
        expected = None if PROCESS.launched is None else self._runtime.expected(key)
        with torch.no_grad(), autograd.shown(self._shown):
            if not self._device.is_accelerator:
                shards = shards or shards_of(self._group, storage.layout, self.site)
                if lease is not None:
                    storage.users.take(storage.begin, storage.end, lease)
                storage.fill(shards)
                with launching(expected):
                    storage.gather()
                return None
            # The lease is dropped when the module is done, which its own kernels are on its stream.
            copies, gathers = streams
            if copied is not None:
                copies.wait_event(copied)
                for shard in shards or ():
                    self._device.record_stream(shard, copies)
            with self._device.on_stream(copies):
                shards = shards or shards_of(self._group, storage.layout, self.site)
                if lease is not None:
                    storage.users.take(storage.begin, storage.end, lease)
                storage.fill(shards)
            gathers.wait_stream(copies)
            with self._device.on_stream(gathers), launching(expected):
                storage.gather()
                event = gathers.record_event()
                if lease is not None:
                    lease.after(event)
            return event
