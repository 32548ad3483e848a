"""Plans written by hand, for tests of the memory that need no program."""

from __future__ import annotations

from symmplan.model import Access, Buffer, Operation, Placement, Plan, Problem, SegmentSpec


def hand_made(buffers, *, groups=("default",), segment="s0", op="test::op") -> Plan:
    """One segment with ``buffers`` ``{name: nbytes}`` side by side, each 256-aligned."""
    placements = {}
    offset = 0
    for name, nbytes in buffers.items():
        placements[name] = Placement(segment, offset, nbytes)
        offset += -(-nbytes // 256) * 256
    problem = Problem(
        buffers=[Buffer(n, b, group=groups[0], op=op) for n, b in buffers.items()],
        operations=[
            Operation(f"op{i}", group=group, handshake=True, release=True)
            for i, group in enumerate(groups)
        ],
        accesses=[Access("op0", name, write=True) for name in buffers],
        shared_groups=[groups] if len(groups) > 1 else [],
    )
    return Plan(
        problem=problem,
        segments=(SegmentSpec(segment, tuple(groups), offset, offset),),
        placements=dict(sorted(placements.items())),
    )


def two_segments(groups: tuple[str, str], nbytes=4096) -> Plan:
    """A segment for each of two groups."""
    problem = Problem(
        buffers=[Buffer("a", nbytes, group=groups[0]), Buffer("b", nbytes, group=groups[1])],
        operations=[Operation("op0", group=groups[0]), Operation("op1", group=groups[1])],
        accesses=[Access("op0", "a", write=True), Access("op1", "b", write=True)],
    )
    return Plan(
        problem=problem,
        segments=(
            SegmentSpec("s0", (groups[0],), nbytes, nbytes),
            SegmentSpec("s1", (groups[1],), nbytes, nbytes),
        ),
        placements={"a": Placement("s0", 0, nbytes), "b": Placement("s1", 0, nbytes)},
    )
