"""Two levels of CPU ranks on two hosts beside torch's own way.

    PYTHONPATH=.:tests/helpers python tests/helpers/two_level_times.py

FSDP2's collectives of four ranks on two namespaced hosts: medians of several measurements of the
slowest rank, with both algorithms.
"""

from __future__ import annotations

import statistics

from hosts import HostPool

from symmplan.bench.comm import fsdp_choices

_SIZES = [1 << n for n in range(14, 25, 2)]
_ROUNDS = 5


def _rows(rank, size):
    from symmplan.choose import trials

    trials.forget()
    settings = {"sizes": _SIZES, "dtype": "float32", "device": "cpu"}
    return fsdp_choices(rank, settings)["rows"]


def main():
    found = {}
    with HostPool((2, 2), mib=[2048] * 2, timeout=300.0) as pool:
        for _ in range(_ROUNDS):
            (rows, *_) = pool.run(_rows)
            for row in rows:
                for algorithm, seconds in row["seconds"].items():
                    found.setdefault((row["op"], row["nbytes"], algorithm), []).append(seconds)
    times = {key: statistics.median(each) for key, each in found.items()}
    for (op, nbytes, algorithm), seconds in times.items():
        if algorithm == "two-level":
            plain = times[op, nbytes, "ordinary"]
            us = f"{plain * 1e6:10.0f} us {seconds * 1e6:10.0f} us"
            print(f"{op:15} {nbytes:12,} {us}  {plain / seconds:.2f}x")


if __name__ == "__main__":
    main()
