"""The catalogue as data: torch's collectives; `rows_symm_mem` has ``torch.ops.symm_mem``.

[Note: what the catalogue says]
    ``where`` names what some way of running the op can use if it is symmetric, not what it refuses
    to do without: all ops of this module also run on ordinary memory. Which of it a memory backend
    really uses is decided where the program is rewritten for that backend. So ``all_reduce``
    declares its input, too, although torch's own implementation clones it and reduces the clone in
    place: a one-sided all-reduce reads the input where it lies.

[Note: facts of collectives]
    What the process group's own collectives do, on any backend (symmplan's collectives over shared
    memory do more, see `symmplan.memory.ops`). The words are those of [Note: peers count] in
    `symmplan.model`.

    *meets*: what a rank gets from an all-gather, a reduce-scatter or an all-reduce depends on what
    every rank gave, so no rank is through (at the wait) before all have started. A broadcast makes
    the others wait for the root and for nobody else. In an all-to-all a rank waits for those that
    send it something: with given splits that may be nobody. Neither meets, then.

    *enters*, *releases*: a rank's tensors are the collective's from the moment it calls it until
    its work ends there; that is the contract under which programs reuse them. Peers, and whoever
    moves the bytes, touch them at no other time. But a rank's own input is read at once, whether
    or not peers have arrived: no collective handshakes in the sense of ours, and none releases,
    since the others may still be at theirs when this rank is through.

    Sources: torch's ``csrc/distributed/c10d/Functional.cpp`` and ``ProcessGroup.hpp``; NCCL's user
    guide on symmetric windows and copy-engine collectives.
"""

from __future__ import annotations

from attrs import field, frozen

__all__ = ["COLLECTIVES", "Row"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@frozen
class Row:
    """One op of the catalogue. See `symmplan.model.OpSpec` for the meaning of the facts.

    Attributes:
        op: Qualified name; the row is about its ``.default`` overload.
        where: Arguments and results that should be symmetric, given as words in one string.
        group: The argument that carries the group.
        pads: The words of ``where`` whose segment's signal pad the op uses.
        handshake: As in `OpSpec`.
        release: As in `OpSpec`.
        meets: As in `OpSpec`.
        enters: As in `Requirement`, for all of ``where``.
        releases: As in `Requirement`, for all of ``where``.
        asynchronous: As in `OpSpec`.
        out: Name of the out-variant, in the same namespace.
        note: For people.
    """

    op: str
    where: tuple[str, ...] = field(converter=_words)
    group: str = "group_name"
    pads: tuple[str, ...] = field(default="", converter=_words)
    handshake: bool = False
    release: bool = False
    meets: bool = False
    enters: bool = False
    releases: bool = False
    asynchronous: bool = False
    out: str | None = None
    note: str = ""

    @property
    def out_name(self) -> str | None:
        """The out-variant's qualified name."""
        return None if self.out is None else f"{self.op.partition('::')[0]}::{self.out}"


def _collective(
    op: str,
    where: str,
    *,
    group: str = "group_name",
    meets: bool = True,
    out: str | None = None,
    note: str = "",
) -> Row:
    """One of the process group's collectives. See [Note: facts of collectives]."""
    return Row(
        op,
        where,
        group,
        meets=meets,
        enters=True,
        releases=True,
        asynchronous=True,
        out=out,
        note=note,
    )


def _functional(
    name: str, where: str, *, meets: bool = True, out: str | None = None, note: str = ""
) -> Row:
    return _collective(f"_c10d_functional::{name}", where, meets=meets, out=out, note=note)


def _autograd(name: str, where: str, *, meets: bool = True) -> Row:
    note = "differentiable front of the op of that name in _c10d_functional"
    return _collective(f"_c10d_functional_autograd::{name}", where, meets=meets, note=note)


def _c10d(name: str, where: str, *, meets: bool = True, note: str = "") -> Row:
    note = note or "its Work ends it"
    return _collective(f"c10d::{name}", where, group="process_group", meets=meets, note=note)


_CLONES = "torch clones the input and works in place on the clone"
_NO_OUT = "no variant writes into given tensors: the result is staged"
_PAIRWISE = "a rank waits for those that send it something"
_PARTS = "parts of one size can be written where they are told"
_ROOT = "ranks wait for the root alone; NCCL has no symmetric kernel for it"

_FUNCTIONAL = (
    _functional("all_gather_into_tensor", "input return", out="all_gather_into_tensor_out"),
    _functional("all_gather_into_tensor_out", "input out"),
    _functional("all_gather_into_tensor_coalesced", "inputs return", note=_NO_OUT),
    _functional("all_reduce", "input return", note=_CLONES),
    _functional("all_reduce_", "input"),
    _functional("all_reduce_coalesced", "inputs return", note=_CLONES),
    _functional("all_reduce_coalesced_", "inputs"),
    _functional("reduce_scatter_tensor", "input return", out="reduce_scatter_tensor_out"),
    _functional("reduce_scatter_tensor_out", "input out"),
    _functional("reduce_scatter_tensor_coalesced", "inputs return", note=_NO_OUT),
    _functional("all_to_all_single", "input return", meets=False, note=f"{_PAIRWISE}; {_PARTS}"),
    _functional("broadcast", "input return", meets=False, note=f"{_CLONES}; {_ROOT}"),
    _functional("broadcast_", "input", meets=False, note=_ROOT),
)

_AUTOGRAD = (
    _autograd("all_gather_into_tensor", "input return"),
    _autograd("reduce_scatter_tensor", "input return"),
    _autograd("all_to_all_single", "input return", meets=False),
)

_DTENSOR = (
    Row(
        "_dtensor::shard_dim_alltoall",
        "",
        note="sends from and receives into buffers of its own: nothing to place",
    ),
)

_C10D = (
    _c10d("_allgather_base_", "output_tensor input_tensor"),
    _c10d("_reduce_scatter_base_", "output_tensor input_tensor"),
    _c10d("allgather_into_tensor_coalesced_", "outputs inputs"),
    _c10d("reduce_scatter_tensor_coalesced_", "outputs inputs"),
    _c10d("allreduce_", "tensors"),
    _c10d("allreduce_coalesced_", "tensors"),
    _c10d("alltoall_base_", "output input", meets=False, note=_PAIRWISE),
    _c10d("broadcast_", "tensors", meets=False, note=_ROOT),
)

#: Torch's own collectives.
COLLECTIVES: tuple[Row, ...] = (*_FUNCTIONAL, *_AUTOGRAD, *_DTENSOR, *_C10D)
