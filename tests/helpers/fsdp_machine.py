"""Run programs of `fsdp_programs.py` on ranks, without and with symmplan: the same bits?

    # what a seed draws, and what becomes of it
    PYTHONPATH=.:tests/helpers python tests/helpers/fsdp_machine.py 17
    # the same of a program by hand, and the smallest one found that still fails
    PYTHONPATH=.:tests/helpers python tests/helpers/fsdp_machine.py "Program(ranks=2, ...)" --reduce
    # many, with those that fail printed
    PYTHONPATH=.:tests/helpers python tests/helpers/fsdp_machine.py 0-999

`compared` runs a program on a rank, in both ways; `verdict` says what is wrong with what all
ranks return; a `Judge` has the ranks.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import functools
import gc
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import attrs
import fsdp_acts
import torch
import torch.distributed as dist
from attrs import evolve
from fsdp_conditions import Hoard, flat, groups_of_its_own, holding, in_order_of_ranks
from fsdp_models import Trace, differences
from fsdp_programs import Program, Unit, built, drawn, mesh_of
from fsdp_pushed import drawn_pushed
from fsdp_reads import drawn_reading
from ranks import RankPool, RanksFailed

from symmplan.choose.tuning_table import Table, TuningRow
from symmplan.device import kind_of
from symmplan.errors import SymmplanError


class _Sleeps:
    """A rank that is late at random moments."""

    def __init__(self, model, most):
        self._draw, self._most = random.Random(1), most / 1000
        for block in model.blocks:
            block.up.register_forward_pre_hook(self)
            block.down.register_full_backward_pre_hook(self)

    def __call__(self, *_):
        if self._draw.random() < 0.3:
            time.sleep(self._draw.uniform(0, self._most))


@functools.cache
def _table(ranks):
    """A file that says how collectives of some sizes run."""
    algorithms = (("all_gather", "ordinary", "symmetric"), ("reduce_scatter", "push", "ordinary"))
    rows = [
        TuningRow(op, ranks, nbytes, algorithm)
        for op, *found in algorithms
        for nbytes, algorithm in zip((1024, 8192), found, strict=True)
    ]
    folder = tempfile.mkdtemp(prefix="fsdp-programs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "table.json"
    path.write_text(Table("shm", tuple(rows)).to_json(), encoding="utf-8")
    return str(path)


def _options(program):
    return {
        "memory": "auto",
        "choose": _table(program.ranks) if program.choose == "table" else program.choose,
        "unsharded_modules": program.unsharded_modules,
        "capacity": program.capacity,
        "timeout": 10.0,
        "debug": program.debug,
    }


def _begin(rank, world):
    """What the process has by now is not looked at by each collection of garbage."""
    gc.collect()
    gc.freeze()


def compared(rank, world, program):
    """Run a program without and with symmplan, up to the first act at which plain FSDP2 fails.

    Returns:
        ``{"differences", "refused": text of symmplan's error or None, "unsupported": that of plain
        FSDP2's, "silent": whether only plain FSDP2 failed on all ranks at one act, "done": how many
        acts, "counts": how often what happened, "intact": whether the kept buffers were}``.
    """
    told = {"refused": None, "unsupported": None, "silent": False, "counts": {}}
    hoard = Hoard(program.hold[1])
    traces = {False: Trace(), True: Trace()}

    def keep(_, tensor):
        if rank == program.hold[0] and program.hold[1]:
            hoard.keep(tensor)

    def run(acts, *, planned, fails=False):
        torch.manual_seed(7)
        model = built(program)
        _Sleeps(model, dict(program.late).get(rank, 0.0))
        make = getattr(torch.optim, program.optimizer)
        options = _options(program)
        how = {"apart": program.apart, "in_backward": program.in_backward, "optimizer": make}
        actor = fsdp_acts.Actor(model, rank, planned=planned, **how, **options)
        items = traces[planned].items
        for act in acts:
            try:
                actor.do(act)
            except SymmplanError as error:
                told["refused"] = f"{act}: {type(error).__name__}: {error}"
                break
            except Exception as error:
                if planned and fails and actor.done == len(acts) - 1:
                    break
                if planned:
                    raise
                told["unsupported"] = f"{act}: {type(error).__name__}: {error}"
                break
            items[:] = actor.trace.items
        told["silent"] = fails and actor.done == len(acts)
        if actor.done == len(program.acts):
            actor.trace.parameters(actor.model)
            items[:] = actor.trace.items
        told["counts"] = actor.end()
        return actor.done

    with contextlib.ExitStack() as stack:
        mesh_of(program.ranks, hybrid=program.hybrid)  # which later programs have, too
        stack.enter_context(groups_of_its_own())
        if not kind_of(torch.device("cpu")).is_accelerator:  # a double: two ranks, any order
            stack.enter_context(in_order_of_ranks())
        stack.enter_context(holding(keep))
        if program.flat:
            stack.enter_context(flat())
        done = [0] * world
        dist.all_gather_object(done, run(program.acts, planned=False))
        # What all ranks fail at alike, they are to fail at with symmplan.
        fails = told["unsupported"] is not None and min(done) == max(done)
        told["done"] = run(program.acts[: min(done) + fails], planned=True, fails=fails)
        hoard.end()
    gc.collect()
    plain, planned = traces.values()
    if told["refused"] is not None or told["unsupported"] is not None:
        del plain.items[len(planned.items) :]
    return {**told, "differences": differences(plain, planned), "intact": all(hoard.intact)}


def verdict(results):
    """What is wrong with what the ranks return; empty if nothing is."""
    found = []
    for rank, result in enumerate(results):
        if result["differences"]:
            count, first = len(result["differences"]), result["differences"][0]
            found.append(f"rank {rank}: {count} tensors differ, the first is {first}")
        if result["silent"]:
            found.append(f"rank {rank}: no error as plain FSDP2's {result['unsupported']}")
        if result["refused"] is not None:
            found.append(f"rank {rank} refused {result['refused']}")
        if not result["intact"]:
            found.append(f"rank {rank}: a buffer that was kept was overwritten")
        if result["done"] != results[0]["done"]:
            found.append(f"rank {rank}: {result['done']} acts, rank 0: {results[0]['done']}")
    return "\n".join(found)


class Judge:
    """Runs programs on ranks, which it keeps for the next program of as many."""

    def __init__(self, pool=RankPool):
        self._pool = pool
        self._ranks = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop()

    def __call__(self, program):
        """What is wrong with a program, and what ranks return if they do."""
        if self._ranks is None or self._ranks.world_size != program.ranks:
            self._stop()
            self._ranks = self._pool(program.ranks, timeout=90.0)
            self._ranks.run(_begin)
        try:
            results = self._ranks.run(compared, program)
        except RanksFailed as error:
            wrong, results = str(error), []
        else:
            wrong = verdict(results)
        if wrong:  # what they did not finish would disturb the next
            self._stop()
        return wrong, results

    def _stop(self):
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


# By hand.


def _kind(said):
    """How a program fails: what it is reduced to fails so, too."""
    words = ("tensors differ", "overwritten", "did not finish", "exited with", "acts, rank 0")
    return re.findall(r"\w+Error|" + "|".join(words), said)[:1]


def smallest(program, judge, said):
    """The smallest program found that fails as ``said``: without acts, blocks and options."""
    went_on = True
    while went_on:
        went_on = False
        for smaller in _smaller(program):
            if _kind(judge(smaller)[0]) == _kind(said):
                program, went_on = smaller, True
                break
    return program


def _smaller(program):
    for count in (4, 2, 1):
        for at in range(0, len(program.acts), count):
            yield evolve(program, acts=program.acts[:at] + program.acts[at + count :])
    usual = {f.name: f.default for f in attrs.fields(Program) if f.default is not attrs.NOTHING}
    for name, value in usual.items():
        if getattr(program, name) != value:
            yield evolve(program, **{name: value})
    for at, unit in enumerate(program.units):
        others = program.units[:at], program.units[at + 1 :]
        if len(program.units) > 1 and not program.stages:
            yield evolve(program, units=(*others[0], *others[1]))
        for f in attrs.fields(Unit):
            if getattr(unit, f.name) != f.default:
                plain = evolve(unit, **{f.name: f.default})
                yield evolve(program, units=(*others[0], plain, *others[1]))
    for at, (name, *arguments) in enumerate(program.acts):
        others = program.acts[:at], program.acts[at + 1 :]
        simpler = [("train",)] if name not in ("train", "apply") or arguments else []
        if name == "around":
            simpler += [(name, arguments[0][:i] + arguments[0][i + 1 :]) for i in (0, 1)]
        for act in simpler:
            if act != program.acts[at]:
                yield evolve(program, acts=(*others[0], act, *others[1]))
    if program.ranks > 2 and not program.hybrid:
        yield evolve(program, ranks=2)


def _chosen(text, ranks, draw):
    if text.startswith("Program"):
        return {"": eval(text)}
    first, _, last = text.partition("-")
    found = {s: draw(s, ranks) for s in range(int(first), int(last or first) + 1)}
    return {f"seed {s}": found[s] for s in sorted(found, key=lambda s: found[s].ranks)}


def _count(counts, program, results):
    counts["programs"] += 1
    for result in results[:1]:
        counts["acts"] += result["done"]
        counts["acts that were drawn"] += len(program.acts)
        counts["programs that plain FSDP2 ended"] += result["unsupported"] is not None
        counts.update({f"- {reason}": count for reason, count in result["counts"].items()})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="a seed, seeds as 0-999, or a program as it is printed")
    parser.add_argument("--ranks", type=int, help="of seeds; 2, 3 and 4 in turn unless told")
    parser.add_argument("--only", type=int, help="only programs of so many ranks")
    parser.add_argument("--reduce", action="store_true", help="make failing programs smaller")
    kinds = {"usual": drawn, "pushed": drawn_pushed, "reading": drawn_reading}
    parser.add_argument("--kind", choices=kinds, default="usual", help="of programs of seeds")
    given = parser.parse_args()
    chosen = _chosen(given.program, given.ranks, kinds[given.kind])
    wrong, counts = [], collections.Counter()
    with Judge() as judge:
        for name, program in chosen.items():
            if given.only in (None, program.ranks):
                said, results = judge(program)
                _count(counts, program, results)
                if counts["programs"] % 100 == 0:
                    print(f"{counts['programs']} programs, {len(wrong)} wrong", flush=True)
                if said:
                    wrong.append(name)
                if said or len(chosen) == 1:
                    print(f"{name}: {program}\n{said[-4000:] or results[0]}\n", flush=True)
                if said and given.reduce:
                    print(f"    reduced: {smallest(program, judge, said)}\n", flush=True)
    for name, count in counts.items():
        print(f"{name}: {count}")
    print(f"wrong: {len(wrong)} {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
