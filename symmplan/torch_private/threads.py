"""Marks of threads, and exceptions in other threads."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from symmplan.errors import SymmplanError


def mark_thread(key: str, mark: object) -> None:
    """Leave ``mark`` with this thread, and with those of autograd that work for it."""
    torch._C._stash_obj_in_tls(key, mark)


def thread_mark(key: str) -> object:
    """What `mark_thread` left with this thread; None if nothing."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def raise_in_thread(thread: int, error: SymmplanError | None) -> None:
    """Let a thread raise ``error`` when it next runs Python code; None takes that back.

    Args:
        thread: As `threading.get_ident` gives it.
        error: What to raise. It is made anew there, from its values.
    """
    kind: Any = None
    if error is not None:
        base = type(error)
        values = {"expected": error.expected, "got": error.got, "fix": error.fix, **error.fields}

        def build(self: Any) -> None:
            base.__init__(self, error.what, group=error.group, rank=error.rank, **values)

        kind = type(base.__name__, (base,), {"__init__": build, "__module__": base.__module__})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if kind is None else ctypes.py_object(kind)
    )
