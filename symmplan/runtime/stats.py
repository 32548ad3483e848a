"""Counters of what was planned and what ran, the same for graphs, sessions and FSDP2."""

from __future__ import annotations

from attrs import asdict, frozen

from symmplan.report.format import size

#: The counters of plans; the others are of runs.
_PLANNED = ("graphs", "modules", "plans", "placed", "staged", "bound", "unplanned", "barriers")
#: Between two lines of a text.
_NEXT = ",\n      "


@frozen
class Copy:
    """A declared tensor that is copied, and what would avoid it.

    Attributes:
        op: Qualified name of the op.
        where: The argument or result.
        buffer: Name of the buffer.
        nbytes: How much is copied.
        reason: Why.
        line: Where to change the program, ``"file:line"``.
        fix: What to write there.
    """

    op: str
    where: str
    buffer: str
    nbytes: int
    reason: str
    line: str
    fix: str


@frozen(kw_only=True)
class Stats:
    """What a compile backend, an eager session or `symmplan.fsdp.apply` has done so far.

    A call is a call of a declared op; for FSDP2, a collective. Counters that do not apply stay 0.

    Attributes:
        graphs: Graphs that Dynamo handed over.
        modules: Parameter groups of FSDP modules that were found; most modules have one.
        plans: How many graphs, sessions or models have a plan.
        placed: Declared tensors that the plans put into symmetric memory: ``staged + bound``. For
            FSDP2, buffers of collectives.
        staged: Those of them that are copied in or out.
        bound: Those of them that are produced or used where they lie.
        unplanned: Declared tensors that were left out.
        barriers: Barriers that the plans insert.
        rendezvous: Rendezvous made: segments times groups, and times the communicators for copy
            engines. Does not grow once all is planned.
        segment_bytes: Bytes of symmetric memory on this rank. More than the plans need if a larger
            segment from the cache is used; 0 for a session that lies in segments of FSDP2.
        lower_bound_bytes: Proven minimum of those bytes.
        unshared_bytes: Bytes that one buffer per tensor would take.
        iterations: Iterations of a session that ended, or runs of graphs that have a plan.
        recorded: Calls that ran before there was a plan.
        served: Later calls that ran in placements.
        reused: Gathers of FSDP2 in backward that were not needed, because ``unsharded_modules=``
            kept their modules unsharded after forward.
        plain: Later calls that ran in ordinary memory.
        copies: Copies into and out of placements. For FSDP2: how often a collective, or a graph in
            its segments, was staged or had to copy other tensors of this rank elsewhere, because
            the bytes were still in use.
        reordered: How often FSDP2 made a collective in another order than planned, as evaluations
            do; nothing is lost by it.
        replans: How often a program was planned again, because it did something new or a size
            outgrew its plan.
        sleeps: How often segments were given back by ``sleep()``.
        kept: Pinned inputs of graphs (``bind=True``).
        missed: How often a pinned input was not in its placement and had to be copied there.
        crossing_bytes: Bytes that stay in their placements from a forward to its backward.
        evacuated: How often such a tensor had to be copied; see `CompileBackend.evacuated`.
        bytes_beyond_segments: Bytes of its devices that symmplan has taken, by the driver's number,
            beyond segments and torch's allocator: by all of the process; 0 on the CPU.
        beyond_segments: The same by what took them, most first: ``"rendezvous"``, the
            ``"communicators"`` for copy engines and between hosts, with what they have of segments,
            ``"trials"`` besides, and ``"kernels"``. Below 0 if bytes were returned.
        bytes_without_owner: Bytes that are in use besides, and were not when symmplan first took
            any, by the driver's number: the program's kernels and later communicators, and other
            processes.
        reasons: Why calls were plain or copied, and how often, most frequent first.
        flat: FSDP modules whose gathers are flat, so that FSDP2 copies parameters out, and why.
        disengaged: Collectives that did not run as planned in the last check, and why; see
            `Checked`.
        copied: Tensors that a session copies in every iteration, with the reason and the line that
            would avoid the copy.
    """

    graphs: int = 0
    modules: int = 0
    plans: int = 0
    placed: int = 0
    staged: int = 0
    bound: int = 0
    unplanned: int = 0
    barriers: int = 0
    rendezvous: int = 0
    segment_bytes: int = 0
    lower_bound_bytes: int = 0
    unshared_bytes: int = 0
    iterations: int = 0
    recorded: int = 0
    served: int = 0
    reused: int = 0
    plain: int = 0
    copies: int = 0
    reordered: int = 0
    replans: int = 0
    sleeps: int = 0
    kept: int = 0
    missed: int = 0
    crossing_bytes: int = 0
    evacuated: int = 0
    bytes_beyond_segments: int = 0
    beyond_segments: tuple[tuple[str, int], ...] = ()
    bytes_without_owner: int = 0
    reasons: tuple[tuple[str, int], ...] = ()
    flat: tuple[tuple[str, str], ...] = ()
    disengaged: tuple[tuple[str, str], ...] = ()
    copied: tuple[Copy, ...] = ()

    def metrics(self) -> dict[str, int]:
        """The counters by name, ``{"symmplan/served": 36, ...}``, for a logger of numbers.

        The names are always the same. For lists (``beyond_segments``, ``reasons``, ``flat``,
        ``disengaged``, ``copied``) the value is the length. Sizes are in bytes.
        """
        counted = asdict(self, recurse=False).items()
        return {
            f"symmplan/{name}": len(value) if isinstance(value, tuple) else value
            for name, value in counted
        }

    def __repr__(self) -> str:
        """What was planned, its bytes, and what ran, a line each; of lists the lengths."""
        counted = {name.partition("/")[2]: number for name, number in self.metrics().items()}
        kinds = {name: _kind(name) for name in counted}
        lines = []
        for kind in ("planned", "bytes", "ran"):
            show = size if kind == "bytes" else str
            said = [f"{n}={show(x)}" for n, x in counted.items() if x and kinds[n] == kind]
            lines += [", ".join(said)] if said else []
        return f"Stats({_NEXT.join(lines)})"


def _kind(name: str) -> str:
    """Of what a counter is: ``"planned"``, ``"bytes"`` or ``"ran"``."""
    if "bytes" in name:
        return "bytes"
    return "planned" if name in _PLANNED else "ran"
