"""Random programs of one-sided ops beside collectives, whose numbers are exact.

A `Program` is plain data; `run` executes it on tensors, eagerly or under ``torch.compile``. Values
are matrices of whole numbers in float64, so that every sum is exact and results can be compared bit
by bit; inputs differ from rank to rank and from iteration to iteration, so that a stale byte shows.
"""

from __future__ import annotations

import attrs
import torch
from hypothesis import strategies as st
from one_sided_ops import NAMES

COLUMNS = 6
#: This process's rank, where compilers can see it.
_HERE = {"rank": 0}
_PLAIN = ("relu", "next", "add", "copy", "turn", "view", "part", "rows", "next_", "pause")
_COLLECTIVES = (
    *("gather", "reduce", "reduce_", "scatter", "gathers", "reduces", "broadcast", "broadcast_"),
    *("exchange", "send", "start_gather", "start_reduce", "start_reduce_", "start_scatter"),
)


@attrs.frozen
class Program:
    """Steps over a growing list of values; the first ``len(inputs)`` are the inputs.

    ``inputs`` holds rows; a step is ``(kind, *operands)``; ``outputs`` are indices of values.
    """

    world: int
    inputs: tuple[int, ...]
    steps: tuple[tuple, ...]
    outputs: tuple[int, ...]


@attrs.define
class _Value:
    """What the generator knows of a value."""

    shape: tuple[int, int]
    fresh: bool = False  # neither an input nor a view of one: may be updated in place
    pending: bool = False  # an asynchronous result that nobody has waited for
    whole: bool = True  # contiguous, as far as known


@st.composite
def one_sided_programs(draw, world: int, *, max_steps: int = 9, in_place: bool = True) -> Program:
    """Programs of ``world`` ranks with two groups of all of them.

    ``in_place``: with collectives that work in place, which torch does not compile.
    """
    inputs = tuple(draw(st.lists(st.sampled_from([2 * world, 4 * world]), min_size=1, max_size=2)))
    known = [_Value((rows, COLUMNS)) for rows in inputs]
    steps: list[tuple] = []
    # A value that peers have touched is what the next op should touch.
    for _ in range(draw(st.integers(2, max_steps))):
        kinds = draw(st.sampled_from((NAMES, NAMES, _COLLECTIVES, _PLAIN)))
        kind = draw(st.sampled_from(kinds))
        if kinds is _COLLECTIVES and kind.endswith("_") and not in_place:
            continue
        ready = [i for i, v in enumerate(known) if not v.pending]
        recent = ready[-2:]
        i = draw(st.sampled_from(draw(st.sampled_from((recent, ready)))))
        _step(draw, steps, known, kind, i, world)
        pending = [j for j, v in enumerate(known) if v.pending]
        if pending and draw(st.integers(0, 2)) == 0:
            _wait(steps, known, draw(st.sampled_from(pending)))
    for j, value in enumerate(known):
        if value.pending:
            _wait(steps, known, j)
    outputs = draw(st.lists(st.integers(0, len(known) - 1), min_size=1, max_size=3, unique=True))
    return Program(world, inputs, tuple(steps), tuple(outputs))


def _wait(steps: list[tuple], known: list[_Value], j: int) -> None:
    steps.append(("wait", j))
    known[j].pending = False


def _step(draw, steps: list[tuple], known: list[_Value], kind: str, i: int, world: int) -> None:
    value = known[i]
    rows, columns = value.shape
    group = draw(st.integers(0, 1))
    # Work under way may still use what it was given: to write that now would be a race.
    calm = not any(v.pending for v in known)
    made = None
    if kind in NAMES:
        in_place = "_" in kind
        if in_place and not (value.fresh and calm and value.whole and rows > 1):
            return
        steps.append((kind, i, group))
        made = None if in_place else _Value(value.shape, fresh=True)
    elif kind in ("relu", "next", "copy"):
        steps.append((kind, i))
        made = _Value(value.shape, fresh=True)
    elif kind == "add":
        same = [j for j, v in enumerate(known) if v.shape == value.shape and not v.pending]
        steps.append((kind, i, draw(st.sampled_from(same))))
        made = _Value(value.shape, fresh=True)
    elif kind == "turn":
        steps.append((kind, i))
        made = _Value((columns, rows), fresh=value.fresh, whole=False)
    elif kind == "view":
        steps.append((kind, i))
        made = attrs.evolve(value)
    elif kind == "part" and rows > 2:
        steps.append((kind, i))
        made = _Value((rows - 2, columns), fresh=value.fresh, whole=value.whole)
    elif kind == "rows" and rows > 3:
        steps.append((kind, i))
        made = _Value(((rows + 1) // 2, columns), fresh=value.fresh, whole=False)
    elif kind == "next_" and value.fresh and calm:
        steps.append((kind, i))
    elif kind == "pause":
        steps.append((kind,))
    elif kind in ("gather", "start_gather") and rows * world <= 60:
        steps.append((kind, i, group))
        made = _Value((rows * world, columns), fresh=True, pending=kind != "gather")
    elif kind in ("reduce", "start_reduce", "broadcast", "exchange", "send"):
        if kind in ("exchange", "send") and rows % world:
            return
        root = (draw(st.integers(0, world - 1)),) if kind in ("broadcast", "send") else ()
        steps.append((kind, i, *root, group))
        made = _Value(value.shape, fresh=True, pending=kind == "start_reduce")
    elif kind in ("reduce_", "start_reduce_", "broadcast_"):
        if not (value.fresh and calm and value.whole):
            return
        root = (draw(st.integers(0, world - 1)),) if kind == "broadcast_" else ()
        steps.append((kind, i, *root, group))
        if kind == "start_reduce_":
            # The value itself is under way now; nobody may look at it or at views of it.
            for v in known:
                v.fresh = False
            steps.append(("pause",))
            steps.append(("wait", i))
    elif kind in ("scatter", "start_scatter") and rows % world == 0:
        steps.append((kind, i, group))
        made = _Value((rows // world, columns), fresh=True, pending=kind != "scatter")
    elif kind in ("gathers", "reduces"):
        fits = [
            j
            for j, v in enumerate(known)
            if not v.pending and (kind == "reduces" or v.shape[0] * world <= 60)
        ]
        if i not in fits:
            return
        j = draw(st.sampled_from(fits))
        steps.append((kind, i, j, group))
        for v in (value, known[j]):
            factor = world if kind == "gathers" else 1
            known.append(_Value((v.shape[0] * factor, v.shape[1]), fresh=True))
    if made is not None:
        known.append(made)


def here(rank: int) -> None:
    """This process is a rank."""
    _HERE["rank"] = rank


def make_inputs(program: Program, rank: int, turn: int) -> list[torch.Tensor]:
    """Inputs of an iteration, whole numbers; the last is for pauses."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    tensors = [
        torch.randint(-9, 10, (rows, COLUMNS), generator=generator).double()
        for rows in program.inputs
    ]
    return [*tensors, torch.zeros(1)]


def run(program: Program, groups: list[str], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Execute the program; ``groups`` are torch's names of its process groups."""
    ops, own, size = torch.ops._c10d_functional, torch.ops.one_sided, program.world
    values, idle = list(tensors[:-1]), tensors[-1]
    for kind, *operands in program.steps:
        x = values[operands[0]] if operands else idle
        if kind in NAMES:
            made = getattr(own, kind)(x, groups[operands[-1]])
            values += [] if made is None else [made]
        elif kind in _LOCAL:
            values.append(_LOCAL[kind](x))
        elif kind == "add":
            values.append(x + values[operands[1]])
        elif kind == "next_":
            x.add_(1.0)
        elif kind == "pause":
            own.pause(idle)
        elif kind == "wait":
            values[operands[0]] = ops.wait_tensor(x)
        else:
            values += _collective(ops, kind, x, operands[1:-1], groups[operands[-1]], values, size)
    return tuple(values[i] for i in program.outputs)


_LOCAL = {
    "relu": torch.relu,
    "next": lambda x: x + 1,
    "copy": lambda x: x.clone(),
    "turn": lambda x: x.t(),
    "view": lambda x: x.view(x.shape[0], 2, -1).view(x.shape) if x.is_contiguous() else x[:],
    "part": lambda x: x[1:-1],
    "rows": lambda x: x[::2],
}


def _collective(ops, kind, x, more, group, values, size) -> list[torch.Tensor]:
    start, _, name = kind.rpartition("start_")
    end = (lambda t: t) if kind.startswith("start_") else ops.wait_tensor
    del start
    if name == "gather":
        return [end(ops.all_gather_into_tensor(x, size, group))]
    if name == "reduce":
        return [end(ops.all_reduce(x, "sum", group))]
    if name == "scatter":
        return [end(ops.reduce_scatter_tensor(x, "sum", size, group))]
    if name == "reduce_":
        end(ops.all_reduce_(x, "sum", group))
        return []
    if name == "broadcast":
        return [end(ops.broadcast(x, more[0], group))]
    if name == "broadcast_":
        end(ops.broadcast_(x, more[0], group))
        return []
    if name in ("gathers", "reduces"):
        pair = [x, values[more[0]]]
        if name == "gathers":
            made = ops.all_gather_into_tensor_coalesced(pair, size, group)
        else:
            made = ops.all_reduce_coalesced(pair, "sum", group)
        return [end(t) for t in made]
    x = x.contiguous()  # not every torch does that by itself
    rows = x.shape[0] // size
    equal = [rows] * size
    if name == "exchange":
        return [end(ops.all_to_all_single(x, equal, equal, group))]
    return [end(_sent(ops, x, more[0], size, group))]


def _sent(ops, x: torch.Tensor, root: int, size: int, group: str) -> torch.Tensor:
    """Each rank sends all its rows to the one ``root`` places behind it, and nothing to others."""
    rank = _HERE["rank"]
    sends, receives = [0] * size, [0] * size
    sends[(rank + root) % size] = x.shape[0]
    receives[(rank - root) % size] = x.shape[0]
    return ops.all_to_all_single(x, receives, sends, group)
