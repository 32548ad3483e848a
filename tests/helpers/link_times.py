"""Collectives as they were measured and as `symmplan.simulation.Links` predicts them.

    PYTHONPATH=.:tests/helpers python tests/helpers/link_times.py [-o links.json]

Four ranks of namespaced hosts, on one host and on two. The links are fitted to every second size;
the sizes between are predicted. Prints each collective with both times, and how far they are apart;
and what is gained by two levels.

    PYTHONPATH=.:tests/helpers python tests/helpers/link_times.py --devices 2 --links dgx-h100

NCCL's collectives of this host's devices, alone: with the links of a known machine or of a file,
and with fitted ones.

    symmplan bench comm --device cuda --ranks 2 --dtype bfloat16 -o choices.json
    PYTHONPATH=.:tests/helpers python tests/helpers/link_times.py --choices choices.json

The times by which algorithms were chosen on one host: beside matrix products, with copies.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import asdict, evolve
from hosts import HostPool
from ranks import run_ranks

from symmplan.bench.comm import fsdp_choices
from symmplan.runtime.tuning_table import read_table
from symmplan.simulation.links import Links, Span, links_of

_SIZES = [1 << n for n in range(14, 25, 2)]
_SHAPES = {(4,): Span(4), (2, 2): Span(4, 2, 2)}
_FITTED = ("within", "ordinary", "between", "within_latency", "between_latency", "start")
_ROUNDS = 5
_NAMESPACED = Links(
    within=4e9,
    ordinary=1e9,
    between=1e9,
    within_latency=1e-5,
    between_latency=1e-4,
    start=1e-5,
    rails=False,
    name="namespaced hosts",
    source="tests/helpers/link_times.py",
)
#: Bytes of one rank's part on devices, and calls that are timed together.
_ON_DEVICES, _CALLS = [1 << n for n in (18, 20, 22, 24, 26, 27, 28)], 10
#: Cycles for which a device sleeps first, so that the host is ahead of it.
_SLEEP = 2_000_000


def _measured(shape):
    """``{(op, bytes, algorithm): seconds}`` of some hosts, the median of several rounds."""
    found = {}
    settings = {"sizes": _SIZES, "dtype": "float32", "device": "cpu"}
    with HostPool(shape, mib=[2048] * len(shape), timeout=300.0) as pool:
        for _ in range(_ROUNDS):
            pool.run(_forget)
            (rows, *_) = pool.run(_rows, settings)
            for row in rows:
                for algorithm, seconds in row["seconds"].items():
                    key = row["op"], row["nbytes"], algorithm
                    found.setdefault(key, []).append(seconds)
    return {key: statistics.median(times) for key, times in found.items()}


def _rows(rank, size, settings):
    return fsdp_choices(rank, settings)["rows"]


def _forget(rank, size):
    from symmplan.runtime import trials

    trials.forget()


def _error(links, times):
    """The mean square of the logarithms of predicted by measured times."""
    return statistics.mean(math.log(_predicted(links, key) / t) ** 2 for key, t in times.items())


def _predicted(links, key):
    shape, op, nbytes, algorithm = key
    return links.seconds(op, nbytes, _SHAPES[shape], algorithm)


def _fit(times, links):
    """Links of which each number is moved as long as that helps."""
    chance = random.Random(0)
    least, step = _error(links, times), 2.0
    while step > 1.001:
        better = False
        for name in _FITTED:
            factor = step ** chance.choice((-1, 1))
            for value in (getattr(links, name) * factor, getattr(links, name) / factor):
                moved = evolve(links, **{name: value})
                error = _error(moved, times)
                if error < least:
                    links, least, better = moved, error, True
        step = step if better else math.sqrt(step)
    return links


def _compared(links, times):
    """Print measured and predicted times, and the factors between them."""
    apart = {}
    for key, seconds in times.items():
        shape, op, nbytes, algorithm = key
        ratio = _predicted(links, key) / seconds
        apart.setdefault((shape, algorithm), []).append(max(ratio, 1 / ratio))
        us = f"{seconds * 1e6:10.0f} us {_predicted(links, key) * 1e6:10.0f} us  {ratio:.2f}"
        print(f"{shape!s:8} {op:15} {nbytes:12,} {algorithm:12} {us}")
    for key, factors in apart.items():
        print(*key, f"median factor {statistics.median(factors):.2f}, most {max(factors):.2f}")


def _gains(times):
    """Print what two levels gain over torch's own way."""
    for (shape, op, nbytes, algorithm), seconds in times.items():
        if algorithm == "two-level":
            plain = times[shape, op, nbytes, "ordinary"]
            us = f"{plain * 1e6:10.0f} us {seconds * 1e6:10.0f} us"
            print(f"{op:15} {nbytes:12,} {us}  {plain / seconds:.2f}x")


def _of_table(path):
    """The times of a tuning table of devices of one host, as `_measured` has them."""
    rows = read_table(path).rows
    _SHAPES.update({(row.ranks,): Span(row.ranks) for row in rows})
    return {
        ((row.ranks,), row.op, row.nbytes, algorithm): seconds
        for row in rows
        if row.op != "all_to_all"
        for algorithm, seconds in row.seconds.items()
    }


def _alone(rank, size, sizes):
    """``{(op, bytes): seconds}`` of NCCL's collectives with nothing beside them."""
    torch.cuda.set_device(rank)
    found = {}
    for nbytes in sizes:
        whole = torch.zeros(size * nbytes // 2, dtype=torch.bfloat16, device="cuda")
        part, other = torch.zeros_like(whole[: nbytes // 2]), torch.zeros_like(whole)
        calls = {
            "all_gather": lambda w=whole, p=part: dist.all_gather_into_tensor(w, p),
            "reduce_scatter": lambda w=whole, p=part: dist.reduce_scatter_tensor(p, w),
            "c10d::allreduce_": lambda w=whole: dist.all_reduce(w),
            "all_to_all": lambda w=whole, o=other: dist.all_to_all_single(o, w),
        }
        for op, call in calls.items():
            took = [_seconds(call) for _ in range(_ROUNDS + 4)]
            found[op, size * nbytes] = statistics.median(took[2:])
    dist.barrier()
    return found


def _seconds(call):
    """Of one of several calls."""
    dist.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_SLEEP)
    begin.record()
    for _ in range(_CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / _CALLS


def _of_devices(ranks):
    """Times of this host's devices, as `_measured` has them; of the slowest rank."""
    found = run_ranks(_alone, ranks, _ON_DEVICES, init="nccl", timeout=300.0)
    _SHAPES[ranks,] = Span(ranks)
    return {((ranks,), *key, "ordinary"): max(of[key] for of in found) for key in found[0]}


def _shown(times, links):
    """Print predictions of every second size, from links that are fitted to the others."""
    sizes = sorted({nbytes for _, _, nbytes, _ in times})
    fitted = _fit({key: t for key, t in times.items() if key[2] in sizes[::2]}, links)
    _compared(fitted, {key: t for key, t in times.items() if key[2] in sizes[1::2]})
    print(json.dumps(asdict(fitted), indent=2))
    return fitted


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--devices", type=int, metavar="RANKS")
    parser.add_argument("--choices", metavar="TABLE")
    parser.add_argument("--links", default="dgx-h100")
    args = parser.parse_args()
    known = links_of(args.links)
    if args.choices:
        _compared(known, _of_table(args.choices))
        return
    if args.devices:
        times = _of_devices(args.devices)
        _compared(known, times)
        fitted = _shown(times, evolve(known, name="devices", source=_NAMESPACED.source))
    else:
        times = {(s, *key): t for s in list(_SHAPES) for key, t in _measured(s).items()}
        fitted = _shown(times, _NAMESPACED)
        _gains(times)
    if args.output is not None:
        args.output.write_text(json.dumps(asdict(fitted), indent=2) + "\n")


if __name__ == "__main__":
    main()
