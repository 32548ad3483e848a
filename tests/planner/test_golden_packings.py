"""What each packer makes of some hard instances, offset by offset.

All ranks must get the same bytes, so what a packer makes of an instance is a part of the plan's
format, also where it is not needed for the lowest peak. ``PYTHONPATH=tests/helpers python
tests/planner/test_golden_packings.py`` writes it anew; the CHANGELOG says so under *Plan format*
if plans differ.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from instances import cut_rectangle, loosened, stream_program, waves
from strategies import gap_rows, hard_rows

from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.planner.items import conflicts_of, items_of
from symmplan.planner.packing import bound as packing_bound
from symmplan.planner.packing import improve, solve
from symmplan.planner.packing.blocks import Style, glue
from symmplan.planner.packing.bound import heaviest_clique, heaviest_moment
from symmplan.planner.packing.greedy import (
    Random,
    first_fit,
    greedy_orders,
    lowest_first,
    squeak,
    sweep_fit,
)
from symmplan.planner.packing.improve import Improver
from symmplan.planner.packing.task import Space, task_of

FILE = Path(__file__).with_name("golden_packings.json")
#: Items that may be placed or glued for each instance.
WORK = 20_000


def _mixed(seed, *, buffers=26, streams=3, pins=False, aligns=(1, 2, 4)):
    """Buffers of a program on several streams, with alignments, pinned ones and persistent ones."""
    random = Random(seed)
    operations = [Operation(f"o{i:02}", f"s{random.below(streams)}") for i in range(30)]
    edges = [(f"o{i:02}", f"o{i + 1 + random.below(3):02}") for i in range(27) if random.below(4)]
    made, accesses = [], []
    for i in range(buffers):
        align = aligns[random.below(len(aligns))]
        # Far enough from each other, and the first at byte 0.
        at = 46 * (i // 9) + (i // 9) % 2 * align if pins and i % 9 == 4 else None
        made.append(Buffer(f"b{i:02}", 1 + random.below(40), "g", align=align, offset=at))
        begin, length = random.below(28), random.below(9)
        last = min(29, begin + length)
        accesses += [Access(f"o{o:02}", f"b{i:02}") for o in sorted({begin, last})]
    return Problem(made, operations, accesses, edges=edges)


def _beside_persistent(seed, buffers=16, *, even=False, pins=False):
    problem = _mixed(seed, buffers=buffers, aligns=(1,) if even else (1, 2, 4), pins=pins)
    fixed = [
        Buffer(f"p{i}", 5 + 3 * i, "g", align=1 if even else (4, 1, 2)[i % 3], persistent=True)
        for i in range(4)
    ]
    accesses = [Access("o00", b.name) for b in fixed]
    return Problem(
        (*problem.buffers, *fixed),
        problem.operations,
        (*problem.accesses, *accesses),
        edges=problem.edges,
    )


def _twice(rows, after):
    """The same buffers twice, one time after the other."""
    again = [(f"{name}'", begin + after, end + after, size) for name, begin, end, size in rows]
    return [*rows, *again]


INSTANCES = {
    "hard": lambda: Problem.from_intervals(hard_rows()),
    "gap": lambda: Problem.from_intervals(gap_rows()),
    "gap joined": lambda: Problem.from_intervals(_twice(gap_rows(), 8)),
    "hard twice": lambda: Problem.from_intervals(_twice(hard_rows()[:24], 60)),
    **{
        f"cut {seed}": lambda seed=seed: Problem.from_intervals(
            cut_rectangle(30 + 8 * seed, seed=seed, width=40 + 40 * seed)
        )
        for seed in range(4)
    },
    **{
        f"loose {seed}": lambda seed=seed: Problem.from_intervals(
            loosened(cut_rectangle(40, seed=seed, width=60), seed=seed, per_mille=60)
        )
        for seed in range(4)
    },
    **{f"waves {k}": lambda k=k: Problem.from_intervals(waves(50, seed=k)) for k in range(3)},
    **{
        f"close {seed}": lambda seed=seed: Problem.from_intervals(
            loosened(cut_rectangle(90, seed=seed, width=90), seed=seed, per_mille=10)
        )
        for seed in (2, 3)
    },
    "twins": lambda: Problem.from_intervals(
        [(f"{name}.{k}", *row) for name, *row in hard_rows()[10:24] for k in range(3)]
    ),
    "streams": lambda: stream_program(90, seed=1),
    **{f"mixed {k}": lambda k=k: _mixed(k) for k in range(4)},
    **{f"even {k}": lambda k=k: _mixed(k, aligns=(1,)) for k in range(4)},
    **{f"pinned {k}": lambda k=k: _mixed(k, pins=True, aligns=(1, 2)) for k in range(4)},
    **{f"beside {k}": lambda k=k: _beside_persistent(k) for k in range(3)},
    **{f"even beside {k}": lambda k=k: _beside_persistent(k, even=True) for k in range(2)},
    "pinned beside": lambda: _beside_persistent(0, 6, even=True, pins=True),
    "persistent": lambda: _beside_persistent(0, 0, even=True),
}


def _digest(*parts):
    said = hashlib.sha256()
    for part in parts:
        said.update(repr(np.asarray(part).tolist()).encode())
    return said.hexdigest()[:12]


def made_of(problem):
    """What the packers make of a problem: digests by the packer's name."""
    items = items_of(problem)
    task = task_of(items, np.arange(len(items)))
    conflicts = conflicts_of(task)
    space = Space(task, conflicts)
    order = np.arange(len(space))
    fits = [first_fit(task, conflicts, o) for o in greedy_orders(task, conflicts)]
    best = min(fits, key=lambda offset: (offset + task.size).max())
    peak = int((best + task.size).max())
    bound, _ = heaviest_clique(task, conflicts)  # who shows it is up to networkx
    with mock.patch.object(packing_bound, "MAX_FLOW_ITEMS", 0):
        grown = heaviest_clique(task, conflicts)
    plans = {}
    with mock.patch.object(solve, "WORK", WORK):
        plans["plan"] = _packed(task)
    for name, limit in (("tangled", len(task)), ("stacked", len(task) - 1)):
        with mock.patch.multiple(solve, WORK=0, MAX_TANGLED=limit):
            plans[name] = _packed(task)
    found = {
        **plans,
        "conflicts": _digest(conflicts.bounds, conflicts.neighbours),
        "bounds": _digest(bound, *heaviest_moment(task), *grown),
        "space": _digest(space.low, space.high, space.hull_high, space.load),
        "first fit": _digest(*fits),
        "sweep": _digest(sweep_fit(task)),
        "lowest first": _digest(lowest_first(space, order)),
        "squeak": _digest(*squeak(space, order, bound, 80)),
        "improve": _digest(*_improved(space, best, peak, bound)),
    }
    if space.align is None and not space.blocked and items.entry.shape[1] == 1:
        styles = (Style(), Style(power=2, early=2), Style(power=0, early=8, noise=8, seed=3))
        found["glue"] = _digest(*(part for s in styles for part in _glued(space, peak, s)))
    return found


def _packed(task):
    made = solve.pack(task)
    return _digest(made.offset, made.peak, made.bound, made.proof)


def _improved(space, offset, peak, bound):
    low = int(space.task.size.max())  # is proven, too, and leaves more to be tried
    for at_least in (bound, low):
        improver = Improver(space, offset, peak, at_least, WORK)
        with mock.patch.object(improve, "_SWEEPS", 1):
            improver.run()
        yield improver.offset
        yield improver.peak, improver.work


def _glued(space, target, style):
    for blocks in glue(space, target, style, (4, 9, 16)):
        yield from (blocks.low, blocks.high, blocks.size)
        yield blocks.spread(np.arange(len(blocks.size)), len(space))


@pytest.mark.parametrize(
    "name",
    [
        name if number % 3 == 0 else pytest.param(name, marks=pytest.mark.further)
        for number, name in enumerate(INSTANCES)
    ],
)
def test_packers_make_what_they_made(name):
    assert made_of(INSTANCES[name]()) == json.loads(FILE.read_text(encoding="utf-8"))[name]


def test_the_instances_say_something():
    """Packers differ from each other and from instance to instance."""
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    assert golden.keys() == INSTANCES.keys()
    for packer in ("plan", "first fit", "lowest first", "squeak", "improve"):
        assert len({entry[packer] for entry in golden.values()}) > 0.9 * len(golden)
    assert sum("glue" in entry for entry in golden.values()) > 9


if __name__ == "__main__":
    entries = {name: made_of(make()) for name, make in INSTANCES.items()}
    FILE.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
