"""`symmplan.eager`: declared ops of an ordinary eager program in planned symmetric memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from symmplan.integrate.eager.session import Session
from symmplan.process import PROCESS
from symmplan.runtime.options import Options, here
from symmplan.torch_private.table import require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.choose.choice import Choose
    from symmplan.memory.backends import MemoryName
    from symmplan.place.algorithms import Collectives


def eager(
    group: Any = None,
    memory: MemoryName = "auto",
    *,
    choose: Choose = "auto",
    capacity: int | str | None = None,
    device: torch.device | str | None = None,
    timeout: float = 300.0,
    debug: bool | Literal["poison"] = False,
    collectives: Collectives = "auto",
) -> Session:
    """A session in which declared ops run in planned symmetric memory.

    The first iteration is recorded. `Session.step` ends it: the ranks agree on a plan and
    rendezvous once. Later iterations make the same calls and follow the plan. If the first one has
    all-to-alls of unequal parts, the second one is recorded, too.

    Args:
        group: Torch's process group of all ranks that run the program; the default one if None.
        memory: Name of a memory backend.
        choose: How the algorithms of collectives are chosen. ``"placed"``, also called
            ``"symmetric"``: every declared tensor is in symmetric memory. ``"measure"``: each kind
            and size of collective is timed by each algorithm when the iteration is planned, and
            stays ordinary if symmetric memory is not clearly faster. ``"copy engine"``: copy
            engines run all-gathers (``memory="nccl"``). ``"ordinary"``: only ops that need
            symmetric memory are planned. ``"auto"``: measured on devices, placed elsewhere. The
            path of a ``.json`` file: as measured elsewhere, see `symmplan.simulate`.
        capacity: Most bytes that the segments may take on any rank, as a number or as text such as
            ``"40GiB"``. None for what is free when the iteration is planned, less a tenth. All
            ranks use the smallest value of any rank. Collectives that gain least for their bytes
            are demoted, and ``session.plan.summary()`` lists them.
        device: Where declared tensors lie; the current CUDA device if the group has NCCL, else the
            CPU.
        timeout: Seconds that ranks wait for each other before they raise.
        debug: Overwrite every placement when its buffer is no longer live, so that a late reader
            shows in the results. In shared memory also find races: each access of placement bytes,
            by any rank and also inside declared ops, is compared with the other ranks' last
            accesses. If nothing orders two accesses, a `RaceError` names both. This is slow.
            ``"poison"`` only overwrites.
        collectives: ``"process group"`` runs the process group's own collectives on the placements,
            as on devices. ``"auto"`` runs the memory backend's collectives if it has any, as
            ``"shm"`` does.

    Raises:
        RaceError: With ``debug=True``, from any op inside the session.
        OptionError: An option has a wrong value; the message names it.
        BackendError: ``memory`` serves no tensors on the device. The first declared call, or
            `Session.step`, raises it if the backend that was asked for by name serves no rank.
        AgreementError: Ranks were given different options. The first declared call, or
            `Session.step`, raises it on every rank.
        MissingSeamError: This torch lacks a name that sessions need.

    Collective: no. Entering and leaving the session and `Session.step` are.

    Notes:
        If a rank cannot get or share memory, the session's calls run in torch's own way on all
        ranks. One warning says why, and ``session.stats.reasons`` counts it.
    """
    options = Options(
        memory=memory,
        choose=choose,
        capacity=capacity,
        timeout=timeout,
        debug=debug,
        collectives=collectives,
    )
    require("sessions")
    where = here("symmplan.eager", group, device)[1]
    options.check_device(where)
    return Session(group, where, options)


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Like `torch.empty`, in memory that a declared op can use without a copy.

    Inside a session the memory is the placement of the declared tensor that it becomes. Outside a
    session, and in the recorded iteration, it is ordinary memory.

    Args:
        size: Shape in elements.
        dtype: Element type.
        device: Where it lies.

    Raises:
        RunError: The session expected another call here.

    Collective: no.
    """
    session: Session | None = PROCESS.session
    if torch.compiler.is_compiling() or session is None:
        return torch.empty(*size, dtype=dtype, device=device)  # type: ignore[arg-type]
    return session._memory("empty", torch.empty, size, {"dtype": dtype, "device": device})


def out(fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """``fn(*args, **kwargs)``, written straight into the placement of the argument it becomes.

    Args:
        fn: A function of torch that takes ``out=``, such as `torch.mm`. If autograd records the
            call, ``fn`` is called without ``out=``, because ``out=`` cannot be differentiated.
        args: Its arguments.
        kwargs: Its arguments by name.

    Returns:
        The result of ``fn``. Inside a session its memory is a placement. Outside a session ``out``
        only calls ``fn``.

    Raises:
        RunError: The session expected another call here.

    Collective: no.
    """
    session: Session | None = PROCESS.session
    if torch.compiler.is_compiling() or session is None or _differentiates(args, kwargs):
        return fn(*args, **kwargs)
    return session._memory("out", fn, args, kwargs)


def _differentiates(args: Any, kwargs: Any) -> bool:
    """Whether autograd would follow the call, which no ``out=`` can do."""
    if torch.is_grad_enabled():
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return True
    return False
