"""What an FSDP2 program has of its devices that changes in the midst of training.

    PYTHONPATH=.:tests/helpers python tests/helpers/changed_bytes.py

12 layers of Llama 3 8B with an embedding and a head, built on the device, take six steps on two
devices. Then half of the layers stay unsharded after forward for six steps, and then they are
resharded again. GiB in use by the driver, at most in these six steps and behind them. Without
devices a small model is trained, and only the counters say anything.
"""

from __future__ import annotations

import functools

import torch
from ranks import RankPool

from symmplan.report.format import table

GiB = 1 << 30
STEPS = 6
#: The phases, and whether the first half of the layers reshards after forward.
PHASES = {"first": True, "unsharded": False, "again": True}
#: Layers, width, words of the vocabulary.
LARGE, SMALL = (12, 4096, 32768), (4, 64, 128)
#: ``(type of reductions, tokens, whether AdamW steps, layers are compiled, checkpointed)``.
CASES = [
    ("bfloat16", 4096, False, False, False),
    ("float32", 2048, True, False, False),
    ("bfloat16", 4096, True, True, True),
    ("bfloat16", 4096, True, True, False),
]


def _trained(rank, world, device, planned, reduce, tokens, optimized, compiled, checkpointed):
    """A row for each phase."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    import symmplan
    from symmplan.bench.parts.fsdp_ranks import _Driver
    from symmplan.bench.parts.llama import Llama, parts

    look = device == "cuda"
    layers, dim, words = LARGE if look else SMALL
    with torch.device(device):
        model = Llama(layers, dim, words)
    if not optimized:
        model = model.bfloat16()
    for layer in model.layers:
        if checkpointed:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        if compiled:
            layer.compile()
    policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, reduce))
    mesh = dist.init_device_mesh(device, (world,))
    for part in (*parts(model), model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5) if optimized else None
    handle = symmplan.fsdp.apply(model, timeout=60.0) if planned else None
    rows = []
    for number, (phase, reshard) in enumerate(PHASES.items()):
        for layer in model.layers[: layers // 2]:
            layer.set_reshard_after_forward(reshard)
        driver = _Driver(look=look)
        for step in range(STEPS):
            torch.manual_seed(1000 * number + 10 * step + rank)
            tokens_ = torch.randint(words, (1, tokens), device=device)
            made = model(tokens_).float().flatten(0, 1)
            functional.cross_entropy(made, tokens_.roll(-1, 1).flatten()).backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
            del tokens_, made
        most = driver.over()
        free, total = torch.cuda.mem_get_info() if look else (0, 0)
        stats = None if handle is None else handle.stats
        counts = ("", "") if stats is None else (stats.placed, stats.replans)
        rows.append((phase, f"{most / GiB:.2f}", f"{(total - free) / GiB:.2f}", *counts))
    if handle is not None:
        handle.remove()
    return rows


def main():
    """Print the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines = [("program", "side", "phase", "at most", "behind", "placed", "replans")]
    for case in CASES:
        for planned in (False, True):
            init = "nccl" if device == "cuda" else "gloo"
            with RankPool(2, init=init, timeout=150) as pool:
                rows, _ = pool.run(_trained, device, planned, *case)
            side = "symmplan" if planned else "FSDP2"
            program = case[0] + ", compiled" * case[3] + ", checkpoints" * case[4]
            lines += [(program, side, *map(str, row)) for row in rows]
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
