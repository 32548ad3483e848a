"""The processes that a launcher such as torchrun started, as the ranks of one process group."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from symmplan.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["is_launched", "launched_group"]

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return all(name in os.environ for name in _LAUNCHED)


@contextlib.contextmanager
def launched_group(command: str, kind: str = "") -> Iterator[torch.device]:
    """The group of all these processes, while it is entered; gives the device of this one.

    Args:
        command: What is run, for an error.
        kind: ``"cpu"`` or ``"cuda"``; without, CUDA devices if there is one for each process.

    Raises:
        CommandError: No launcher started this process, or there is no device for it.

    Collective: yes, over all processes that were launched.
    """
    missing = [name for name in _LAUNCHED if name not in os.environ]
    if missing:
        raise CommandError(
            f"{command} needs processes that torchrun started",
            expected=f"the variables {', '.join(_LAUNCHED)}",
            got=f"no {missing[0]}",
            fix=f"torchrun --nproc-per-node 2 -m {command}",
        )
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    there = torch.cuda.device_count() > local and dist.is_nccl_available()
    if kind == "cuda" and not there:
        raise CommandError(
            "there are fewer CUDA devices than processes",
            expected=f"a device with the number {local}",
            got=torch.cuda.device_count(),
            fix="start one process for each device, or pass --device cpu",
        )
    if there and kind != "cpu":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()
