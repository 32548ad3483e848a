"""Random declarations of random ops, and random programs that call them; see `random_program`."""

from __future__ import annotations

import random
import types
from typing import Any

import torch
from attrs import frozen

_TENSORS = ("Tensor", "Tensor", "Tensor?", "Tensor[]", "Tensor?[]", "Tensor({}!)", "Tensor({}!)[]")
_TENSORS = (*_TENSORS, "Tensor({}!)?")
_OTHERS = ("int", "str", "str?", "float", "int[]", "bool")
_NAMES = ("input", "x", "out", "group", "group_name", "pg", "tag", "mode", "dim")
_LIBRARIES: list[Any] = []
_FAKE: dict[str, Any] = {}


@frozen
class Declared:
    """An op that was declared somehow, and ``((name, type), ...)`` of its arguments."""

    op: Any
    arguments: tuple[tuple[str, str], ...]
    positional: int  # how many of them may be given without a name
    schema: str


class _Registry:
    """Stands in for torch's registry where torch has none."""

    get = staticmethod(_FAKE.get)
    _data = _FAKE


def _upstream_declares(library: Any, name: str, wanted: list[str]) -> None:
    if hasattr(library, "register_symm_mem_args"):
        library.register_symm_mem_args(name, wanted)
        return
    from symmplan.torch_private import torch_registry

    torch_registry._simple_registry = _Registry
    holder = types.SimpleNamespace(get=lambda: wanted, is_registered=lambda: True)
    _FAKE[f"{library.ns}::{name}"] = types.SimpleNamespace(symm_mem_args=holder)


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _implementation(results: tuple[str, ...], written: frozenset[int]) -> Any:
    """Computes something of all its tensors, and adds one to those that it writes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        tensors = _tensors(given)
        total = sum((t.sum() for t in tensors), torch.zeros(()))
        for i in written:
            for tensor in _tensors([given[i]]):
                tensor.add_(1)
        like = torch.ones(16) if not tensors else torch.ones_like(tensors[0])
        made = [like * (i + 1) + total for i in range(len(results))]
        made = [[m, m + 1] if r == "Tensor[]" else m for m, r in zip(made, results, strict=True)]
        return None if not made else made[0] if len(made) == 1 else tuple(made)

    return run


def random_op(seed: int) -> Declared:
    """An op with a random schema, declared at random: by symmplan, by torch's registry, wrongly."""
    import symmplan

    dice = random.Random(seed)
    names = dice.sample(_NAMES, dice.randint(1, 5))
    kinds = [dice.choice(_TENSORS if i == 0 or dice.random() < 0.5 else _OTHERS)
             for i in range(len(names))]  # fmt: skip
    letters = iter("abcdefgh")
    types_ = [k.format(next(letters)) if "{}" in k else k for k in kinds]
    results = tuple(
        dice.choice(("Tensor", "Tensor", "Tensor[]")) for _ in range(dice.randint(0, 2))
    )
    written = frozenset(i for i, k in enumerate(kinds) if "{}" in k)
    if not results and not written:
        results = ("Tensor",)
    positional = dice.choice((len(names), dice.randint(0, len(names))))
    parts = [f"{t} {n}" for t, n in zip(types_, names, strict=True)]
    named = ["*"] if positional < len(names) else []
    text = ", ".join([*parts[:positional], *named, *parts[positional:]])
    schema = f"f{seed}({text}) -> ({', '.join(results)})"
    library = torch.library.Library("symmtest_any", "FRAGMENT")
    _LIBRARIES.append(library)
    library.define(schema)
    run = _implementation(results, written)
    library.impl(f"f{seed}", run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"symmtest_any::f{seed}", run, lib=library)
    tensors = [n for n, k in zip(names, kinds, strict=True) if k.startswith("Tensor")]
    if dice.random() < 0.5:
        returns = ["return"] if results else []
        where = dice.sample([*tensors, *returns], dice.randint(1, len(tensors) + len(returns)))
        strings = [n for n, k in zip(names, kinds, strict=True) if k.startswith("str")]
        try:
            symmplan.register_symm_mem_args(
                f"symmtest_any::f{seed}",
                where,
                group=dice.choice([None, *strings]),
                asynchronous=dice.random() < 0.1,
                handshake=dice.random() < 0.3,
            )
        except symmplan.errors.DeclarationError as error:  # the only thing that it may mind
            assert "several arguments that may name its process group" in str(error)  # noqa: PT017
    else:
        wanted = [*names, "nowhere", "return", dice.choice(tensors)]
        _upstream_declares(library, f"f{seed}", dice.sample(wanted, dice.randint(1, len(wanted))))
    op = getattr(torch.ops.symmtest_any, f"f{seed}").default
    return Declared(op, tuple(zip(names, kinds, strict=True)), positional, schema)


def random_program(seed: int, group: str) -> tuple[Any, str]:
    """A function of two tensors that calls random ops, and the schemas of those."""
    dice = random.Random(1000 + seed)
    ops = [random_op(10 * seed + i) for i in range(dice.randint(1, 2))]
    plans = []
    for op in ops:
        values = []
        for _, kind in op.arguments:
            pick = lambda: dice.randrange(6)  # noqa: E731
            if kind in ("Tensor", "Tensor({}!)"):
                values.append(("tensor", pick()))
            elif kind in ("Tensor?", "Tensor({}!)?"):
                values.append(("tensor", pick()) if dice.random() < 0.6 else ("plain", None))
            elif kind.startswith("Tensor"):
                # Inductor itself is wrong about an empty list that is written.
                least = 1 if "!" in kind else 0
                picked = [pick() for _ in range(dice.randint(least, 3))]
                values.append(("list", list(dict.fromkeys(picked))))
            else:
                choices = {
                    "int": [3], "float": [0.5], "bool": [True], "int[]": [[1, 2]],
                    "str": [group, "no such group", ""], "str?": [group, None, "elsewhere"],
                }  # fmt: skip
                values.append(("plain", dice.choice(choices[kind])))
        plans.append((op, values))

    def program(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        made = [x + 1, y * 2, x.clone(), (x - y)[1:], (y + 3).t(), torch.relu(y)]
        for op, values in plans:
            args = [
                made[v] if k == "tensor" else [made[i] for i in v] if k == "list" else v
                for k, v in values
            ]
            names = [name for name, _ in op.arguments]
            named = zip(names[op.positional :], args[op.positional :], strict=True)
            results = op.op(*args[: op.positional], **dict(named))
            made += [r * 2 for r in _tensors([results])]
        return [m + 1 for m in made]

    return program, "; ".join(op.schema for op in ops)
