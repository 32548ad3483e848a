"""An all-gather on tensors made symmetric by hand, and a compiled one on ordinary tensors.

    python examples/functional_all_gather.py

`torch.ops._c10d_functional.all_gather_into_tensor` allocates its result itself, so under
`torch.compile` alone it never uses symmetric memory. With symmplan the same model does.
The example profiles both programs. Both must use symmetric memory: on two CUDA devices through
NCCL's symmetric kernels or copy engines, on the CPU through the collective in shared memory.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import symmplan

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = 2
ROWS, COLUMNS = 1024, 512  # of one rank's part

#: What shows in a profile when symmetric memory is used.
SYMMETRIC = {"cuda": ("ncclSymk", "Memcpy PtoP"), "cpu": ("symmplan::all_gather_out",)}


def model(x: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    """Gather all ranks' rows, multiply. Knows nothing of symmetric memory."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, RANKS, group)) @ weight


def by_hand(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that gathers ``x`` in memory that was made symmetric by hand."""
    group = dist.group.WORLD.group_name
    if x.is_cuda:
        import torch.distributed._symmetric_memory as symm_mem

        given = symm_mem.empty(x.shape, dtype=x.dtype, device=x.device)
        gathered = symm_mem.empty((RANKS * ROWS, COLUMNS), dtype=x.dtype, device=x.device)
        for tensor in (given, gathered):
            symm_mem.rendezvous(tensor, group)
        given.copy_(x)
        return lambda: dist.all_gather_into_tensor(gathered, given) or gathered

    from symmplan.memory import realize

    plan = symmplan.plan(symmplan.Problem.from_intervals([("out", 0, 1, RANKS * x.nbytes)]))
    gathered = realize(plan, memory="shm").tensor("out", x.dtype, (RANKS * ROWS, COLUMNS))
    gather = torch.ops.symmplan.all_gather_out
    return lambda: gather(x, RANKS, "default", out=gathered) or gathered


def profile(function: Callable[[], object]) -> list[str]:
    """Names of the kernels and ops that gathered."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    activity = getattr(torch.profiler.ProfilerActivity, device.upper())
    with torch.profiler.profile(activities=[activity]) as profiler:
        function()
        if device == "cuda":
            torch.cuda.synchronize()
    names = sorted({event.name for event in profiler.events()})
    return [n for n in names if "PtoP" in n or "nccl" in n or "all_gather" in n]


def run(rank: int, store: str) -> None:
    """What every rank runs."""
    cuda = torch.cuda.device_count() >= RANKS
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        device_id=device if cuda else None,
    )
    if cuda:
        import torch.distributed._symmetric_memory as symm_mem

        symm_mem.set_backend("NCCL")
        dist.barrier()  # NCCL's memory needs a communicator
    torch.manual_seed(rank)
    x = torch.randn(ROWS, COLUMNS, device=device)
    weight = torch.eye(COLUMNS, device=device)
    group = dist.group.WORLD.group_name
    expected = model(x, weight, group)

    hand_made = by_hand(x)
    # backend="symmplan" would leave out what it measures to be slower; here all is to be seen.
    backend = symmplan.backend(choose="placed")
    compiled = torch.compile(model, backend=backend)
    algorithms = {
        "dist, tensors made symmetric by hand": hand_made,
        "torch.compile with symmplan, ordinary tensors": lambda: compiled(x, weight, group),
    }
    for name, algorithm in algorithms.items():
        for _ in range(3):
            torch.testing.assert_close(algorithm(), expected, rtol=1e-2, atol=1e-2)
        names = profile(algorithm)
        if rank == 0:
            print(f"{name}: {', '.join(names)}")
        assert any(mark in n for n in names for mark in SYMMETRIC[device.type]), names
    if rank == 0:
        print(backend.stats)
    dist.barrier()
    backend.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run, args=(f"{directory}/store",), nprocs=RANKS)
