"""Which memory backend a program gets.

[Note: two levels by default]
    On devices ``memory="auto"`` is NCCL's memory, which serves no group on several hosts without
    NVLink between them. CUDA's mappings serve such a group in two levels; see [Note: two levels] in
    `symmplan.memory.meeting.counterparts`. One allocator serves a process, see [Note: torch's
    allocators]. So ``"auto"`` is ``"cuda"`` if NCCL's memory reaches none of the program's groups,
    CUDA's serves one of them in two levels, and torch's allocator is CUDA's. A program that has
    other groups within a host, as HSDP does, keeps NCCL's memory. What was decided stays so in this
    process: torch keeps NCCL's allocator once it is chosen, and CUDA's cannot be chosen, so
    `PROCESS` does. Otherwise a later program, or another graph of the same one, would take the
    allocator from a plan that has not allocated yet.

    Sums of up to some MiB are faster over CUDA's mappings (see `symmplan.place.algorithms`), so
    ``"auto"`` is those for a compiled graph without a backward that has no other collectives, if
    torch's allocator is CUDA's and the graph's groups are all ranks, on one host, where NCCL's
    windows serve them, too: all other programs have these then, which need no allocator of torch's.

    A rank knows its own groups and its own allocator, and the topology of its groups. Ranks that
    meet it in one group may have others. So the ranks of groups on several hosts tell each other
    what they found (`agree_on_levels`). A program on one host does not exchange more for that.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch.distributed as dist

from symmplan.coordination.world import current
from symmplan.device import kind_of
from symmplan.errors import BackendError
from symmplan.memory.backends import BACKENDS, check_device, misfit
from symmplan.memory.meeting.topology import known
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from symmplan.coordination.exchange import Exchange
    from symmplan.coordination.groups import Group
    from symmplan.memory.backends import Backend

__all__ = ["agree_on_levels", "resolve_backend"]


def resolve_backend(
    memory: str,
    device: torch.device,
    groups: Mapping[str, Group],
    *,
    temporary: bool = False,
    levels: bool | None = None,
    sums: bool = False,
) -> Backend:
    """The backend called ``memory``, if it fits.

    Args:
        memory: A name in `BACKENDS`.
        device: Where the segments shall lie.
        groups: The groups that will meet in them.
        temporary: As for `symmplan.memory.realize`.
        levels: The result of `agree_on_levels`. By default it is what this rank knows by itself.
        sums: Whether all collectives of the program are sums that kernels add up over mappings.

    Raises:
        BackendError: There is no such backend, or it does not fit device, groups or machine.

    Collective: no.
    """
    if memory not in BACKENDS:
        raise BackendError(
            f"there is no memory backend {memory!r}",
            expected=f"one of {', '.join(BACKENDS)}",
            got=repr(memory),
            fix='pass memory="auto"',
            memory=memory,
        )
    from symmplan.memory.backends.local import LocalBackend

    alone = all(group.size == 1 for group in groups.values())
    world = current()
    if world is not None:
        if world.automatic and not alone:
            sums = sums and all(group.size == world.ranks for group in groups.values())
            world.memory = "cuda" if sums or all(_levels(groups, device)) else "nccl"
            world.automatic = False
        return LocalBackend(world)
    if memory == "auto":
        memory = _automatic(device, groups, alone, levels, sums=sums)
    if memory == "local":
        if not alone:
            large = next(group for group in groups.values() if group.size > 1)
            raise misfit(
                memory,
                f"group {large.name!r} has {large.size} ranks",
                expected="groups of one rank",
                fix='pass memory="shm" for CPU ranks of one host',
            )
        return LocalBackend()
    check_device(memory, device)
    if memory == "shm":
        from symmplan.memory.backends.shm import ShmBackend

        return ShmBackend()
    from symmplan.memory.backends.torch_symm import TorchSymmBackend

    if memory == "nccl":
        from symmplan.memory.backends.windows import WindowsBackend, has_windows

        if has_windows(groups, device, temporary=temporary):
            return WindowsBackend(groups, temporary=temporary)
    return TorchSymmBackend(memory, device, groups)


def agree_on_levels(
    exchange: Exchange,
    asked: Mapping[str, Group],
    groups: Mapping[str, Group],
    device: torch.device,
) -> bool | None:
    """Whether ``memory="auto"`` is ``"cuda"``. See [Note: two levels by default].

    Ranks that meet through others hear each other in a later round.

    Args:
        exchange: Of all who take part.
        asked: Its groups, whose topology is known.
        groups: All groups of the program.
        device: Where this rank's tensors lie; of the same kind on all ranks.

    Returns:
        None if no device of ``asked`` is on another host.

    Collective: yes, over those of ``asked`` that are on several hosts.
    """
    named = {name: group.process_group for name, group in asked.items()}
    apart = [name for name, of in known(named, device).items() if of.hosts > 1]
    if not kind_of(device).is_accelerator or not apart:
        return None
    alone, served = _levels(groups, device)
    for turn in range(3):
        mine = json.dumps([alone, served]).encode()
        said = exchange.round(f"levels {turn}", mine, groups=apart)
        heard = [json.loads(text) for of in said.values() for text in of]
        alone, served = all(a for a, _ in heard), any(s for _, s in heard)
    return alone and served


def _automatic(
    device: torch.device,
    groups: Mapping[str, Group],
    alone: bool,
    levels: bool | None,
    *,
    sums: bool,
) -> str:
    if kind_of(device).is_accelerator:
        if alone and all(group.process_group is None for group in groups.values()):
            return "local"
        from symmplan.memory.backends.torch_symm import serves_nccl
        from symmplan.memory.backends.windows import has_windows

        if levels is None:
            levels = all(_levels(groups, device))
        if levels or _is_decided(device):
            PROCESS.cuda_memory = True
            return "cuda"
        windows = has_windows(groups, device, temporary=False)
        if windows and sums and _maps(groups, device):
            return "cuda"
        return "nccl" if windows or serves_nccl(groups) else "cuda"
    if device.type == "cpu":
        return "local" if alone else "shm"
    raise misfit(
        "auto",
        f"no backend serves device {device}",
        expected="cpu or cuda",
        fix="move the model to a CPU or CUDA device",
    )


def _maps(groups: Mapping[str, Group], device: torch.device) -> bool:
    """Whether torch's allocator has CUDA's mappings, which reach all ranks of the job."""
    from symmplan.memory.backends.torch_symm import serves_cuda

    if not serves_cuda(device) or any(g.size < dist.get_world_size() for g in groups.values()):
        return False
    of = known({name: group.process_group for name, group in groups.items()}, device)
    return not any(topology.why_not("cuda") for topology in of.values())


def _levels(groups: Mapping[str, Group], device: torch.device) -> tuple[bool, bool]:
    """Whether only CUDA's memory may serve some groups; whether it serves one in two levels.

    Both where it was decided before.
    """
    if _is_decided(device):
        return True, True
    several = {name: g.process_group for name, g in groups.items() if g.size > 1}
    found = known(several, device)
    alone = len(found) == len(several) and all(of.why_not("nccl") for of in found.values())
    if current() is None:
        from symmplan.memory.backends.torch_symm import serves_cuda

        alone = alone and serves_cuda(device)
    return alone, any(of.two_levels("cuda") for of in found.values())


def _is_decided(device: torch.device) -> bool:
    """Whether ``"auto"`` was CUDA's memory before, and torch's allocator still is."""
    if current() is not None or not PROCESS.cuda_memory:
        return False
    from symmplan.memory.backends.torch_symm import serves_cuda

    return serves_cuda(device)
