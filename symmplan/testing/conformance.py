"""The conformance kit: any packer, ours or a third party's, can be run through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations

from hypothesis import given, settings

from symmplan.errors import VerificationError
from symmplan.model import Problem
from symmplan.testing.oracles import conflicts
from symmplan.testing.strategies import interval_problems, problems

__all__ = ["Packer", "check_offsets", "check_packer"]

#: Gives byte offsets by buffer name for a problem with one group.
Packer = Callable[[Problem], Mapping[str, int]]


def check_offsets(problem: Problem, offsets: Mapping[str, int]) -> int:
    """Check byte offsets in one segment and return their peak in bytes.

    Args:
        problem: One group, at most some hundred operations and buffers.
        offsets: Offset in bytes by buffer name.

    Raises:
        VerificationError: A buffer is missing, unknown, misaligned, not where it is pinned or
            below zero, or two that conflict share bytes; ``kind`` says which.
    """
    buffers = {b.name: b for b in problem.buffers}
    clashes = conflicts(problem)

    def wrong(kind: str, what: str) -> VerificationError:
        return VerificationError(what, kind=kind, fix="correct the packer")

    for name in sorted(buffers.keys() ^ offsets.keys()):
        kind = "missing_buffer" if name in buffers else "unknown_buffer"
        raise wrong(kind, f"buffer {name!r} is in only one of problem and packing")
    for name, b in buffers.items():
        at = offsets[name]
        if at < 0:
            raise wrong("out_of_segment", f"buffer {name!r} begins at byte {at}")
        if at % b.align:
            raise wrong("misaligned", f"buffer {name!r} at byte {at} is not {b.align}-aligned")
        if b.offset not in (None, at):
            raise wrong("pin", f"buffer {name!r} at byte {at} is pinned at {b.offset}")
    for x, y in combinations(sorted(buffers), 2):
        low = max(offsets[x], offsets[y])
        high = min(offsets[x] + buffers[x].nbytes, offsets[y] + buffers[y].nbytes)
        if low < high and frozenset((x, y)) in clashes:
            raise wrong("overlap", f"buffers {x!r} and {y!r} share bytes [{low}, {high})")
    return max((offsets[n] + b.nbytes for n, b in buffers.items()), default=0)


def check_packer(
    pack: Packer, *, examples: int = 100, alignment: bool = True, partial_order: bool = True
) -> None:
    """Run a packer through the conformance kit.

    It must place every buffer, aligned, without a conflict; never need more than all buffers side
    by side; not depend on the order in which a problem lists its buffers; and reach the optimum of
    instances that any reasonable packer solves.

    Args:
        pack: Gives byte offsets by buffer name for a problem with one group and no constraints.
        examples: Generated problems of each kind.
        alignment: Whether the packer supports alignments other than 1.
        partial_order: Whether it supports more than one stream.

    Raises:
        VerificationError: A packing is wrong.
        AssertionError: It is right but depends on the listing, or is absurdly large.
    """
    options = settings(max_examples=examples, deadline=None, database=None, derandomize=True)

    @options
    @given(interval_problems())
    def total(problem: Problem) -> None:
        _check_one(pack, problem)

    @options
    @given(
        problems(
            max_streams=3 if partial_order else 1,
            aligns=(1, 2, 4) if alignment else (1,),
            groups=("g",),
            remote=False,
            constraints=False,
            pins=False,
        )
    )
    def partial(problem: Problem) -> None:
        _check_one(pack, problem)

    total()
    partial()
    stairs = [(f"b{i}", i, i + 2, 8 + i) for i in range(40)]
    stack = [(f"b{i}", 0, 3, 1 + i) for i in range(20)]
    alone = [(f"b{i}", i, i + 1, 1 + i) for i in range(20)]
    for rows, best in ((stack, 210), (alone, 20)):
        problem = Problem.from_intervals(rows)
        assert check_offsets(problem, pack(problem)) == best
    problem = Problem.from_intervals(stairs)
    assert check_offsets(problem, pack(problem)) <= 4 * (8 + 39)


def _check_one(pack: Packer, problem: Problem) -> None:
    offsets = dict(pack(problem))
    peak = check_offsets(problem, offsets)
    padding = max(b.align for b in problem.buffers) - 1
    assert peak <= sum(b.nbytes + padding for b in problem.buffers)
    again = Problem(
        buffers=problem.buffers[::-1],
        operations=problem.operations,
        accesses=problem.accesses[::-1],
        edges=problem.edges[::-1],
    )
    assert dict(pack(again)) == offsets
