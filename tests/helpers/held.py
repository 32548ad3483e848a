"""Which segments the plans of a process have, whatever the programs of earlier tests still hold."""

from __future__ import annotations


def segments_of_plans():
    """`symmplan.segments` without those that were released and that only tensors still keep."""
    import symmplan

    kept_by_tensors = ("tensors",)
    return tuple(s for s in symmplan.segments() if s.users != kept_by_tensors)
