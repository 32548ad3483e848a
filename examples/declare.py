"""Declare which tensors of an op must be symmetric, and see that mistakes are caught at once."""

import torch

import symmplan


# Every rank reads its peers' `x`, so `x` must lie at the same offset of a segment on all ranks.
@symmplan.symm_args("x", group="group_name", align=64, handshake=True)
@torch.library.custom_op("examples::peer_sum", mutates_args=())
def peer_sum(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """The sum of ``x`` over the ranks of a group; every rank reads its peers' memory."""
    placed = symmplan.handle(x, group_name)
    placed.barrier()
    return sum((placed.peer(rank) for rank in range(placed.world_size)), torch.zeros_like(x))


def main() -> None:
    """Print what is declared, and what a wrong declaration says."""
    print(symmplan.requirements("examples::peer_sum"))
    # An op of torch, from the built-in catalogue.
    print(symmplan.requirements("_c10d_functional::all_gather_into_tensor"))
    try:
        symmplan.register_symm_mem_args("examples::peer_sum", ["y"])
    except symmplan.errors.DeclarationError as error:
        print(f"a mistake says:\n{error}")


if __name__ == "__main__":
    main()
