"""Collectives of namespaced hosts, as measured and as `symmplan.simulation.Links` predicts them.

    PYTHONPATH=.:tests/helpers python tests/helpers/link_times.py [-o links.json]

Four ranks, on one host and on two. The links are fitted to every second size; the sizes between
are predicted. Prints each collective with both times, and how far they are apart.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from pathlib import Path

from attrs import asdict, evolve
from hosts import HostPool

from symmplan.bench.comm import _choices
from symmplan.simulation.links import Links, Span

_SIZES = [1 << n for n in range(14, 25, 2)]
_SHAPES = {(4,): Span(4), (2, 2): Span(4, 2, 2)}
_FITTED = ("within", "ordinary", "between", "within_latency", "between_latency", "start")
_ROUNDS = 5


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
    return _choices(rank, settings)["rows"]


def _forget(rank, size):
    from symmplan.runtime import trials

    trials.forget()


def _error(links, times):
    """The mean square of the logarithms of predicted by measured times."""
    return statistics.mean(math.log(_predicted(links, key) / t) ** 2 for key, t in times.items())


def _predicted(links, key):
    shape, op, nbytes, algorithm = key
    return links.seconds(op, nbytes, _SHAPES[shape], algorithm)


def _fit(times):
    """Links of which each number is moved as long as that helps."""
    chance = random.Random(0)
    links = Links(
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    times = {(s, *key): t for s in _SHAPES for key, t in _measured(s).items()}
    sizes = sorted({nbytes for _, _, nbytes, _ in times})
    links = _fit({key: t for key, t in times.items() if key[2] in sizes[::2]})
    apart = {}
    for key, seconds in times.items():
        shape, op, nbytes, algorithm = key
        if nbytes in sizes[1::2]:
            ratio = _predicted(links, key) / seconds
            apart.setdefault((shape, algorithm), []).append(max(ratio, 1 / ratio))
            us = f"{seconds * 1e6:10.0f} us {_predicted(links, key) * 1e6:10.0f} us  {ratio:.2f}"
            print(f"{shape!s:8} {op:15} {nbytes:12,} {algorithm:10} {us}")
    for key, factors in apart.items():
        print(*key, f"median factor {statistics.median(factors):.2f}, most {max(factors):.2f}")
    print(json.dumps(asdict(links), indent=2))
    if args.output is not None:
        args.output.write_text(json.dumps(asdict(links), indent=2) + "\n")


if __name__ == "__main__":
    main()
