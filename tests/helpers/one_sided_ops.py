"""Declared one-sided ops for tests: every combination of what such an op may do and declare.

``one_sided::<kind><in place?><handshake><release>``, such as ``push_01``: kind ``read`` reads
peers' bytes, ``push`` writes them, ``both`` does both; a ``_`` says that it works in place on its
argument; then whether it waits for all ranks before it touches anything, and whether after. All
declarations are true. Each pauses at random before, between and after its accesses, see `slow`.

Where a tensor has no placement, the op takes the process group's way, between two barriers, so that
the same program runs without symmplan and with anything left out.
"""

from __future__ import annotations

import functools
import random
import time
from itertools import product

import torch
import torch.distributed as dist

KINDS = ("read", "push", "both", "read_", "push_", "both_")
NAMES = tuple(f"{kind}{h}{r}" for kind, h, r in product(KINDS, (0, 1), (0, 1)))

_PAUSES = {"most": 0.0, "seed": random.Random(0), "late": {}}


def slow(rank: int, most: float, seed: int, late: dict[str, float] | None = None) -> None:
    """Pause up to ``most`` seconds at each access, and before ops that ``late`` names so long."""
    _PAUSES.update(most=most, seed=random.Random(1000 * seed + rank), late=late or {})


def pause(on: torch.Tensor, op: str = "") -> None:
    """A pause as `slow` asked for, on a tensor's device; they differ, so that ranks overtake."""
    wanted = _PAUSES["late"].get(op, 0.0)
    if _PAUSES["most"]:
        wanted += _PAUSES["most"] * _PAUSES["seed"].choice((0.0, 0.0, 0.1, 1.0))
    if wanted and on.is_cuda:
        torch.cuda._sleep(int(wanted * 1.8e9))  # cycles
    elif wanted:
        time.sleep(wanted)


def _group(name: str):
    return dist.distributed_c10d._resolve_process_group(name)


def _gathered(x: torch.Tensor, name: str) -> list[torch.Tensor]:
    group = _group(name)
    dist.barrier(group=group)
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, [(r + 1) * p for r, p in enumerate(parts)])


def _placed(x: torch.Tensor, name: str):
    import symmplan
    from symmplan.memory import locate

    return None if locate(x) is None else symmplan.placed.handle(x, name)


class _Op:
    """One op, functional and with an ``out``, or in place."""

    def __init__(self, kind: str, handshake: int, release: int) -> None:
        self.kind, self.handshake, self.release = kind, handshake, release
        self.name = f"{kind}{handshake}{release}"

    def begin(self, placed) -> None:
        pause(placed.tensor, f"{self.name}:begin")
        if self.handshake:
            placed.barrier()
        pause(placed.tensor, self.name)

    def end(self, placed) -> None:
        pause(placed.tensor, f"{self.name}:end")
        if self.release:
            placed.barrier()

    def read(self, x: torch.Tensor, name: str) -> torch.Tensor:
        placed = _placed(x, name)
        if placed is None:
            parts = _gathered(x, name)
            dist.barrier(group=_group(name))
            return _sum(parts)
        self.begin(placed)
        parts = []
        for shift in range(placed.world_size):
            rank = (placed.rank + shift) % placed.world_size
            parts.append((rank, placed.peer(rank).clone()))
            pause(x)
        self.end(placed)
        return _sum([part for _, part in sorted(parts, key=lambda p: p[0])])

    def push(self, x: torch.Tensor, name: str) -> torch.Tensor:
        group = _group(name)
        out = _gathered(x, name)[(group.rank() - 1) % group.size()] * 2
        dist.barrier(group=group)
        return out

    def push_out(self, x: torch.Tensor, name: str, *, out: torch.Tensor) -> None:
        placed = _placed(out, name)
        if placed is None:
            out.copy_(self.push(x, name))
            return
        self.begin(placed)
        placed.peer((placed.rank + 1) % placed.world_size).copy_(x * 2)
        self.end(placed)

    def both(self, x: torch.Tensor, name: str) -> torch.Tensor:
        group = _group(name)
        out = _gathered(x, name)[(group.rank() - 2) % group.size()] + 1
        dist.barrier(group=group)
        return out

    def both_out(self, x: torch.Tensor, name: str, *, out: torch.Tensor) -> None:
        given, placed = _placed(x, name), _placed(out, name)
        if placed is None or given is None:
            made = self.both(x, name)
            out.copy_(made)
            dist.barrier(group=_group(name))
            return
        self.begin(placed)
        seen = given.peer((given.rank - 1) % given.world_size) + 1
        pause(x)
        placed.peer((placed.rank + 1) % placed.world_size).copy_(seen)
        self.end(placed)

    def in_place(self, x: torch.Tensor, name: str) -> None:
        """The second half of the rows comes from first halves."""
        half, group = x.shape[0] // 2, _group(name)
        first, second = slice(0, half), slice(half, 2 * half)
        rank, size = group.rank(), group.size()
        placed = _placed(x, name)
        if placed is None:
            parts = [part[first] for part in _gathered(x, name)]
            made = {
                "read_": lambda: _sum(parts),
                "push_": lambda: parts[(rank - 1) % size] * 2,
                "both_": lambda: parts[(rank - 2) % size] + 1,
            }[self.kind]()
            x[second] = made
            dist.barrier(group=group)
            return
        self.begin(placed)
        if self.kind == "read_":
            x[second] = _sum([placed.peer(r)[first] for r in range(size)])
        elif self.kind == "push_":
            placed.peer((rank + 1) % size)[second] = x[first] * 2
        else:
            seen = placed.peer((rank - 1) % size)[first] + 1
            pause(x)
            placed.peer((rank + 1) % size)[second] = seen
        self.end(placed)


def _pausing(x: torch.Tensor) -> None:
    pause(x, "pause")


@functools.cache
def load() -> None:
    """Define and declare the ops, once per process."""
    import symmplan

    lib = torch.library.Library("one_sided", "FRAGMENT")
    _KEEP.append(lib)
    lib.define("pause(Tensor(a!) x) -> ()")
    lib.impl("pause", _pausing, "CompositeExplicitAutograd")
    torch.library.register_fake("one_sided::pause", lambda _x: None, lib=lib)
    for kind, handshake, release in product(KINDS, (0, 1), (0, 1)):
        op = _Op(kind, handshake, release)
        facts = {"handshake": bool(handshake), "release": bool(release)}
        qualified = f"one_sided::{op.name}"
        if kind.endswith("_"):
            lib.define(f"{op.name}(Tensor(a!) x, str group_name) -> ()")
            lib.impl(op.name, op.in_place, "CompositeExplicitAutograd")
            torch.library.register_fake(qualified, lambda _x, _g: None, lib=lib)
            symmplan.register_symm_mem_args(qualified, ["x"], **facts)
            continue
        lib.define(f"{op.name}(Tensor x, str group_name) -> Tensor")
        lib.impl(op.name, getattr(op, kind), "CompositeExplicitAutograd")
        torch.library.register_fake(
            qualified,
            lambda x, _g: torch.empty_like(x, memory_format=torch.contiguous_format),
            lib=lib,
        )
        if kind == "read":
            symmplan.register_symm_mem_args(qualified, ["x"], **facts)
            continue
        lib.define(f"{op.name}_out(Tensor x, str group_name, *, Tensor(a!) out) -> ()")
        lib.impl(f"{op.name}_out", getattr(op, f"{kind}_out"), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{qualified}_out", lambda _x, _g, *, out: None, lib=lib)
        where = ["return"] if kind == "push" else ["x", "return"]
        symmplan.register_symm_mem_args(qualified, where, out=f"{qualified}_out", **facts)


_KEEP: list[torch.library.Library] = []
