"""Small all-reduces in which nobody meets: a word is there when it is not empty.

[Note: words that say that they came]
    Each rank writes its input straight into a slot of its own in each peer's workspace, in words of
    four bytes, and sums what comes into its own, in the order of the ranks. A slot has words that
    no rank sends: not a number, of one kind. Who finds anything else has the word, so no barrier
    comes before or behind. Who has read a word empties it again. Each word goes to all peers, so
    this serves small sums.

    Calls of even and of odd numbers have slots of their own. When a rank writes those of call n, it
    has ended call n - 1, for which it had words of each peer. Those come from a peer that has ended
    its call n - 2, and with it has read and emptied the slot: what a kernel stores is there when
    the kernel ends, before the next of its stream begins. Calls are counted on the device, so each
    replay of a CUDA graph is a call of its own. Calls whose order no stream gives have workspaces
    of their own, as their tensors, which use the signal pad, lie in different segments.

    In the words of [Note: peers count] in `symmplan.model`: such a sum synchronizes, as each word
    of a result needs all peers. It does not handshake, because a rank reads its own bytes when it
    starts, and it does not release, because peers may still write their results when it ends. Peers
    touch no bytes of a rank but its workspace.

Source: the all-reduces that TensorRT-LLM and FlashInfer call Lamport's.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from symmplan.device import device_of, runs_triton
from symmplan.memory.kernels import as_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.coordination.groups import Group
    from symmplan.memory.segment import Rendezvous

__all__ = ["Workspace", "kernels_run", "workspace_nbytes", "workspace_of"]

_LOG = logging.getLogger("symmplan")

#: Bytes that a rank may send to its peers in a call. With more, ranks that sum a part each are
#: faster.
_MOST = 1 << 20
#: Slots begin at a multiple of so many bytes: kernels are compiled for that.
_ALIGN = 64
#: Words of 32 bits that a program of the kernel sums, and its warps.
_BLOCK, _WARPS = 512, 4
#: How often a waiting program looks in a second, about.
_LOOKS = {"cuda": 2_000_000, "cpu": 10_000}
#: Whether a word of 32 bits has two numbers.
_HALVES = {torch.float32: False, torch.bfloat16: True}


def workspace_nbytes(ranks: int, nbytes: int) -> int:
    """Bytes of a workspace for sums of up to so many bytes, or fewer where those are too large."""
    room = min(max(nbytes, 4 * _BLOCK), _MOST // max(ranks - 1, 1)) // _ALIGN * _ALIGN
    return 2 * ranks * room


def kernels_run(group: Group, device: torch.device, timeout: float) -> bool:
    """Whether Triton runs the kernels of a workspace here; compiled now, not in a CUDA graph later.

    Args:
        group: The ranks.
        device: This rank's.
        timeout: As for `Workspace`.
    """
    if not runs_triton(device) or _kernel() is None:
        return False
    try:
        there = torch.empty(workspace_nbytes(group.size, 0), dtype=torch.uint8, device=device)
        alone = Workspace([there] * group.size, group.rank, timeout)
        for dtype in _HALVES:
            for numel in (4, 4 * _BLOCK):
                there.zero_()  # nothing is waited for
                alone.all_reduce(torch.zeros(numel, dtype=torch.uint8, device=device).view(dtype))
        device_of(device).synchronize()
    except Exception as error:  # noqa: BLE001 (Triton's, a compiler's, the driver's)
        _LOG.warning("Triton compiles no kernels on %s: %s", device, error)
        return False
    return True


@functools.cache
def _kernel() -> Any:
    try:
        from symmplan.memory.meeting.workspace_kernel import lamport_all_reduce
    except ImportError:
        return None
    return lamport_all_reduce


def workspace_of(meeting: Rendezvous, timeout: float) -> Workspace:
    """The workspace of a group whose ranks all have kernels.

    Args:
        meeting: How the ranks meet in `workspace_nbytes` bytes of each, which have no other use.
        timeout: As for `Workspace`.

    Collective: yes.
    """
    peers, rank = meeting.peers, meeting.group.rank
    peers[rank].fill_(255)  # all empty
    meeting.barrier()
    return Workspace(peers, rank, timeout, meeting)


class Workspace:
    """All-reduces over one group, one after the other. See [Note: words that say that they came].

    Args:
        peers: Each rank's workspace, as one-dimensional uint8.
        rank: Which of them is this rank's.
        timeout: Seconds that a kernel waits for a peer, about.
        holds: What keeps the peers' memory mapped.
    """

    def __init__(
        self, peers: Sequence[torch.Tensor], rank: int, timeout: float, holds: Any = None
    ) -> None:
        self._rank, self._ranks = rank, len(peers)
        self._own, self._holds = peers[rank].view(torch.int32), holds
        self._device = device = self._own.device
        self._room = self._own.numel() // (2 * self._ranks)  # words
        addresses = [peer.data_ptr() for peer in peers]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._calls = torch.zeros(2, dtype=torch.int32, device=device)
        self._limit = min(int(timeout * _LOOKS[device.type]), 2**31 - 1)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether it sums such tensors."""
        nbytes = tensor.numel() * tensor.element_size()
        return tensor.dtype in _HALVES and 0 < nbytes <= 4 * self._room and not nbytes % 4

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous tensor in place, in float32, rounded once: the same bits on all ranks.

        Collective: yes, in the order of the current stream, which is the same as of other calls.
        """
        words = as_bytes(tensor).view(torch.int32)
        numel = words.numel()
        with device_of(self._device).current():
            _kernel()[(-(-numel // _BLOCK),)](
                *(words, self._own, self._addresses, self._calls, numel, self._room, self._limit),
                RANKS=self._ranks,
                RANK=self._rank,
                HALVES=_HALVES[tensor.dtype],
                WHOLE=not numel % _BLOCK,
                TRAPS=self._device.type != "cpu",
                BLOCK=_BLOCK,
                num_warps=_WARPS,
            )
