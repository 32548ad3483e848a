"""Start the ranks of a benchmark, never wait for them for ever, collect what they measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan.errors import CommandError
from symmplan.report.progress import Progress
from symmplan.testing.ranks import run_ranks as launch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["check_peers", "compared", "meet", "rounds_of", "run_ranks"]

#: Seconds: for the others when a rank has failed, and for a collective.
_GRACE, _GROUP_TIMEOUT = 5.0, 120.0


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
    act: Callable[[int, int, dict[str, Any]], Any],
    options: dict[str, Any],
    *,
    ranks: int,
    device: str,
    timeout: float,
    connect: bool = True,
) -> list[Any]:
    """Call ``act(rank, ranks, options)`` in new processes that share a process group.

    Args:
        act: Defined at the top of a module; returns plain data.
        options: Plain data. ``threads``: torch threads per rank; ``zero_cta``: let NCCL use no
            processors for what the copy engine can do.
        ranks: How many processes.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL, one device for each rank).
        timeout: Seconds for everything.
        connect: Whether NCCL connects at once.

    Returns:
        What each rank returned.

    Raises:
        RanksFailedError: A rank failed, or did not finish in time. No process is left.
    """
    progress = Progress()
    try:
        return launch(
            _met,
            ranks,
            act,
            options,
            timeout=timeout,
            init="nccl" if device == "cuda" else "gloo",
            method="spawn",
            grace=_GRACE,
            group_timeout=_GROUP_TIMEOUT,
            threads=options.get("threads", 1),
            connect=connect,
            copy_engines=bool(options.get("zero_cta")),
            quiet=True,
            progress=progress,
        )
    finally:
        progress.close()


def _met(rank: int, ranks: int, act: Callable[..., Any], options: dict[str, Any]) -> Any:
    meet()  # symmetric memory needs a communicator that has run something
    return act(rank, ranks, options)


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
