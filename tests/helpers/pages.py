"""Run the code of a Markdown page, block after block, and compare what it prints.

    python tests/helpers/pages.py docs/tour.md
    torchrun --nproc-per-node 2 tests/helpers/pages.py docs/how-to/fsdp2.md  # says torchrun

Blocks marked ``python`` share one namespace, those marked ``sh`` are commands in the working
directory, where the examples are. The next block, if it is marked ``text``, is what was printed;
"..." in it stands for anything. Blocks without a mark are drawings; those marked ``console`` are
commands that need a cluster, or minutes. On several ranks commands run, and output is compared, on
the first.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TORCHRUN = "-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:0"
_RANKS = re.compile(r"\btorchrun --nproc-per-node (\d+) ")


def blocks(text: str) -> list[tuple[str, int, str]]:
    """``(mark, line of its first line, what it says)`` of each block."""
    return [(m[1], text.count("\n", 0, m.start(2)) + 1, m[2]) for m in _BLOCK.finditer(text)]


def ranks(text: str) -> int:
    """On how many ranks the page says that it runs."""
    said = _RANKS.search(text)
    return int(said[1]) if said else 1


def is_run(mark: str, code: str) -> bool:
    """Whether it is code. What installs is run by ``.ci/run``, in fresh environments."""
    return mark == "python" or (mark == "sh" and not code.startswith("python -m pip "))


def alike(said: str, printed: str) -> bool:
    """Whether the page says what was printed."""
    said, printed = ("\n".join(map(str.rstrip, t.strip().splitlines())) for t in (said, printed))
    return doctest.OutputChecker().check_output(said + "\n", printed + "\n", doctest.ELLIPSIS)


def command(code: str) -> str:
    """What a command of the page prints on stdout."""
    names = {"python": "", "symmplan": "-m symmplan", "torchrun": TORCHRUN}
    functions = [f'{n}() {{ "{sys.executable}" {f} "$@"; }}' for n, f in names.items()]
    script = "\n".join(["set -euo pipefail", *functions, code])
    # The command is none of the ranks that run the page.
    ranked = re.compile(r"TORCHELASTIC_.*|MASTER_.*|(.*_)?(RANK|WORLD_SIZE)")
    env = {name: value for name, value in os.environ.items() if not ranked.fullmatch(name)}
    done = subprocess.run(
        ["bash", "-c", script], stdout=subprocess.PIPE, text=True, check=True, env=env
    )
    return done.stdout


def run(page: Path) -> int:
    """How many blocks were run. Raises if one fails or prints something else."""
    found = blocks(page.read_text(encoding="utf-8"))
    first = os.environ.get("RANK", "0") == "0"
    space: dict[str, object] = {"__name__": "__main__", "__file__": str(page)}
    count = 0
    for (mark, line, code), follows in zip(found, [*found[1:], ("", 0, "")], strict=True):
        if not is_run(mark, code) or (mark == "sh" and not first):
            continue
        count += 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if mark == "sh":
                printed.write(command(code))
            else:  # with the page's lines in tracebacks
                exec(compile("\n" * (line - 1) + code, str(page), "exec"), space)
        if first and follows[0] == "text":
            assert alike(follows[2], printed.getvalue()), (
                f"{page}, line {line}, prints\n{printed.getvalue()}\nand not\n{follows[2]}"
            )
    return count


if __name__ == "__main__":
    try:
        print(f"{run(Path(sys.argv[1]))} blocks")
    except BaseException:  # noqa: BLE001 - whatever it is, it is shown
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # peers may be waiting: torchrun ends them
