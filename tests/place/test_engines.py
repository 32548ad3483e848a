"""Communicators for copy engines, without any: what they are made of, and what runs over them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from ranks import pool_of

import symmplan
from symmplan.integrate.fsdp import segments as fsdp_memory
from symmplan.integrate.fsdp.segments import Memory
from symmplan.memory import realize
from symmplan.memory.backends import torch_symm
from symmplan.model import Access, Buffer, Operation, Problem, SegmentSpec
from symmplan.place.engines import register
from symmplan.process import PROCESS
from symmplan.runtime.options import Options
from symmplan.runtime.tenants import timed
from symmplan.torch_private import nccl

CPU = torch.device("cpu")

two = pool_of(2, timeout=120)


def _arena(names, met):
    """One segment that met groups in the order ``met``; the plan has their names sorted."""
    joined = []
    segment = SimpleNamespace(
        spec=SegmentSpec("s0", tuple(sorted(names)), 512, 0),
        rendezvous={name: None for group in met for name in (group, f"torch's {group}")},
    )
    arena = SimpleNamespace(memory="nccl", segments={"s0": segment})
    arena.join = lambda more: joined.extend((s, list(groups)) for s, groups in more.items())
    return arena, joined


@pytest.mark.parametrize("names", [("row", "column"), ("a", "b"), ("b", "a")])
def test_segments_are_registered_in_the_order_in_which_they_met_their_groups(names):
    """On each rank of a mesh its row and its column have names of their own, in any alphabetical
    order; who registers first with its row waits for whoever registers first with its column."""
    row, column = names
    arena, joined = _arena(names, met=(row, column))
    engines = {
        name: SimpleNamespace(group_name=f"{place} engines")
        for name, place in ((column, "column"), (row, "row"))
    }
    register(arena, engines)
    assert joined == [("s0", ["row engines", "column engines"])]


class _Backend:
    """What a process group of NCCL has below it."""

    def __init__(self, options):
        self.options = options


class _Connects(_Backend):
    """The same in a torch that connects without a collective."""

    connected = False

    def eager_connect_single_device(self, device):
        assert device.type == "cuda"
        self.connected = True


@pytest.mark.parametrize("backend", [_Backend, _Connects])
@pytest.mark.parametrize("has_ctas", [True, False])
def test_a_communicator_for_copy_engines_has_one_channel_and_is_connected(
    monkeypatch, backend, has_ctas
):
    """NCCL takes bytes of the device for each channel, and again for a first collective."""
    ctas = {"min_ctas": 0, "max_ctas": 0} if has_ctas else {}
    config = SimpleNamespace(cta_policy=0, **ctas)
    library = SimpleNamespace(
        Options=lambda: SimpleNamespace(config=config), NCCL_CTA_POLICY_ZERO=2
    )
    made, reduced = [], []

    def new_group(name, ranks, number, kind, timeout, what, options):
        assert (ranks, number, kind, timeout, what) == ([0, 1], 3, "nccl", 5, "engines")
        assert world.bound_device_id is None
        made.append(below := backend(options))
        return SimpleNamespace(_get_backend=lambda _: below)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", library, raising=False)
    monkeypatch.setattr(nccl, "new_group", new_group)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(dist, "all_reduce", lambda _, group: reduced.append(group))
    world = SimpleNamespace(bound_device_id="cuda:0")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: world)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    like = SimpleNamespace(_get_backend=lambda _: _Backend(SimpleNamespace(_timeout=5)))
    group = nccl.copy_engine_group(like, "engines", 3)
    wanted = {"cta_policy": 2, **({"min_ctas": 1, "max_ctas": 1} if has_ctas else {})}
    assert vars(config) == wanted
    assert made[0].options._timeout == 5
    assert getattr(made[0], "connected", None) is (True if backend is _Connects else None)
    assert reduced == ([] if backend is _Connects else [group])
    assert world.bound_device_id == "cuda:0"

    def fails(_):
        raise RuntimeError("out of memory")

    ended = []
    monkeypatch.setattr(nccl, "_connect", fails)
    monkeypatch.setattr(nccl, "end", ended.append)
    with pytest.raises(RuntimeError, match="out of memory"):
        nccl.copy_engine_group(like, "engines", 3)
    assert len(ended) == 1  # so that the next one can have its name


def test_no_ordinary_collective_runs_over_a_communicator_for_copy_engines(monkeypatch):
    """Neither before a segment is registered with it, nor when ranks meet after a push."""
    ours, theirs = (SimpleNamespace(rank=lambda: 1, group_name=n) for n in ("ours", "theirs"))
    reduced = []
    monkeypatch.setattr(PROCESS, "engines_made", {(0, 1): ours})
    monkeypatch.setattr(nccl, "serves", lambda _: True)
    monkeypatch.setattr(dist, "all_reduce", lambda _, group: reduced.append(group))
    for group in (ours, theirs):
        torch_symm._warm_up(SimpleNamespace(name=group.group_name, process_group=group), CPU)
    assert reduced == [theirs]

    met = []
    segment = SimpleNamespace(
        meeting=lambda group: met.append(group) or SimpleNamespace(), peers=lambda _: ()
    )
    memory = Memory(Options())
    memory.groups, memory.engines, memory._device = {"theirs": theirs}, {"theirs": ours}, CPU
    memory._arenas.append(SimpleNamespace(segments={"s0": segment}, give_back=lambda: None))
    scheduled = SimpleNamespace(
        call=SimpleNamespace(group="theirs"), place=SimpleNamespace(segment="s0")
    )
    memory.pushes(scheduled)
    assert met == [theirs]
    memory._arenas.clear()


@pytest.mark.parametrize("present", [True, False])
def test_segments_are_registered_only_with_engines_that_run_something(monkeypatch, present):
    """Also those that there are already, if a later plan has the first such collective."""
    registered = []

    def register(arena, engines):
        registered.append(dict(engines))
        return len(engines)

    arena = SimpleNamespace(segments={"s0": None}, rendezvous=1, races=None)

    def obtain(_, plan, device, groups, meet):
        meet(arena)
        return arena, 1

    for name, fake in {
        "fits": lambda *_: present,
        "agree": lambda *_: None,
        "register": register,
        "known_of": lambda groups: {group: f"{group}'s" for group in groups},
        "warm_up": lambda _: None,
    }.items():
        monkeypatch.setattr(fsdp_memory, name, fake)
    monkeypatch.setattr(fsdp_memory.Preparation, "obtain", obtain)
    memory = Memory(Options())
    memory.groups, memory._device = {"a": None, "b": None}, CPU
    memory._arenas += [arena] if present else []
    held = memory.prepare(SimpleNamespace(segments=()), {"b"})
    assert registered == [{"b": "b's"}]
    assert (held is None) == present
    memory.adopt(held)
    assert memory.engines == {"a": "a's", "b": "b's"}
    assert memory.rendezvous == 1
    memory._arenas.clear()


def _registered_in_vain(rank, size, left):
    """Register a segment with a further group, which fails on one rank, and then again."""
    from memory_plans import hand_made

    from symmplan.errors import BackendError
    from symmplan.memory import arena as arenas
    from symmplan.memory.backends.shm import ShmBackend

    other, acts, said = dist.new_group([0, 1]), [], []

    def fails(*_):
        acts.append("registers")
        if rank:
            raise BackendError("no luck", fix="try tomorrow")

    def require_left(_):
        if rank and not left:
            raise BackendError("nothing is left", fix="try tomorrow")

    arena = realize(hand_made({"x": 64}), memory="shm", timeout=20.0)
    more = {name: {other.group_name: other} for name in arena.segments}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShmBackend, "rendezvous", fails)
        patch.setattr(arenas.Arena, "frees", False)  # as NCCL's
        patch.setattr(arenas, "require_left", require_left)
        for _ in range(2):
            with pytest.raises(BackendError) as caught:
                arena.join(more)
            said.append(caught.value.what)
        arena.give_back()
    kept = arena in PROCESS.cache.values()
    arena.release()
    PROCESS.cache.clear()
    return acts, said[1], kept


@pytest.mark.ranks
@pytest.mark.all_cases
def test_who_was_registered_where_a_peer_failed_does_not_leave_it_alone_later(two):
    """Torch registers once: ranks that could would skip what the others try again, who would wait.

    What failed before anybody registered may be tried again, in the same segments.
    """
    for acts, said, kept in two.run(_registered_in_vain, True):
        assert acts == ["registers"]
        assert "could not be registered with a group before" in said
        assert not kept
    for rank, (acts, said, kept) in enumerate(two.run(_registered_in_vain, False)):
        assert acts == []
        assert said == "nothing is left" or rank == 0
        assert kept


def test_parts_of_one_segment_meet_each_in_its_own_groups():
    """A tenant whose segments have groups of their own may get all of its parts in one segment."""
    groups = ("tensor", "context", "expert")

    def made(*shared):
        problem = Problem(
            buffers=[Buffer(g, 64, g) for g in groups],
            operations=[Operation(g, group=g) for g in groups],
            accesses=[Access(g, g, write=True) for g in groups],
            shared_groups=shared,
        )
        return realize(symmplan.plan(problem), memory="local")

    own, parent = made(), made(groups)
    ((name, whole),) = parent.segments.items()
    segments = {s.spec.groups[0]: n for n, s in own.segments.items()}
    places = {segments[g]: evolve(p, segment=name) for g, p in parent.plan.placements.items()}
    mine = timed(SimpleNamespace(arena=own), parent, places)
    for group in groups:
        part = mine.segments[segments[group]]
        assert {*part.rendezvous} == {group}
        assert part.meeting() is whole.meeting(group)
        assert part.allocation is whole.tensor
        assert part.tensor.data_ptr() == whole.address + places[segments[group]].offset
    mine.give_back()
    assert whole.meeting("tensor").peers  # the parent's stay
    assert mine.released
    parent.give_back()
    own.give_back()
    assert parent.released
