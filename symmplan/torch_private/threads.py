"""Marks of threads."""

from __future__ import annotations

import torch


def mark_thread(key: str, mark: object) -> None:
    """Leave ``mark`` with this thread, and with those of autograd that work for it."""
    torch._C._stash_obj_in_tls(key, mark)


def thread_mark(key: str) -> object:
    """What `mark_thread` left with this thread; None if nothing."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None
