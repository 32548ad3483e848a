"""Declare which tensors of an op must be symmetric, run the op, and see that mistakes are caught.

    python examples/declare.py

prints the declarations, the error for a wrong declaration, and a sum for which two ranks of this
machine read each other's memory.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import symmplan

RANKS = 2


# Every rank reads its peers' `x`, so `x` must lie at the same offset of a segment on all ranks.
@symmplan.symm_args("x", group="group_name", align=64, handshake=True)
@torch.library.custom_op("examples::peer_sum", mutates_args=())
def peer_sum(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """The sum of ``x`` over the ranks of a group; every rank reads its peers' memory."""
    placed = symmplan.placed.handle(x, group_name)
    placed.barrier()
    return sum((placed.peer(rank) for rank in range(placed.world_size)), torch.zeros_like(x))


@peer_sum.register_fake
def _(x: torch.Tensor, _group_name: str) -> torch.Tensor:
    return torch.empty_like(x)


def run(rank: int, store: str) -> None:
    """What every rank runs: the op in a compiled program, its input in a planned placement."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    group = dist.group.WORLD.group_name
    backend = symmplan.backend(inner="eager", timeout=60.0)
    program = torch.compile(lambda x: peer_sum(x + 1.0, group), backend=backend)
    total = program(torch.full((4,), float(rank)))
    assert total.tolist() == [3.0] * 4
    if rank == 0:
        print(f"(0 + 1) + (1 + 1) on two ranks: {total}")
        print(backend.plans[0].summary())
    dist.barrier()
    backend.release()
    dist.destroy_process_group()


def main() -> None:
    """Print what is declared, and what a wrong declaration says; then run the op."""
    print(symmplan.requirements("examples::peer_sum"))
    # An op of torch, from the built-in catalogue.
    print(symmplan.requirements("_c10d_functional::all_gather_into_tensor"))
    try:
        symmplan.register_symm_mem_args("examples::peer_sum", ["y"])
    except symmplan.errors.DeclarationError as error:
        print(f"a mistake says:\n{error}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(f"{folder}/store",), nprocs=RANKS)


if __name__ == "__main__":
    main()
