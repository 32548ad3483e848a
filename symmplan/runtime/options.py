"""The options of all entry points, checked in the same way for each.

They are checked where they are given, before the program is looked at.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

from symmplan.choose.choice import CHOOSE
from symmplan.choose.tuning_table import is_table, read_table
from symmplan.coordination.world import current, on_device
from symmplan.device import accelerator, device_of, kind_of
from symmplan.errors import CaptureError, OptionError, closest
from symmplan.memory import BACKENDS, DEFAULT_TIMEOUT
from symmplan.memory.backends import check_device
from symmplan.planner.budget import bytes_of
from symmplan.torch_private import c10d, nccl

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from symmplan.choose.choice import Choose
    from symmplan.choose.tuning_table import Table
    from symmplan.memory.backends import MemoryName
    from symmplan.model import AlgorithmName
    from symmplan.place.algorithms import Collectives


@frozen(kw_only=True)
class Options:
    """How a program is to be placed.

    Attributes:
        memory: Name of the memory backend, or ``"auto"``: shared memory for CPU ranks; on devices
            NCCL's, or CUDA's where only that serves the program's groups, in two levels, and for a
            compiled graph without a backward of small sums over all ranks of a host. See [Note: two
            levels by default] in `symmplan.memory.backends.resolve`.
        choose: How the algorithms of collectives are chosen. ``"measure"``: each kind and size of
            collective is timed in every way there is, and what is not clearly faster in symmetric
            memory is left out of the plan. ``"placed"``, the same as ``"symmetric"``: all that can
            be is in symmetric memory. ``"ordinary"``: no collective is, only ops that need it.
            ``"copy engine"``: collectives that have it run without kernels where the memory backend
            has copy engines, the others in symmetric memory. ``"push"``: the same, but FSDP2's
            reduce-scatters are pushes of gradients into peers' memory; ``"shared push"``: into
            bytes that others have before and after. ``"two-level"``: all in symmetric memory;
            groups on several hosts have no other way there. ``"auto"``: measured on devices and
            over several hosts, placed elsewhere, as shared memory between processes is always
            faster. The path of a file that ends with ``.json``: as it was measured elsewhere, see
            `symmplan.choose.tuning_table`; equal on all ranks.
        capacity: Bytes that all segments of a plan may take together on any rank, as a number or as
            text such as ``"40GiB"``; the least of what the ranks were given counts. None for what
            the program has without symmplan, less a tenth; see [Note: what the program had] in
            `symmplan.memory.room`. Collectives that do not fit are demoted; see [Note: demotions]
            in `symmplan.planner.budget`.
        timeout: Seconds that ranks wait for each other before they raise.
        debug: Whether dead placements are overwritten, so that a late reader shows; True also to
            look for races, ``"poison"`` for the former alone.
        collectives: Whose collectives run; see `symmplan.place.algorithms.Lowerings`.

    Raises:
        OptionError: A backend, an algorithm, a debug mode or collectives that do not
            exist, a capacity that is not a number of bytes, a timeout that is not a number of
            seconds, or a table that cannot be read.
        BackendError: A backend that serves no device of this process.
    """

    memory: MemoryName = "auto"
    choose: Choose = "auto"
    capacity: int | None = field(default=None, converter=bytes_of)
    timeout: float = DEFAULT_TIMEOUT
    debug: bool | Literal["poison"] = False
    collectives: Collectives = "auto"

    def __attrs_post_init__(self) -> None:
        known("memory backend", self.memory, tuple(BACKENDS))
        if is_table(self.choose):
            read_table(str(self.choose))
        else:
            known("algorithm", self.choose, CHOOSE)
        known("debug mode", self.debug, (True, False, "poison"))
        known("collectives", self.collectives, ("auto", "process group"))
        seconds: Any = self.timeout
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not number or not 0 < seconds < math.inf:
            raise OptionError(
                f"timeout is {seconds!r}",
                expected="a number of seconds above 0",
                got=repr(seconds),
                fix=f"pass timeout={DEFAULT_TIMEOUT}",
            )
        if BACKENDS[self.memory].devices:
            import torch

            if accelerator() is None:
                self.check_device(torch.device("cpu"))

    def check_device(self, device: torch.device) -> None:
        """Refuse a memory backend that serves no tensors on ``device``.

        Raises:
            BackendError: It serves none. In a simulated world none is obtained, so none is refused.
        """
        if current() is None:
            check_device(self.memory, device)

    @property
    def table(self) -> Table | None:
        """The tuning table that was given, or that a simulated world has."""
        if is_table(self.choose):
            return read_table(str(self.choose))
        world = current()
        if world is None or world.choices is None:
            return None
        return read_table(world.choices)

    def chosen(self, device: torch.device) -> AlgorithmName | Literal["measure", "table"]:
        """``"measure"``, the algorithm of all collectives that have it, or ``"table"``."""
        choose: Any = self.choose
        if choose == "auto":
            choose = "measure" if on_device(device) else "symmetric"
        if is_table(choose) or (choose == "measure" and current() is not None):
            return "table"
        found: AlgorithmName | Literal["measure"] = "symmetric" if choose == "placed" else choose
        return found

    def agreed(self, device: torch.device) -> dict[str, tuple[Any, Any]]:
        """``{option: (what must be equal on all ranks, how it was given)}``, as plain data.

        The backend is not in it, which may be the same under other names; nor are the capacity,
        of which the least counts, and the timeout.
        """
        table = None if self.table is None else self.table.digest
        same = {"debug": self.debug, "collectives": self.collectives}
        return {
            "device": (device.type, device.type),
            "table": (table, table),
            "choose": (self.chosen(device), str(self.choose)),
            **{name: (x, x) for name, x in same.items()},
        }


def here(who: str, group: Any, device: torch.device | str | None) -> tuple[str, torch.device]:
    """Name of a process group, and the device of its tensors.

    Args:
        who: Needs them, for people.
        group: Torch's process group; the default one if None.
        device: Where they lie; the current CUDA device if the group has NCCL, else the CPU.

    Raises:
        CaptureError: There is no process group, or ``group`` is none.
        OptionError: There is no such device.
    """
    import torch

    if not c10d.has_process_groups():
        raise CaptureError(
            f"{who} needs torch.distributed",
            expected="an initialised process group",
            got="none",
            fix="call torch.distributed.init_process_group first",
        )
    chosen: Any = torch.distributed.group.WORLD if group is None else group
    if not isinstance(chosen, torch.distributed.ProcessGroup):
        raise CaptureError(
            f"{who} was given no process group",
            expected="a torch.distributed.ProcessGroup, or None for all ranks",
            got=repr(group),
            fix="pass mesh.get_group() of a device mesh, or the result of "
            "torch.distributed.new_group",
        )
    if device is None:
        device = accelerator()
        if device is None or not nccl.serves(chosen):
            device = "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(
            f"device is {device!r}",
            expected="a torch.device, or the name of one",
            got=repr(device),
            fix="leave device= out, or pass the device of the program's tensors",
        ) from error
    if not kind_of(found).is_available():
        raise OptionError(
            f"device is {device!r}",
            expected="a device that this process has",
            got="no CUDA device",
            fix="leave device= out; symmplan doctor says what this machine has",
        )
    return c10d.group_name(chosen), device_of(found).device


def function(what: str, given: object, fix: str) -> None:
    """Refuse what cannot be called.

    Raises:
        OptionError: It is no function.
    """
    if not callable(given):
        raise OptionError(
            f"{what} is {given!r}", expected="a function", got=type(given).__name__, fix=fix
        )


def known(what: str, given: object, names: Sequence[object]) -> None:
    """Refuse what is none of ``names``; the first is what is advised.

    Raises:
        OptionError: It is none of them; 1 is not True.
    """
    if not any(isinstance(given, type(name)) and given == name for name in names):
        close = closest(given, names)
        raise OptionError(
            f"unknown {what} {given!r}",
            expected=", ".join(map(repr, names)),
            got=repr(given),
            fix=f"did you mean {close!r}?" if close else f"use {names[0]!r}",
        )


def whole(what: str, given: object, least: int = 1) -> None:
    """Refuse everything but an integer of at least ``least``.

    Raises:
        OptionError: It is none; True is not 1.
    """
    if isinstance(given, bool) or not isinstance(given, Integral) or given < least:
        raise OptionError(
            f"{what} is {given!r}",
            expected=f"a whole number of at least {least}",
            got=repr(given),
            fix=f"pass {what}={least} or more",
        )
