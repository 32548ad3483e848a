"""How plans of random tiny programs fare under the explorer, as numbers.

``python tests/explorer_counts.py 5000`` counts for that many programs.
"""

from __future__ import annotations

import sys

import attrs
from explorer_programs import planned, problem_of, tiny_programs, told
from hypothesis import HealthCheck, Phase, given, settings

import symmplan
from symmplan.errors import VerificationError
from symmplan.testing import explore

#: Orders to run of one program before giving up.
LIMIT = 500


@attrs.define
class Counts:
    """Counted over programs.

    Attributes:
        programs: How many.
        sharing: Those in whose plans buffers share bytes.
        unknown: Times that the explorer gave up, plans and plans without one barrier together.
        barriers: Barriers in all plans.
        needed: Those without which a read can see a wrong value.
        one_group: Barriers in plans of programs with one group.
        one_group_needed: Those of them that are needed.
    """

    programs: int = 0
    sharing: int = 0
    unknown: int = 0
    barriers: int = 0
    needed: int = 0
    one_group: int = 0
    one_group_needed: int = 0


def judge(program, counts: Counts) -> None:
    """Plan a program; fail if the explorer finds the plan wrong, or what `verify` accepts."""
    plan = symmplan.plan(problem_of(program))
    tiny = planned(program, plan)
    verdict = explore(program, tiny, limit=LIMIT)
    assert verdict.kind in ("right", "gave up"), told(program, tiny, verdict)
    counts.programs += 1
    counts.unknown += verdict.kind == "gave up"
    counts.sharing += plan.peak_bytes < plan.unshared_bytes
    for i in range(len(plan.barriers)):
        left = attrs.evolve(plan, barriers=plan.barriers[:i] + plan.barriers[i + 1 :])
        tiny = planned(program, left)
        verdict = explore(program, tiny, limit=LIMIT)
        counts.barriers += 1
        counts.needed += verdict.kind == "wrong"
        counts.unknown += verdict.kind == "gave up"
        if not program.groups:
            counts.one_group += 1
            counts.one_group_needed += verdict.kind == "wrong"
        if verdict.kind == "wrong":
            assert not _verifies(left), told(program, tiny, verdict)


def _verifies(plan: symmplan.Plan) -> bool:
    try:
        plan.verify()
    except VerificationError:
        return False
    return True


def count(programs: int) -> Counts:
    """Judge that many random programs, the same each time."""
    counts = Counts()

    @settings(
        max_examples=programs,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(tiny_programs())
    def run(program) -> None:
        judge(program, counts)

    run()
    return counts


if __name__ == "__main__":
    for name, value in attrs.asdict(count(int((sys.argv[1:] or ["1000"])[0]))).items():
        print(f"{name.replace('_', ' ')}: {value}")
