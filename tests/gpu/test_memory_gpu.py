"""Torch's symmetric memory behind symmplan's protocol, on real devices.

    python -m pytest tests/gpu/test_memory_gpu.py -m gpu

It starts its own processes, one for each device, and again for each backend: a process can use
only one. Needs two CUDA devices of one host that reach each other.
"""

from __future__ import annotations

import pytest
import torch
from devices import finish, needs_devices, ranks_on
from memory_plans import hand_made, two_segments

pytestmark = needs_devices()

MiB = 1 << 20


@pytest.fixture(scope="module", params=["nccl", "cuda", "nvshmem"])
def pool(request):
    if request.param == "nvshmem":
        from torch.distributed import _symmetric_memory

        if not _symmetric_memory.is_nvshmem_available():
            pytest.skip("this torch has no NVSHMEM")
    with ranks_on(2, timeout=180) as ranks:
        ranks.memory = request.param
        yield ranks
        ranks.outcomes(finish)


# Rank side.


def device_of(rank):
    return torch.device("cuda", rank)


def lifecycle(rank, world, memory):
    """Realize, look around, communicate in placements through NCCL, release."""
    import torch.distributed as dist

    from symmplan.errors import ReleasedError
    from symmplan.memory import locate, realize
    from symmplan.placed import handle

    device = device_of(rank)
    plan = hand_made({"pad": 768, "out": 2 * MiB, "in": 4 * MiB})
    told = {}
    with realize(plan, memory=memory, device=device, timeout=60) as arena:
        segment = arena.segments["s0"]
        told["memory"] = arena.memory
        told["rendezvous"] = arena.rendezvous
        told["storage"] = segment.tensor.untyped_storage().nbytes() == segment.nbytes
        out = arena.tensor("out", torch.float32)
        mine = torch.full((out.numel() // world,), float(rank + 1), device=device)
        told["located"] = locate(out) == (segment, 768)
        dist.all_gather_into_tensor(out, mine)
        parts = out.view(world, -1).mean(dim=1).tolist()
        told["gathered"] = parts == [float(r + 1) for r in range(world)]
        source = arena.tensor("in", torch.float32)
        source.fill_(rank + 1)
        piece = torch.empty(source.numel() // world, device=device)
        dist.reduce_scatter_tensor(piece, source)
        told["scattered"] = bool((piece == world * (world + 1) / 2).all())
        segment.barrier()
        placed = handle(out)
        told["placed"] = (placed.offset, placed.rank, placed.world_size)
        torch.cuda.synchronize()
    try:
        segment.barrier()
    except ReleasedError:
        told["released"] = locate(out) is None
    return told


def peers(rank, world, memory):
    """Peer views: write to the neighbour, barrier, read what arrived."""
    from symmplan.errors import BackendError
    from symmplan.memory import realize
    from symmplan.placed import handle

    device = device_of(rank)
    with realize(
        hand_made({"pad": 256, "x": MiB}), memory=memory, device=device, timeout=60
    ) as arena:
        x = arena.tensor("x", torch.int32)
        placed = handle(x)
        x.fill_(-1)
        placed.barrier()
        try:
            placed.peer((rank + 1) % world).fill_(rank)
        except BackendError as error:
            placed.barrier()
            return f"no peer views: {error}"
        placed.barrier()
        got = x.unique().tolist()
        placed.barrier()
        torch.cuda.synchronize()
        return got == [(rank - 1) % world]


def one_sided(rank, world, memory):
    """symmplan's own collectives on peer views."""
    from symmplan.memory import realize

    device = device_of(rank)
    ops = torch.ops.symmplan
    with realize(
        hand_made({"a": MiB, "b": MiB}), memory=memory, device=device, timeout=60
    ) as arena:
        a = arena.tensor("a", torch.float32)
        b = arena.tensor("b", torch.float32)
        mine = torch.full((a.numel() // world,), float(rank), device=device)
        ops.all_gather_out(mine, world, "default", out=a)
        gathered = a.view(world, -1)[:, 5].tolist() == [float(r) for r in range(world)]
        b.fill_(rank + 1)
        ops.all_reduce_out(b, "sum", "default", out=b)
        reduced = b.unique().tolist() == [world * (world + 1) / 2]
        piece = torch.empty(b.numel() // world, device=device)
        ops.reduce_scatter_out(b, "avg", world, "default", out=piece)
        scattered = piece.unique().tolist() == [world * (world + 1) / 2]
        ops.broadcast_out(mine, world - 1, "default", out=a[: mine.numel()])
        sent = a[: mine.numel()].unique().tolist() == [float(world - 1)]
        torch.cuda.synchronize()
        return gathered, reduced, scattered, sent


def two_groups(rank, world, memory):
    """A second group over the same ranks; and one segment rendezvoused with both."""
    import torch.distributed as dist

    from symmplan.memory import realize

    device = device_of(rank)
    second = dist.new_group(list(range(world)))
    groups = {"second": second}
    with realize(
        two_segments(("default", "second"), nbytes=MiB),
        memory=memory,
        device=device,
        groups=groups,
        timeout=60,
    ) as arena:
        arena.segments["s0"].barrier()
        arena.segments["s1"].barrier()
        apart = arena.rendezvous
        torch.cuda.synchronize()
    with realize(
        hand_made({"x": MiB}, groups=("default", "second")),
        memory=memory,
        device=device,
        groups=groups,
        timeout=60,
    ) as arena:
        x = arena.tensor("x", torch.float32)
        for name, group in (("default", None), ("second", second)):
            dist.all_gather_into_tensor(
                x, torch.full((x.numel() // world,), float(rank), device=device), group=group
            )
            arena.segments["s0"].barrier(name)
        right = x.view(world, -1)[:, 0].tolist() == [float(r) for r in range(world)]
        torch.cuda.synchronize()
        return apart, arena.rendezvous, right


def again_and_again(rank, world, memory):
    """Arenas come and go; device memory comes back."""
    from symmplan.memory import realize

    device = device_of(rank)
    free = []
    for _ in range(5):
        with realize(hand_made({"x": 64 * MiB}), memory=memory, device=device, timeout=60) as arena:
            arena.tensor("x").fill_(rank)
            arena.segments["s0"].barrier()
            torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info(device)[0])
    return free


def for_a_while(rank, world, memory):
    """Temporary arenas serve two groups and give their memory back, each rank at its own time."""
    from datetime import timedelta

    import torch.distributed as dist

    from symmplan.errors import BackendError
    from symmplan.memory import realize
    from symmplan.memory.streams import off_default_stream

    device = device_of(rank)
    again = dist.new_group([0, 1])
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.zeros(1, device=device), group=again)
    told = {"free": [], "right": [], "peers": []}
    for turn in range(4):
        plan = hand_made({"x": 256 * MiB})
        with realize(plan, memory=memory, device=device, timeout=60, temporary=True) as arena:
            arena.join({"s0": {again.group_name: again}})
            whole = arena.tensor("x", torch.float32)
            part = whole.numel() // world
            for group in (None, again):
                mine = whole.zero_()[rank * part : (rank + 1) * part].fill_(rank + 1 + turn)
                with off_default_stream(device):
                    dist.all_gather_into_tensor(whole, mine, group=group)
                told["right"] += [
                    bool((whole[r * part] == r + 1 + turn).all()) for r in range(world)
                ]
            if not turn:
                try:
                    told["peers"] = len(arena.segments["s0"].peers("default"))
                except BackendError as error:
                    told["peers"] = str(error)
            del whole, mine
            # One rank leaves, and only then the other; NVSHMEM frees collectively.
            first, gone = rank == turn % 2, f"{memory}/{again.group_name}/{turn}"
            if not first and memory != "nvshmem":
                store.wait([gone], timedelta(seconds=60))
        if first:
            store.set(gone, "")
        dist.barrier()  # what a peer still maps is not free
        told["free"].append(torch.cuda.mem_get_info(device)[0])
    ordinary = torch.zeros(256 * MiB, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(ordinary, torch.ones_like(ordinary[: ordinary.numel() // world]))
    told["right"].append(bool((ordinary == 1).all()))
    dist.barrier()
    return told


def mismatch(rank, world, memory):
    from symmplan.memory import realize

    plan = hand_made({"x": MiB if rank else 2 * MiB})
    realize(plan, memory=memory, device=device_of(rank), timeout=10)


def another_backend(rank, world, memory, other):
    from symmplan.memory import realize

    told = []
    for which in (memory, other):
        with realize(
            hand_made({"x": MiB}), memory=which, device=device_of(rank), timeout=60
        ) as arena:
            x = arena.tensor("x").fill_(rank + 1)
            arena.segments["s0"].barrier()
            told.append(int(arena.segments["s0"].peers()[1 - rank][5]))
            arena.segments["s0"].barrier()
            torch.cuda.synchronize()
            del x
    return told


def automatic(rank, world):
    from symmplan.memory import realize

    with realize(hand_made({"x": MiB}), device=device_of(rank), timeout=60) as arena:
        arena.segments["s0"].barrier()
        torch.cuda.synchronize()
        return arena.memory


def split_words(rank, world, memory):
    """Numbers of bfloat16 on each rank of which an in-place gather in a placement is wrong."""
    import torch.distributed as dist

    from symmplan.memory import realize
    from symmplan.memory.streams import off_default_stream

    device = device_of(rank)
    wrong = []
    with realize(hand_made({"x": MiB}), memory=memory, device=device, timeout=60) as arena:
        for count in (*range(288, 302), 1001, 4097, 20001):
            whole = arena.tensor("x", torch.bfloat16)[: world * count].fill_(-1)
            parts = [torch.arange(count, device=device) % 200 + r for r in range(world)]
            mine = whole[rank * count : (rank + 1) * count].copy_(parts[rank])
            with off_default_stream(device):
                dist.all_gather_into_tensor(whole, mine)
            if not torch.equal(whole, torch.cat(parts).to(torch.bfloat16)):
                wrong.append(count)
            dist.barrier()
        torch.cuda.synchronize()
    return wrong


# Parent side.


def test_gathers_of_whole_words_are_right(pool):
    """What NCCL gets wrong is left out of plans; ``-s`` prints it."""
    wrong = pool.run(split_words, pool.memory)
    print(f"{pool.memory}: wrong gathers of so many bfloat16 on each rank: {wrong}")
    assert not any(count % 2 == 0 for found in wrong for count in found)
    assert pool.memory == "nccl" or not any(wrong)


def test_lifecycle(pool):
    for rank, told in enumerate(pool.run(lifecycle, pool.memory)):
        assert told == {
            "memory": pool.memory,
            "rendezvous": 1,
            "storage": True,
            "located": True,
            "gathered": True,
            "scattered": True,
            "placed": (768, rank, 2),
            "released": True,
        }


def test_peer_views(pool):
    answers = pool.run(peers, pool.memory)
    if any(isinstance(answer, str) for answer in answers):
        pytest.skip(str(answers))
    assert answers == [True, True]


def test_one_sided_collectives(pool):
    outcomes = pool.outcomes(one_sided, pool.memory)
    if any(o.error and "cannot address" in o.error.text for o in outcomes):
        pytest.skip("no peer views here")
    assert [o.value for o in outcomes] == [(True,) * 4] * 2, [o.describe() for o in outcomes]


def test_groups(pool):
    assert pool.run(two_groups, pool.memory) == [(2, 2, True)] * 2


def test_memory_comes_back(pool):
    for free in pool.run(again_and_again, pool.memory):
        assert free[-1] >= free[0] - 32 * MiB, free


def test_temporary_memory_comes_back(pool):
    for told in pool.run(for_a_while, pool.memory):
        print(pool.memory, told)
        assert all(told["right"])
        assert pool.memory != "nccl" or "temporary segments have no peer views" in told["peers"]
        if pool.memory != "nvshmem":  # which frees collectively
            assert told["free"][-1] >= told["free"][0] - 32 * MiB


def test_a_mismatch_raises_on_both(pool):
    outcomes = pool.outcomes(mismatch, pool.memory)
    assert [o.error and o.error.kind for o in outcomes] == ["AgreementError"] * 2


def test_two_memories_serve_a_process_if_torch_allocates_one_of_them(pool):
    other = "cuda" if pool.memory == "nccl" else "nccl"
    assert pool.run(another_backend, pool.memory, other) == [[2, 2], [1, 1]]


def test_torch_has_one_allocator_in_a_process(pool):
    if pool.memory != "nvshmem":
        pytest.skip("CUDA's is torch's default")
    outcomes = pool.outcomes(another_backend, pool.memory, "cuda")
    assert [o.error and o.error.kind for o in outcomes] == ["BackendError"] * 2


def test_temporary_memory_comes_back_where_torch_expands_its_segments():
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with ranks_on(2, timeout=180, env=env) as pool:
        pool.memory = "nccl"
        test_temporary_memory_comes_back(pool)


def test_auto_prefers_nccl():
    with ranks_on(2, timeout=180) as pool:
        assert pool.run(automatic) == ["nccl"] * 2
