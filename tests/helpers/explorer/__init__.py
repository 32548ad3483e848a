"""The explorer: runs tiny programs in every order that their calls allow.

`machine` takes small steps in every order that matters. `behaviours` says which steps a call
consists of. `program` turns tiny programs into threads and reports the result. None of these
modules knows how plans are made or checked.
"""

from explorer.program import (
    TinyBuffer,
    TinyCall,
    TinyPlan,
    TinyProgram,
    Verdict,
    WrongRead,
    explore,
)

__all__ = ["TinyBuffer", "TinyCall", "TinyPlan", "TinyProgram", "Verdict", "WrongRead", "explore"]
