"""The options of a session, and the rounds in which its ranks say what they are about to do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from symmplan.coordination.exchange import Exchange
from symmplan.errors import AgreementError
from symmplan.integrate.eager.groups import OwnGroups

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from symmplan.capture.streams import DeviceStreams
    from symmplan.coordination.groups import Group
    from symmplan.runtime.options import Options


@frozen
class Settings:
    """The options of a session.

    Attributes:
        groups: ``{name: group}`` of its ranks, one.
        device: Where declared tensors lie.
        streams: The device's streams; None if it has none.
        options: The user's options.
        own_groups: The groups whose calls are the session's.
    """

    groups: Mapping[str, Group]
    device: torch.device
    streams: DeviceStreams | None
    options: Options
    own_groups: OwnGroups = field(init=False)

    @own_groups.default
    def _own_groups(self) -> OwnGroups:
        return OwnGroups(self.group.torch_name, self.group.ranks)

    @property
    def group(self) -> Group:
        """The group of its ranks."""
        (group,) = self.groups.values()
        return group

    @property
    def process_groups(self) -> dict[str, Any]:
        """Torch's group under its name."""
        return {self.group.name: self.group.process_group}


def meet(settings: Settings, op: str, detail: str = "", more: Any = None) -> list[Any]:
    """Every rank says what it is about to do.

    Args:
        settings: Of the session.
        op: What it is.
        detail: What else must be equal on all ranks.
        more: What need not, as plain data.

    Returns:
        ``more`` of each rank.

    Raises:
        AgreementError: Somebody is about to do something else.

    Collective: yes.
    """
    group = settings.group
    with Exchange(settings.groups, settings.options.timeout) as exchange:
        note = json.dumps([op, detail, more]).encode()
        said = [json.loads(text) for text in exchange.round("call", note)[group.name]]
    other = next((i for i, given in enumerate(said) if given[:2] != said[0][:2]), None)
    if other is not None:
        texts = [said[i][:2] for i in (0, other)]
        names = [f"{what} {how}".strip() for what, how in texts]
        raise AgreementError(
            f"ranks 0 and {other} make different calls in a recorded iteration",
            expected=f"{names[0]} (rank 0)",
            got=f"{names[1]} (rank {other})",
            fix="make the same declared calls with the same shapes on every rank",
            group=group.name,
            rank=group.rank,
            ranks=(0, other),
            op=texts[0][0],
            buffer="",
        )
    return [given[2] for given in said]
