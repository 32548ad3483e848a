"""A custom op that reads its peers' memory: one declaration, eager and compiled.

    python examples/peer_read.py

`peers::mean` handshakes before it reads. `peers::mean_unguarded` does not, so its plan contains the
necessary barriers. On CUDA devices a Triton kernel reads through the peers' pointers.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import symmplan

if TYPE_CHECKING:
    from symmplan.memory import PlacedTensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU compiler: the CPU's path needs none
    triton = None

if triton is not None:

    @triton.jit
    def add_scaled(total, peer, scale, count, first: tl.constexpr, block: tl.constexpr):  # noqa: ANN001, ANN201
        """``total = peer * scale``, added to what is there unless it is the ``first`` peer."""
        at = tl.program_id(0) * block + tl.arange(0, block)
        inside = at < count
        value = tl.load(peer + at, mask=inside).to(tl.float32) * scale
        if not first:
            value += tl.load(total + at, mask=inside)
        tl.store(total + at, value, mask=inside)


def read_mean(placed: PlacedTensor) -> torch.Tensor:
    """The mean of all ranks' tensors, read from their memory."""
    parts = [placed.peer(rank) for rank in range(placed.world_size)]
    if not placed.tensor.is_cuda:
        return torch.stack(parts).mean(0)
    total = torch.empty_like(parts[0], dtype=torch.float32)
    count, block = total.numel(), 1024
    for rank, part in enumerate(parts):  # a pointer into the memory of each peer
        grid = (triton.cdiv(count, block),)
        add_scaled[grid](total, part, 1 / len(parts), count, first=rank == 0, block=block)
    return total.to(parts[0].dtype)


@symmplan.symm_args("x", group="group_name", handshake=True, release=False)
@torch.library.custom_op("peers::mean", mutates_args=())
def mean(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Meets the peers, then reads them."""
    placed = symmplan.placed.handle(x, group_name)
    placed.barrier()  # the handshake: every rank has written its x
    return read_mean(placed)


@symmplan.symm_args("x", group="group_name", handshake=False, release=False)
@torch.library.custom_op("peers::mean_unguarded", mutates_args=())
def mean_unguarded(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Reads the peers at once: whoever calls it sees to it that they are ready."""
    return read_mean(symmplan.placed.handle(x, group_name))


for op in (mean, mean_unguarded):
    op.register_fake(lambda x, _group_name: torch.empty_like(x))


def work(rank: int, world_size: int, store: str) -> None:
    """What every rank runs."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        device_id=device if cuda else None,
    )
    group = dist.group.WORLD.group_name

    def program(x: torch.Tensor) -> torch.Tensor:
        a = symmplan.placed.out(torch.add, x, 1.0)
        b = symmplan.placed.out(torch.mul, mean(a, group), 2.0)
        return mean_unguarded(b, group) - x

    x = torch.full((16, 64), float(rank), device=device)
    expected = torch.full_like(x, (1 + (world_size - 1) / 2) * 2) - x
    memory = "cuda" if cuda else "shm"
    with symmplan.eager(timeout=60.0, memory=memory) as session:
        for _ in range(4):
            got = program(x)
            session.step()
            torch.testing.assert_close(got, expected)
        if rank == 0:
            print("eager:", session.stats)
            print("barriers before:", [b.before for b in session.plan.barriers])
    backend = symmplan.backend(inner="eager", memory=memory, timeout=60.0)
    compiled = torch.compile(program, backend=backend)
    for _ in range(4):
        torch.testing.assert_close(compiled(x), expected)
    if rank == 0:
        print("compiled:", backend.stats)
    dist.barrier()
    backend.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(work, args=(2, f"{directory}/store"), nprocs=2)
