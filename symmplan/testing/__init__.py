"""For tests of planners, ours and others': strategies, oracles and a conformance kit.

>>> from symmplan.planner import plan
>>> from symmplan.testing import check_packer
>>> check_packer(lambda p: {n: x.offset for n, x in plan(p).placements.items()}, examples=5)
"""

from symmplan.testing.conformance import (
    Packer,
    check_offsets,
    check_packer,
    interval_lists,
    interval_problems,
    problems,
)
from symmplan.testing.declaration import (
    Contradiction,
    DeclarationReport,
    Fact,
    check_declaration,
)
from symmplan.testing.explorer.program import (
    TinyBuffer,
    TinyCall,
    TinyPlan,
    TinyProgram,
    Verdict,
    WrongRead,
    explore,
)
from symmplan.testing.oracles import (
    conflicts,
    happens_before,
    heaviest_set,
    linear_extensions,
    lowest_peak,
    unsynchronised,
)

__all__ = [
    "Contradiction",
    "DeclarationReport",
    "Fact",
    "Packer",
    "TinyBuffer",
    "TinyCall",
    "TinyPlan",
    "TinyProgram",
    "Verdict",
    "WrongRead",
    "check_declaration",
    "check_offsets",
    "check_packer",
    "conflicts",
    "explore",
    "happens_before",
    "heaviest_set",
    "interval_lists",
    "interval_problems",
    "linear_extensions",
    "lowest_peak",
    "problems",
    "unsynchronised",
]
