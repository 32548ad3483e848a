"""All-to-alls whose tensors are not equally large on all ranks.

[Note: uneven all-to-alls]
    Ranks may send different numbers of rows to each other, but they must plan the same bytes. So
    before a part with all-to-alls is captured, its ranks tell each other the sizes, and whether the
    compiled code has them from elsewhere, as a list: then one rank alone may get another list, and
    its peers, which run on with theirs, could not know. A call whose sizes differ, or are given,
    stays in ordinary memory on all ranks, now and whenever its code is compiled again.
    So does a call that has no placement with its first sizes, whatever the reason. A rank may
    compile again alone, because its own sizes have changed, and asks nobody then. It also asks
    nobody if all its parts are of one size that all ranks had before.

    If a call had equal sizes before, there are graphs in which it is placed. One rank alone could
    return to them. So when ranks learn that a call stays in ordinary memory from then on, they drop
    what was compiled of its code so far, all at the same place of the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan.capture.bounds import bound
from symmplan.capture.graphs import tensor_leaves
from symmplan.coordination.groups import resolve_groups
from symmplan.integrate.compile.parts import declared
from symmplan.place.algorithms import has_unequal_parts, why_unfit
from symmplan.registry.catalogue import collective_of
from symmplan.torch_private.compilers import (
    compile_again,
    compiled_code,
    compiled_frame,
    lists_of_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx

    from symmplan.capture import Captured
    from symmplan.integrate.compile.parts import PartName
    from symmplan.integrate.compile.pool import Pool
    from symmplan.model import OpSpec
    from symmplan.place.algorithms import Lowerings

__all__ = ["GIVEN", "UNEVEN", "AllToAlls"]

#: Where all parts are equally large, torch's functions compute their sizes if they get none.
GIVEN = (
    "the program gives the sizes of its parts in a list, which may be another one on one rank "
    "alone; where they are equal, pass None"
)

UNEVEN = "its tensors are not equally large on all ranks, and all ranks must plan the same bytes"


class AllToAlls:
    """The all-to-alls of a part that is compiled.

    Args:
        module: The part.
        name: Which it is.
        groups: ``{call: name of its group}`` of all declared calls.
        pool: Knows which sizes all ranks had alike.
    """

    def __init__(
        self, module: fx.GraphModule, name: PartName, groups: Mapping[fx.Node, str], pool: Pool
    ) -> None:
        self._groups, self._pool = groups, pool
        calls = [(n, s) for n, _, s in declared(module.graph) if n in groups]
        calls = [(n, s) for n, s in calls if collective_of(s.op) == "all-to-all"]
        self._calls: dict[fx.Node, OpSpec] = dict(calls)
        self._given = lists_of_numbers() if calls else set()
        self._keys = {n: (compiled_frame(), name, i) for i, n in enumerate(self._calls)}

    @property
    def left_out(self) -> dict[fx.Node, str]:
        """Those that stay in ordinary memory for good, and why."""
        found = {n: self._pool.exchanged.get(key) for n, key in self._keys.items()}
        return {node: why for node, why in found.items() if isinstance(why, str)}

    def settle(self, captured: Captured) -> None:
        """Leave those in ordinary memory for good that have no placement with their first sizes."""
        for node, key in self._keys.items():
            first = len(self._pool.exchanged.get(key) or ()) == 1
            reasons = [s.reason for s in captured.at(node) if s.reason]
            if first and reasons and all(s.buffer is None for s in captured.at(node)):
                self._pool.exchanged[key] = reasons[0]

    def uneven(self, lowerings: Lowerings) -> dict[fx.Node, str]:
        """Those that stay in ordinary memory, and why. See [Note: uneven all-to-alls].

        Collective: over their groups, if there are sizes that were not compared yet.
        """
        exchanged = self._pool.exchanged
        new: dict[str, dict[fx.Node, list[Any]]] = {}
        for node, key in self._keys.items():
            sizes, known = self._sizes(node, lowerings), exchanged.setdefault(key, set())
            if isinstance(known, str) or None in sizes:  # it stays out on all ranks
                continue
            if tuple(sizes) not in known or has_unequal_parts(node):
                new.setdefault(self._groups[node], {})[node] = sizes
        if new:
            groups = {n: g.process_group for n, g in resolve_groups(new).items()}
            told = {name: list(mine.values()) for name, mine in new.items()}
            said = self._pool.progress.gather(groups, told=told)
            was_placed = False
            for name, mine in new.items():
                for i, (node, sizes) in enumerate(mine.items()):
                    key = self._keys[node]
                    same = all(_is_same(other, i, sizes) for other in said[name])
                    given = any(_at(other, i)[-1:] == [True] for other in said[name])
                    was_placed = was_placed or (bool(exchanged[key]) and (given or not same))
                    alike = {*exchanged[key], tuple(sizes)} if same else UNEVEN
                    exchanged[key] = GIVEN if given else alike
            code = compiled_code() if was_placed else None
            if code is not None:
                compile_again(code)
        return self.left_out

    def _sizes(self, node: fx.Node, lowerings: Lowerings) -> list[Any]:
        """What the plan depends on: bytes of its tensors, whether it can be placed, may change."""
        values = (n.meta.get("val") for n in (node, *node.all_input_nodes))
        tensors = [fake for value in values for _, fake in tensor_leaves(value)]
        row = lowerings.row(self._calls[node], self._groups[node])
        unfit = row is not None and bool(why_unfit(row, node))
        parts = (tuple(a) for a in node.args if isinstance(a, (list, tuple)) and a)
        given = any(sizes in self._given for sizes in parts)
        return [*(bound(t.numel() * t.element_size()) for t in tensors), unfit, given]


def _is_same(other: Any, index: int, sizes: list[Any]) -> bool:
    return bool(_at(other, index) == sizes)


def _at(other: Any, index: int) -> list[Any]:
    """What a rank told of one call; nothing if it has no such call."""
    told = other[index : index + 1] if isinstance(other, list) else []
    return told[0] if told and isinstance(told[0], list) else []
