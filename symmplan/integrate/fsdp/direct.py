"""Unsharded parameters that live in their placements: nothing is copied in or out.

FSDP2 casts shards into a flat tensor, copies that into the all-gather's input, gathers rank after
rank, and copies the result out into parameters. Here a parameter's whole placement is its storage:
shards are cast straight into this rank's parts of it, and one coalesced gather fills the rest.

[Note: the seam]
    FSDP2's public hooks hand out flat buffers; no torch up to 2.15 lets a custom all-gather choose
    how parameters lie, which is proposed upstream (pytorch/pytorch#188276). So methods of its
    parameter groups are replaced, as attributes of the objects: ``unshard``, ``wait_for_unshard``
    and ``_to_sharded`` of a group, ``free_unsharded_param`` of its parameters. Where any of what
    they use is missing, a group does what they do not (see `layout_of`), or somebody has replaced
    them on the class, the class's methods run and gathers are flat.

[Note: one address]
    Autograd saves views of an unsharded parameter in forward and reads them in backward, after it
    was resharded and gathered again. So all gathers of a group lie at one offset, whatever the
    order in which the program uses it, and a later plan does not move it.

[Note: a gather ahead of its time]
    A gather that a program did not do ahead of time while it was recorded may find its bytes in
    use. If it is a prefetch, it is put off: FSDP2 asks again when it needs the parameters, and the
    next plan, for which parameters may move if no graph has views of them, has room for it. If it
    is needed now, prefetches give way that nobody has used. Else the module leaves, or, where a
    graph has views of its parameters, those leave that are in its bytes: their gathers are flat
    from now on, which the next plan knows. Of these, one whose parameters a graph has views of,
    too, but which is not in use before its backward pass, is resharded until then and leaves later.
    All that depends on what is alive on a rank, so the ranks ask each other. Only where two modules
    with graphs are in use at once the program cannot go on, and all ranks raise.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from symmplan.errors import RunError
from symmplan.integrate.fsdp.changes import state_of
from symmplan.integrate.fsdp.layout import OTHERS, Gathered, Layout, layout_of
from symmplan.memory.streams import current_stream, on_stream
from symmplan.memory.tell import everywhere
from symmplan.place.loans import Loan
from symmplan.place.observe import launching
from symmplan.torch_private import autograd, c10d, fsdp2

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmplan.capture.fsdp import Key
    from symmplan.integrate.fsdp.changes import State
    from symmplan.integrate.fsdp.home import Home
    from symmplan.integrate.fsdp.runtime import Runtime

__all__ = ["Direct"]


class Direct:
    """An FSDP2 parameter group whose parameters may live in a placement.

    Args:
        runtime: Of the model.
        site: Name of the module in the model.
        group: FSDP2's parameter group.
    """

    def __init__(self, runtime: Runtime, site: str, group: Any) -> None:
        self.site = site
        self._runtime = runtime
        self._group = group
        self._layout: Layout | None = None
        self._home: Home | None = None
        self._loan: Loan | None = None
        self._state: State | None = None  # of the shards, when they were gathered
        self._looked = False
        self._put_off = False
        # When it was put off: which collective, and on which streams it is to run.
        self._wanted: tuple[Key, tuple[Any, Any]] | None = None
        self._to_leave = False
        self._shown = f"FSDP::all_gather ({site})"  # FSDP2's name for it
        self._replaced = {name: group.__dict__.get(name) for name in fsdp2.REPLACED}
        self._of_class = [getattr(type(group), name) for name in fsdp2.REPLACED]
        group.unshard = self.unshard
        group.wait_for_unshard = self.wait_for_unshard
        group._to_sharded = self.to_sharded

    @property
    def parameters(self) -> list[Any]:
        """FSDP2's."""
        return list(self._group.fsdp_params)

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

    def unshard(self, async_op: bool = False) -> None:
        """Start to gather, if that was not done yet.

        Collective: yes.
        """
        group = self._group
        if not self._looked:
            self._look()
        self._runtime.ahead.asked(self, needed=not self._is_there())
        there = self._is_there()
        if self._home is not None and not there:
            self._to_leave = self._to_leave or not self._is_torchs()
            free = self._to_leave and not autograd.in_backward()
            if free and all(self._everywhere(self.can_leave)):
                self.leave()
        if self._layout is None:
            self._own("unshard", async_op)
            return
        if there:
            return
        key = self._key()
        self._runtime.arrive(key, group.device)
        if self._home is None:
            self._own("unshard", async_op)
            return
        streams = self._streams(async_op=async_op)
        if self._room(self._home, needed=False):
            self._put_off = False
            self._start(key, self._home, streams)
        elif not self._put_off:
            self._put_off = True
            self._wanted = key, streams
            self._runtime.put_off(key, self)

    def gather_ahead(self) -> State | None:
        """Start to gather if there is room, before FSDP2 asks for that.

        Returns:
            The state of the shards; None if nothing was started.

        Collective: yes, if that was done.
        """
        group, home, state = self._group, self._home, self.state()
        if home is None or state is None or self._to_leave or not self._is_torchs():
            return None
        if self._is_there() or not group.is_sharded or home.users.held(home.begin, home.end):
            return None
        with group.use_training_state(type(group._training_state).FORWARD):
            key = self._key()
            if not self._runtime.comes(key):
                return None
            streams = self._streams(async_op=group.unshard_async_op)
            if home.is_cuda:  # it may have waited for no change of the shards yet
                streams[0].wait_stream(current_stream())
            self._start(key, home, streams)
        return state

    def state(self) -> State | None:
        """Of the shards."""
        return state_of(self._group.fsdp_params, cuda=self._group.device.type == "cuda")

    def forget(self) -> None:
        """Nobody will use what was gathered ahead."""
        if self._forget():
            assert self._layout is not None
            self._runtime.forgotten(self._layout.key(self.site, backward=False))
            self._let_go()

    def start_early(self) -> bool:
        """Start a gather that was put off, if there is room now. Whether it need not wait more.

        Collective: yes.
        """
        if not self._put_off or self._home is None or self._wanted is None:
            return True
        if not self._room(self._home, needed=False):
            return False
        self._put_off = False
        self._start(self._wanted[0], self._home, self._wanted[1])
        return True

    def wait_for_unshard(self) -> None:
        """Wait until the parameters are there, and let the module have them."""
        self._wait()
        if self._group._training_state.name == "FORWARD":
            self._runtime.used(self.site)

    def _wait(self) -> None:
        group, home = self._group, self._home
        result = group._all_gather_result
        if home is None or (result is not None and not isinstance(result, Gathered)):
            if self._put_off and result is None:
                self._own("unshard", False)
            self._put_off = False
            self._own("wait_for_unshard")
            return
        if result is None:
            if group.is_unsharded or not self._put_off:
                return
            self._late(home)
            result = group._all_gather_result
            if not isinstance(result, Gathered):
                self._own("wait_for_unshard")
                return
        fsdp2.release_gather(group)
        if result.all_gather_event is not None:
            current_stream().wait_event(result.all_gather_event)
        home.move_in(group.fsdp_params)
        group._to_unsharded()
        group._all_gather_result = None
        home.keep(group.fsdp_params, None if autograd.in_backward() else self._state)

    def to_sharded(self) -> None:
        """The module is done with the parameters."""
        group = self._group
        was = group.is_sharded
        self._own("_to_sharded")
        if was:
            return
        self._let_go()

    @property
    def awaits_backward(self) -> bool:
        """Whether a graph that was not used yet has views of the parameters."""
        return self._home is not None and self._home.viewed and fsdp2.in_step(self._group)

    def remove(self) -> None:
        """Give FSDP2 its own methods back, and its parameters storages of their own.

        Collective: no.
        """
        group = self._group
        self._forget()
        self._move_out()
        for name, before in self._replaced.items():
            group.__dict__.pop(name, None)
            if before is not None:
                setattr(group, name, before)

    def _is_there(self) -> bool:
        """Whether FSDP2 need not gather."""
        group = self._group
        return (
            group._all_gather_result is not None
            or group.is_unsharded
            or (not group.unshard_in_backward and group._training_state.name == "PRE_BACKWARD")
        )

    def _own(self, name: str, *args: Any) -> None:
        """What the group would do without us; also what somebody gave its class meanwhile."""
        before = self._replaced[name]
        if before is None:
            getattr(type(self._group), name)(self._group, *args)
        else:
            before(*args)

    def _is_torchs(self) -> bool:
        """Whether the class's methods are those of the beginning."""
        kind = type(self._group)
        return [getattr(kind, name) for name in fsdp2.REPLACED] == self._of_class

    def _look(self) -> None:
        self._looked = True
        found: Layout | str = OTHERS
        if self._is_torchs() and fsdp2.has_torchs_methods(self._group):
            found = layout_of(self._group)
        if isinstance(found, Layout):
            self._layout = found
            self._runtime.planning.layouts[self.site] = found
        else:
            self._runtime.planning.flat[self.site] = found

    def _key(self) -> Key:
        assert self._layout is not None
        return self._layout.key(self.site, backward=autograd.in_backward())

    def _late(self, home: Home) -> None:
        """Gather now what was put off."""
        self._put_off = False
        if not self._room(home, needed=True):
            self._clear(home)
        if self._home is None:
            self._own("unshard", False)
        else:
            self._start(self._key(), home, self._streams(async_op=False))

    def _clear(self, home: Home) -> None:
        """Those leave the bytes that can on all ranks: this module, or who is there.

        Collective: yes, over the group.
        """
        holders = [t.owner for t in home.users.holders(home.begin, home.end)]
        others = [o for o in holders if o is None or not o.gives_way(needed=True)]
        owned = [o for o in others if o is not None]
        can = self._everywhere(self.can_leave, *(o.can_leave for o in owned))
        idle = self._everywhere(*(o.is_idle for o in owned))
        if can[0]:
            self.leave()
        elif len(owned) == len(others) and all(a or b for a, b in zip(can[1:], idle, strict=True)):
            for other, leaves in zip(owned, can[1:], strict=True):
                if leaves:
                    other.leave()
                else:
                    other.reshard()
            self._room(home, needed=True)
        else:
            raise RunError(
                f"FSDP module {self.site!r} needs its parameters while others are in their bytes "
                f"[{home.begin}, {home.end}), and graphs still refer to both",
                expected="modules that were unsharded one after the other when the first step was "
                "recorded to be so until their backward passes are done",
                got=f"bytes in use in {'backward' if autograd.in_backward() else 'forward'}",
                fix="call handle.remove() and symmplan.fsdp.apply(model) again before the program "
                "changes",
                module=self.site,
            )

    def _room(self, home: Home, *, needed: bool) -> bool:
        """Whether the bytes are free. If ``needed``, gathers ahead of their time give way."""
        holders = home.users.holders(home.begin, home.end)
        if not all(t.owner is not None and t.owner.gives_way(needed=needed) for t in holders):
            return False
        for loan in holders:
            loan.owner.give_way()
        return True

    def gives_way(self, *, needed: bool) -> bool:
        """Whether nobody has used what was gathered, nor will before it can be gathered again."""
        pending = self._group._all_gather_result is not None
        # FSDP2 forgets a prefetch that missed its target when the backward pass ends.
        return self._group.is_sharded and (needed or not pending)

    def give_way(self) -> None:
        """Let go of what was gathered; it is gathered again when it is needed."""
        self._put_off = self._forget()
        self._let_go()

    def can_leave(self) -> bool:
        """Whether the parameters can move to memory of their own."""
        return self._home is not None and not self._home.viewed

    def is_idle(self) -> bool:
        """Whether FSDP2 gathers the parameters again before they are used again."""
        state: str = self._group._training_state.name
        return state in ("IDLE", "POST_BACKWARD")

    def reshard(self) -> None:
        """Give the bytes away until the backward pass; and for good when no graph hinders it."""
        self._group._to_sharded()
        self._to_leave = True

    def _everywhere(self, *conditions: Callable[[], bool]) -> list[bool]:
        """Whether they hold on all ranks. Collective: yes, over the group."""
        group, timeout = self._group._all_gather_process_group, self._runtime.options.timeout
        return everywhere("room", [condition() for condition in conditions], group, timeout)

    def leave(self) -> None:
        """FSDP2's own gathers from now on; what is unsharded stays so."""
        self._to_leave = False
        self._move_out()
        self._let_go()
        self._layout = None
        if self._is_torchs():
            self._runtime.left(self.site)
        else:
            self._runtime.left(self.site, OTHERS)

    def vacate(self) -> None:
        """The parameters have memory of their own until the next plan.

        What was gathered and not yet waited for is gathered again when it is needed.
        """
        self._put_off = self._forget() or self._put_off
        self._move_out()
        self._let_go()

    def _move_out(self) -> None:
        if self._home is not None:
            self._home.move_out(self._group.fsdp_params, filled=self._group.is_unsharded)
        self._home = None

    def _forget(self) -> bool:
        """Forget a gather that nobody waited for. Whether there was one."""
        result = self._group._all_gather_result
        if not isinstance(result, Gathered):
            return False
        self._group._all_gather_result = None
        return True

    def _let_go(self) -> None:
        """The module does not use its bytes any more."""
        self._runtime.released(self.site)
        if self._loan is not None:
            self._loan.drop()
            self._loan = None
            self._runtime.made_room()

    def _streams(self, *, async_op: bool) -> tuple[Any, Any]:
        """Where shards are cast, and where they are gathered; Nones on the CPU."""
        group = self._group
        if group.device.type != "cuda":
            return None, None
        streams: tuple[Any, Any] = group.comm_ctx.get_all_gather_streams(
            async_op, group._training_state
        )
        return streams

    def _start(self, key: Key, home: Home, streams: tuple[Any, Any]) -> None:
        group = self._group
        state = self._state = self.state()
        self._loan = Loan(current_stream() if home.is_cuda else None, owner=weakref.proxy(self))
        if key.backward and home.has(group.fsdp_params, state):
            home.users.take(home.begin, home.end, self._loan)
            self._runtime.counts.reused += 1
            group._all_gather_result = Gathered()
        else:
            home.users.claim(home.begin, home.end)
            group._all_gather_result = Gathered(self._gather(key, home, self._loan, streams))
        self._runtime.gathered(key, c10d.group_name(group._all_gather_process_group))

    def _gather(self, key: Key, home: Home, loan: Loan, streams: tuple[Any, Any]) -> Any:
        """Gather; on devices, an event behind that."""
        shards = [p._sharded_param_data for p in self._group.fsdp_params]
        with torch.no_grad(), autograd.shown(self._shown):
            if not home.is_cuda:
                home.users.take(home.begin, home.end, loan)
                home.fill(shards)
                with launching(self._runtime.expected(key)):
                    home.gather()
                return None
            # The loan is dropped when the module is done, which its own kernels are on its stream.
            copies, gathers = streams
            with on_stream(copies):
                home.users.take(home.begin, home.end, loan)
                home.fill(shards)
            gathers.wait_stream(copies)
            with on_stream(gathers), launching(self._runtime.expected(key)):
                home.gather()
                event = gathers.record_event()
                loan.after(event)
            return event
