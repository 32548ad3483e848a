"""What FSDP2 did in a stretch of the program: its collectives, and how long their buffers lived."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from attrs import define, evolve, field, frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["Call", "Key", "Kind", "Recording"]

Kind = Literal["all_gather", "reduce_scatter"]


@frozen(cache_hash=True)
class Key:
    """By what a collective is recognised in a later step; equal on all ranks."""

    site: str  # name of the FSDP module in the model
    kind: Kind  # ``"all_gather"`` or ``"reduce_scatter"``
    numel: int  # elements of the all-gather's output, or of the reduce-scatter's input
    dtype: str  # element type, as torch prints it
    backward: bool  # whether autograd was running

    @property
    def nbytes(self) -> int:
        """Size of its buffer in bytes."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return self.numel * dtype.itemsize

    @property
    def of_backward(self) -> bool:
        """Whether it belongs to a backward pass; FSDP2 may reduce after it."""
        return self.backward or self.kind == "reduce_scatter"


@frozen
class Call:
    """A collective.

    Attributes:
        key: See `Key`.
        nbytes: Size of its buffer in bytes.
        group: Name of the process group. Empty until it runs: FSDP2 also asks for buffers that it
            then uses without a collective.
    """

    key: Key
    nbytes: int
    group: str = ""


@define(eq=False)
class Recording:
    """The events of a stretch of the program, in the order of issue.

    Attributes:
        collectives: Every buffer that FSDP2 asked for, in order.
        events: ``(what, index in collectives)`` with ``"begin"``, ``"run"``, ``"drop"``, or
            ``"release"``: the module is done with the parameters that this all-gather gathered;
            and ``("guest", number)``: a guest runs, see `symmplan.place.guests`.
        heard: Of collectives that are not FSDP2's how many of its had run before, and what they
            are; see `symmplan.place.listening`.
        after_forward: The all-gathers whose modules FSDP2 released because forward was done.
        carried: Those that ran before the stretch, and whose modules were not released since.
    """

    collectives: list[Call] = field(factory=list)
    events: list[tuple[str, int]] = field(factory=list)
    heard: list[tuple[int, Any]] = field(factory=list)
    after_forward: set[int] = field(factory=set)
    carried: set[int] = field(factory=set)
    _launched: int = 0

    def begin(self, key: Key, nbytes: int) -> int:
        """FSDP2 asks for a buffer of ``nbytes`` bytes; returns its index."""
        index = len(self.collectives)
        self.collectives.append(Call(key, nbytes))
        self.events.append(("begin", index))
        return index

    def run(self, index: int, group: str) -> None:
        """The collective of buffer ``index`` runs over ``group``."""
        call = self.collectives[index]
        self.collectives[index] = Call(call.key, call.nbytes, group)
        self.events.append(("run", index))
        self._launched += 1

    def hear(self, other: Any) -> None:
        """Somebody else's collective is called. May be called from any thread."""
        self.heard.append((self._launched, other))

    def drop(self, index: int) -> None:
        """Nobody holds buffer ``index`` any more. May be called from any thread."""
        self.events.append(("drop", index))

    def release(self, index: int, *, after_forward: bool = False) -> None:
        """The parameters that all-gather ``index`` gathered are resharded."""
        self.events.append(("release", index))
        if after_forward:
            self.after_forward.add(index)

    def carry(self, key: Key, group: str) -> int:
        """A module's parameters are there when the stretch begins; returns the gather's index."""
        index = self.begin(key, key.nbytes)
        self.run(index, group)
        self.carried.add(index)
        return index

    def guest(self, number: int) -> None:
        """A guest runs. Once between two other events is enough, however long FSDP2 rests."""
        behind = (i for i, e in enumerate(reversed(self.events)) if e[0] != "guest")
        last = next(behind, len(self.events))
        if ("guest", number) not in self.events[len(self.events) - last :]:
            self.events.append(("guest", number))

    @property
    def ran(self) -> tuple[int, ...]:
        """The indices of the collectives that ran."""
        return tuple(i for i, c in enumerate(self.collectives) if c.group)

    def drops(self) -> list[int | None]:
        """For each buffer, how many of the other events came before its drop; None if it lives."""
        result: list[int | None] = [None] * len(self.collectives)
        before = 0
        for what, index in tuple(self.events):  # other threads may append
            if what == "drop":
                result[index] = before
            else:
                before += 1
        return result

    def with_drops(self, drops: Sequence[int | None]) -> Recording:
        """The same with other drops, those of one moment in the order of their buffers."""
        due: dict[int, list[int]] = {}
        for index, before in enumerate(drops):
            if before is not None:
                due.setdefault(before, []).append(index)
        events: list[tuple[str, int]] = []
        others = [event for event in tuple(self.events) if event[0] != "drop"]
        for before, event in enumerate([*others, None]):
            events += [("drop", index) for index in due.get(before, ())]
            events += [] if event is None else [event]
        return evolve(self, events=events)
