"""A user's own model as a side of ``symmplan bench fsdp``: what ``train.py:build`` returns."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from symmplan.bench.parts.fsdp_sides import Side
from symmplan.bench.parts.programs import program_of
from symmplan.errors import CommandError
from symmplan.torch_private import fsdp2

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ProgramSide"]

_EXPECTED = "(model, step): a model under fully_shard, and a function that makes one step of it"


class ProgramSide(Side):
    """A user's model, trained by the user's own step.

    Args:
        name: Which side.
        rank: This one.
        options: Of the benchmark; ``program`` names the function that builds.

    Collective: yes.
    """

    _step: Callable[[], Any]

    @property
    def collectives(self) -> int:
        """0: how many collectives the user's program has is not known."""
        return 0

    def advance(self) -> None:
        """The user's step does all of it."""

    def _made(self) -> nn.Module:
        program = self._options["program"]
        world = str(self._options["ranks"])
        own = {"RANK": str(self._rank), "WORLD_SIZE": world}  # as torchrun tells a program
        os.environ.update({**own, **{f"LOCAL_{name}": value for name, value in own.items()}})
        built = program_of(program, "builds a sharded model")()
        if not (isinstance(built, tuple) and len(built) == 2):
            raise _wrong(program, type(built).__name__)
        model, step = built
        if not isinstance(model, nn.Module) or not callable(step):
            kinds = ", ".join(type(each).__name__ for each in built)
            raise _wrong(program, f"({kinds})")
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if not modules:
            raise CommandError(
                f"the model that {program!r} builds is not sharded",
                expected="a model under torch.distributed.fsdp.fully_shard",
                got=f"{type(model).__name__} without modules under fully_shard",
                fix="call fully_shard on the blocks and on the model before you return the model",
            )
        groups = [group for module in modules for group in fsdp2.param_groups(module)]
        comms = [comm for group in groups for comm in fsdp2.comms(group)]
        custom = [type(comm).__name__ for comm in comms if not fsdp2.is_plain_comm(comm)]
        if custom:
            raise CommandError(
                f"the model that {program!r} builds has other collectives than FSDP2's already",
                expected="a model without symmplan; the benchmark applies it",
                got=", ".join(dict.fromkeys(custom)),
                fix="remove symmplan.fsdp.apply, set_custom_all_gather and similar calls from "
                "the program",
            )
        self._step = step
        return model

    def _batches(self, number: int, tokens: int) -> list[torch.Tensor]:
        del number, tokens  # the step has its own
        return []

    def _stepped(self, batches: list[torch.Tensor]) -> torch.Tensor:
        del batches
        loss = self._step()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            return loss.detach()
        return torch.tensor(float(loss) if isinstance(loss, (int, float)) else math.nan)


def _wrong(program: str, got: str) -> CommandError:
    return CommandError(
        f"{program!r} does not return a model and its step",
        expected=_EXPECTED,
        got=got,
        fix="return model, step",
    )
