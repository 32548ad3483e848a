"""Swap one comparison of a module for its neighbour, and see whether a test notices.

``python tests/helpers/mutants.py`` takes every swap in turn, or those of some modules:

    python tests/helpers/mutants.py order packing/greedy --jobs 2
    python tests/helpers/mutants.py --sample 20 --seed 7

Each swap is made in a copy of the tree, and the tests of the module run there until one fails: the
mutant is *killed*. So is one that runs on after many times the seconds of processor that the tests
take otherwise, or takes too much memory. What no test can notice stands with the reason in
`equivalent_mutants.json`, by its text and not by its line; it is left out unless ``--equivalent``
asks for it. Exit code 1 if a mutant survives, or if one that is listed does not.

Random tests draw what ``HYPOTHESIS_PROFILE=ci`` draws, and do not shrink what they find.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING

import attrs
from paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")

_SMOKE, _SPANS, _ORDER, _GOLDEN, _MODEL = (
    "planner/test_planner_smoke",
    "planner/test_planner",
    "planner/test_order",
    "planner/test_golden_packings",
    "model/test_problem",
)
_SHARE = (_SMOKE, _ORDER, _GOLDEN, _MODEL, _SPANS)
_PEERS = (_SMOKE, _SPANS, "planner/test_verify", "planner/test_explorer_plans")
_PACK = ("planner/test_planner_solve", _GOLDEN, "planner/test_planner_improve", _ORDER, _SPANS)
#: ``{module of symmplan: the tests that judge it}``, likeliest to notice first.
MODULES = {
    "planner/order": _SHARE,
    "planner/items": _SHARE,
    "planner/needs": _PEERS,
    "planner/barriers": _PEERS,
    **{
        f"planner/packing/{name}": _PACK
        for name in ("blocks", "bound", "greedy", "improve", "solve", "task")
    },
    "capture/decide": (
        "capture/test_capture_decisions",
        "capture/test_capture",
        "planner/test_golden",
    ),
}

#: Each with what differs at the boundary, and with what is always different.
SWAPS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}

#: What a run may take: so many times the processor's seconds of a run without a swap, so many more,
#: and bytes.
PATIENCE = 3
GRACE = 5
MEMORY = 16 << 30


@attrs.frozen
class Mutant:
    """A module of which one comparison is another.

    Attributes:
        module: Name in `MODULES`.
        where: Qualified name of the function.
        was: The comparison, as `ast.unparse` writes it.
        becomes: What stands there instead.
        line: Line of the comparison.
        text: The module.
    """

    module: str
    where: str
    was: str
    becomes: str
    line: int = attrs.field(eq=False)
    text: str = attrs.field(repr=False, eq=False)

    def __str__(self) -> str:
        return f"{self.module}.py:{self.line} {self.where}: {self.was}  ->  {self.becomes}"


def source_of(module: str) -> str:
    return (ROOT / "symmplan" / f"{module}.py").read_text(encoding="utf-8")


def mutants_of(module: str, source: str) -> Iterator[Mutant]:
    """Every swap of one comparison, from the top of the module to its end."""
    tree = ast.parse(source)
    for where, node in _comparisons(tree, ()):
        was = ast.unparse(node)
        for k, operator in enumerate(node.ops):
            for swap in SWAPS[type(operator)]:
                node.ops[k] = swap()
                becomes, text = ast.unparse(node), ast.unparse(tree)
                yield Mutant(module, ".".join(where), was, becomes, node.lineno, text)
            node.ops[k] = operator


def _comparisons(
    node: ast.AST, where: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], ast.Compare]]:
    for child in ast.iter_child_nodes(node):
        inner = where
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = (*where, child.name)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        elif isinstance(child, ast.Compare):
            yield where, child
        yield from _comparisons(child, inner)


def equivalents() -> dict[Mutant, str]:
    """Those that no test can notice, and why."""
    listed = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    return {
        Mutant(
            entry["module"],
            entry["where"],
            _written(entry["was"]),
            _written(entry["becomes"]),
            0,
            "",
        ): entry["why"]
        for entry in listed
    }


def _written(expression: str) -> str:
    """As this Python's `ast.unparse` writes it."""
    return ast.unparse(ast.parse(expression, mode="eval"))


class Copies:
    """Copies of the tree in which mutants are judged, one for each job.

    Attributes:
        seconds: Of processor that each file of tests takes without a swap.
    """

    def __init__(self, folder: Path, jobs: int) -> None:
        self.seconds: dict[str, float] = {}
        self._free: Queue[Path] = Queue()
        for job in range(jobs):
            copy = folder / f"copy{job}"
            for name in ("symmplan", "tests"):
                left_out = shutil.ignore_patterns("__pycache__", ".hypothesis")
                shutil.copytree(ROOT / name, copy / name, ignore=left_out)
            shutil.copy(ROOT / "pyproject.toml", copy)
            self._free.put(copy)

    def check(self, tests: str) -> None:
        """See that a file's tests pass without a swap, and how long they take.

        Raises:
            RuntimeError: They do not.
        """
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        copy = self._free.get()
        said = _run(copy, tests, 3600)
        self._free.put(copy)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if said != "survived":
            raise RuntimeError(f"without a mutant {tests} should pass; it was {said}")
        self.seconds[tests] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def judge(self, mutant: Mutant, files: Sequence[str]) -> str:
        """What the first file of tests that notices says: ``"killed"``, ``"timeout"``, or
        ``"survived"`` where none does.
        """
        copy = self._free.get()
        file = copy / "symmplan" / f"{mutant.module}.py"
        original = file.read_text(encoding="utf-8")
        try:
            file.write_text(mutant.text, encoding="utf-8")
            runs = (_run(copy, f, int(GRACE + PATIENCE * self.seconds[f])) for f in files)
            return next((said for said in runs if said != "survived"), "survived")
        finally:
            file.write_text(original, encoding="utf-8")
            self._free.put(copy)


def _run(copy: Path, tests: str, seconds: int) -> str:
    """Run a file's tests in a copy until one fails, with so many seconds of processor."""
    environment = {
        **os.environ,
        "HYPOTHESIS_PROFILE": "mutants",
        "EXAMPLES": "all",
        "PYTHONDONTWRITEBYTECODE": "1",  # mutants of one length and second would pass for equal
        "PYTHONPATH": str(copy),
    }
    options = ("-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, tests],
        cwd=copy,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (seconds, seconds + 5))
        resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY, MEMORY))
        code = process.wait(60 * seconds)  # the machine may be busy
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    if code in (4, 5):
        raise RuntimeError(f"pytest found no tests in {tests}")
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout"
    return "killed" if code else "survived"


def tests_of(module: str) -> tuple[str, ...]:
    return tuple(f"tests/{name}.py" for name in MODULES[module])


def named(words: Iterable[str]) -> list[str]:
    """Modules by their names or the ends of them; all for none."""
    found = [m for m in MODULES if not words or any(f"/{m}".endswith(f"/{w}") for w in words)]
    if not found:
        raise SystemExit(f"no such module; there are {', '.join(MODULES)}")
    return found


def run(mutants: Sequence[Mutant], jobs: int) -> list[tuple[Mutant, str]]:
    """Judge mutants, and say of each as soon as it is known."""
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        copies = Copies(Path(folder), jobs)
        for file in dict.fromkeys(f for m in mutants for f in tests_of(m.module)):
            copies.check(file)
            print(f"{copies.seconds[file]:.0f} s of processor: {file}", flush=True)

        def judge(mutant: Mutant) -> tuple[Mutant, str]:
            begin = time.monotonic()
            said = copies.judge(mutant, tests_of(mutant.module))
            print(f"{said:8} {time.monotonic() - begin:4.0f} s  {mutant}", flush=True)
            return mutant, said

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(judge, mutants))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("module", nargs="*", help="such as order or packing/greedy; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--sample", type=int, help="so many of them, at random")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--equivalent", action="store_true", help="those that are listed instead")
    options = parser.parse_args(argv)
    listed = equivalents()
    mutants = [
        mutant
        for module in named(options.module)
        for mutant in mutants_of(module, source_of(module))
        if (mutant in listed) == options.equivalent
    ]
    if options.sample is not None:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    begin = time.monotonic()
    found = run(mutants, options.jobs)
    wrong = [m for m, said in found if (said == "survived") != options.equivalent]
    counts = {w: sum(said == w for _, said in found) for w in ("killed", "timeout", "survived")}
    print(", ".join(f"{n} {w}" for w, n in counts.items()), end="")
    print(f", of {len(found)} in {time.monotonic() - begin:.0f} s")
    for mutant in wrong:
        print(f"{'listed, but killed' if options.equivalent else 'survived'}: {mutant}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
