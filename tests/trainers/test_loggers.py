"""The functions of `docs/how-to/metrics.md` send the numbers of a model to TensorBoard and W&B."""

from __future__ import annotations

import importlib.util

import pages
import pytest
from paths import ROOT
from ranks import RankPool

PAGE = ROOT / "docs" / "how-to" / "metrics.md"
STEPS = 4


def of_the_page(name):
    """A function that the page shows."""
    text = PAGE.read_text(encoding="utf-8")
    (code,) = (code for _, _, code in pages.blocks(text) if f"def {name}(" in code)
    space = {}
    exec(code, space)
    return space[name]


def _train(rank, size, log):
    """Steps of a small model; what ``log`` returns after each."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import symmplan

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for module in (*model, model):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (size,)))
    with symmplan.fsdp.apply(model, choose="placed") as handle:
        for step in range(STEPS):
            model(torch.full((2, 8), float(rank + step))).sum().backward()
            log(handle.metrics(), step)
        return handle.metrics()


def _to_tensorboard(rank, size, folder):
    from torch.utils.tensorboard import SummaryWriter

    send = of_the_page("to_tensorboard")
    with SummaryWriter(f"{folder}/rank{rank}") as writer:
        return _train(rank, size, lambda metrics, step: send(writer, metrics, step))


def _to_wandb(rank, size, folder):
    import wandb

    send = of_the_page("to_wandb")
    if rank > 0:
        return _train(rank, size, lambda *_: None)
    run = wandb.init(project="symmplan", mode="offline", dir=folder)
    metrics = _train(rank, size, lambda metrics, step: send(run, metrics, step))
    run.log({}, step=STEPS)  # a step's numbers go out when the next step comes, or at the end
    sent, last = {name: run.summary[name] for name in metrics}, run.step
    run.finish()
    return metrics, sent, last


@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.filterwarnings("ignore")  # tensorboard's own
def test_tensorboard_has_the_numbers_of_each_step_and_rank(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with RankPool(2, timeout=120.0) as ranks:
        counted = ranks.run(_to_tensorboard, str(tmp_path))
    for rank, metrics in enumerate(counted):
        log = reader.EventAccumulator(str(tmp_path / f"rank{rank}")).Reload()
        assert set(log.Tags()["scalars"]) == set(metrics)
        for name, value in metrics.items():
            events = log.Scalars(name)
            assert [event.step for event in events] == [*range(STEPS)]
            assert events[-1].value == value
        served = [event.value for event in log.Scalars("symmplan/served")]
        assert served == sorted(served)
        assert served[0] == 0 < served[-1]
        assert metrics["symmplan/algorithms/symmetric"] == metrics["symmplan/placed"] > 0


@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_wandb_has_the_numbers_of_each_step(tmp_path):
    with RankPool(2, timeout=120.0) as ranks:
        (metrics, sent, last), _ = ranks.run(_to_wandb, str(tmp_path))
    assert sent == metrics
    assert sent["symmplan/served"] > 0
    assert last == STEPS
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
