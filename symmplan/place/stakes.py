"""What the calls of a captured program have at stake when bytes are short.

See [Note: who gives way] in `symmplan.planner.budget`. Calls of one op over one group with tensors
of the same sizes give way together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from symmplan.place.choice import GAVE_WAY
from symmplan.planner.budget import Stake

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    from torch import fx

    from symmplan.capture import Captured
    from symmplan.place.chooser import Chosen
    from symmplan.place.ways import Lowerings

__all__ = ["Stakes"]


@define(eq=False)
class Stakes:
    """Which calls of a program give way together; found when it is first captured."""

    lowerings: Lowerings
    _kinds: dict[fx.Node, Hashable] = field(init=False, factory=dict)

    def refused(self, gave: Collection[Hashable]) -> dict[fx.Node, str]:
        """``{call: reason}`` of those that gave way."""
        return {node: GAVE_WAY for node, kind in self._kinds.items() if kind in gave}

    def of(self, captured: Captured, chosen: Chosen) -> list[Stake]:
        """What its calls have in symmetric memory."""
        problems = [p for p in (captured.problem, captured.residence) if p is not None]
        buffers = {b.name: b for p in problems for b in p.buffers}
        there: dict[fx.Node, list[str]] = {}
        for site in captured.sites:
            if site.buffer is not None:
                there.setdefault(site.node, []).append(site.buffer)
        alike: dict[Hashable, list[fx.Node]] = {}
        for node, names in there.items():
            sizes = tuple(buffers[name].nbytes for name in names)
            key = (captured.specs[node].op, buffers[names[0]].group, sizes)
            alike.setdefault(self._kinds.setdefault(node, key), []).append(node)
        stakes = []
        for kind, nodes in alike.items():
            spec, nbytes = captured.specs[nodes[0]], sum(buffers[n].nbytes for n in there[nodes[0]])
            choice = chosen.of.get(nodes[0])
            stakes.append(
                Stake(
                    key=kind,
                    what=f"{spec.op} with {nbytes:,} bytes",
                    way="copy engine" if nodes[0] in chosen.engines else "symmetric",
                    calls=len(nodes),
                    nbytes=nbytes,
                    buffers=frozenset(name for node in nodes for name in there[node]),
                    seconds={} if choice is None else choice.seconds,
                    needed=self.lowerings.row(spec) is None,
                )
            )
        return stakes
