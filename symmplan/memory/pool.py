"""The pool: the ranks of a group need one segment, and all their programs have parts of it.

[Note: one pool]
    Compiled graphs, their pinned inputs and eager sessions of the same ranks and memory backend
    share one segment, the *host*. Each has a part of it, which nobody else uses while it is leased.
    So accesses of two programs need no order. A part is free again once its program has released it
    and no tensor uses its bytes, on every rank. Programs may end on one rank after the other, so
    the ranks exchange which bytes are free before a part is given out.

    If a new program does not fit, the segment grows: all ranks allocate a larger one, and the other
    programs move there. They can move only if each of them is idle at the same place of its program
    on all ranks; an eager session is idle when no tensor of it is alive. If a program cannot move
    (a CUDA graph has its addresses, a tensor uses its bytes), or if there is no room for both
    segments at the same time, no program moves, and the new program gets another segment.

    Programs do not share a part in turn. They may run at the same time: in two threads, in another
    order on each rank, or one inside the other. When a run begins, only this rank would know that
    the bytes are in use, but all ranks would have to agree on another place for the run. Graphs
    that run one after the other are graphs of one backend, and share their bytes.

    A segment that several groups have registered, or whose signal pad is used, has no parts.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from attrs import define, field

from symmplan.coordination.agreement import agree, no_note
from symmplan.coordination.exchange import Exchange
from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.own import own_work
from symmplan.coordination.world import current
from symmplan.memory import cache
from symmplan.memory.arena import realize
from symmplan.memory.backends import BACKENDS
from symmplan.memory.resolve import resolve_backend
from symmplan.memory.room import agreed_room
from symmplan.memory.streams import synchronize
from symmplan.model import Access, Buffer, Operation, Placement, Problem
from symmplan.planner import plan as plan_problem
from symmplan.process import PROCESS
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from symmplan.coordination.groups import Group
    from symmplan.memory.arena import Arena
    from symmplan.memory.segment import Segment
    from symmplan.model import Plan, SegmentSpec

__all__ = ["obtain"]

#: Where parts begin, in bytes: where allocations do.
_ALIGN = 4096

#: What a rank tells of a group's segments: ``{number: [[begin, end, moment], ...]}`` of what is not
#: free there, with the moment at which its program holds still, None if it cannot move.
_Said = dict[str, list[list[Any]]]


@own_work
def obtain(
    plan: Plan,
    groups: Mapping[str, Any],
    *,
    memory: str,
    device: torch.device,
    timeout: float,
    user: str,
    debug: bool = False,
    old: Arena | None = None,
) -> tuple[Arena, bool]:
    """Memory for ``plan`` in the pool's segments. See [Note: one pool].

    Args:
        plan: What must fit.
        groups: As for `symmplan.memory.cache.obtain`.
        memory: Name of the memory backend.
        device: Where it must lie.
        timeout: Seconds that ranks wait for each other.
        user: As for `symmplan.memory.realize`.
        debug: The same.
        old: What the new memory takes the place of, an arena.

    Returns:
        The arena, and whether it is new.

    Raises:
        AgreementError, BackendError, PeerTimeoutError: As `symmplan.memory.realize`.

    Collective: yes, over those groups.
    """
    names = [name for spec in plan.segments for name in spec.groups]
    members = resolve_groups([*names, *groups], groups)
    if memory == "auto" and plan.segments:
        memory = resolve_backend(memory, device, members).name
    given: dict[str, Any] = {"memory": memory, "device": device, "timeout": timeout}
    if current() is not None or not BACKENDS[memory].pools or not _has_parts(plan):
        return cache.obtain(plan, groups, **given, user=user, debug=debug)
    agree(plan, groups, timeout)  # else ranks ask for different things
    synchronize(device)  # before all ranks meet: then nobody uses what is given back, or moves
    asked = [members[spec.groups[0]] for spec in plan.segments]
    pools = [_Hosts.of(group, given) for group in asked]
    with ExitStack() as still:
        mine = [hosts.claims(old, still) for hosts in pools]
        with Exchange(members, timeout) as exchange:
            texts = exchange.round("pool", json.dumps(mine).encode())
        within = {}
        try:
            for i, (hosts, spec) in enumerate(zip(pools, plan.segments, strict=True)):
                said = [_read(t, hosts.group, r)[i] for r, t in enumerate(texts[hosts.group.name])]
                within[spec.name] = hosts.place(spec, said, old)
            arena = realize(plan, groups=groups, user=user, debug=debug, within=within, **given)
            try:
                for hosts in pools:
                    hosts.move()
            except BaseException:
                arena.give_back()
                raise
        finally:
            for host, _ in within.values():
                host.give_back("")  # if nobody came
    return arena, True


def _has_parts(plan: Plan) -> bool:
    """Whether the plan's segments, and there are some, may be parts of others."""
    segments = plan.segments
    return bool(segments) and all(len(s.groups) == 1 and not s.signal_pad for s in segments)


@define(eq=False)
class _Hosts:
    """The segments of the ranks of a group.

    Attributes:
        group: The group.
        given: Memory backend, device and timeout.
        arenas: ``{number: arena}``; numbers are equal on all ranks.
        moving: Whose parts of which segments move to where.
    """

    group: Group
    given: Mapping[str, Any]
    arenas: dict[int, Arena]
    moving: list[tuple[Segment, Arena, Placement]] = field(init=False, factory=list)

    @classmethod
    def of(cls, group: Group, given: Mapping[str, Any]) -> _Hosts:
        """Those that there are yet."""
        key = (group.ranks, given["memory"], str(given["device"]))
        arenas: dict[int, Arena] = PROCESS.pool.setdefault(key, {})
        for number, arena in list(arenas.items()):
            if arena.released or not arena.tenants or not _is_known(_segment(arena)):
                del arenas[number]
        return cls(group, given, arenas)

    def claims(self, old: Arena | None, still: ExitStack) -> _Said:
        """What is not free on this rank; who can move holds still as long as ``still`` is open."""
        found: _Said = {}
        for number, arena in self.arenas.items():
            segment, mine = _segment(arena), found.setdefault(str(number), [])
            for part in segment.parts:
                asks = old is not None and part in old.segments.values()
                tenant = None if part.tenant is None else part.tenant()
                moment = None if tenant is None else still.enter_context(tenant.still())
                mine.append([part.begin, part.begin + part.nbytes, -1 if asks else moment])
            bounds = [claim[:2] for claim in mine]
            mine += [
                [begin, end, None]
                for begin, end in segment.held()
                if not any(b <= begin and end <= e for b, e in bounds)
            ]
            mine.sort(key=lambda claim: claim[:2])
        return found

    def place(
        self, spec: SegmentSpec, said: Sequence[_Said], old: Arena | None
    ) -> tuple[Arena, Placement]:
        """Where a part of so many bytes lies: in a segment that there is, or in another.

        Args:
            spec: What is asked for.
            said: What each rank told.
            old: Whose part it takes the place of.

        Collective: yes, if there is no place.
        """
        common = [n for n in self.arenas if all(str(n) in claims for claims in said)]
        for number in common:
            taken = [claim[:2] for claims in said for claim in claims[str(number)]]
            segment = _segment(self.arenas[number])
            begin = _gap(taken, spec.nbytes, segment.nbytes)
            if begin is not None:
                return self.arenas[number], Placement(segment.spec.name, begin, spec.nbytes)
        movers: list[Segment] = []
        if common:
            theirs = [claims[str(common[-1])] for claims in said]
            parts = list(_segment(self.arenas[common[-1]]).parts)
            if all(x == theirs[0] for x in theirs) and all(c[2] is not None for c in theirs[0]):
                movers = [p for p in parts if old is None or p not in old.segments.values()]
        end, places = spec.nbytes, []
        for part in movers:
            begin = _up(end)
            places.append(begin)
            end = begin + part.nbytes
        if movers and not self._has_room(end):
            movers, end = [], spec.nbytes
        host = self._made(spec, end, 1 + max((int(n) for c in said for n in c), default=0))
        name = _segment(host).spec.name
        self.moving = [
            (part, host, Placement(name, begin, part.nbytes))
            for part, begin in zip(movers, places, strict=False)
        ]
        return host, Placement(name, 0, spec.nbytes)

    def _has_room(self, nbytes: int) -> bool:
        """Whether all ranks have so many bytes besides. Collective: yes."""
        groups = {self.group.name: self.group.process_group}
        room = agreed_room(None, 0, groups, **self.given)
        return min(room.nbytes, room.at_once) >= nbytes

    def _made(self, spec: SegmentSpec, nbytes: int, number: int) -> Arena:
        """Another segment, with no parts yet. Collective: yes."""
        group = spec.groups[0]
        problem = Problem(
            buffers=(Buffer("parts", nbytes, group),),
            operations=(Operation("hold"),),
            accesses=(Access("hold", "parts"),),
        )
        groups = {group: self.group.process_group}
        groups = {} if self.group.process_group is None else groups
        arena, _ = cache.obtain(plan_problem(problem), groups, **self.given, user="")
        self.arenas[number] = arena
        return arena

    def move(self) -> None:
        """Let those move of whom `place` said it. Collective: yes."""
        for part, host, place in self.moving:
            tenant = part.tenant()  # type: ignore[misc]
            tenant.move_in(tenant.arena.elsewhere({part.spec.name: (host, place)}))


def _segment(arena: Arena) -> Segment:
    """The one of an arena of the pool."""
    return next(iter(arena.segments.values()))


def _is_known(segment: Segment) -> bool:
    """Whether a group whose ranks met there is one yet."""
    groups = [r.group.process_group for r in segment.rendezvous.values()]
    return all(group is None or c10d.is_registered(group) for group in groups)


def _gap(taken: Iterable[list[int]], nbytes: int, size: int) -> int | None:
    """The first place of so many bytes that are not taken; None if there is none."""
    at = 0
    for begin, end in sorted(taken):
        if at + nbytes <= begin:
            return at
        at = max(at, _up(end))
    return at if at + nbytes <= size else None


def _up(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _read(text: bytes, group: Group, rank: int) -> list[_Said]:
    """What a rank told."""
    try:
        return [
            {str(n): [[int(b), int(e), m] for b, e, m in claims] for n, claims in of.items()}
            for of in json.loads(text)
        ]
    except (ValueError, TypeError, AttributeError) as error:
        raise no_note(group, rank) from error
