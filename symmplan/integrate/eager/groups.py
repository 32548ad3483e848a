"""Which calls of an eager program are its session's: those over the session's ranks.

[Note: other groups]
    Ranks of a session may also be in groups that not all of them are in, such as those of tensor
    parallelism. A call over such a group comes on its ranks only, so the others cannot agree on
    it. It runs in torch's own way, in every iteration. Its tensors stay in ordinary memory, because
    only the group's ranks know when it uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from symmplan.errors import CaptureError
from symmplan.registry import resolve_group_name, spec_for
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.torch_private.ops import OpOverload


@frozen(eq=False)
class OwnGroups:
    """Tells a session's calls from those over other groups. See [Note: other groups].

    Args:
        group: Name of the session's group.
        ranks: Its ranks in the world.
    """

    group: str
    ranks: Sequence[int]
    #: ``{name of a group: whether it has these ranks}``.
    _known: dict[str, bool] = field(init=False, factory=dict)

    @property
    def why_none(self) -> str:
        """Why none of an iteration's calls was the session's."""
        others = [name for name, ours in self._known.items() if not ours]
        if others:
            return (
                f"the iteration called declared ops over other groups alone ({', '.join(others)}; "
                f"the session's is {self.group}): give symmplan.eager() theirs as group="
            )
        return (
            "the iteration called no declared op (`symmplan ops` lists those that are, "
            "symmplan.symm_args declares others)"
        )

    def elsewhere(self, op: OpOverload) -> Callable[[Any, Any], bool]:
        """A function of a call's arguments that says whether it is over another group.

        Args:
            op: What is called.
        """
        spec = spec_for(op)
        if spec is None or spec.group is None:
            return lambda *_: False
        name = spec.group
        index = [a.name for a in op._schema.arguments].index(name)

        def elsewhere(args: Any, kwargs: Any) -> bool:
            group = args[index] if index < len(args) else kwargs.get(name)
            if not isinstance(group, str):
                try:
                    group = resolve_group_name(spec, op, args, kwargs, self.group)
                except CaptureError:  # the op says so, where it minds
                    return True
            known = self._known.get(group)
            return not (self._have(group) if known is None else known)

        return elsewhere

    def _have(self, group: str) -> bool:
        try:
            known = sorted(c10d.group_ranks(group)) == sorted(self.ranks)
        except LookupError:  # the op says so, where it minds
            known = False
        self._known[group] = known
        return known
