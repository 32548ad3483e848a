"""A hash that is equal on all ranks exactly if their plans agree.

[Note: fingerprint]
    SHA-256 of canonical JSON that holds the program (operations in canonical order with stream,
    group and facts; accesses; edges; constraints), the buffers (name, bytes,
    alignment, pin, flags) and the decisions (segments, placements, barriers).

    Process groups appear as numbers by first use, because the same program runs over differently
    named groups on different ranks of a mesh. What is shown to people (op, where, dtype, shape),
    what was left out, and bounds and their proofs do not count: they do not change a byte.

    The fingerprint of an unchanged program changes only when offsets, barriers or this note
    change; such a change raises ``SCHEME`` or is a *Plan format* entry in the change log.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from symmplan.model import Plan

__all__ = ["fingerprint"]

#: Raised when the content of the hash changes for the same plan.
SCHEME = 2


def fingerprint(plan: Plan) -> str:
    """Hash of the canonical plan, 64 hexadecimal digits. See [Note: fingerprint].

    Args:
        plan: The plan.
    """
    text = json.dumps(_content(plan), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _content(plan: Plan) -> dict[str, Any]:
    problem = plan.problem
    index = order_of(problem).index
    buffers = sorted(problem.buffers, key=lambda b: b.name)
    operations = sorted(problem.operations, key=lambda o: index[o.name])
    label: dict[str | None, int] = {None: -1}
    named = [*(b.group for b in buffers), *(o.group for o in operations)]
    for group in [*named, *(g for s in plan.segments for g in s.groups)]:
        label.setdefault(group, len(label) - 1)
    shared = [sorted(label[g] for g in groups if g in label) for groups in problem.shared_groups]
    return {
        "scheme": SCHEME,
        "buffers": [
            [b.name, b.nbytes, label[b.group], b.align, b.offset, b.persistent, b.signal_pad]
            for b in buffers
        ],
        "operations": [
            [
                o.name,
                o.stream,
                label[o.group],
                [o.handshake, o.release, o.meets],
                sorted(index[n] for n in o.ends),
            ]
            for o in operations
        ],
        "accesses": sorted(
            {
                (index[a.operation], a.buffer, a.write, a.remote, a.enters, a.releases)
                for a in problem.accesses
            }
        ),
        "edges": sorted({(index[a], index[b]) for a, b in problem.edges}),
        "together": sorted({tuple(sorted(p)) for p in problem.together}),
        "apart": sorted({tuple(sorted(p)) for p in problem.apart}),
        "shared_groups": sorted({tuple(s) for s in shared if len(s) > 1}),
        "segments": [
            [s.name, sorted(label[g] for g in s.groups), s.nbytes, s.signal_pad]
            for s in plan.segments
        ],
        "placements": [
            [name, p.segment, p.offset, p.nbytes] for name, p in sorted(plan.placements.items())
        ],
        "barriers": [
            [index[b.before], label[b.group], sorted(b.buffers)]
            for b in sorted(plan.barriers, key=lambda b: index[b.before])
        ],
    }
