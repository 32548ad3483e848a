"""Imported when all else is: garbage collections pass by what was imported."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
