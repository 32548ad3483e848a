"""Counts a program's ordinary memory by the storages of fake tensors.

What tensors have is counted, and on devices also what torch's caching allocator would have for
them, see [Note: the caching allocator] in `symmplan.device.allocator`.

[Note: kinds are found later]
    The kind of a storage is not known when it is made: a gradient is a result like any other until
    it is assigned to a parameter, and a later plan decides which buffers lie in placements. So each
    storage is noted with its size when it is made, resized and dropped. The storages are assigned
    to kinds when the program has ended.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import define, field
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from symmplan.device import Allocation, HeldBlock
from symmplan.device.allocator import CachingAllocator
from symmplan.torch_private.autograd import local_part
from symmplan.torch_private.fake_world import current_stream, followed_memory
from symmplan.torch_private.ops import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

    from symmplan.device.allocator import CachedBlock

__all__ = ["Cached", "Kind", "Storages"]

Kind = Literal["parameters", "gradients", "optimizer", "activations", "placed", "segment", "held"]


@define(eq=False)
class _Storage:
    """A storage: where it is and for what, its bytes now, and what is done when it is gone."""

    device: torch.device
    kind: Kind = "activations"
    nbytes: int = 0
    then: list[Callable[[], None]] = field(factory=list)


@define(eq=False)
class Cached:
    """What torch's allocator has for storages that come and go.

    Args:
        allocator: The allocator.

    Attributes:
        highest: The most bytes that it had of the driver.
    """

    highest: int = 0
    _allocator: CachingAllocator = field(factory=CachingAllocator)
    _blocks: dict[_Storage, tuple[int, CachedBlock]] = field(factory=dict)

    def change(self, storage: _Storage, change: int, stream: Hashable) -> None:
        """The bytes of a storage become more or less, on a stream."""
        nbytes, block = self._blocks.pop(storage, (0, None))
        if block is not None:
            self._allocator.drop(block)
        if nbytes + change:
            taken = self._allocator.take(nbytes + change, stream)
            self._blocks[storage] = nbytes + change, taken
        self.highest = max(self.highest, self._allocator.reserved)

    def held(self) -> list[HeldBlock]:
        """What the allocator has, as `symmplan.device` says it."""
        return self._allocator.held({id(s): block for s, (_, block) in self._blocks.items()})

    def begin(self) -> None:
        """Forget the most, and give back what is cached."""
        self._allocator.empty()
        self.highest = self._allocator.reserved


@define(eq=False)
class Storages:
    """The storages of a program."""

    _changes: list[tuple[_Storage, int, Hashable]] = field(factory=list)
    _live: dict[int, tuple[_Storage, Any]] = field(factory=dict)
    _begin: int = 0
    _now: int = 0
    _highest: int = 0
    _lately: dict[Any, int] = field(factory=dict)
    _modules: weakref.WeakSet[torch.nn.Module] = field(factory=weakref.WeakSet)
    _cached: Cached = field(factory=Cached)
    _followed: int = 0
    _allocations: int = 0

    def seen(self, tensor: torch.Tensor) -> _Storage:
        """The storage of a tensor; of a DTensor, of its part."""
        part = local_part(tensor)
        storage = part.untyped_storage()
        key = storage._cdata
        found = self._live.get(key)
        if found is not None:
            return found[0]
        made = _Storage(part.device)

        def gone(_: Any) -> None:
            self._live.pop(key, None)
            self._resize(made, 0)
            for act in made.then:
                act()

        self._live[key] = made, weakref.ref(storage, gone)
        self._resize(made, storage.nbytes())
        return made

    def results(self, results: Any) -> None:
        """An op made these."""
        if type(results) is torch.Tensor or isinstance(results, torch.Tensor):
            self.seen(results)
        else:
            for leaf in tree_leaves(results):
                if isinstance(leaf, torch.Tensor):
                    self.seen(leaf)

    def begin(self) -> None:
        """The program has built what it trains. It may have built more than one thing."""
        self._follow()
        self._cached.begin()
        self._begin, self._highest = len(self._changes), self._now

    def allocated(self) -> tuple[int, int, int, int]:
        """Bytes of all but segments.

        All is counted where FSDP2 has it that will lie in a placement.

        Returns:
            What tensors have now; the most that they had since the program has built what it
            trains; the most that torch's allocator had since then; and how often it allocated.
        """
        self._count()
        self._follow()
        return self._now, self._highest, self._cached.highest, self._allocations

    def note(self) -> tuple[int, list[HeldBlock]]:
        """What is allocated from now on is noted: see `symmplan.device.Device`."""
        self._follow()
        return len(self._changes), self._cached.held()

    def noted(self, since: int) -> list[Allocation]:
        """What was allocated and freed ``since`` then: see `symmplan.device.Device`."""
        size: dict[_Storage, int] = {}
        for storage, change, _ in self._changes[:since]:
            size[storage] = size.get(storage, 0) + change
        found, number = [], 0
        for storage, change, stream in self._changes[since:]:
            nbytes = size[storage] = size.get(storage, 0) + change
            number += nbytes > 0
            if storage.kind not in ("segment", "held"):
                found.append(Allocation(number if nbytes else 0, id(storage), nbytes, stream))
        return found

    def _follow(self) -> None:
        """Let torch's allocator serve what has happened since."""
        for storage, change, stream in self._changes[self._followed :]:
            if storage.kind not in ("segment", "held"):
                self._cached.change(storage, change, stream)
        self._followed = len(self._changes)

    def lately(self, asker: Any) -> int:
        """The most since ``asker`` asked for it; now, if that is the first time."""
        self._count()
        most = self._lately.get(asker, self._now)
        self._lately[asker] = self._now
        return most

    def _count(self) -> None:
        self._highest = max(self._highest, self._now)
        for asker, most in self._lately.items():
            self._lately[asker] = max(most, self._now)

    def segment(self, tensor: torch.Tensor) -> None:
        """What was made last lies in a segment, or is one."""
        storage = self.seen(tensor)
        if storage.kind != "segment":
            storage.kind = "segment"
            self._now -= storage.nbytes

    def hold(
        self, gradients: Sequence[torch.Tensor], itemsize: int, tensor: torch.Tensor
    ) -> list[_Storage]:
        """Gradients that a planned program keeps until a tensor's storage is gone.

        They count from the moment on at which this program drops them.

        Args:
            gradients: The gradients.
            itemsize: Bytes of an element as they are kept.
            tensor: The tensor.
        """
        over = weakref.ref(tensor.untyped_storage())
        made = [_Storage(local_part(gradient).device, "held") for gradient in gradients]

        def keep(kept: _Storage, nbytes: int) -> None:
            if over() is not None:
                self._resize(kept, nbytes)

        for gradient, kept in zip(gradients, made, strict=True):
            nbytes = gradient.numel() * itemsize
            self.seen(gradient).then.append(functools.partial(keep, kept, nbytes))
            weakref.finalize(tensor.untyped_storage(), self._resize, kept, 0).atexit = False
        return made

    def _resize(self, storage: _Storage, nbytes: int) -> None:
        if nbytes == storage.nbytes or storage.device.type == "meta":
            return
        change = nbytes - storage.nbytes
        self._changes.append((storage, change, current_stream(storage.device)))
        self._allocations += nbytes > 0
        if storage.kind not in ("segment", "held"):
            self._count()
            self._now += nbytes - storage.nbytes
        storage.nbytes = nbytes

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While inside, storages are sorted, and those that are resized noticed."""
        hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._before(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._after(optimizer)),
        ]
        try:
            with followed_memory(self._resized, self._modules.add, self._sort_modules):
                yield
                self._sort_modules()
        finally:
            for hook in hooks:
                hook.remove()

    def _resized(self, storage: Any, size: int) -> None:
        found = self._live.get(storage._cdata)
        if found is not None:
            self._resize(found[0], size)

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        self._sort(p for group in optimizer.param_groups for p in group["params"])

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self.seen(value).kind = "optimizer"

    def _sort_modules(self) -> None:
        self._sort(p for m in tuple(self._modules) for p in m.parameters(recurse=False))

    def _sort(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            self.seen(parameter).kind = "parameters"
            if parameter.grad is not None:
                self.seen(parameter.grad).kind = "gradients"

    def with_gradients(self) -> float:
        """How many of the parameters have their gradients, from 0 to 1."""
        all_ = [p for m in tuple(self._modules) for p in m.parameters(recurse=False)]
        return sum(p.grad is not None for p in all_) / max(1, len(all_))

    def peak(self, held: Collection[_Storage] = ()) -> dict[Kind, int]:
        """Bytes of each kind at the moment at which all but what is placed are most.

        Of what `hold` gave only ``held`` counts, among activations. What came before `begin` does
        not count. The state of optimizers does all the time: it is made at the end of the first
        step, and is there in each later one.
        """
        now: dict[Kind, int] = dict.fromkeys(
            ("parameters", "gradients", "optimizer", "activations"), 0
        )
        now["optimizer"] = self._most("optimizer")
        most, at = -1, dict(now)
        total = 0
        for index, (storage, change, _) in enumerate(self._changes):
            kind: Kind = "activations" if storage in held else storage.kind
            if kind not in now or kind == "optimizer":
                continue
            now[kind] += change
            total += change
            if total > most and index >= self._begin:
                most, at = total, dict(now)
        return at

    def most_without(self) -> int:
        """The most bytes at once if nothing lay in a placement: all but the segments.

        The same count as in `peak`.
        """
        most = total = 0
        for index, (storage, change, _) in enumerate(self._changes):
            if storage.kind not in ("segment", "optimizer", "held"):
                total += change
                most = max(most, total if index >= self._begin else 0)
        return most + self._most("optimizer")

    def reserved(self, *, without: bool, held: Collection[_Storage] = ()) -> int:
        """The most bytes that torch's allocator has for what `peak` counts.

        Args:
            without: Whether nothing lies in a placement: what `most_without` counts.
            held: As for `peak`.
        """
        cached = Cached()
        left = ("segment", "optimizer", "held") if without else ("segment", "optimizer", "placed")
        states = [c for c in self._changes if c[0].kind == "optimizer" and c[1] > 0]
        for index, (storage, change, stream) in enumerate(self._changes):
            if index == self._begin:
                cached.begin()
                for state in states:
                    cached.change(*state)
            if storage in held or (storage.kind != "held" and storage.kind not in left):
                cached.change(storage, change, stream)
        return cached.highest

    def _most(self, kind: Kind) -> int:
        """Peak bytes of a kind."""
        sizes = accumulate((n for s, n, _ in self._changes if s.kind == kind), initial=0)
        return max(sizes)
