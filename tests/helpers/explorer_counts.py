"""How plans of random tiny programs fare under the explorer, as numbers.

``python tests/helpers/explorer_counts.py 5000`` counts for that many tiny programs, and
``python tests/helpers/explorer_counts.py 500 shm`` for as many FX programs, rewritten for one
algorithm.
"""

from __future__ import annotations

import sys

import attrs
from explorer import explore
from explorer_graphs import fx_programs, judge, world
from explorer_programs import planned, problem_of, tiny_programs, told
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import symmplan
from symmplan.errors import VerificationError

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


def judge_tiny(program, counts: Counts) -> None:
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
        judge_tiny(program, counts)

    run()
    return counts


def count_graphs(
    programs: int, algorithm: str, groups: list[str], *, barriers: bool = True
) -> Counts:
    """Judge that many random FX programs, the same each time; counts those with placements.

    Args:
        programs: How many.
        algorithm: How collectives run.
        groups: Names of the process groups.
        barriers: Whether to count which barriers are needed.
    """
    counts = Counts()

    @settings(
        max_examples=programs,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        fx_programs(ranks=3),
        st.sampled_from(["wire", "push", "pull"]),
        st.booleans(),
        st.booleans(),
    )
    def run(program, transport, poison, inductor) -> None:
        drawn = {"transport": transport, "poison": poison, "inductor": inductor}
        judged = judge(program, algorithm, groups, **drawn)
        if judged is None:
            return
        assert judged.verdict.kind in ("right", "gave up"), judged
        counts.programs += 1
        counts.unknown += judged.verdict.kind == "gave up"
        counts.sharing += _overlaps(judged.rewritten.plan)
        counts.barriers += len(judged.rewritten.plan.barriers)
        for i in range(len(judged.rewritten.plan.barriers) if barriers else 0):
            left = judge(
                program,
                algorithm,
                groups,
                **drawn,
                kept=lambda all_, i=i: all_[:i] + all_[i + 1 :],
            )
            counts.needed += left.verdict.kind == "wrong"
            counts.unknown += left.verdict.kind == "gave up"

    run()
    return counts


def _overlaps(plan: symmplan.Plan) -> bool:
    places = list(plan.placements.values())
    return any(
        p.segment == q.segment and p.offset < q.end and q.offset < p.end
        for i, p in enumerate(places)
        for q in places[:i]
    )


def main(number: str = "1000", algorithm: str | None = None) -> None:
    if algorithm is None:
        counts = count(int(number))
    else:
        with world(3) as groups:
            counts = count_graphs(int(number), algorithm, groups)
    for name, value in attrs.asdict(counts).items():
        print(f"{name.replace('_', ' ')}: {value}")


if __name__ == "__main__":
    main(*sys.argv[1:])
