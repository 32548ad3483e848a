"""Marks of threads."""

from __future__ import annotations

import ctypes
import functools
import sys

import torch


def mark_thread(key: str, mark: object) -> None:
    """Leave ``mark`` with this thread, and with those of autograd that work for it."""
    torch._C._stash_obj_in_tls(key, mark)
    if _takes_references():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mark))


def thread_mark(key: str) -> object:
    """What `mark_thread` left with this thread; None if nothing."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


@functools.cache
def _takes_references() -> bool:
    """Whether torch drops references to marks that it never counted (2.11 does)."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("symmplan probe", probe)
    if sys.getrefcount(probe) > before:
        return False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return True
