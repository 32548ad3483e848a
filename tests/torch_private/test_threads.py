"""Marks of threads."""

from __future__ import annotations

import sys

from symmplan.torch_private.threads import mark_thread, thread_mark


def test_a_mark_outlives_the_marks_that_replace_it():
    """Some torch drop a reference that they never took, and the mark would be freed in use."""
    marks = [object() for _ in range(3)]
    held = [sys.getrefcount(mark) for mark in marks]
    for mark in [*marks, *marks, None]:
        mark_thread("symmplan test", mark)
        assert thread_mark("symmplan test") is mark
    assert [sys.getrefcount(mark) for mark in marks] == held
