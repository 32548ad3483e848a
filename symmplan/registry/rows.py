"""The catalogue as data: torch's collectives; `rows_symm_mem` has ``torch.ops.symm_mem``.

[Note: what the catalogue says]
    ``where`` names what some way of running the op can use if it is symmetric, not what it refuses
    to do without: all ops of this module also run on ordinary memory. Which of it a memory backend
    really uses is decided where the program is rewritten for that backend. So ``all_reduce``
    declares its input, too, although torch's own implementation clones it and reduces the clone in
    place: a one-sided all-reduce reads the input where it lies.

[Note: handshake and release of collectives]
    Gathers, reduce-scatters and all-reduces make every rank wait for every other, and a rank is
    through (at the wait, if asynchronous) only when no peer needs its bytes any more.

    Broadcasts and all-to-alls, and the ring forms of the others, meet pairwise: nobody touches a
    rank's bytes before that rank arrived, but a third rank may still be on its way. That is as good
    as a handshake unless the third rank is inside a one-sided op without release on the same bytes.

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
        asynchronous: As in `OpSpec`.
        out: Name of the out-variant, in the same namespace.
        note: For people.
    """

    op: str
    where: tuple[str, ...] = field(converter=_words)
    group: str = "group_name"
    pads: tuple[str, ...] = field(default="", converter=_words)
    handshake: bool = True
    release: bool = True
    asynchronous: bool = False
    out: str | None = None
    note: str = ""

    @property
    def out_name(self) -> str | None:
        """The out-variant's qualified name."""
        return None if self.out is None else f"{self.op.partition('::')[0]}::{self.out}"


def _functional(
    name: str,
    where: str,
    *,
    out: str | None = None,
    note: str = "",
) -> Row:
    return Row(
        f"_c10d_functional::{name}",
        where,
        asynchronous=True,
        out=out,
        note=note,
    )


def _autograd(name: str, where: str) -> Row:
    return Row(
        f"_c10d_functional_autograd::{name}",
        where,
        asynchronous=True,
        note="differentiable front of the op of that name in _c10d_functional",
    )


def _c10d(name: str, where: str, *, note: str = "") -> Row:
    return Row(
        f"c10d::{name}",
        where,
        group="process_group",
        asynchronous=True,
        note=note or "its Work ends it",
    )


_CLONES = "torch clones the input and works in place on the clone"
_NO_OUT = "no variant writes into given tensors: the result is staged"
_PAIRWISE = "ranks meet pairwise"

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
    _functional("all_to_all_single", "input return", note=f"{_PAIRWISE}; {_NO_OUT}"),
    _functional(
        "broadcast",
        "input return",
        note=f"{_CLONES}; NCCL has no symmetric kernel for it",
    ),
    _functional("broadcast_", "input", note="NCCL has no symmetric kernel for it"),
)

_AUTOGRAD = (
    _autograd("all_gather_into_tensor", "input return"),
    _autograd("reduce_scatter_tensor", "input return"),
    _autograd("all_to_all_single", "input return"),
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
    _c10d("alltoall_base_", "output input", note=_PAIRWISE),
    _c10d("broadcast_", "tensors", note="NCCL has no symmetric kernel for it"),
)

#: Torch's own collectives.
COLLECTIVES: tuple[Row, ...] = (*_FUNCTIONAL, *_AUTOGRAD, *_DTENSOR, *_C10D)
