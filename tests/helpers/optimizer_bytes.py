"""What an optimizer that gathers takes beside FSDP2: milliseconds of its step, bytes of a device.

    PYTHONPATH=.:tests/helpers python tests/helpers/optimizer_bytes.py

Muon over two ranks, as in ``examples/trainers/muon.py``: each rank orthogonalizes every second
matrix, which all-to-alls deal out, or the first rank two of three, or all ranks gather all of them.
On two devices 24 matrices of width 4,096 in bfloat16, six steps; GiB in use by the driver, at most
since the first step and after the last. Without devices small matrices, and only the counters say
anything.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from functools import partial

import torch
from ranks import RankPool
from torch import nn

from symmplan.report.format import table

GiB = 1 << 30
STEPS = 6
#: Layers, width, rows of a batch.
LARGE, SMALL = (24, 4096, 4096), (6, 64, 16)
SIDES = ("FSDP2", "FSDP2 planned", "and the optimizer")


def _orthogonal(x, addmm=torch.addmm):
    """Newton-Schulz; ``addmm`` makes the result."""
    x = x / (x.norm() + 1e-7)
    for by in (*[torch.addmm] * 4, addmm):
        gram = x @ x.T
        x = by(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x


def _dealt(grads, momenta, world):
    """The rows of the updates of ``world`` matrices, one of which each rank has whole meanwhile."""
    import torch.distributed as dist

    import symmplan

    shards = [grad.add(m, alpha=0.95) for grad, m in zip(grads, momenta, strict=True)]
    mine, back = (torch.empty(world, *s.shape, dtype=s.dtype, device=s.device) for s in shards[:2])
    dist.all_to_all_single(mine, symmplan.placed.out(torch.stack, shards))
    addmm = partial(symmplan.placed.out, torch.addmm)
    dist.all_to_all_single(back, _orthogonal(mine.flatten(0, 1), addmm).view_as(mine))
    return back


def _dealt_unequally(grads, momenta, world):
    """The same of more matrices than ranks: the first ranks have one more of them."""
    import torch.distributed as dist

    import symmplan

    rank, ranks = dist.get_rank(), range(world)
    counts = [len(range(r, len(grads), world)) for r in ranks]
    order = [i for r in ranks for i in range(r, len(grads), world)]
    shards = [grad.add(m, alpha=0.95) for grad, m in zip(grads, momenta, strict=True)]
    own, size = counts[rank], shards[0].shape
    mine = shards[0].new_empty(world * own, *size)
    sent = symmplan.placed.out(torch.stack, [shards[i] for i in order])
    dist.all_to_all_single(mine, sent, [own] * world, counts)
    del sent
    made = [_orthogonal(mine[i::own].flatten(0, 1)).view(world, *size) for i in range(own)]
    del mine
    rows = symmplan.placed.out(torch.stack, made, 1).flatten(0, 1)
    back = shards[0].new_empty(len(grads), *size)
    dist.all_to_all_single(back, rows, counts, [own] * world)
    return [back[order.index(i)] for i in range(len(grads))]


def _gathered(grads, momenta, world):
    """The same, where each rank gathers every matrix."""
    import torch.distributed as dist

    import symmplan

    made = []
    for grad, m in zip(grads, momenta, strict=True):
        whole = grad.new_empty(world * grad.shape[0], *grad.shape[1:])
        shard = symmplan.placed.out(torch.add, grad, m, alpha=0.95)
        dist.all_gather_into_tensor(whole, shard)
        made.append(_orthogonal(whole).chunk(world)[dist.get_rank()])
    return made


@torch.no_grad()
def _update(some, momenta, act, world):
    grads = [p.grad.to_local() for p in some]
    kept = [momenta[p].mul_(0.95).add_(grad) for p, grad in zip(some, grads, strict=True)]
    for p, change in zip(some, act(grads, kept, world), strict=True):
        p.to_local().sub_(change, alpha=0.02)


#: ``{how: (what makes the updates of so many matrices for each rank, how many)}``.
HOW = {
    "all-to-all": (_dealt, 2),
    "unequal all-to-all": (_dealt_unequally, 3),
    "all-gather": (_gathered, 2),
}


def _trained(rank, world, device, side, how):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import symmplan
    from symmplan.bench.parts.fsdp_ranks import _Driver

    look = device == "cuda"
    layers, width, rows = LARGE if look else SMALL
    act, some = HOW[how]
    torch.manual_seed(0)
    kind = {"bias": False, "device": device, "dtype": torch.bfloat16 if look else torch.float32}
    blocks = [nn.Sequential(nn.Linear(width, width, **kind), nn.GELU()) for _ in range(layers)]
    mesh = dist.init_device_mesh(device, (world,))
    model = nn.Sequential(*(fully_shard(block, mesh=mesh) for block in blocks))
    fully_shard(model, mesh=mesh)
    handle = None if side == SIDES[0] else symmplan.fsdp.apply(model, timeout=60.0)
    session = None
    if side == SIDES[2]:
        session = symmplan.eager(device=device, timeout=60.0)
    batch = torch.randn(world, rows, width, device=device).to(kind["dtype"])
    momenta = {p: torch.zeros_like(p.to_local()) for p in model.parameters()}
    weights, taken, driver = [*model.parameters()], [], _Driver(look=look)
    with session or contextlib.nullcontext():
        for _ in range(STEPS):
            (model(batch[rank]) - 1).square().mean().backward()
            if look:
                torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            for first in range(0, layers, some):
                _update(weights[first : first + some], momenta, act, world)
            if look:
                torch.cuda.synchronize()
            taken.append((time.perf_counter() - begin) * 1e3)
            model.zero_grad()
            if session is not None:
                session.step()
        most = driver.over()
        free, total = torch.cuda.mem_get_info() if look else (0, 0)
        placed = "" if session is None else f"{session.stats.segment_bytes}"
        copies = "" if session is None else f"{session.stats.copies}"
    checked = sum(p.to_local().double().abs().sum().item() for p in weights)
    if handle is not None:
        handle.remove()
    ms = statistics.median(taken[2:])
    return [
        f"{ms:.2f}",
        f"{most / GiB:.2f}",
        f"{(total - free) / GiB:.2f}",
        placed,
        copies,
    ], checked


def main():
    """Print the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    columns = "optimizer", "side", "ms", "at most", "behind", "segments of its own", "copies"
    lines = [columns]
    for how in HOW:
        sums = set()
        for side in SIDES:
            init = "nccl" if device == "cuda" else "gloo"
            with RankPool(2, init=init, timeout=150) as pool:
                (row, checked), _ = pool.run(_trained, device, side, how)
            sums.add(checked)
            lines.append((how, side, *row))
        print("equal" if len(sums) == 1 else f"DIFFERENT {sums}")
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
