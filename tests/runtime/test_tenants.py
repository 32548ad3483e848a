"""Compiled graphs lie in FSDP2's segments: one pool for both, and the same bits."""

from __future__ import annotations

import pytest
import torch
from held import segments_of_plans
from ranks import pool_of
from torch import nn

from symmplan.errors import RunError

pytestmark = pytest.mark.ranks

WIDTH, VOCABULARY, BLOCKS, TOKENS = 32, 2048, 3, 8


class Block(nn.Module):
    """A residual MLP, tensor-parallel by hand: its parameters are this rank's part."""

    def __init__(self, group, size, gathers):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH // size)
        self.down = nn.Linear(4 * WIDTH // size, WIDTH)
        self.group = group
        self.gathers = gathers

    def forward(self, x):
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        h = torch.relu(self.up(_Copied.apply(x, self.group)))
        if self.gathers:  # saved for the backward, in its placement
            whole = all_gather_tensor_autograd(h, 0, self.group)
            h = h + (whole.sin() * whole.cos())[: len(h)]
        return x + _Summed.apply(self.down(h), self.group)


class _Copied(torch.autograd.Function):
    """The same on all ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _sum(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    """The sum over all ranks; its gradient is the same on all."""

    @staticmethod
    def forward(ctx, x, group):
        return _sum(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _sum(x, group):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x * 1.0, "sum", group))


class Model(nn.Module):
    """Embeddings that are larger than all else, blocks, and a head."""

    def __init__(self, group, size, gathers):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(group, size, gathers) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(mesh, group, backend, *, planned, gathers=False):
    """A model whose blocks are compiled, tensor-parallel over ``group`` and sharded over ``mesh``.

    Returns it, and what `symmplan.fsdp.apply` gave if it is ``planned``.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import symmplan

    torch.manual_seed(dist.get_rank(group))
    model = Model(group.group_name, group.size(), gathers).to(mesh.device_type)
    with torch.no_grad():  # what is not tensor-parallel is the same
        for p in (*model.embed.parameters(), *model.head.parameters()):
            p.copy_(torch.linspace(-0.05, 0.05, p.numel()).view(p.shape))
    for i, plain in enumerate(model.blocks):
        block = torch.compile(plain, backend=backend, fullgraph=True)
        fully_shard(block, mesh=mesh)
        model.blocks[i] = block
    fully_shard(model, mesh=mesh)
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=60.0) if planned else None
    return model, handle


def _step(model, optimizer, turn, rank, *, late=False):
    import time

    torch.manual_seed(100 * turn)
    tokens = torch.randint(0, VOCABULARY, (TOKENS,)) + 0
    if late and rank == turn % 4:
        time.sleep(0.02)
    loss = model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _trained(rank, size, dp, tp, acts, gathers=False, algorithms=("placed", "placed")):
    """Losses with and without symmplan, and what the process holds.

    ``algorithms`` are those of the graphs' collectives in each tensor-parallel group.
    """
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    whole = dist.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    mesh, group = whole["dp"], whole["tp"].get_group()
    wanted, _ = made(mesh, group, "aot_eager", planned=False, gathers=gathers)
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.01)
    backend = symmplan.backend(inner="eager", timeout=60.0, choose=algorithms[rank // tp])
    model, handle = made(mesh, group, backend, planned=True, gathers=gathers)
    mine = torch.optim.SGD(model.parameters(), lr=0.01)
    differences, alone, slept = [], 0, []
    for turn, act in enumerate(acts):
        held = None
        if act == "held" and rank == 1:  # as by a hook that keeps a buffer of FSDP2's
            memory = handle._runtime.memory
            (name,) = (n for n in handle.plan.placements if n.startswith("tenant"))
            place = handle.plan.placements[name]
            held = memory.take(place)
            memory.at(place).fill_(7)
        if act in ("step", "held"):
            a = _step(wanted, optimizer, turn, rank)
            b = _step(model, mine, turn, rank, late=True)
            differences += [] if torch.equal(a, b) else [(turn, float(a), float(b))]
        elif act == "forward":
            tokens = torch.arange(TOKENS) + turn
            with torch.no_grad():
                a, b = wanted(tokens), model(tokens)
            differences += [] if torch.equal(a, b) else [(turn, "forward")]
        elif act == "twice":  # all forwards before all backwards
            losses = []
            for one in (wanted, model):
                some = [one(torch.arange(TOKENS) + turn + i).square().mean() for i in range(2)]
                for loss in some:
                    loss.backward()
                losses.append(sum(float(x) for x in some))
            differences += [] if losses[0] == losses[1] else [(turn, losses)]
        elif act == "remove":
            handle.remove()
        elif act == "refused":  # by one rank, for all that meet in the segments
            backend.sleep()
            kind = type(handle._runtime.planning.unshards[0])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kind, "can_leave", lambda _: rank != 3)
                with pytest.raises(RunError, match="are in use"):
                    handle.sleep()
            slept.append(handle.asleep)
        elif act == "sleep":
            if any(arena.parent is not None for arena in backend._pool.arenas):
                with pytest.raises(RunError, match="others have bytes"):
                    handle.sleep()
            backend.sleep()
            handle.sleep()
            slept.append(not segments_of_plans() and handle.asleep)
        if held is not None:
            differences += [] if bool((memory.at(place) == 7).all()) else [(turn, "lost")]
            held.drop()
        if turn == 0:
            alone = sum(s.nbytes for s in segments_of_plans())
    for a, b in zip(wanted.parameters(), model.parameters(), strict=True):
        same = torch.equal(_whole(a), _whole(b))
        differences += [] if same else ["parameters"]
    held = segments_of_plans()
    found = {
        "differences": differences,
        "graphs alone": alone,
        "fsdp alone": _alone(handle.plan),
        "held": [(s.nbytes, len(set(s.groups)), s.users) for s in held],
        "served": (backend.stats.served, handle.stats.served, handle.stats.plain),
        "copies": handle.stats.copies,
        "rendezvous": handle.stats.rendezvous,
        "slept": slept,
    }
    handle.remove()
    backend.release()
    found["left"] = len(segments_of_plans())
    dist.barrier()
    return found


def _whole(parameter):
    """What is unsharded stays so after a forward pass."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def _alone(plan):
    """Bytes that FSDP2's buffers need by themselves."""
    import attrs

    import symmplan

    problem = plan.problem
    names = {b.name for b in problem.buffers if not b.name.startswith("tenant")}
    alone = attrs.evolve(
        problem,
        buffers=[attrs.evolve(b, offset=None) for b in problem.buffers if b.name in names],
        accesses=[a for a in problem.accesses if a.buffer in names],
        shared_groups=(),
    )
    return symmplan.plan(alone).peak_bytes


four = pool_of(4, timeout=200.0)


@pytest.mark.further
def test_both_share_one_segment(four):
    results = four.run(_trained, 2, 2, ["step"] * 4)
    for found in results:
        assert found["differences"] == []
        ((nbytes, groups, users),) = found["held"]
        assert groups == 2
        assert users == ("FSDP2", "compiled graphs")
        assert found["rendezvous"] == 2
        assert nbytes <= 1.05 * max(found["graphs alone"], found["fsdp alone"])
        served, placed, plain = found["served"]
        assert served > 0
        assert placed > 0
        assert plain == found["copies"] == 0
        assert found["left"] == 0


@pytest.mark.further
@pytest.mark.parametrize(
    "acts",
    [
        ["step", "step", "forward", "step", "forward", "forward", "step"],
        ["step", "step", "twice", "step", "twice"],
        ["forward", "step", "step", "step"],
        ["step", "step", "remove", "step", "forward"],
        ["step", "step", "held", "step", "held", "held", "step"],
    ],
    ids=["forwards between", "twice", "forward first", "removed", "held"],
)
def test_whatever_is_done_between_has_the_same_bits(four, acts):
    for found in four.run(_trained, 2, 2, acts):
        assert found["differences"] == []
        assert found["left"] == 0


@pytest.mark.further
def test_who_has_bytes_of_fsdp2_sleeps_first(four):
    acts = ["step", "step", "step", "sleep", "step", "step", "sleep", "forward", "sleep", "twice"]
    for found in four.run(_trained, 2, 2, acts):
        assert found["differences"] == []
        assert found["slept"] == [True] * 3
        assert found["left"] == 0


@pytest.mark.further
def test_ranks_of_a_tenant_hear_who_does_not_sleep(four):
    acts = ["step", "step", "step", "refused", "step", "sleep", "step"]
    for found in four.run(_trained, 2, 2, acts):
        assert found["differences"] == []
        assert found["slept"] == [False, True]
        assert found["left"] == 0


@pytest.mark.further
def test_what_is_saved_for_a_backward_stays_apart(four):
    for found in four.run(_trained, 2, 2, ["step"] * 4, True):
        assert found["differences"] == []
        assert sorted(users for *_, users in found["held"]) == [("FSDP2",), ("compiled graphs",)]


@pytest.mark.further
def test_graphs_that_run_otherwise_on_other_ranks_change_no_plan(four):
    """As where each tensor-parallel group has measured what is fastest for it."""
    results = four.run(_trained, 2, 2, ["step"] * 3, False, ("placed", "ordinary"))
    for rank, found in enumerate(results):
        assert found["differences"] == []
        assert found["served"][1] > 0
        users = [("FSDP2",), ("compiled graphs",)] if rank < 2 else [("FSDP2",)]
        assert sorted(users for *_, users in found["held"]) == users
        assert found["left"] == 0


def _two_backends(rank, size, late):
    """Blocks of two backends live in one segment; a rank is late behind one of them."""
    import time

    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import symmplan

    torch._dynamo.reset()
    mesh, group = dist.init_device_mesh("cpu", (size,)), dist.group.WORLD.group_name
    first, second = (symmplan.backend("eager", timeout=60.0, choose="placed") for _ in range(2))
    torch.manual_seed(rank)
    blocks = [Block(group, size, gathers=False) for _ in range(4)]
    blocks[1].up, blocks[1].down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
    for i, backend in enumerate((first, first, second, second)):
        blocks[i] = fully_shard(torch.compile(blocks[i], backend=backend, dynamic=False), mesh=mesh)
    model = fully_shard(nn.Sequential(*blocks), mesh=mesh)
    if rank == late[0]:
        blocks[late[1]].register_forward_hook(lambda *_: time.sleep(0.2))
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=60.0)
    for _ in range(4):
        model(torch.ones(8, WIDTH)).square().mean().backward()
    held = [s.users for s in segments_of_plans() if s.users]
    planned = [b.stats.plans for b in (first, second)]
    handle.remove()
    for backend in (first, second):
        backend.release()
    dist.barrier()
    return held, planned, len(segments_of_plans())


@pytest.mark.further
@pytest.mark.parametrize("late", [(0, 0), (0, 1), (1, 2), (3, 3)])
def test_backends_that_are_tenants_in_one_segment_count_apart(four, late):
    for held, planned, left in four.run(_two_backends, late):
        assert held == [("FSDP2", "compiled graphs"), ("epoch counters",)]
        assert planned[0] > planned[1]
        assert left == 0
