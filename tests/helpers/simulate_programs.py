"""Small programs that run on real ranks and in simulated worlds: what `test_simulate.py` compares.

A program is a function of plain data. It returns what has the plans: handles of FSDP2's, backends.
"""

from __future__ import annotations

import functools

import attrs
import torch
import torch.distributed as dist
from held import segments_of_plans
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import symmplan


@attrs.frozen
class Config:
    """A program.

    Attributes:
        kind: ``"eager"``, ``"experts"``, ``"fsdp"``, ``"hsdp"``, ``"fsdp x tp"``, ``"tp"``,
            ``"compiled"``, ``"1f1b"`` or ``"interleaved"``.
        ranks: How many it runs on.
        dim: Width of the model, a multiple of four.
        widths: Of the hidden layer of each block, in units of ``dim``.
        steps: Training steps, one or more.
        micro: Micro-batches of a step.
        low: Whether parameters are gathered in bfloat16.
        reshard: FSDP2's ``reshard_after_forward``.
        prefetch: How many blocks are gathered ahead, explicitly.
        inner: Who compiles.
    """

    kind: str = "fsdp"
    ranks: int = 2
    dim: int = 8
    widths: tuple[int, ...] = (1, 2)
    steps: int = 1
    micro: int = 1
    low: bool = False
    reshard: bool = True
    prefetch: int = 0
    inner: str = "inductor"


class Block(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, dim, widths):
        super().__init__()
        self.inlet = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim, width * dim) for width in widths)

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x


def program(config):
    """Run ``config``; returns what plans."""
    return _KINDS[config.kind](config)


def _sharded(model, mesh, config):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if config.low else None
    options = {} if policy is None else {"mp_policy": policy}
    options |= {"mesh": mesh, "reshard_after_forward": config.reshard}
    blocks = list(model.blocks)
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    for i, block in enumerate(blocks if config.prefetch else ()):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + config.prefetch])
    return model


def _train(model, config):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(config.steps):
        for micro in range(config.micro):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == config.micro - 1)
            model(torch.randn(4, config.dim)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _fsdp(config):
    mesh = init_device_mesh("cpu", (config.ranks,))
    model = _sharded(Net(config.dim, config.widths), mesh, config)
    handle = symmplan.fsdp.apply(model)
    _train(model, config)
    return [handle]


def _hsdp(config):
    mesh = init_device_mesh("cpu", (2, config.ranks // 2), mesh_dim_names=("replicate", "shard"))
    model = _sharded(Net(config.dim, config.widths), mesh, config)
    handle = symmplan.fsdp.apply(model)
    _train(model, config)
    return [handle]


def _parallel(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _fsdp_tp(config):
    mesh = init_device_mesh("cpu", (config.ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    model = _parallel(Net(config.dim, config.widths), mesh["tp"])
    handle = symmplan.fsdp.apply(_sharded(model, mesh["dp"], config))
    _train(model, config)
    return [handle]


def _tp(config):
    """Tensor-parallel blocks, compiled."""
    mesh = init_device_mesh("cpu", (config.ranks,))
    model = _parallel(Net(config.dim, config.widths), mesh)
    backend = symmplan.backend(inner=config.inner)
    compiled = torch.compile(model, backend=backend)
    _train(compiled, config)
    return [backend]


def _compiled(config):
    backend = symmplan.backend(inner=config.inner)
    _functional(backend, config)
    return [backend]


def _functional(backend, config):
    """Functional collectives in a compiled function."""
    from torch.distributed._functional_collectives import (
        all_gather_tensor,
        all_reduce,
        reduce_scatter_tensor,
    )

    group = dist.group.WORLD

    def step(x, weights):
        for i, weight in enumerate(weights):
            x = all_gather_tensor(torch.tanh(x @ weight), 0, group)
            x = reduce_scatter_tensor(x, "sum", 0, group)
            x = all_reduce(x, "sum", group) if i % 2 else x
        return x

    compiled = torch.compile(step, backend=backend)
    dim = config.dim
    weights = [torch.randn(dim, dim) for _ in config.widths]
    for _ in range(config.steps):
        compiled(torch.randn(4, dim), weights)


def _pipeline(config, *, interleaved):
    """Stages of which each has FSDP2 of its own, over the ranks that run the same stages."""
    pp = 2
    mesh = init_device_mesh("cpu", (pp, config.ranks // pp), mesh_dim_names=("pp", "dp"))
    rank = mesh.get_local_rank("pp")
    count = 2 * pp if interleaved else pp
    handles, stages = [], []
    for index in range(rank, count, pp):
        part = _sharded(Net(config.dim, config.widths), mesh["dp"], config)
        handles.append(symmplan.fsdp.apply(part))
        given = torch.empty(4, config.dim, requires_grad=index > 0)
        made = torch.empty(4, config.dim, requires_grad=True)
        options = {"input_args": given, "output_args": made, "group": mesh.get_group("pp")}
        stages.append(PipelineStage(part, index, count, torch.device("cpu"), **options))
    loss = functools.partial(torch.nn.functional.mse_loss)
    kind = ScheduleInterleaved1F1B if interleaved else Schedule1F1B
    schedule = kind(stages if interleaved else stages[0], 2 * pp, loss_fn=loss)
    for _ in range(config.steps):
        x, target = torch.randn(8 * pp, config.dim), torch.randn(8 * pp, config.dim)
        schedule.step(*([x] if rank == 0 else []), **({"target": target} if rank == pp - 1 else {}))
        for stage in stages:
            stage.submod.zero_grad()
    return handles


def _experts(config):
    """Rows to other ranks and back, beside FSDP2."""
    via = symmplan.expert_parallel(max_tokens=8 * config.ranks, timeout=60.0)
    planners = _fsdp(config)
    for step in range(config.steps):
        counts = [1 + step] * config.ranks
        routes = via.routes(torch.tensor(counts) if config.micro > 1 else counts)
        rows = torch.randn(sum(counts), config.dim, requires_grad=True)
        via.combine(torch.tanh(via.dispatch(rows, routes)), routes).sum().backward()
        assert rows.grad.shape == rows.shape
    return [via, *planners]


def _session(config):
    """An eager session, which is not left: what it holds is asked for."""
    session = symmplan.eager()
    session.__enter__()
    for _ in range(config.steps):
        x = torch.randn(4, config.dim)
        for width in config.widths:
            whole = torch.empty(4 * config.ranks, config.dim)
            dist.all_gather_into_tensor(whole, torch.tanh(x))
            whole = whole.repeat(1, width) if width > 1 else whole * 2
            x = torch.empty(4, config.dim * width)
            dist.reduce_scatter_tensor(x, whole)
            x = x[:, : config.dim].contiguous()
            dist.all_reduce(x)
        session.step()
    return [session]


_KINDS = {
    "eager": _session,
    "experts": _experts,
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "fsdp x tp": _fsdp_tp,
    "tp": _tp,
    "compiled": _compiled,
    "1f1b": functools.partial(_pipeline, interleaved=False),
    "interleaved": functools.partial(_pipeline, interleaved=True),
}


def real(rank, ranks, config):
    """``config`` on real ranks: the fingerprints of its plans, and the bytes it holds."""
    torch._dynamo.reset()
    planners = program(config)
    plans = []
    for planner in planners:
        if hasattr(planner, "freeze") and not planner.planned:
            planner.freeze()
        plans += planner.plans if hasattr(planner, "plans") else [planner.plan]
    held = sum(s.nbytes for s in segments_of_plans())
    for planner in planners:
        (planner.remove if hasattr(planner, "remove") else planner.release)()
    return [plan.fingerprint for plan in plans], held


def simulated(rank, config):
    """``config`` in a simulated world."""
    from symmplan.simulation import simulate

    report = simulate(
        functools.partial(program, config), ranks=config.ranks, rank=rank, memory="shm"
    )
    return [plan.fingerprint for plan in report.plans], report.peak_bytes


def reads_a_table(rank, ranks, files, kind):
    """What ranks say that read their own of ``files``; the algorithms taken, if nothing."""
    torch._dynamo.reset()
    options = {"choose": files[rank]}
    try:
        if kind == "fsdp":
            model = _sharded(Net(8, (1,)), init_device_mesh("cpu", (ranks,)), Config())
            handle = symmplan.fsdp.apply(model, **options)
            _train(model, Config(steps=2))
            plan = handle.plan
            handle.remove()
        elif kind == "eager":
            with symmplan.eager(timeout=20.0, **options) as session:
                for _ in range(2):
                    out = torch.ops._c10d_functional.all_reduce(torch.ones(64), "sum", "0")
                    torch.ops._c10d_functional.wait_tensor(out)
                    session.step()
                plan = session.plan
        else:
            backend = symmplan.backend(inner="eager", **options)
            _functional(backend, Config("compiled"))
            (plan,) = backend.plans
            backend.release()
    except Exception as error:  # noqa: BLE001
        found = getattr(error, "inner_exception", error)
        return type(found).__name__, found.what, found.ranks
    return len(plan.placements)
