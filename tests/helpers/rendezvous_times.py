"""What a rendezvous costs, by the number of ranks of its group.

    PYTHONPATH=.:tests/helpers python tests/helpers/rendezvous_times.py

Times a plan of one segment, from its agreement to its meeting, on ranks of this machine in shared
memory, and how much of that is waiting for the store. The store answers each rank's requests one
after the other, so both grow with the ranks; a line through the times gives those of more ranks.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from ranks import RankPool

_RANKS = (2, 4, 8, 16)
_ASKED = (8, 64, 512)
_TIMES = 7


def _realized(rank, size):
    """Seconds of each time, and rounds of requests to the store in one."""
    from symmplan.coordination.exchange import Exchange
    from symmplan.memory import realize
    from symmplan.model import Problem
    from symmplan.planner import plan

    made = plan(Problem.from_intervals([("x", 0, 1, 1 << 20)]))
    rounds, original = [], Exchange.round
    Exchange.round = lambda *args, **kw: rounds.append(1) or original(*args, **kw)
    seconds = []
    for _ in range(_TIMES):
        rounds.clear()
        began = time.perf_counter()
        arena = realize(made, memory="shm", timeout=60.0)
        seconds.append(time.perf_counter() - began)
        arena.release()
    return seconds, len(rounds)


def main():
    found = {}
    for count in _RANKS:
        with RankPool(count, timeout=120.0) as pool:
            said = pool.run(_realized)
        slowest = [max(times) for times in zip(*(s for s, _ in said), strict=True)]
        found[count] = statistics.median(slowest[1:])
        print(f"{count:4} ranks {found[count] * 1e3:8.1f} ms in {said[0][1]} rounds, 1 rendezvous")
    slope, begin = np.polyfit([*found], [*found.values()], 1)
    print(f"{begin * 1e3:.1f} ms and {slope * 1e3:.2f} ms for each rank")
    for count in _ASKED:
        print(f"{count:4} ranks {(begin + slope * count) * 1e3:8.1f} ms by this line")


if __name__ == "__main__":
    main()
