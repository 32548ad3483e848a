"""How fast a machine's links are, and what a collective takes over them.

[Note: predicted times]
    A collective takes ``start`` seconds, a latency for each step that goes over a link, and its
    bytes by what carries them. Torch's own way is a ring: its steps are those of NCCL's tuning
    model. In symmetric memory each rank writes to all others of its domain together, which is one
    step. In two levels counterparts exchange their part in a ring, and what has come goes on
    within the domain meanwhile; what is summed is summed there first. Rows of experts go to a
    counterpart in one step, and on from there.

    Not in it: that equal rows cross once, that kernels of collectives and of products slow each
    other down, trees, messages so small that other protocols carry them, and networks that are not
    as fast between all hosts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, fields, frozen, validators

from symmplan.errors import OptionError
from symmplan.registry.catalogue import collective_of, runs_on_groups

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from typing_extensions import Self

    from symmplan.model import AlgorithmName

__all__ = ["PRESETS", "Links", "Span", "links_of"]


@frozen
class Span:
    """How a group lies on a machine.

    Attributes:
        ranks: How many it has.
        domains: On how many domains: hosts, or hosts that NVLink joins.
        each: How many are on each; 0 if not equally many.
    """

    ranks: int
    domains: int = 1
    each: int = 0


#: Those of which a part passes, by the number of ranks. Of others the largest tensor does, whole.
_SPREAD = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
#: Those that are in no row of the catalogue: FSDP2's, of experts, of lists, symmplan's own.
_MORE: Mapping[str, str] = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "c10d::allgather_": "all-gather",
    "c10d::gather_": "all-gather",
    "c10d::scatter_": "all-gather",
    "c10d::reduce_scatter_": "reduce-scatter",
    "c10d::alltoall_": "all-to-all",
    "symmplan::all_gather_out": "all-gather",
    "symmplan::reduce_scatter_out": "reduce-scatter",
    "symmplan::all_reduce_out": "all-reduce",
    "symmplan::all_to_all_single_out": "all-to-all",
}


def _collective(op: str) -> str:
    """What passes between ranks in an op."""
    return _MORE.get(op) or (collective_of(op) if runs_on_groups(op) else "")


@frozen(kw_only=True)
class Links:
    """A machine's links, as one rank sees them, and how fast it computes.

    Attributes:
        within: Bytes per second that a rank sends to its domain in symmetric memory.
        ordinary: Bytes per second that a rank sends to its domain in ordinary collectives.
        between: Bytes per second that a rank sends to other domains, while its whole domain sends.
        within_latency: Seconds of a step within a domain.
        between_latency: Seconds of a step between domains.
        start: Additional seconds of each collective.
        rails: Whether all ranks of a domain send to other domains at the same time in ordinary
            collectives, as with NCCL and a network card for each device; else one, as with gloo.
        flops: Floating-point operations of matrix products per second; 0 if nothing computes.
        name: Name of the machine.
        source: Where the numbers come from.

    Examples:
        >>> links = PRESETS["dgx-h100"]
        >>> span = Span(ranks=64, domains=8, each=8)
        >>> round(links.seconds("all_gather", 1 << 30, span, "ordinary") * 1e3, 2)
        2.91
    """

    within: float = field(converter=float, validator=validators.gt(0.0))
    ordinary: float = field(converter=float, validator=validators.gt(0.0))
    between: float = field(converter=float, validator=validators.gt(0.0))
    within_latency: float = field(default=0.0, converter=float, validator=validators.ge(0.0))
    between_latency: float = field(default=0.0, converter=float, validator=validators.ge(0.0))
    start: float = field(default=0.0, converter=float, validator=validators.ge(0.0))
    rails: bool = True
    flops: float = field(default=0.0, converter=float, validator=validators.ge(0.0))
    name: str = ""
    source: str = ""

    def seconds(self, op: str, nbytes: int, span: Span, algorithm: AlgorithmName) -> float:
        """Predicted seconds of a collective; see [Note: predicted times].

        Args:
            op: Its name in `symmplan.simulation.timeline.Collective`.
            nbytes: Bytes of its largest tensor on one rank.
            span: Ranks and domains of its group.
            algorithm: Its algorithm.
        """
        n, kind = span.ranks, _collective(op)
        if n == 1 or not nbytes:
            return 0.0
        if algorithm == "two-level":
            return self.start + self._two_levels(kind, nbytes, span)
        turns = 2 if kind == "all-reduce" else 1
        passes = turns * nbytes * (n - 1) / n if kind in _SPREAD else nbytes
        if algorithm != "ordinary":
            return self.start + self.within_latency + passes / self.within
        if kind == "all-to-all":
            return self.start + self._exchange(nbytes, span)
        steps = turns * (n - span.domains), turns * (span.domains - 1)
        latency = steps[0] * self.within_latency + steps[1] * self.between_latency
        return self.start + latency + passes / self._ring(span)

    def _ring(self, span: Span) -> float:
        """Bytes a second of torch's own way."""
        if span.domains == 1:
            return self.ordinary
        cards = (span.each or 1) if self.rails else 1
        return min(self.ordinary, cards * self.between)

    def _exchange(self, nbytes: int, span: Span) -> float:
        """Each rank sends to each other, within and between domains at the same time."""
        each = span.ranks / span.domains
        near = nbytes * (each - 1) / span.ranks / self.ordinary + self.within_latency
        if span.domains == 1:
            return near
        return max(near, nbytes * (1 - each / span.ranks) / self.between + self.between_latency)

    def _two_levels(self, kind: str, nbytes: int, span: Span) -> float:
        n, h, each = span.ranks, span.domains, max(1, span.each)
        near = nbytes * (each - 1) / each / self.within
        if kind == "all-to-all":  # counterparts get the rows of their domain, and pass them on
            far = nbytes * (1 - each / n) / self.between
            return self.between_latency + self.within_latency + near + far
        steps = (h - 1) * self.between_latency + self.within_latency
        far = nbytes / n * (h - 1) / self.between
        if kind == "all-gather":  # at the same time, but for the last part
            return steps + max(near, far) + min(near, far) / _PARTS
        if kind == "reduce-scatter":
            return steps + near + far
        return 2 * (steps + near + far)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Those of a file, as JSON.

        Raises:
            OptionError: There is none, or it has no such numbers.
        """
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**given)
        except (OSError, ValueError, TypeError) as error:
            known = ", ".join(x.name for x in fields(cls))
            raise OptionError(
                f"{str(path)!r} is neither a file with links nor a known machine",
                expected=f"a JSON object with {known}, or one of {', '.join(PRESETS)}",
                got=str(error).splitlines()[0],
                fix="name a known machine, or write within, ordinary and between in bytes per "
                "second",
            ) from error


#: Parts in which two levels gather.
_PARTS = 4

_GB, _US, _TERA = 1e9, 1e-6, 1e12
_NCCL = "latencies: NCCL's tuning model (src/graph/tuning.cc: rings, protocol Simple)"
_H100 = Links(
    name="dgx-h100",
    within=450 * _GB,
    ordinary=450 * _GB,
    between=50 * _GB,
    within_latency=3.4 * _US,
    between_latency=9.6 * _US,
    start=8.4 * _US,
    flops=989 * _TERA,
    source="NVIDIA DGX H100 and H100 data sheets: NVLink 900 GB/s in both directions together, a "
    f"400 Gb/s ConnectX-7 for each GPU, 989 dense bfloat16 TFLOP/s; {_NCCL}",
)
#: Machines whose links are known: peak rates as published, which no program reaches in full.
PRESETS: Mapping[str, Links] = {
    links.name: links
    for links in (
        _H100,
        evolve(
            _H100,
            name="dgx-h200",
            source=_H100.source.replace("DGX H100 and H100", "DGX H200 and H200"),
        ),
        evolve(
            _H100,
            name="dgx-a100",
            within=300 * _GB,
            ordinary=300 * _GB,
            between=25 * _GB,
            flops=312 * _TERA,
            source="NVIDIA DGX A100 and A100 data sheets: NVLink 600 GB/s in both directions "
            "together, a 200 Gb/s ConnectX-6 for each GPU, 312 dense bfloat16 TFLOP/s; " + _NCCL,
        ),
        evolve(
            _H100,
            name="gb200-nvl72",
            within=900 * _GB,
            ordinary=900 * _GB,
            flops=2500 * _TERA,
            source="NVIDIA GB200 NVL72 data sheet: NVLink 1.8 TB/s in both directions together, a "
            f"400 Gb/s ConnectX-7 for each GPU, 2.5 dense bfloat16 PFLOP/s; {_NCCL}",
        ),
    )
}


def links_of(given: Any) -> Links | None:
    """Links by name, from a file, or as they are.

    Args:
        given: A `Links`, a name in `PRESETS`, or the path of a file; None for none.

    Raises:
        OptionError: It is none of these.
    """
    if given is None or isinstance(given, Links):
        return given
    found = PRESETS.get(given) if isinstance(given, str) else None
    return found or Links.read(given)
