"""Random distributed programs: what capture and the compile backend are tried on.

A `Program` is plain data, so that it can be sent to ranks; `run` executes it on tensors, eagerly,
under ``make_fx`` or under ``torch.compile``. Values have 8 columns and 2 to 16 rows, in float32 or
float64 (two element sizes, and sums that do not depend on fusion).
"""

from __future__ import annotations

import attrs
import torch
from hypothesis import strategies as st

COLUMNS = 8


@attrs.frozen
class Program:
    """Steps over a growing list of values; the first ``len(inputs)`` are the inputs.

    ``inputs`` holds rows; a step is ``(kind, *operands)``; ``outputs`` are indices of values.
    """

    inputs: tuple[int, ...]
    steps: tuple[tuple, ...]
    outputs: tuple[int, ...]


@attrs.define
class _Known:
    """What the generator knows of a value."""

    rows: int
    dtype: str = "f32"
    fresh: bool = False  # neither an input nor a view of one: may be updated in place
    pending: bool = False  # an asynchronous result that nobody has waited for


@st.composite
def programs(draw, *, groups: int = 2, custom: bool = True, max_steps: int = 12) -> Program:
    """Programs with views, in-place updates, async collectives, several groups and dead code."""
    inputs = tuple(draw(st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=3)))
    known = [_Known(rows) for rows in inputs]
    steps: list[tuple] = []
    kinds = [
        "relu", "sin", "add", "mm", "view", "half", "clone", "add_", "cast", "strided",
        "gather", "scatter", "reduce", "start", "gathers", "gather", "scatter",
    ]  # fmt: skip
    if custom:
        kinds += ["peers", "push", "bump", "scale", "sum"]
    for _ in range(draw(st.integers(1, max_steps))):
        kind = draw(st.sampled_from(kinds))
        ready = [i for i, k in enumerate(known) if not k.pending]
        i = draw(st.sampled_from(ready))
        value = known[i]
        group = draw(st.integers(0, groups - 1))
        # Work under way may still read what it was given: to write it now would be a race.
        calm = not any(k.pending for k in known)
        if kind == "add":
            same = [
                j for j in ready if (known[j].rows, known[j].dtype) == (value.rows, value.dtype)
            ]
            steps.append((kind, i, draw(st.sampled_from(same))))
            known.append(_Known(value.rows, value.dtype, fresh=True))
        elif kind in ("relu", "sin", "mm", "clone"):
            steps.append((kind, i))
            known.append(_Known(value.rows, value.dtype, fresh=True))
        elif kind == "cast":
            dtype = "f64" if value.dtype == "f32" else "f32"
            steps.append((kind, i))
            known.append(_Known(value.rows, dtype, fresh=True))
        elif kind == "strided":
            steps.append((kind, i))
            known.append(_Known(2, value.dtype, fresh=value.fresh))
        elif kind == "view":
            steps.append((kind, i))
            known.append(_Known(value.rows, value.dtype, fresh=value.fresh))
        elif kind == "half" and value.rows > 2:
            steps.append((kind, i, draw(st.booleans())))
            known.append(_Known(value.rows // 2, value.dtype, fresh=value.fresh))
        elif kind == "bump" and value.fresh and calm:
            steps.append((kind, i, group))
        elif kind == "add_" and value.fresh and calm:
            steps.append((kind, i))
        elif kind == "gather" and value.rows < 16:
            steps.append((kind, i, group))
            known.append(_Known(value.rows * 2, value.dtype, fresh=True))
        elif kind == "gathers" and value.rows < 16:
            others = [j for j in ready if known[j].rows < 16 and known[j].dtype == value.dtype]
            j = draw(st.sampled_from(others))
            steps.append((kind, i, j, group))
            known.append(_Known(value.rows * 2, value.dtype, fresh=True))
            known.append(_Known(known[j].rows * 2, value.dtype, fresh=True))
        elif kind == "scatter" and value.rows > 2:
            steps.append((kind, i, group))
            known.append(_Known(value.rows // 2, value.dtype, fresh=True))
        elif kind in ("reduce", "peers", "push", "scale", "sum"):
            steps.append((kind, i, group))
            known.append(_Known(value.rows, value.dtype, fresh=True))
        elif kind == "start" and value.rows < 16:
            steps.append((kind, i, group))
            known.append(_Known(value.rows * 2, value.dtype, pending=True))
        pending = [j for j, k in enumerate(known) if k.pending]
        if pending and draw(st.booleans()):
            j = draw(st.sampled_from(pending))
            steps.append(("wait", j))
            known[j].pending = False
            known[j].fresh = True
    for j, k in enumerate(known):
        if k.pending:
            steps.append(("wait", j))
    count = len(known)
    outputs = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True))
    return Program(inputs, tuple(steps), tuple(outputs))


def make_inputs(program: Program, rank: int) -> list[torch.Tensor]:
    """Inputs that differ from rank to rank, and the weight of ``mm`` last."""
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(rows, COLUMNS, generator=generator) for rows in program.inputs]
    weight = torch.randn(COLUMNS, COLUMNS, generator=torch.Generator().manual_seed(99)) / 4
    return [*tensors, weight]


def run(program: Program, groups: list[str], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Execute the program; ``groups`` are torch's names of its process groups."""
    ops = torch.ops._c10d_functional
    *inputs, weight = tensors
    values: list[torch.Tensor] = list(inputs)
    size = 2

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        return ops.wait_tensor(tensor)

    for kind, *operands in program.steps:
        x = values[operands[0]]
        group = groups[operands[-1]] if kind in _GROUPED else ""
        if kind == "relu":
            values.append(torch.relu(x))
        elif kind == "sin":
            values.append(torch.sin(x))
        elif kind == "clone":
            values.append(x.clone())
        elif kind == "add":
            values.append(x + values[operands[1]])
        elif kind == "mm":
            values.append(x @ weight.to(x.dtype))
        elif kind == "cast":
            values.append(x.to(torch.float64 if x.dtype == torch.float32 else torch.float32))
        elif kind == "view":
            values.append(x.view(-1, 2 * COLUMNS).view(-1, COLUMNS))
        elif kind == "strided":  # counts from the start of the storage
            values.append(x.as_strided((2, COLUMNS), (COLUMNS, 1), 0))
        elif kind == "bump":
            torch.ops.symmplan_test.bump(x, group)
        elif kind == "half":
            half = x.shape[0] // 2
            values.append(x[:half] if operands[1] else x[half:])
        elif kind == "add_":
            x.add_(1.0)
        elif kind == "gather":
            values.append(wait(ops.all_gather_into_tensor(x, size, group)))
        elif kind == "start":
            values.append(ops.all_gather_into_tensor(x, size, group))
        elif kind == "wait":
            values[operands[0]] = wait(x)
        elif kind == "gathers":
            pair = [x, values[operands[1]]]
            values += [wait(t) for t in ops.all_gather_into_tensor_coalesced(pair, size, group)]
        elif kind == "scatter":
            values.append(wait(ops.reduce_scatter_tensor(x, "sum", size, group)))
        elif kind == "reduce":
            values.append(wait(ops.all_reduce(x, "sum", group)))
        elif kind == "peers":
            values.append(torch.ops.symmplan_test.peer_mean(x, group))
        elif kind == "push":
            values.append(torch.ops.symmplan_test.push_next(x, group))
        elif kind == "sum":
            values.append(torch.ops.symmplan_test.peer_sum(x, group))
        elif kind == "scale":
            values.append(torch.ops.symmplan_test.scale(x, group))
    return tuple(values[i] for i in program.outputs)


_GROUPED = frozenset(
    {"gather", "start", "gathers", "scatter", "reduce", "peers", "push", "bump", "scale", "sum"}
)
