"""Start the ranks of a benchmark, never wait for them for ever, collect what they measured."""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import json
import multiprocessing
import os
import time
import warnings
from typing import TYPE_CHECKING, Any

from symmplan.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.process import BaseProcess

__all__ = ["check_peers", "compared", "meet", "rounds_of", "run_ranks"]


def check_peers(ranks: int) -> None:
    """For what is compared between ranks.

    Raises:
        CommandError: There are fewer than two.
    """
    if ranks < 2:
        raise CommandError(
            "a comparison needs peers",
            expected="--ranks 2 or more",
            got=ranks,
            fix="--ranks 2",
        )


def meet() -> None:
    """A barrier over all ranks, which tells NCCL the device instead of letting it guess.

    Collective: yes.
    """
    import torch
    import torch.distributed as dist

    cuda = dist.get_backend() == "nccl"
    dist.barrier(device_ids=[torch.cuda.current_device()] if cuda else None)


def run_ranks(
    act: Callable[[int, dict[str, Any]], Any],
    options: dict[str, Any],
    *,
    ranks: int,
    device: str,
    timeout: float,
    eager: bool = True,
) -> list[Any]:
    """Call ``act(rank, options)`` in new processes that share a process group.

    Args:
        act: Defined at the top of a module; returns plain data.
        options: Plain data. ``threads``: torch threads per rank; ``zero_cta``: let NCCL use no
            processors for what the copy engine can do.
        ranks: How many processes.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL, one device for each rank).
        timeout: Seconds for everything.
        eager: Whether NCCL connects at once. Communicators that are made later are then split
            from the first one, which those with other options should not be.

    Returns:
        What each rank returned.

    Raises:
        CommandError: A rank failed, or did not finish in time. No process is left.
    """
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(
            target=_rank, args=(act, rank, ranks, device, store.port, options, eager), daemon=True
        )
        for rank in range(ranks)
    ]
    with _ended(processes):
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in processes):
            if any(p.exitcode for p in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        codes = [process.exitcode for process in processes]
        if any(code != 0 for code in codes):
            raise CommandError(
                "ranks of the benchmark failed or did not finish",
                expected=f"all of them done within {timeout:g} s",
                got=f"exit codes {codes} (None: still running)",
                fix="see their output above, or raise --timeout",
                exit_codes=codes,
            )
        return [json.loads(bytes(store.get(f"bench/result/{rank}"))) for rank in range(ranks)]


@contextlib.contextmanager
def _ended(processes: list[BaseProcess]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join()


def _rank(
    act: Callable[[int, dict[str, Any]], Any],
    rank: int,
    ranks: int,
    device: str,
    port: int,
    options: dict[str, Any],
    eager: bool,
) -> None:
    """One rank's life."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    warnings.simplefilter("ignore")  # torch's own; they would bury the progress
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cuda = device == "cuda"
    more: dict[str, Any] = {}
    if cuda:
        torch.cuda.set_device(rank)
        if eager:
            more["device_id"] = torch.device("cuda", rank)
        if options.get("zero_cta"):
            nccl: Any = dist.ProcessGroupNCCL
            more["pg_options"] = nccl.Options()
            more["pg_options"].config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    torch.set_num_threads(options.get("threads", 1))
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=PrefixStore("bench/group", store),
        rank=rank,
        world_size=ranks,
        timeout=dt.timedelta(seconds=120),
        **more,
    )
    meet()  # symmetric memory needs a communicator that has run something
    store.set(f"bench/result/{rank}", json.dumps(act(rank, options)))
    meet()
    gc.collect()  # what is left in cycles holds the group, whose threads must end with it
    dist.destroy_process_group()


def rounds_of(found: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """``{side: milliseconds of each round}`` of one row, of the slowest of its ranks."""
    return {
        side: [max(times) * 1e3 for times in zip(*(f["seconds"][side] for f in found), strict=True)]
        for side in found[0]["seconds"]
    }


def compared(
    ranks: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    row: Callable[[Sequence[dict[str, Any]]], dict[str, Any]],
) -> dict[str, Any]:
    """The result of a comparison of sides: the options, the machine, and a row for all ranks each.

    Args:
        ranks: What each rank found: ``rows``, ``torch`` and ``machine``.
        options: What was asked for.
        row: Makes one row of those of all ranks; whether results are ``equal`` is added.
    """
    rows = []
    for found in zip(*(r["rows"] for r in ranks), strict=True):
        first = {k: v for k, v in found[0].items() if k != "seconds"}
        rows.append({**first, "equal": all(f["equal"] for f in found), **row(found)})
    return {
        "ok": all(made["equal"] for made in rows),
        **options,
        "torch": ranks[0]["torch"],
        "machine": ranks[0]["machine"],
        "results": rows,
    }
