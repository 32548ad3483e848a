"""What torch's allocator has for a recorded step, with some of FSDP2's buffers elsewhere."""

from __future__ import annotations

import math
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symmplan.capture.fsdp_recording import Key, Look, Recording
from symmplan.capture.fsdp_reserved import Reserved
from symmplan.device import Allocation
from symmplan.device.allocator import CachingAllocator
from symmplan.model import PUSHES

MIB = 1 << 20

#: Bytes of a layer's parameters and of activations that its backward needs, in MiB; of others.
layers = st.lists(
    st.tuples(
        st.integers(1, 40), st.integers(0, 30), st.just(300) | st.integers(0, 60).map(MIB.__mul__)
    ),
    min_size=1,
    max_size=5,
)
#: Of buffers of gradients beyond these, as where parts are padded.
PADDING = 1024


class _Program:
    """A program that trains, on an allocator of its own.

    Args:
        layers: Its layers.
        algorithms: How each of its collectives runs; others are ordinary.
        had: Bytes of tensors that are there from the beginning on, of which every other is freed.
        optimized: Bytes of each state of an optimizer, which is made in the first step, and of
            what that has besides while it steps.

    Attributes:
        moved: Whether sharded gradients of what is pushed are allocated on the program's stream.
    """

    def __init__(self, layers, algorithms=(), had=(), optimized=()):
        self.layers, self.algorithms, self.moved = layers, algorithms, False
        self.optimized = optimized
        self.allocator, self.recording = CachingAllocator(), Recording()
        self.history, self.made, self.live, self.number = [], 0, {}, 0
        for index, nbytes in enumerate(had):
            self.take(("had", index), nbytes)
        for index in range(0, len(had), 2):
            self.drop(("had", index))
        self.held = self.allocator.held({name: block for name, (block, _) in self.live.items()})
        self.allocator = CachingAllocator()
        used = self.allocator.hold(self.held)
        self.live = {name: (used[name], n) for name, (_, n) in self.live.items()}
        self.history, self.made = [], 0

    def take(self, name, nbytes, stream="main"):
        if nbytes:
            self.made += 1
            self.history.append(Allocation(self.made, name, nbytes, stream))
            self.live[name] = self.allocator.take(nbytes, stream), nbytes

    def drop(self, name):
        if name in self.live:
            self.history.append(Allocation(0, name, 0, ""))
            self.allocator.drop(self.live.pop(name)[0])

    def look(self, *, own=False):
        self.recording.moments.append(Look(len(self.recording.events), 0, 0, own, self.made))

    def begin(self, kind, layer, nbytes, stream, *, backward):
        """A collective's index, its algorithm, and its buffer where it is ordinary."""
        index = len(self.recording.collectives)
        name = self.algorithms[index] if index < len(self.algorithms) else "ordinary"
        self.look()
        self.recording.begin(Key(f"l{layer}", kind, nbytes, "uint8", backward), nbytes)
        self.take(("flat", index), nbytes if name == "ordinary" else 0, stream)
        self.look(own=True)
        return index, name

    def gather(self, layer, nbytes, *, backward):
        index, name = self.begin("all_gather", layer, nbytes, "gathers", backward=backward)
        self.recording.run(index, "g")
        self.look()
        self.take(("parameters", layer), nbytes if name == "ordinary" else 0)
        self.recording.filled[index] = len(self.recording.events)
        self.look(own=True)
        self.recording.drop(index)
        self.drop(("flat", index))

    def reduce(self, layer, nbytes):
        index, name = self.begin("reduce_scatter", layer, nbytes, "main", backward=True)
        if name not in PUSHES:
            self.drop(("gradient", layer))
        self.recording.run(index, "g")
        self.take("sum", nbytes // 4, "reductions")
        moved = self.moved and name in PUSHES
        self.take(("shard", layer), nbytes // 2, "main" if moved else "reductions")
        self.drop("sum")
        self.look()
        return index

    def step(self):
        for layer, (weight, saved, moment) in enumerate(self.layers):
            self.gather(layer, weight * MIB, backward=False)
            self.take(("saved", layer), saved * MIB)
            self.take("moment", moment)
            self.drop("moment")
            self.drop(("parameters", layer))
        self.drop(("had", 1))
        before = None
        for layer in reversed(range(len(self.layers))):
            weight, _, moment = self.layers[layer]
            self.gather(layer, weight * MIB, backward=True)
            self.take("moment", moment)
            self.take(("gradient", layer), weight * MIB)
            self.drop("moment")
            self.drop(("saved", layer))
            self.drop(("parameters", layer))
            index = self.reduce(layer, weight * MIB + PADDING)
            self.over(before)
            before = layer, index
        self.over(before)
        self.optimize()
        for layer in range(len(self.layers)):
            self.drop(("shard", layer))
        self.look()

    def optimize(self):
        names = ["optimizer", *(["state"] if ("state", 0) not in self.live else ())]
        for name in reversed(names):
            for index, nbytes in enumerate(self.optimized):
                self.take((name, index), nbytes)
        for index in range(len(self.optimized)):
            self.drop(("optimizer", index))

    def over(self, reduction):
        """A reduction is over, and with it what FSDP2 and a push keep for it."""
        if reduction is not None:
            layer, index = reduction
            self.recording.drop(index)
            self.drop(("flat", index))
            self.drop(("gradient", layer))


def _reserved(layers, had=(), optimized=(), free=-1 << 40):
    program = _Program(layers, had=had, optimized=optimized)
    program.step()
    unsharded = {f"l{i}": weight * MIB for i, (weight, _, _) in enumerate(layers)}
    return Reserved(program.recording, program.held, program.history, unsharded, free), program


def _chosen(data, calls):
    names = {
        "all_gather": ("ordinary", "symmetric", "copy engine"),
        "reduce_scatter": ("ordinary", "copy engine", "push", "shared push"),
    }
    return [data.draw(st.sampled_from(names[call.key.kind])) for call in calls]


def _has(program, algorithms, *, moved=False, kept=False):
    """What a program has in its second step, in which its collectives run so."""
    program.step()
    if {*algorithms} != {"ordinary"} and not kept:
        program.allocator.empty()
    program.algorithms, program.recording, program.moved = algorithms, Recording(), moved
    program.step()
    return program.allocator.reserved


#: Bytes of tensors that an optimizer has.
many = st.lists(st.integers(1, 30 * MIB), max_size=6)


@given(layers, st.data(), many, many)
def test_a_replay_has_what_the_program_would_have(layers, data, had, optimized):
    """Which is a program whose collectives run so from the second step on."""
    free = data.draw(st.sampled_from([-1 << 40, 1 << 40]))
    reserved, recorded = _reserved(layers, had, optimized, free)
    assert reserved.complete
    calls = recorded.recording.collectives
    chosen = _chosen(data, calls)

    def has(algorithms, *, kept=reserved.keeps, **how):
        return _has(_Program(layers, (), had, optimized), algorithms, kept=kept, **how)

    placed = ["symmetric"] * len(calls)
    assert reserved.keeps == (free > 0 and has(placed, kept=True) < has(placed, kept=False))
    without, all_ = (has([name] * len(calls)) for name in ("symmetric", "ordinary"))
    assert reserved.replaced == all_ - without
    assert reserved.more(chosen) == has(chosen) - without
    assert reserved.more(["ordinary"] * len(calls)) == reserved.replaced
    assert reserved._replayed(chosen, moved=True) == has(chosen, moved=True)


#: With these the allocator needs fewer bytes if it keeps its cache.
KEPT = {"layers": [(1, 9, 300)], "optimized": [13 * MIB, 12 * MIB]}


@pytest.mark.parametrize(
    ("program", "free", "keeps"),
    [
        (KEPT, MIB, True),
        (KEPT, -1, False),
        ({"layers": [(20, 10, 0)], "optimized": [13 * MIB]}, 1 << 40, False),
    ],
)
def test_the_cache_is_kept_where_that_takes_fewer_bytes_and_the_driver_has_enough(
    program, free, keeps
):
    reserved, recorded = _reserved(**program, free=free)
    placed = ["symmetric"] * len(recorded.recording.collectives)
    kept, given_back = (_has(_Program(**program), placed, kept=kept) for kept in (True, False))
    assert (kept < given_back) == (program is KEPT)
    assert reserved.keeps == keeps
    assert reserved._replayed(placed) == (kept if keeps else given_back)
    assert reserved.more(placed) == 0


@given(
    layers,
    st.data(),
    many,
    st.integers(0, 80),
    st.booleans(),
)
def test_a_replay_retries_as_often_as_the_program_would(layers, data, had, short, moved):
    """In its first step all is ordinary, and then its collectives run so."""
    reserved, recorded = _reserved(layers, had)
    chosen = _chosen(data, recorded.recording.collectives)
    limit = recorded.allocator.reserved - short * MIB
    plan = data.draw(st.integers(0, 40)) * MIB

    def retries():
        program = _Program(layers, (), had)
        program.allocator.limit = limit
        for number, algorithms in enumerate(((), chosen, chosen, chosen, chosen)):
            program.algorithms, program.recording = algorithms, Recording()
            program.moved = moved and number > 0
            program.step()
            if number == 0:
                if {*chosen} != {"ordinary"} or program.allocator.reserved > limit - plan:
                    program.allocator.empty()
                if program.allocator.reserved > limit - plan:
                    return math.inf
                program.allocator.limit -= plan
            elif number == 1:
                before = program.allocator.retries
        return program.allocator.retries - before

    try:
        found = retries()
    except MemoryError:
        found = math.inf
    assert reserved.retries(chosen, limit, plan=plan, moved=moved) == found


def _moves(said, chosen="push", reserved_moved=1):
    """What `gradients_move` finds by retries, moved or not, on the devices of 9 sizes."""
    reserved, recorded = _reserved([(20, 10, 0), (20, 10, 0)])
    of = {"all_gather": "symmetric", "reduce_scatter": chosen}
    algorithms = [of[call.key.kind] for call in recorded.recording.collectives]

    def retries(_, algorithms, limit, *, plan, moved=False):
        return said[moved]((100 - limit) // 10)

    def replayed(_, algorithms, *, moved=False):
        return reserved_moved if moved else 1

    with (
        mock.patch.object(Reserved, "retries", retries),
        mock.patch.object(Reserved, "_replayed", replayed),
    ):
        return reserved.gradients_move(algorithms, 100, 40, plan=1)


@pytest.mark.parametrize(
    ("moved", "alone", "found"),
    [
        (lambda n: 0, lambda n: 0, True),
        (lambda n: 0, lambda n: 6, True),
        (lambda n: 6, lambda n: 6, True),
        (lambda n: n, lambda n: 4, False),
        (lambda n: math.inf if n > 7 else 0, lambda n: 4, False),
        (lambda n: math.inf if n > 7 else 0, lambda n: math.inf if n > 7 else 4, True),
        (lambda n: math.inf, lambda n: math.inf, False),
    ],
)
def test_gradients_move_where_the_allocator_retries_no_more_often(moved, alone, found):
    assert _moves({True: moved, False: alone}) is found
    assert not _moves({True: moved, False: alone}, chosen="copy engine")


def test_gradients_stay_where_the_allocator_needs_more_with_them():
    """As where parts of their blocks are in use when they are allocated."""
    assert not _moves({True: lambda _: 0, False: lambda _: 0}, reserved_moved=2)


def test_gradients_that_stay_after_the_step_are_not_moved():
    """It is not known then whether there are any in the next forward pass."""
    with mock.patch.object(_Program, "drop", _but_shards(_Program.drop)):
        assert not _moves({True: lambda _: 0, False: lambda _: 0})


def _but_shards(drop):
    def but_shards(program, name):
        if name[0] != "shard":
            drop(program, name)

    return but_shards


@pytest.mark.parametrize(
    ("planned", "plain", "found"),
    [
        (0, 0, (False, True)),
        (3, 3, (True, True)),
        (4, 3, (True, False)),
        (math.inf, 3, (True, False)),
        (math.inf, math.inf, (True, False)),
        (2, math.inf, (True, True)),
    ],
)
def test_a_full_device_is_one_on_which_the_allocator_retries(planned, plain, found):
    said = {"ordinary": lambda _: plain, "symmetric": lambda _: planned}
    assert _goes_on(said) == found


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 5))
def test_a_planned_program_needs_no_larger_device(planned, plain, retries):
    """Each fits in so many of the devices that are tried, the largest first."""
    fits = {"ordinary": plain, "symmetric": planned}
    said = {
        name: lambda number, most=most: retries if number < most else math.inf
        for name, most in fits.items()
    }
    full, as_well = _goes_on(said)
    assert full
    assert as_well == (planned > 0 and planned >= plain)


def test_retries_count_where_the_program_fits_without_a_plan():
    said = {
        "ordinary": lambda number: 3 if number < 2 else math.inf,
        "symmetric": lambda _: 4,
    }
    assert _goes_on(said) == (True, False)


def _goes_on(said):
    """What `goes_on` finds by retries on the devices of 9 sizes."""
    reserved, recorded = _reserved([(20, 10, 0)])
    calls = len(recorded.recording.collectives)

    def retries(_, algorithms, limit, *, plan=0):
        assert (plan > 0) == ("symmetric" in algorithms)
        return said[algorithms[0]]((100 - limit) // 10)

    with mock.patch.object(Reserved, "retries", retries):
        return reserved.goes_on(["symmetric"] * calls, 100, 40, plan=1)


def test_a_program_that_changes_has_what_it_had_before():
    """Torch's allocator gives nothing back of that."""
    program = _Program([(20, 10, 0), (10, 5, 5)])
    program.step()
    begun = program.recording, program.held, program.history, {"l0": 20 * MIB, "l1": 10 * MIB}
    first = Reserved(*begun)
    for more in (-MIB, 0, 30 * MIB):
        later = Reserved(*begun, 0, first.most + more)
        assert later.most == first.most + max(0, more)
        assert later.replaced == first.replaced + max(0, more)
        assert later.more(later._ordinary) == first.more(first._ordinary)


def test_what_a_step_leaves_behind_is_there_in_the_next_one():
    """As the state of an optimizer is, which is made at the end of the first step."""
    program = _Program([(20, 0, 0)])
    program.step()
    program.take("state", 20 * MIB)
    found = Reserved(program.recording, [], program.history, {"l0": 20 * MIB})
    # It has taken the block of a gradient, for which there is none in the second step.
    without = _reserved([(20, 0, 0)])[0]
    assert found._without == without._without + 20 * MIB


@pytest.mark.parametrize("what", ["flat"])
def test_it_is_known_if_a_buffer_is_not_among_the_allocations(what):
    """A process group may allocate it."""
    program = _Program([(20, 10, 0), (10, 5, 5)])
    program.step()
    history = [a for a in program.history if a.block[0] != what or a.block[1] != 1]
    assert not Reserved(program.recording, [], history, {}).complete
