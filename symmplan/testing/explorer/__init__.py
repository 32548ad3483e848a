"""The explorer: runs tiny programs in every order that their calls allow.

`machine` takes small steps, `behaviours` says what calls do as such steps, `program` turns tiny
programs into threads, `search` runs them in every order that matters, `explore` says what it means.
None of them knows how plans are made or checked.
"""

from symmplan.testing.explorer.behaviours import BEHAVIOURS
from symmplan.testing.explorer.explore import Verdict, WrongRead, explore
from symmplan.testing.explorer.program import TinyBuffer, TinyCall, TinyPlan, TinyProgram

__all__ = [
    "BEHAVIOURS",
    "TinyBuffer",
    "TinyCall",
    "TinyPlan",
    "TinyProgram",
    "Verdict",
    "WrongRead",
    "explore",
]
