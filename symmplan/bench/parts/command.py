"""What the commands share: options, ranks, the machine, rows of all ranks, tables."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from symmplan.bench.parts.numbers import count_of, number_of
from symmplan.bench.parts.timing import median_ms, meet, slowest
from symmplan.errors import CommandError
from symmplan.launcher.ranks import run_shown
from symmplan.report.format import count, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["Option", "add_options", "cells", "check_peers", "compared", "hardware", "measured"]
__all__ += ["choice_lines", "heading", "settings_of", "words_of"]

#: Seconds for a collective.
_GROUP_TIMEOUT = 120.0
#: How numbers of a type are read: nothing is measured of what has no size.
_CHECKED: dict[Any, Callable[[str], Any]] = {int: count_of, float: number_of}


@frozen
class Option:
    """An option of a benchmark, which its ranks get to know.

    Attributes:
        name: As in Python.
        help: Its help text; defaults are added.
        cpu: The default; False for a switch.
        cuda: The default on CUDA devices, if it is another.
        more: Other arguments for argparse; ``also`` are other words for the option.
    """

    name: str
    help: str
    cpu: Any
    cuda: Any = None
    more: dict[str, Any] = field(factory=dict)


def add_options(
    parser: argparse.ArgumentParser, options: Iterable[Option], *, ranks: int = 2, timeout: float
) -> None:
    """Add the options of every benchmark that starts ranks, and its own options."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default cpu)")
    add("--ranks", type=count_of, default=ranks, help=f"processes to start (default {ranks})")
    for option in options:
        more = dict(option.more)
        words = [f"--{option.name.replace('_', '-')}", *more.pop("also", ())]
        if option.cpu is False:
            more |= {"action": "store_const", "const": True}
        if "action" not in more:
            first = option.cpu[0] if isinstance(option.cpu, (list, tuple)) else option.cpu
            kind = more.get("type", None if first is None else type(first))
            more["type"] = _CHECKED.get(kind, kind)
        add(*words, dest=option.name, default=None, help=_described(option), **more)
    help_ = f"seconds for everything (default {timeout:g})"
    add("--timeout", type=number_of, default=timeout, help=help_)


def _described(option: Option) -> str:
    if option.cpu is None or isinstance(option.cpu, bool):
        return option.help
    cpu, cuda = (
        " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        for value in (option.cpu, option.cuda)
    )
    default = f"default {cpu}" + ("" if cuda is None else f", on cuda {cuda}")
    return f"{option.help} ({default})" if option.help else default


def settings_of(args: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """The settings of ranks, as plain data: the given options, and defaults for the others."""
    cuda = args.device == "cuda"
    found: dict[str, Any] = {"device": args.device, "ranks": args.ranks}
    for option in options:
        default = option.cuda if cuda and option.cuda is not None else option.cpu
        given = getattr(args, option.name)
        found[option.name] = default if given is None else given
    return {**found, "threads": max(1, (os.cpu_count() or 1) // args.ranks)}


def check_peers(ranks: int) -> None:
    """For what is compared between ranks.

    Raises:
        CommandError: There are fewer than two.
    """
    if ranks < 2:
        raise CommandError(
            "a comparison needs peers", expected="--ranks 2 or more", got=ranks, fix="--ranks 2"
        )


def measured(
    act: Callable[[int, dict[str, Any]], dict[str, Any]],
    settings: dict[str, Any],
    args: argparse.Namespace,
    *,
    connect: bool = True,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Call ``act(rank, settings)`` in new processes that share a process group.

    Args:
        act: Defined at the top of a module; returns plain data.
        settings: What `settings_of` made; ``zero_cta``: let NCCL use copy engines.
        args: Of the command.
        connect: Whether NCCL connects immediately; see `symmplan.launcher.ranks.RankPool`.

    Returns:
        The head of the result (the command, the settings, the machine), and the result of each
        rank.

    Raises:
        CommandError: There are fewer devices than ranks.
        RanksFailedError: A rank failed, or did not finish in time. No process is left.
    """
    if settings["device"] == "cuda":
        _check_devices(settings["ranks"])
    ranks = run_shown(
        _act,
        settings["ranks"],
        act,
        settings,
        timeout=args.timeout,
        init="nccl" if settings["device"] == "cuda" else "gloo",
        group_timeout=_GROUP_TIMEOUT,
        threads=settings["threads"],
        connect=connect,
        copy_engines=bool(settings.get("zero_cta")),
    )
    about = {"ok": True, "command": words_of(args), **settings, "machine": ranks[0][0]}
    return about, [found for _, found in ranks]


def _check_devices(ranks: int) -> None:
    import torch

    there = torch.cuda.device_count()
    if there < ranks:
        raise CommandError(
            f"--device cuda needs a GPU for each of {count(ranks, 'rank')}",
            expected=count(ranks, "CUDA device"),
            got=there,
            fix=f"--ranks {there}" if there > 1 else "--device cpu",
        )


def _act(rank: int, _ranks: int, act: Callable[..., Any], settings: dict[str, Any]) -> Any:
    meet()  # symmetric memory needs a communicator that has run something
    return _machine(settings["device"]), act(rank, settings)


def words_of(args: argparse.Namespace) -> str:
    """The command that would do the same."""
    words = args.parser.prog.split()
    if getattr(args, "program", None) is not None:
        words.append(args.program)
    ours = {"parser", "json", "debug", "output", "program"}
    for key, value in vars(args).items():
        if key in ours or value is None:
            continue
        words.append(f"--{key.replace('_', '-')}")
        if not isinstance(value, bool):
            commas = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += map(str, value) if isinstance(value, list) else [commas]
    return shlex.join(words)


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


def _machine(device: str) -> dict[str, Any]:
    import torch

    cuda = device == "cuda"
    return {
        **hardware(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
    }


def heading(result: Mapping[str, Any], what: str) -> str:
    """The line above the tables: how many ranks, of what, on what."""
    machine = result["machine"]
    nccl = f", NCCL {machine['nccl']}" if machine["nccl"] else ""
    on = machine["cpu"] if machine["device"] == "CPU" else machine["device"]
    return (
        f"{count(result['ranks'], 'rank')}, {what}; {on}, {machine['cores']} cores, "
        f"torch {machine['torch']}{nccl}"
    )


def cells(heads: str | Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """A table: numbers to two decimals, yes and NO for booleans, - for what is not there.

    >>> cells("op ms", [("add", 1.0), ("all-reduce", None)])
    ['  op            ms', '  add         1.00', '  all-reduce     -']
    """
    heads = heads.split() if isinstance(heads, str) else heads
    made = [tuple(head.replace("_", " ") for head in heads)]
    made += [tuple(map(_cell, row)) for row in rows]
    return table(made, right=range(1, len(heads)))


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"
    return "-" if value is None else str(value)


def compared(
    about: Mapping[str, Any],
    ranks: Sequence[Mapping[str, Any]],
    row: Callable[[dict[str, list[float]]], dict[str, Any]],
) -> dict[str, Any]:
    """The result of a comparison of sides: a row for all ranks each.

    Args:
        about: The head of the result.
        ranks: ``rows`` of each, with ``seconds`` by side and whether results are ``equal``.
        row: Makes the other fields of a row, from the rounds of the slowest rank by side.
    """
    rows = []
    for found in zip(*(rank["rows"] for rank in ranks), strict=True):
        rounds = slowest([each["seconds"] for each in found])
        first = {key: value for key, value in found[0].items() if key != "seconds"}
        equal = all(each["equal"] for each in found)
        rows.append({**first, "equal": equal, "ms": median_ms(rounds), **row(rounds)})
    return {**about, "ok": all(made["equal"] for made in rows), "results": rows}


def choice_lines(choices: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each kind and size of collective that was measured."""
    return [
        f"{c['op'].rpartition('::')[2]} of {c['nbytes']:,} bytes: {c['algorithm']}, of "
        + ", ".join(f"{algorithm} {s * 1e6:.0f} us" for algorithm, s in c["seconds"].items())
        for c in choices
    ]
