"""Train a small model under FSDP2 on two local ranks, its collectives in planned placements."""

import multiprocessing
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import symmplan

RANKS = 2


def train(rank: int, port: int) -> None:
    """One rank."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = dist.init_device_mesh("cpu", (RANKS,))

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    # The only change. The first step is recorded; then the ranks agree on a plan.
    handle = symmplan.fsdp.apply(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        loss = model(torch.randn(8, 64)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if rank == 0:
        stats = handle.stats
        print(handle.plan.summary())
        print(
            f"{stats.recorded} collectives recorded, then {stats.served} in placements: "
            f"{stats.segment_bytes} bytes instead of {stats.unshared_bytes}, "
            f"{stats.rendezvous} rendezvous"
        )
    handle.remove()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=train, args=(rank, store.port)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
