"""How gloo runs each op of ``c10d::``: into other memory, and what is copied from there at the end.

A function of the table takes gloo's part of a process group and the arguments of the op. It returns
the works, and ``(target, source, by what the source is divided)``.
"""

from __future__ import annotations

import datetime as dt

import torch
import torch.distributed as dist

from symmplan.torch_private import c10d as names

c10d = dist.distributed_c10d


def _options(kind, given):
    options = getattr(c10d, kind)() if hasattr(c10d, kind) else getattr(dist, kind)()
    if given.get("timeout", -1) > 0:
        options.timeout = dt.timedelta(milliseconds=given["timeout"])
    return options


def reduction_of(given):
    box = given.get("reduce_op")
    return None if box is None else names.boxed_reduction(box)


def _reducing(kind, given, ranks):
    """Options with the reduction, and by what the result is divided: gloo has no averages."""
    options, reduction = _options(kind, given), reduction_of(given)
    if reduction is None:
        raise RuntimeError("gloo has no sums with a factor")
    average = reduction == "avg"
    options.reduceOp = getattr(dist.ReduceOp, "SUM" if average else reduction.upper())
    return options, ranks if average else 1


def _fresh(tensors):
    return [torch.empty_like(t) for t in tensors]


def _to(targets, sources, divisor=1):
    return [(t, s, divisor) for t, s in zip(targets, sources, strict=True)]


def _all_gather(backend, given):
    made = [_fresh(outs) for outs in given["output_tensors"]]
    work = backend.allgather(made, given["input_tensors"], _options("AllgatherOptions", given))
    pairs = zip(given["output_tensors"], made, strict=True)
    return [work], [copy for outs, new in pairs for copy in _to(outs, new)]


def _all_gather_each(backend, given):
    outs, sources = _outs(given), _sources(given)
    made, options = _fresh(outs), _options("AllgatherOptions", given)
    works = [backend._allgather_base(m, s, options) for m, s in zip(made, sources, strict=True)]
    return works, _to(outs, made)


def _reduce_scatter(backend, given):
    outs = given["output_tensors"]
    options, divisor = _reducing("ReduceScatterOptions", given, backend.size())
    made = _fresh(outs)
    return [backend.reduce_scatter(made, given["input_tensors"], options)], _to(outs, made, divisor)


def _reduce_scatter_each(backend, given):
    outs, sources = _outs(given), _sources(given)
    options, divisor = _reducing("ReduceScatterOptions", given, backend.size())
    made = _fresh(outs)
    pairs = zip(made, sources, strict=True)
    return [backend._reduce_scatter_base(*pair, options) for pair in pairs], _to(
        outs, made, divisor
    )


def _all_reduce(backend, given):
    options, divisor = _reducing("AllreduceOptions", given, backend.size())
    made = [t.detach().clone() for t in given["tensors"]]
    works = [backend.allreduce([m], options) for m in made]
    return works, _to(given["tensors"], made, divisor)


def _broadcast(backend, given):
    options = _options("BroadcastOptions", given)
    options.rootRank, options.rootTensor = given["root_rank"], given["root_tensor"]
    made = [t.detach().clone() for t in given["tensors"]]
    return [backend.broadcast(made, options)], _to(given["tensors"], made)


def _reduce(backend, given):
    options, divisor = _reducing("ReduceOptions", given, backend.size())
    options.rootRank, options.rootTensor = given["root_rank"], given["root_tensor"]
    made = [t.detach().clone() for t in given["tensors"]]
    root = backend.rank() == given["root_rank"]
    return [backend.reduce(made, options)], _to(given["tensors"], made, divisor) if root else []


def _all_to_all(backend, given):
    splits = given["output_split_sizes"], given["input_split_sizes"]
    (made,) = _fresh([given["output"]])
    options = _options("AllToAllOptions", given)
    work = backend.alltoall_base(made, given["input"], *splits, options)
    return [work], _to([given["output"]], [made])


def _send(backend, given):
    return [backend.send(given["tensors"], given["dst"], given["tag"])], []


def _receive(backend, given):
    made = _fresh(given["tensors"])
    return [backend.recv(made, given["src"], given["tag"])], _to(given["tensors"], made)


def _all_to_all_of_lists(backend, given):
    outs, sources = given["output_tensors"], given["input_tensors"]
    received, sent = ([t.numel() for t in tensors] for tensors in (outs, sources))
    made = outs[0].new_empty(sum(received))
    flat = torch.cat([t.reshape(-1) for t in sources])
    work = backend.alltoall_base(made, flat, received, sent, _options("AllToAllOptions", given))
    parts = zip(outs, made.split(received), strict=True)
    return [work], [(out, part.view_as(out), 1) for out, part in parts]


def _outs(given):
    return given["outputs"] if "outputs" in given else [given["output_tensor"]]


def _sources(given):
    return given["inputs"] if "inputs" in given else [given["input_tensor"]]


#: Op of ``c10d::`` -> what it is, and what runs it.
RUNS = {
    "allgather_": ("all-gather", _all_gather),
    "_allgather_base_": ("all-gather", _all_gather_each),
    "allgather_into_tensor_coalesced_": ("all-gather", _all_gather_each),
    "reduce_scatter_": ("reduce-scatter", _reduce_scatter),
    "_reduce_scatter_base_": ("reduce-scatter", _reduce_scatter_each),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", _reduce_scatter_each),
    "allreduce_": ("all-reduce", _all_reduce),
    "allreduce_coalesced_": ("all-reduce", _all_reduce),
    "broadcast_": ("broadcast", _broadcast),
    "reduce_": ("reduce", _reduce),
    "alltoall_base_": ("all-to-all", _all_to_all),
    "alltoall_": ("send", _all_to_all_of_lists),
    "send": ("send", _send),
    "recv_": ("send", _receive),
}
