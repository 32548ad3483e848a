"""Rows that kernels write straight into peers' memory, and counts that the host never sees.

The kernels run on CUDA devices; where Triton interprets (``TRITON_INTERPRET=1``), in shared memory.
See [Note: signals] in `symmplan.integrate.moe.rows_kernel`.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from symmplan.device import device_of, kind_of, runs_triton
from symmplan.errors import PeerTimeoutError, RunError
from symmplan.memory.kernels import as_bytes, word_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.coordination.groups import Group
    from symmplan.errors import SymmplanError
    from symmplan.integrate.moe.routes import PaddedRoutes, Routes
    from symmplan.memory.segment import Rendezvous
    from symmplan.model import Placement

__all__ = ["DeviceRows", "has_kernels", "signals_nbytes"]

#: Programs that send, that move what a rank keeps, and that take out, on devices and where Triton
#: interprets: ``[whether the program has other work meanwhile]``.
_PROGRAMS = {"cuda": ((32, 32, 128), (32, 8, 32)), "cpu": ((2, 1, 2), (2, 1, 2))}
#: Bytes that a program copies at a time, and its warps.
_BLOCK, _WARPS = 32 * 1024, 16
#: How often a waiting program looks in a second, about.
_LOOKS = {"cuda": 1_000_000, "cpu": 10_000}


def has_kernels(device: torch.device) -> bool:
    """Whether there is a Triton that runs kernels on ``device``."""
    return runs_triton(device) and _kernels() is not None


@functools.cache
def _kernels() -> Any:
    try:
        from symmplan.integrate.moe import rows_kernel
    except ImportError:
        return None
    return rows_kernel


def signals_nbytes(ranks: int) -> int:
    """Bytes of a rank's signals; see [Note: signals] in `symmplan.integrate.moe.rows_kernel`."""
    return 8 * (4 * ranks + 2 * ranks * (ranks + 1))


class DeviceRows:
    """Exchanges over one group by kernels, one after the other.

    Args:
        meeting: How the ranks meet where rows and signals lie.
        slot: Where rows come in.
        signals: Where signals do; bytes with no other use.
        group: The ranks.
        device: Where the rows lie.
        timeout: Seconds that a kernel waits for a peer, about.

    Collective: yes, to make one.
    """

    def __init__(
        self,
        meeting: Rendezvous,
        slot: Placement,
        signals: Placement,
        group: Group,
        device: torch.device,
        timeout: float,
    ) -> None:
        peers = meeting.peers
        self._peers = peers  # whose memory stays mapped meanwhile
        self._group, self._device = group, device
        self._slot, self._signals = slot.offset, signals.offset
        addresses = [peer.data_ptr() for peer in peers]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._state = torch.zeros(4, dtype=torch.int64, device=device)
        # The host looks at it without waiting for the device.
        self._told = torch.zeros(2, dtype=torch.int64, pin_memory=kind_of(device).pins_memory)
        self._limit = min(int(timeout * _LOOKS[device.type]), 2**31 - 1)
        self._timeout = timeout
        self._compiled: dict[Any, Any] = {}
        self._padded_size = 1 << (group.size - 1).bit_length()
        peers[group.rank][signals.offset : signals.end].zero_()
        meeting.barrier()

    def table(self, counts: torch.Tensor, rows: int) -> torch.Tensor:
        """The counts of all ranks: ``(ranks, ranks + 1)``; behind each rank's, the rows it has.

        Args:
            counts: How many rows this rank sends to each, 64 bits, on the device.
            rows: How many it has.

        Collective: yes.
        """
        size = self._group.size
        made = torch.empty(size, size + 1, dtype=torch.int64, device=self._device)
        given = counts, made, self._addresses, self._state, self._told
        numbers = self._group.rank, size, rows, self._signals, self._limit
        constants = {"RANKS": self._padded_size}
        self._launch("exchange_counts", 1, (*given, *numbers), constants, 4)
        return made

    def push(
        self,
        result: torch.Tensor,
        rows: torch.Tensor,
        routes: Routes | PaddedRoutes,
        room: int,
        *,
        apart: bool,
    ) -> Callable[[], None]:
        """Start an exchange on the current stream.

        Args:
            result: Where this rank's rows go; contiguous, as ``rows``.
            rows: What it sends.
            routes: Who sends how many to whom.
            room: How many rows a rank may get.
            apart: Whether the program has other work until it ends.

        Returns:
            What ends it, on the stream that is current then, behind this one. Before the next one
            starts, it must be called.

        Collective: yes, and what is returned, too.
        """
        group = self._group
        nbytes = math.prod(rows.shape[1:]) * rows.element_size()
        kind = word_of(nbytes, rows.data_ptr() | result.data_ptr())
        width = nbytes // kind.itemsize
        given, made = (as_bytes(x.detach()).view(kind) for x in (rows, result))
        table = routes.on_device(self._device)
        steps = (group.size + 1, 1) if routes.out else (1, group.size + 1)
        where = (table, self._addresses, self._state, self._told, group.rank, group.size)
        senders, keepers, takers = _PROGRAMS[self._device.type][apart]
        constants = {
            "RANKS": self._padded_size,
            "ALIGN": 2 if kind is torch.int64 and not width % 2 else 1,
            "ITEM": kind.itemsize,
            "BLOCK": _BLOCK // kind.itemsize,
            "WHOLE": _kernels().WHOLE,
        }
        sending = {**constants, "SENDERS": senders, "KEEPERS": keepers}
        taking = {**constants, "PROGRAMS": takers}
        there = (self._slot, self._signals, self._limit)
        args = (given, made, *where, *steps, room, width, result.shape[0], *there)
        self._launch("push_rows", senders + keepers, args, sending, _WARPS)

        def take() -> None:
            args = (made, *where, *steps, room, width, *there)
            self._launch("take_rows", takers, args, taking, _WARPS)

        return take

    def _launch(
        self, name: str, programs: int, args: Sequence[Any], constants: dict[str, int], warps: int
    ) -> None:
        """Launch a kernel, past Triton's look at all arguments where it has seen such before.

        Args:
            name: Its name.
            programs: How many there are.
            args: Its arguments. Of the first three, tensors, Triton asks for the type and whether
                they begin at 16 bytes. The others are alike in all calls of its name.
            constants: Its constants, in their order.
            warps: Of a program.
        """
        begins = ((x.dtype, x.data_ptr() % 16 == 0) for x in args[:3])
        key = (name, *begins, *constants.values())
        known = self._compiled.get(key)
        with device_of(self._device).current():
            if known is not None:
                known[programs, 1, 1](*args, *constants.values())
                return
            kernel = getattr(_kernels(), name)
            made = kernel[programs, 1, 1](*args, **constants, num_warps=warps)
            if hasattr(made, "packed_metadata"):  # not where Triton interprets
                self._compiled[key] = made

    def fault(self) -> SymmplanError | None:
        """What kernels have found wrong so far; None if nothing. The host waits for nothing."""
        code, value = self._told.tolist()
        kernels = _kernels()
        here = self._group.here
        if code == kernels.FITS:
            return None
        if code == kernels.OVERFLOW:
            return RunError(
                f"a call outgrew its plan: a rank gets {value} rows",
                expected="at most max_tokens rows, because only the device knew the counts",
                got=f"{value} rows",
                fix=f"pass max_tokens={value} or more, or leave rows= out",
                **here,
            )
        if code == kernels.COUNTS:
            return RunError(
                f"the counts of rank {value} are not valid",
                expected="non-negative numbers of rows, with a sum of at most the rows that exist",
                got="other numbers, which only the device knows",
                fix="pass how many rows go to each rank of the group",
                **here,
                ranks=(value,),
            )
        if code == kernels.WIDTHS:
            return RunError(
                f"rank {value} came to an exchange with rows of another size",
                expected="rows of one shape and type on all ranks",
                got="rows of more bytes, or of fewer",
                fix="pass rows of the same width and dtype on every rank",
                **here,
                ranks=(value,),
            )
        return PeerTimeoutError(
            f"rank {value} did not come to an exchange of rows",
            expected=f"all ranks within {self._timeout:g} s",
            got=f"no signal of rank {value}",
            fix="make the same calls on all ranks, or pass a longer timeout=",
            **here,
            missing=(value,),
        )
