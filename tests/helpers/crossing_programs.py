"""Random programs that are trained, and the order in which their passes run.

A `Training` is plain data, so that it can be sent to ranks. Its programs save results of
collectives and of custom ops for backward, also as views, and some of their backwards use what was
saved in collectives again. Its schedule runs their forwards and backwards in any order, keeps
graphs, drops results, and runs forwards without gradients in between. `train` executes it, with the
programs as they are or compiled. Values have 8 columns and 2 to 16 rows.
"""

from __future__ import annotations

import contextlib

import attrs
import torch
from hypothesis import strategies as st

COLUMNS = 8


@attrs.frozen
class Differentiable:
    """Steps over a growing list of values; the first ``len(inputs)`` are the inputs.

    ``inputs`` holds rows; a step is ``(kind, *operands)``; ``outputs`` are indices of values that
    the loss is made of, ``shown`` of those that the caller gets, too.
    """

    inputs: tuple[int, ...]
    steps: tuple[tuple, ...]
    outputs: tuple[int, ...]
    shown: tuple[int, ...] = ()


@attrs.frozen
class Training:
    """Programs, and what is done with them.

    An action is ``("forward", program)``, whose results get the next number, ``("backward",
    number, keep the graph)``, ``("drop", number)`` or ``("evaluate", program)``.
    """

    programs: tuple[Differentiable, ...]
    actions: tuple[tuple, ...]

    @property
    def keeps(self) -> bool:
        """Whether a backward keeps its graph."""
        return any(a[0] == "backward" and a[2] for a in self.actions)


@st.composite
def differentiable(draw, *, groups: int = 2, custom: bool = True, max_steps: int = 8):
    """Programs in which most collectives' results are saved for backward."""
    inputs = tuple(draw(st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=2)))
    rows = list(inputs)
    steps: list[tuple] = []
    kinds = ["gather", "gather", "scatter", "reduce", "keep", "sin", "mul", "mm", "half", "gram"]
    if custom:
        kinds += ["push", "push", "mean"]
    for _ in range(draw(st.integers(1, max_steps))):
        kind = draw(st.sampled_from(kinds))
        i = draw(st.integers(0, len(rows) - 1))
        group = draw(st.integers(0, groups - 1))
        if kind == "mul":
            same = [j for j, n in enumerate(rows) if n == rows[i]]
            steps.append((kind, i, draw(st.sampled_from(same))))
            rows.append(rows[i])
        elif kind in ("sin", "mm"):
            steps.append((kind, i))
            rows.append(rows[i])
        elif kind == "gram":
            steps.append((kind, i))
            rows.append(COLUMNS)
        elif kind == "half" and rows[i] > 2:
            steps.append((kind, i, draw(st.booleans())))
            rows.append(rows[i] // 2)
        elif kind == "gather" and rows[i] < 16:
            steps.append((kind, i, group))
            rows.append(rows[i] * 2)
        elif kind == "scatter" and rows[i] > 2:
            steps.append((kind, i, group))
            rows.append(rows[i] // 2)
        elif kind == "keep" and rows[i] < 16:
            steps.append((kind, i, group))
            rows.append(rows[i] * 2)
        elif kind in ("reduce", "push", "mean"):
            steps.append((kind, i, group))
            rows.append(rows[i])
    some = st.lists(st.integers(0, len(rows) - 1), max_size=2, unique=True)
    outputs = tuple(dict.fromkeys([*draw(some), len(rows) - 1]))
    return Differentiable(inputs, tuple(steps), outputs, tuple(draw(some)))


@st.composite
def trainings(draw, *, max_programs: int = 2, max_actions: int = 8, **options) -> Training:
    """Programs with schedules that run several forwards before their backwards."""
    programs = tuple(draw(st.lists(differentiable(**options), min_size=1, max_size=max_programs)))
    actions: list[tuple] = []
    waiting: list[int] = []
    count = 0
    for _ in range(draw(st.integers(2, max_actions))):
        kind = draw(st.sampled_from(["forward", "forward", "backward", "drop", "evaluate"]))
        if kind == "forward" or (kind != "evaluate" and not waiting):
            actions.append(("forward", draw(st.integers(0, len(programs) - 1))))
            waiting.append(count)
            count += 1
        elif kind == "evaluate":
            actions.append((kind, draw(st.integers(0, len(programs) - 1))))
        else:
            run = draw(st.sampled_from(waiting))
            keep = kind == "backward" and draw(st.booleans())
            actions.append((kind, run, keep) if kind == "backward" else (kind, run))
            if not keep:
                waiting.remove(run)
    actions += [("backward", run, False) for run in draw(st.permutations(waiting))]
    return Training(programs, tuple(actions))


# -- how a program runs -------------------------------------------------------------------------

F = torch.ops._c10d_functional
_wait = F.wait_tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _wait(F.all_gather_into_tensor(x.contiguous(), 2, group))

    @staticmethod
    def backward(ctx, grad):
        return _wait(F.reduce_scatter_tensor(grad.contiguous(), "sum", 2, ctx.group)), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _wait(F.reduce_scatter_tensor(x.contiguous(), "sum", 2, group))

    @staticmethod
    def backward(ctx, grad):
        return _wait(F.all_gather_into_tensor(grad.contiguous(), 2, ctx.group)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _wait(F.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx, grad):
        return _wait(F.all_reduce(grad.contiguous(), "sum", ctx.group)), None


class _Keep(torch.autograd.Function):
    """Saves what it gathered; peers read that in its backward, so that it must lie in place."""

    @staticmethod
    def forward(ctx, x, group):
        whole = _wait(F.all_gather_into_tensor(x.contiguous(), 2, group))
        ctx.save_for_backward(whole)
        ctx.group = group
        return whole * 2

    @staticmethod
    def backward(ctx, grad):
        (whole,) = ctx.saved_tensors
        mixed = torch.ops.symmplan_test.mix(whole, grad, ctx.group)
        return mixed[: grad.shape[0] // 2], None


class _Push(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return torch.ops.symmplan_test.push_next(x.contiguous(), group)

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.symmplan_test.push_next(grad.contiguous(), ctx.group), None


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        y = x * 1.5
        ctx.save_for_backward(y)
        ctx.group = group
        return torch.ops.symmplan_test.peer_mean(y, group)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors  # read by peers in the forward, and again here
        return torch.ops.symmplan_test.mix(y, grad, ctx.group), None


_COLLECTIVES = {
    "gather": _Gather,
    "scatter": _Scatter,
    "reduce": _Reduce,
    "keep": _Keep,
    "push": _Push,
    "mean": _Mean,
}


def forward(program: Differentiable, groups: list[str], weight, *inputs):
    """The loss of a program, and the values that it shows."""
    values = list(inputs)
    for kind, *operands in program.steps:
        x = values[operands[0]]
        if kind in _COLLECTIVES:
            values.append(_COLLECTIVES[kind].apply(x, groups[operands[-1]]))
        elif kind == "sin":
            values.append(torch.sin(x))
        elif kind == "mul":
            values.append(x * values[operands[1]])
        elif kind == "mm":
            values.append(x @ weight)
        elif kind == "gram":
            values.append(torch.tanh(x.t() @ x))
        elif kind == "half":
            half = x.shape[0] // 2
            values.append(x[:half] if operands[1] else x[half:])
    loss = sum(torch.tanh(values[i]).square().sum() for i in program.outputs)
    return loss, tuple(values[i] for i in program.shown if i >= len(inputs))


def train(training: Training, groups: list[str], rank: int, functions: list) -> list:
    """Execute a schedule.

    Args:
        training: The schedule.
        groups: Torch's names of the process groups.
        rank: The inputs differ from rank to rank.
        functions: For each program, what computes it from a weight and inputs.

    Returns:
        All results and gradients, in the order in which they came; results are copied at the end.
    """
    generator = torch.Generator().manual_seed(rank)
    runs: list = []
    found: list = []
    for action in training.actions:
        kind, which = action[:2]
        if kind in ("forward", "evaluate"):
            program = training.programs[which]
            inputs = [torch.randn(n, COLUMNS, generator=generator) for n in program.inputs]
            weight = torch.randn(COLUMNS, COLUMNS, generator=torch.Generator().manual_seed(7)) / 4
        if kind == "forward":
            leaves = [weight, *inputs]
            for leaf in leaves:
                leaf.requires_grad_()
            loss, shown = functions[which](*leaves)
            runs.append((loss, leaves))
            found += [loss.detach(), *(s.detach() for s in shown)]
            del loss, shown
        elif kind == "evaluate":
            with torch.no_grad():
                loss, shown = functions[which](weight, *inputs)
            found += [loss, *shown]
        elif kind == "backward":
            loss, leaves = runs[which]
            grads = torch.autograd.grad(loss, leaves, retain_graph=action[2], allow_unused=True)
            # A compiled graph gives zeros for what its loss does not depend on.
            found += [
                torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)
            ]
            del loss, leaves
            if not action[2]:
                runs[which] = None
        else:
            runs[which] = None
    return [t.clone() for t in found]


@contextlib.contextmanager
def may_keep_graphs():
    """Backwards that are compiled inside can keep their graphs.

    They must not write what was saved for them, and Inductor's cache does not know whether its code
    does, with or without symmplan.
    """
    from torch._functorch import config
    from torch._inductor import config as inductor

    with config.patch(donated_buffer=False), inductor.patch(force_disable_caches=True):
        yield
