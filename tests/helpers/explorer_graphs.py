"""Random FX programs for the explorer, and how they are rewritten without ranks.

Tensors have few elements, because the explorer looks at each. The one-sided ops are of every kind:
``push``, ``read`` and ``both``, each with and without handshake and release, and have no
implementation: only the explorer runs them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from itertools import product
from typing import TYPE_CHECKING

import attrs
import torch
import torch.distributed as dist
from graph_explorer import GraphOp, explore_graph
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import symmplan
import symmplan.memory.ops.one_sided
from symmplan.capture import capture_fx
from symmplan.capture.producers import writes_eager, writes_inductor
from symmplan.capture.steps import plan_poison
from symmplan.integrate.compile import ops
from symmplan.integrate.compile.rewrite import rewrite
from symmplan.model import Barrier
from symmplan.place.algorithms import Lowerings
from symmplan.place.program import place
from symmplan.torch_private.compilers import fake_mode_of

if TYPE_CHECKING:
    from explorer.program import Verdict

    from symmplan.place.program import PlacedProgram

F = torch.ops._c10d_functional
_KINDS = {"push": "push_next", "read": "read", "both": "read_write_next"}
_KEEP: list[torch.library.Library] = []


@functools.cache
def one_sided() -> dict[str, GraphOp]:
    """Define and declare the one-sided ops, once; what they do, by name."""
    lib = torch.library.Library("symmplan_explorer", "FRAGMENT")
    _KEEP.append(lib)
    found = {}
    for kind, handshake, release in product(_KINDS, (False, True), (False, True)):
        name = f"{kind}{handshake:d}{release:d}"
        full = f"symmplan_explorer::{name}"
        lib.define(f"{name}(Tensor x, str group_name) -> Tensor")
        torch.library.register_fake(full, lambda x, _g: torch.empty(x.shape), lib=lib)
        facts = {"handshake": handshake, "release": release, "label": name}
        found[full] = GraphOp(_KINDS[kind], ("x",), ("return",), **facts)
        declared = {"push": ["return"], "read": ["x"], "both": ["x", "return"]}[kind]
        out = None
        if kind != "read":
            out = f"{full}_out"
            lib.define(f"{name}_out(Tensor x, str group_name, *, Tensor(a!) out) -> ()")
            torch.library.register_fake(out, lambda _x, _g, *, out: None, lib=lib)
            found[out] = GraphOp(_KINDS[kind], ("x",), ("out",), **facts)
        symmplan.register_symm_mem_args(
            full, declared, group="group_name", handshake=handshake, release=release, out=out
        )
    return found


@contextlib.contextmanager
def world(ranks: int):
    """Process groups of ranks that are not there, in which graphs can be traced: two names."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        ops.load()
        one_sided()
        second = dist.new_group(list(range(ranks)))
        yield [dist.group.WORLD.group_name, second.group_name]
    finally:
        dist.destroy_process_group()


@attrs.frozen
class Steps:
    """A program: shapes of its inputs, its steps and which values it returns."""

    inputs: tuple[tuple[int, int], ...]
    steps: tuple[tuple, ...]
    outputs: tuple[int, ...]


@attrs.define
class _Known:
    shape: tuple[int, int]
    fresh: bool = False  # neither an input nor a view of one
    pending: bool = False


_LOCAL = ("relu", "clone", "t", "half", "add", "add_", "flat")
_GROUPED = ("gather", "gather_out", "scatter", "reduce", "reduce_", "broadcast", "exchange")
_STARTED = ("gather", "reduce")


@st.composite
def fx_programs(draw, *, ranks: int, max_steps: int = 6, kinds: tuple[str, ...] = ()) -> Steps:
    """Programs with views, slices, transposes, in-place updates, two groups, sync and async.

    Args:
        draw: Hypothesis's.
        ranks: How many run it.
        max_steps: Besides waits.
        kinds: Of the steps; by default all.
    """
    shapes = st.sampled_from([(1, 2), (ranks, 1), (ranks, 2)])
    inputs = tuple(draw(st.lists(shapes, min_size=1, max_size=2)))
    known = [_Known(shape) for shape in inputs]
    steps: list[tuple] = []
    sided = tuple(f"{k}{h}{r}" for k in _KINDS for h in (0, 1) for r in (0, 1))
    for _ in range(draw(st.integers(1, max_steps))):
        if kinds:
            kind = draw(st.sampled_from(kinds))
        else:
            kind = draw(st.one_of(*map(st.sampled_from, (_LOCAL, _GROUPED, sided, sided))))
        ready = [i for i, k in enumerate(known) if not k.pending]
        i = draw(st.sampled_from(ready[-3:]))
        value = known[i]
        rows, columns = value.shape
        group = draw(st.integers(0, 1))
        # Work under way may still read what it was given: to write it now would be a race.
        calm = not any(k.pending for k in known)
        start = kind in _STARTED and draw(st.booleans())
        shape = value.shape
        if kind in ("gather", "gather_out"):
            shape = (rows * ranks, columns)
        elif kind in ("scatter", "half"):
            shape = (rows // (ranks if kind == "scatter" else 2), columns)
        elif kind == "t":
            shape = (columns, rows)
        elif kind == "flat":
            shape = (rows * columns, 1)
        divides = kind not in ("scatter", "exchange") or not rows % ranks
        changes = kind in ("add_", "reduce_")
        if not divides or not 0 < shape[0] * shape[1] <= 4 * ranks:
            continue
        if changes and not (value.fresh and calm):
            continue
        if changes:
            steps.append((kind, i, group))
        elif kind == "add":
            same = [j for j in ready if known[j].shape == value.shape]
            steps.append((kind, i, draw(st.sampled_from(same))))
            known.append(_Known(shape, fresh=True))
        else:
            steps.append((f"start {kind}" if start else kind, i, group))
            view = kind in ("t", "half", "flat")
            known.append(_Known(shape, fresh=value.fresh or not view, pending=start))
        pending = [j for j, k in enumerate(known) if k.pending]
        if pending and draw(st.booleans()):
            _wait(steps, known, draw(st.sampled_from(pending)))
    for j, k in enumerate(known):
        if k.pending:
            _wait(steps, known, j)
    last = st.integers(max(0, len(known) - 3), len(known) - 1)
    return Steps(inputs, tuple(steps), tuple(draw(st.lists(last, min_size=1, max_size=2))))


def _wait(steps: list[tuple], known: list[_Known], value: int) -> None:
    steps.append(("wait", value))
    known[value].pending, known[value].fresh = False, True


def traced(program: Steps, groups: list[str], ranks: int) -> torch.fx.GraphModule:
    """The program as a graph."""
    inputs = [torch.empty(shape) for shape in program.inputs]
    return make_fx(lambda *t: run(program, groups, ranks, *t), tracing_mode="fake")(*inputs)


def run(program: Steps, groups: list[str], ranks: int, *tensors: torch.Tensor):
    """Execute the program on tensors."""
    values = list(tensors)

    def exchange(x, group):
        each = [x.shape[0] // ranks] * ranks
        return F.all_to_all_single(x, each, each, group)

    collectives = {
        "gather": lambda x, g: F.all_gather_into_tensor(x, ranks, g),
        "scatter": lambda x, g: F.reduce_scatter_tensor(x, "sum", ranks, g),
        "reduce": lambda x, g: F.all_reduce(x, "sum", g),
        "broadcast": lambda x, g: F.broadcast(x, 0, g),
        "exchange": exchange,
        "gather_out": lambda x, g: F.all_gather_into_tensor_out(
            x, ranks, g, out=x.new_empty(x.shape[0] * ranks, x.shape[1])
        ),
    }

    local = {
        "relu": torch.relu,
        "clone": torch.clone,
        "t": torch.t,
        "half": lambda x: x[: x.shape[0] // 2],
        "flat": lambda x: x.reshape(-1, 1),
    }
    for kind, i, *rest in program.steps:
        x = values[i]
        if kind == "wait":
            values[i] = F.wait_tensor(x)
        elif kind == "add":
            values.append(x + values[rest[0]])
        elif kind == "add_":
            x.add_(1)
        elif kind == "reduce_":
            F.wait_tensor(F.all_reduce_(x, "sum", groups[rest[0]]))
        elif kind in local:
            values.append(local[kind](x))
        elif kind.startswith("start "):
            values.append(collectives[kind[6:]](x, groups[rest[0]]))
        elif kind in collectives:
            values.append(F.wait_tensor(collectives[kind](x, groups[rest[0]])))
        else:
            op = getattr(torch.ops.symmplan_explorer, kind)
            values.append(op(x, groups[rest[0]]))
    return tuple(values[i] for i in program.outputs)


@attrs.frozen
class Rewritten:
    """A graph that follows a plan, and the segments among its inputs."""

    module: torch.fx.GraphModule
    segments: dict[str, tuple[str, int]]
    program: PlacedProgram

    @property
    def plan(self) -> symmplan.Plan:
        return self.program.plan


def rewritten(
    module: torch.fx.GraphModule,
    lowerings: Lowerings,
    *,
    poison: bool = False,
    inductor: bool = False,
    told=lambda problem: problem,
    kept=lambda barriers: barriers,
) -> Rewritten | None:
    """The graph, rewritten as `torch.compile` would; None where nothing is placed.

    Args:
        module: The graph; it is changed.
        lowerings: How collectives run.
        poison: As with ``debug=True``.
        inductor: Whether Inductor is to compile it, which lets other nodes write placements.
        told: Changes the problem that is planned.
        kept: Changes the barriers that are run.
    """
    other = writes_inductor if inductor else writes_eager
    capture = functools.partial(
        capture_fx,
        module,
        as_run=lowerings.as_run,
        skip=lowerings.skip,
        producer=functools.partial(lowerings.producer, other=other),
    )
    captured, reasons = capture(), {}
    while partly := lowerings.partly(captured):
        reasons |= partly
        captured = capture(refused=reasons)
    if all(s.buffer is None for s in captured.sites):
        return None
    if poison:
        captured = plan_poison(captured)
    plan = symmplan.plan(told(captured.problem))
    plan.verify()
    barriers = kept([(b.before, b.group) for b in plan.barriers])
    fakes = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    due = [Barrier(*point) for point in barriers]
    program = place(captured, plan, lowerings, lambda _: "symmetric", {}, due)
    inputs = rewrite(module, program, fake_mode_of(fakes))
    names = [n.name for n in module.graph.nodes if n.op == "placeholder"][len(fakes) :]
    segments = {name: (i.segment, i.begin or 0) for name, i in zip(names, inputs, strict=True)}
    return Rewritten(module, segments, program)


#: How collectives may run.
ALGORITHMS = {
    "shm": Lowerings("shm"),
    "process group": Lowerings("shm", "process group"),
    "nccl": Lowerings("nccl"),
    "cuda": Lowerings("cuda"),
}


@attrs.frozen
class Judged:
    """What the explorer says of a rewritten program."""

    verdict: Verdict
    original: torch.fx.GraphModule
    rewritten: Rewritten

    def __str__(self) -> str:
        graphs = (self.original.graph, self.rewritten.module.graph)
        plan = (self.rewritten.plan.barriers, dict(self.rewritten.plan.placements))
        return "\n".join(map(str, (self.verdict.kind, self.verdict, *graphs, *plan)))


def judge(
    program: Steps, algorithm: str, groups: list[str], *, transport: str = "wire", **changes
) -> Judged | None:
    """Trace, plan, rewrite and explore; None where nothing is placed.

    Args:
        program: What to run.
        algorithm: One of `ALGORITHMS`.
        groups: Of `world`.
        transport: How process groups move bytes.
        changes: As in `rewritten`.
    """
    ranks = dist.get_world_size()
    original = traced(program, groups, ranks)
    found = rewritten(copy.deepcopy(original), ALGORITHMS[algorithm], **changes)
    if found is None:
        return None
    verdict = explore_graph(
        found.module,
        original,
        ranks=ranks,
        groups={name: (tuple(range(ranks)),) for name in groups},
        segments=found.segments,
        ops=one_sided(),
        transport=transport,
    )
    return Judged(verdict, original, found)
