"""What a measurement ran on."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["hardware"]


def hardware() -> dict[str, Any]:
    """Processor, cores, system, Python."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        cpu = next(x.split(":", 1)[1].strip() for x in info.splitlines() if "model name" in x)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
