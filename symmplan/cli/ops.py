"""List every op with declared symmetric arguments and results."""

from __future__ import annotations

import fnmatch
import re
from itertools import groupby
from typing import TYPE_CHECKING, Any

from attrs import asdict

from symmplan.bench.parts.programs import import_from_here
from symmplan.errors import CommandError, SymmplanError, UnknownOpError
from symmplan.model import DEFAULT_ALIGN

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

    from symmplan.registry.catalogue import Entry

__all__ = ["add_arguments", "render", "run"]

_LEGEND = """\
pad: uses the signal pad of its segment (+pad: only this tensor does)
handshake: touches no symmetric byte before all ranks have started it
release: ends only after all ranks have finished their accesses
synchronizes: ends only after all ranks have started it
enters: peers touch a rank's bytes only after that rank has started it
releases: peers no longer touch them after that rank has ended it
async: wait_tensor ends it
out: the variant that writes into given tensors
name@16: aligned to 16 bytes instead of 256"""
_CODE = re.compile(r"\w+::\w+|\b_c10d_functional\b")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``symmplan ops``."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help='op ("mylib::foo"), namespace ("symm_mem") or pattern ("*all_reduce*"); default: all',
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import MODULE first, so that what it declares is listed; may be repeated",
    )
    parser.add_argument(
        "--by-collective",
        action="store_true",
        help="list for each collective the ops that run it, which of their tensors must be "
        "symmetric, what NCCL offers for it, and what symmplan does with it, as Markdown",
    )
    parser.add_argument(
        "--all", action="store_true", help="also list the ops that are left out, and why"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """List what is declared, what of torch's communication ops is not and why, what is not known.

    Raises:
        CommandError: A module cannot be imported.
        UnknownOpError: A name matches nothing.
    """
    if args.by_collective:
        return {"collectives": _collectives(args.names)}
    for module in args.imports:
        _import(module)
    import torch

    from symmplan.registry.inventory import inventory

    entries = _select(inventory(), args.names)
    return {
        "torch": str(torch.__version__),
        "ops": [_row(e) for e in entries if e.spec is not None],
        "left_out": [_reason(e) for e in entries if e.spec is None and e.known],
        "not_catalogued": [_reason(e) for e in entries if e.spec is None and not e.known],
        "all": bool(args.all or args.names),
    }


def _collectives(names: list[str]) -> list[dict[str, Any]]:
    from symmplan.place.collectives import by_collective

    every = {found["collective"]: found for found in by_collective()}
    for name in names:
        if name not in every:
            raise UnknownOpError(
                f"no collective is called {name!r}",
                expected=", ".join(every),
                got=repr(name),
                fix="name one of these, or none for all of them",
                op=name,
            )
    return [found for name, found in every.items() if name in (names or every)]


def _import(module: str) -> None:
    try:
        import_from_here(module)
    except SymmplanError:
        raise
    except Exception as error:
        raise CommandError(
            f"module {module!r} cannot be imported",
            expected="a module that declares ops",
            got=f"{type(error).__name__}: {error}",
            fix="check the name and the current folder, or install the package",
            module=module,
        ) from error


def _select(entries: list[Entry], names: list[str]) -> list[Entry]:
    if not names:
        return entries
    chosen: dict[str, Entry] = {}
    for name in names:
        found = [e for e in entries if _matches(e.op, name)] or _defined(name)
        chosen.update((e.op, e) for e in found)
    return [chosen[op] for op in sorted(chosen)]


def _matches(op: str, name: str) -> bool:
    base = op.partition(".")[0]
    namespace, _, short = base.partition("::")
    return any(
        fnmatch.fnmatchcase(candidate, name.removesuffix("::"))
        for candidate in (op, base, namespace, short)
    )


def _defined(name: str) -> list[Entry]:
    """An op outside the list that exists all the same, such as ``aten::add``."""
    from symmplan.registry.inventory import describe_op
    from symmplan.registry.schema import resolve

    if any(c in name for c in "*?[") or "::" not in name:
        raise UnknownOpError(
            f"no declared op matches {name!r}",
            expected="an op, a namespace or a pattern",
            got=repr(name),
            fix="run symmplan ops --all to list every op, or add --import MODULE",
            op=name,
        )
    return [describe_op(op) for op in resolve(name)]


def _row(entry: Entry) -> dict[str, Any]:
    assert entry.spec is not None
    row = asdict(entry.spec)
    del row["wrong"]  # the note has it
    row["symmetric"] = row.pop("requirements")
    row["signal_pad"] = any(r["signal_pad"] for r in row["symmetric"])
    return {**row, "note": entry.note}


def _reason(entry: Entry) -> dict[str, str]:
    return {"op": entry.op, "reason": entry.note}


def render(result: Mapping[str, Any]) -> str:
    """The result as a list for people."""
    if "collectives" in result:
        return "\n\n".join(map(_section, result["collectives"]))
    parts = []
    if result["ops"]:
        by_namespace = groupby(result["ops"], lambda op: str(op["op"].partition("::")[0]))
        parts += ["\n".join([f"{name}::", *map(_op, ops)]) for name, ops in by_namespace]
        parts.append(_LEGEND)
    if result["not_catalogued"]:
        parts.append(_reasons("Not declared", result["not_catalogued"]))
    if result["all"] and result["left_out"]:
        parts.append(_reasons("Left out", result["left_out"]))
    elif result["left_out"]:
        parts.append(f"{len(result['left_out'])} communication ops are left out: --all says why.")
    return "\n\n".join(parts)


def _facts_of_nccl(found: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    nccl, algorithms = found["nccl"], found["algorithms"]
    kernels, engines = (".".join(map(str, nccl[key])) for key in ("kernels", "engines"))
    said = [f"symmetric kernels from {kernels} on" if kernels else "no symmetric kernels"]
    said += [f"copy engines from {engines} on"] if engines else []
    yield "NCCL", ", ".join(said)
    if nccl["sides"]:
        yield "Tensors that NCCL needs in symmetric memory", nccl["sides"]
    if nccl["dtypes"]:
        yield "Types of its symmetric kernels", ", ".join(nccl["dtypes"])
    if nccl["reductions"]:
        since = (f"{op} from {'.'.join(map(str, v))} on" for op, v in nccl["reductions"].items())
        yield "Reductions of its symmetric kernels", ", ".join(since)
    for memory, text in (("nccl", "over NCCL"), ("shm", "in shared memory")):
        yield f"symmplan's algorithms {text}", ", ".join(algorithms[memory])


def _section(found: Mapping[str, Any]) -> str:
    """A collective, in Markdown."""
    lines = [f"## {found['collective']}", ""]
    lines += [f"- {what}: {says}." for what, says in _facts_of_nccl(found)]
    lines += ["", "| op | can be symmetric | over NCCL symmplan runs | in shared memory | note |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for op in found["ops"]:
        where = ", ".join(f"`{name}`" for name in op["symmetric"]) or "-"
        cells = where, *(_CODE.sub(r"`\g<0>`", op[key] or "-") for key in ("nccl", "shm", "note"))
        lines.append(" | ".join((f"| `{op['op']}`", *cells)) + " |")
    return "\n".join(lines)


def _op(op: Mapping[str, Any]) -> str:
    """An op in a line, and its note below."""
    told = [_symmetric(op["symmetric"]), f"group {op['group'] or 'default'}"]
    told += ["pad"] if op["signal_pad"] else []
    told += [", ".join(facts)] if (facts := _facts(op)) else []
    told += ["async"] if op["asynchronous"] else []
    told += [f"out {_short(op['out'])}"] if op["out"] else []
    line = f"{_short(op['op'])}  {'; '.join([*told, op['origin']])}"
    return f"{line}\n    {op['note']}" if op["note"] else line


def _facts(op: Mapping[str, Any]) -> list[str]:
    """What orders ranks, in words; what follows from others is left out."""
    tensors = op["symmetric"]
    shown = [k for k in ("handshake", "release") if op[k]]
    shown += ["synchronizes"] if op["synchronizes"] and not shown else []
    for fact, implied_by in (("enters", "handshake"), ("releases", "release")):
        if tensors and all(t[fact] for t in tensors) and not op[implied_by]:
            shown.append(fact)
    return shown


def _short(op: str) -> str:
    return op.partition("::")[2].removesuffix(".default")


def _symmetric(tensors: list[dict[str, Any]]) -> str:
    some = not all(t["signal_pad"] for t in tensors)
    shown = [
        t["where"]
        + (f"@{t['align']}" if t["align"] != DEFAULT_ALIGN else "")
        + ("+pad" if some and t["signal_pad"] else "")
        for t in tensors
    ]
    return ", ".join(shown) or "-"


def _reasons(title: str, entries: list[dict[str, str]]) -> str:
    by_reason: dict[str, list[str]] = {}
    for entry in entries:
        by_reason.setdefault(entry["reason"], []).append(entry["op"].removesuffix(".default"))
    return "\n".join(f"{title}: {why}\n    {', '.join(ops)}" for why, ops in by_reason.items())
