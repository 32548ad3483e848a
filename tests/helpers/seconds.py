"""Print what each file takes alone, for the table of README.md.

    python tests/helpers/seconds.py [FILE ...]

Seconds are those of the processor, of all processes that a file starts. Names of files, such as
``test_cli.py``, measure these alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from paths import TESTS

#: A file is in the first row whose seconds it does not exceed.
STEPS = (5, 10, 15, 20, 25, 30, 40, 60, 90, 120)


def seconds(path: Path) -> float:
    """What a file takes, looked up while it runs: a forkserver's ranks are not ours to ask."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", path]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    took: dict[str, int] = {}
    while running.poll() is None:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == running.pid:  # the session
                    took[stat.parent.name] = sum(map(int, fields[11:13]))  # utime, stime
        time.sleep(0.1)
    if running.returncode not in (0, 5):  # 5: nothing was selected
        sys.exit(f"{path.name} failed")
    return sum(took.values()) / os.sysconf("SC_CLK_TCK")


def main(names: list[str]) -> None:
    """Measure, and print the rows of the table."""
    rows: dict[int, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if not names or path.name in names:
            took = seconds(path)
            print(f"{took:6.1f} {path.name}", file=sys.stderr, flush=True)
            step = next((step for step in STEPS if took <= step), round(took))
            rows.setdefault(step, []).append(path.stem.removeprefix("test_"))
    for step, files in sorted(rows.items()):
        print(f"| {step} | {', '.join(f'`{name}`' for name in files)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
