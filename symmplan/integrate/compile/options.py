"""How a compile backend was asked to work."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs.converters import optional

from symmplan.coordination.groups import group_key
from symmplan.runtime.options import Options, known


@frozen(kw_only=True)
class CompileOptions(Options):
    """How a compile backend was asked to work; see `Options`.

    Attributes:
        inner: The compiler of the rewritten graphs, ``"inductor"`` or ``"eager"``.
        bind: Keep static inputs of declared ops in symmetric memory.
        default_group: Name of the group of ops that name none; the world if None.
    """

    inner: Literal["inductor", "eager"] = "inductor"
    bind: bool = False
    default_group: str | None = field(default=None, converter=optional(group_key))

    @property
    def may_sum(self) -> bool:
        """Whether small sums may have the memory in which kernels add them up."""
        asked = self.choose in ("auto", "measure", "placed", "symmetric")
        return asked and self.collectives == "auto"

    def __attrs_post_init__(self) -> None:
        known("inner compiler", self.inner, ("inductor", "eager"))
        known("bind=", self.bind, (False, True))
        super().__attrs_post_init__()
