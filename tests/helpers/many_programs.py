"""Run thousands of random programs on real CPU ranks, and print what was wrong.

    PYTHONPATH=.:tests/helpers python tests/helpers/many_programs.py eager --programs 9000

The programs are those of `test_right_numbers`: both ways of running collectives, two and three
ranks, new inputs in each iteration, ranks delayed at random. Exits with 1 if a number was wrong.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from itertools import cycle, islice, product

from hypothesis import HealthCheck, Phase, given, seed, settings
from one_sided_programs import one_sided_programs
from paths import TESTS
from ranks import RankPool

sys.path.append(str(TESTS / "runtime"))
from test_right_numbers import ALGORITHMS, PAUSES, SEEDS, _compiled, _eager, _setup

_WORK = {"eager": _eager, "compiled": _compiled}


def _some(
    integration: str, world: int, algorithm: str, programs: int, start: int, until: float
) -> bool:
    """Run programs in one pool of ranks; says whether all were right."""
    wrong, count = 0, 0
    pool = RankPool(world, timeout=120.0).__enter__()
    pool.run(_setup)

    @seed(start)
    @settings(
        max_examples=programs,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(one_sided_programs(world, in_place=integration == "eager"), PAUSES, SEEDS)
    def run(program, most, pauses):
        nonlocal wrong, count, pool
        if time.monotonic() > until:
            return
        count += 1
        try:
            found = pool.run(_WORK[integration], program, algorithm, most, pauses)
            bad = any(text for text, *_ in found) or len({tuple(c) for _, *c in found}) != 1
            said = str(found)[:600]
        except Exception as error:  # noqa: BLE001 (whatever ranks raise is told)
            bad, said = True, str(error)[-1500:]
            pool.__exit__(None, None, None)
            pool = RankPool(world, timeout=120.0).__enter__()
            pool.run(_setup)
        if bad:
            wrong += 1
            print(f"wrong: {algorithm!r}, {program}, pauses {most} {pauses}\n{said}", flush=True)

    try:
        run()
    finally:
        pool.__exit__(None, None, None)
    print(f"{integration}, {world} ranks, {algorithm}: {count} programs, {wrong} wrong", flush=True)
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("integration", choices=sorted(_WORK))
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1, help="pools of ranks at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        world, algorithm = int(given.one[0]), given.one[1]
        until = time.monotonic() + given.seconds
        right = _some(given.integration, world, algorithm, given.programs, given.seed, until)
        return 0 if right else 1
    kinds = islice(cycle(product((2, 3), ALGORITHMS)), max(given.workers, 4))
    parts = [
        [
            *(sys.executable, __file__, given.integration, "--one", str(world), algorithm),
            *("--programs", str(-(-given.programs // max(given.workers, 4)))),
            *("--seed", str(1000 * given.seed + i), "--seconds", str(given.seconds)),
        ]
        for i, (world, algorithm) in enumerate(kinds)
    ]
    running: list[subprocess.Popen[bytes]] = []
    codes = []
    while parts or running:
        while parts and len(running) < given.workers:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            running.append(subprocess.Popen(parts.pop(0), env=env))
        codes.append(running.pop(0).wait())
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
