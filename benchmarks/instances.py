"""Synthetic problems for benchmarks and tests: hard packings and programs shaped like real ones.

Everything is a function of its arguments: an instance is the same on any Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.planner.packing.greedy import Random

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Interval = tuple[str, int, int, int]

__all__ = ["cut_rectangle", "fsdp_program", "loosened", "moe_program", "steady_stream"]
__all__ += ["stream_program", "tensor_parallel_program", "waves"]


def _between(random: Random, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``, both included."""
    return low + random.below(high - low + 1)


def cut_rectangle(
    pieces: int, *, seed: int = 0, width: int = 512, height: int = 1 << 20, grain: int = 64
) -> list[Interval]:
    """A rectangle of ``width`` instants x ``height`` bytes cut into pieces: a perfect packing.

    Args:
        pieces: How many.
        seed: Which of many.
        width: Instants.
        height: Bytes; the peak of the perfect packing.
        grain: Cuts between bytes lie on multiples of this.
    """
    random = Random(seed)
    done = [(0, width, 0, height)]
    while len(done) < pieces:
        # Large pieces are cut more often.
        k = max(
            (random.below(len(done)) for _ in range(3)),
            key=lambda i: (done[i][1] - done[i][0]) * (done[i][3] - done[i][2]),
        )
        a, b, low, high = done[k]
        if random.below(2) and b - a > 1:
            t = _between(random, a + 1, b - 1)
            done[k] = (a, t, low, high)
            done.append((t, b, low, high))
        elif high - low > grain:
            y = low + grain * _between(random, 1, (high - low - 1) // grain)
            done[k] = (a, b, low, y)
            done.append((a, b, y, high))
    return [(f"b{i}", a, b, high - low) for i, (a, b, low, high) in enumerate(done)]


def loosened(intervals: list[Interval], *, seed: int = 0, per_mille: int = 20) -> list[Interval]:
    """A perfect packing with some pieces shrunk in size or time, so that a little room is left.

    Args:
        intervals: A perfect packing.
        seed: Which of many.
        per_mille: How much of a piece's size is lost at most, in thousandths.
    """
    random = Random(seed)
    result = []
    for name, begin, end, nbytes in intervals:
        size = nbytes - nbytes * random.below(per_mille + 1) // 1000 if random.below(3) else nbytes
        last = end - 1 if end - begin > 3 and not random.below(3) else end
        result.append((name, begin, last, max(size, 1)))
    return result


def waves(
    buffers: int, *, seed: int = 0, capacity: int = 1 << 20, sections: int = 4
) -> list[Interval]:
    """Buffers of few typical sizes, short and long-lived, filling several dense sections.

    Args:
        buffers: How many.
        seed: Which of many.
        capacity: About the most bytes that are live together.
        sections: Dense stretches; some buffers span several.
    """
    random = Random(seed)
    span = 4 * buffers // sections
    typical = [capacity * _between(random, 4, 90) // 1000 // 128 * 128 + 128 for _ in range(9)]
    horizon = span * sections
    live = [0] * horizon
    result: list[Interval] = []
    tries = 0
    while len(result) < buffers and tries < 400 * buffers:
        tries += 1
        kind = random.below(10)
        least, most = 2, 2 + span // 16
        if kind < 1:
            least, most = span // 2, 2 * span
        elif kind < 4:
            least, most = span // 10, span // 3
        length = _between(random, least, most)
        begin = random.below(max(1, horizon - length))
        end = min(horizon, begin + length)
        size = typical[random.below(len(typical))]
        if random.below(3) == 0:
            size = size // (2, 3, 4, 8)[random.below(4)] // 32 * 32 + 32
        if max(live[begin:end]) + size > capacity:
            continue
        for t in range(begin, end):
            live[t] += size
        result.append((f"b{len(result)}", begin, end, size))
    return result


def steady_stream(buffers: int, *, seed: int = 0, overlap: int = 100) -> list[Interval]:
    """Buffers that begin one per instant and of which about ``overlap`` live at a time."""
    random = Random(seed)
    return [
        (f"b{i}", i, i + _between(random, 1, 2 * overlap - 1), 256 * _between(random, 1, 64))
        for i in range(buffers)
    ]


class _ProgramBuilder:
    """Collects a program op by op."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.operations: list[Operation] = []
        self.accesses: list[Access] = []
        self.edges: list[tuple[str, str]] = []

    def buffer(self, name: str, nbytes: int, group: str) -> str:
        self.buffers.append(Buffer(name, nbytes, group=group))
        return name

    def op(
        self,
        name: str,
        *touched: str,
        stream: str = "main",
        group: str | None = None,
        after: Sequence[str] = (),
    ) -> str:
        synchronizes = group is not None
        self.operations.append(Operation(name, stream, group, synchronizes=synchronizes))
        self.accesses.extend(
            Access(
                name, b, write=True, remote=synchronizes, enters=synchronizes, releases=synchronizes
            )
            for b in touched
        )
        self.edges.extend((a, name) for a in after)
        return name

    def problem(self) -> Problem:
        return Problem(self.buffers, self.operations, self.accesses, self.edges)


def fsdp_program(layers: int, *, steps: int = 1, layer_bytes: int = 1 << 20) -> Problem:
    """FSDP with one step of prefetch: gathers and reductions on streams of their own.

    Layers differ in size as embedding, attention, feed-forward do; ``steps`` micro-batches are
    accumulated. Per layer and micro-batch there are five buffers.

    Args:
        layers: Layers of the model.
        steps: Micro-batches.
        layer_bytes: Bytes of a gathered layer, about.
    """
    b = _ProgramBuilder()
    sizes = [layer_bytes * (4 if i in (0, layers - 1) else 1 + i % 3) // 2 for i in range(layers)]
    for s in range(steps):
        for i in range(layers):
            _gather(b, f"s{s}.f{i}", sizes[i], f"s{s}.f{i - 2}.use" if i > 1 else "")
            b.op(f"s{s}.f{i}.use", f"s{s}.f{i}.full", after=[f"s{s}.f{i}.gather"])
        for i in reversed(range(layers)):
            behind = f"s{s}.b{i + 2}.use" if i + 2 < layers else f"s{s}.f{layers - 1}.use"
            _gather(b, f"s{s}.b{i}", sizes[i], behind)
            grad = b.buffer(f"s{s}.g{i}", sizes[i], "dp")
            # One reduction is in flight: its input is reused by the layer after the next.
            before = [f"s{s}.r{i + 2}"] if i + 2 < layers else []
            after = [f"s{s}.b{i}.gather", *before]
            b.op(f"s{s}.b{i}.use", f"s{s}.b{i}.full", grad, after=after)
            b.op(f"s{s}.r{i}", grad, stream="reduce", group="dp", after=[f"s{s}.b{i}.use"])
        b.op(f"s{s}.end", after=[f"s{s}.r0"])
        if s + 1 < steps:
            b.op(f"s{s + 1}.start", stream="gather", after=[f"s{s}.end"])
    return b.problem()


def _gather(b: _ProgramBuilder, name: str, nbytes: int, behind: str) -> None:
    full = b.buffer(f"{name}.full", nbytes, "dp")
    shard = b.buffer(f"{name}.shard", nbytes // 8, "dp")
    b.op(f"{name}.copy", shard, stream="gather", after=[behind] if behind else [])
    b.op(f"{name}.gather", shard, full, stream="gather", group="dp")


def _passes(layers: int, steps: int) -> Iterator[tuple[str, int, int]]:
    """Name, layer and micro-batch of each layer's forward, then backward pass."""
    for s in range(steps):
        for algorithm, order in (("f", range(layers)), ("b", range(layers - 1, -1, -1))):
            yield from ((f"s{s}.{algorithm}{i}", i, s) for i in order)


def tensor_parallel_program(layers: int, *, steps: int = 1, hidden_bytes: int = 1 << 20) -> Problem:
    """Tensor parallelism with sequence sharding: gather, matmul, reduce-scatter, twice per layer.

    Args:
        layers: Layers of the model.
        steps: Micro-batches.
        hidden_bytes: Bytes of one gathered activation.
    """
    b = _ProgramBuilder()
    for layer, _, _ in _passes(layers, steps):
        for part, factor in (("a", 1), ("m", 3)):
            name = f"{layer}{part}"
            full = b.buffer(f"{name}.full", hidden_bytes, "tp")
            wide = b.buffer(f"{name}.part", hidden_bytes * factor // 2, "tp")
            out = b.buffer(f"{name}.out", hidden_bytes // 8, "tp")
            b.op(f"{name}.gather", full, group="tp")
            b.op(f"{name}.matmul", full, wide)
            b.op(f"{name}.scatter", wide, out, group="tp")
            b.op(f"{name}.add", out)
    return b.problem()


def moe_program(layers: int, *, steps: int = 1, token_bytes: int = 1 << 18) -> Problem:
    """Mixture of experts: dispatch and combine all-to-alls of uneven size beside FSDP's gathers.

    Args:
        layers: Layers of the model.
        steps: Micro-batches.
        token_bytes: Bytes of all tokens of a rank.
    """
    b = _ProgramBuilder()
    for name, i, s in _passes(layers, steps):
        load = 4 + (i * 7 + s * 3) % 5
        weights = b.buffer(f"{name}.w", token_bytes * (3 + i % 2), "dp")
        sent = b.buffer(f"{name}.sent", token_bytes, "ep")
        got = b.buffer(f"{name}.got", token_bytes * load // 4, "ep")
        back = b.buffer(f"{name}.back", token_bytes * load // 4, "ep")
        merged = b.buffer(f"{name}.merged", token_bytes, "ep")
        b.op(f"{name}.gather", weights, group="dp")
        b.op(f"{name}.route", sent)
        b.op(f"{name}.dispatch", sent, got, group="ep")
        b.op(f"{name}.experts", got, back, weights)
        b.op(f"{name}.combine", back, merged, group="ep")
        b.op(f"{name}.add", merged)
    return b.problem()


def stream_program(operations: int, *, streams: int = 4, seed: int = 0) -> Problem:
    """Operations on several streams with random waits; each writes a buffer that later ones read.

    Args:
        operations: How many; there are half as many buffers.
        streams: How many.
        seed: Which of many.
    """
    random = Random(seed)
    b = _ProgramBuilder()
    for i in range(operations):
        after = []
        if i >= 16 and i % 3 == 0:
            after = [f"o{i - _between(random, 1, 15)}"]
        touched = []
        if i % 2 == 0:
            touched.append(b.buffer(f"b{i}", 256 * _between(random, 1, 64), "g"))
        elif i > 8:
            touched.append(f"b{(i - 1 - 2 * random.below(4))}")
        b.op(f"o{i}", *touched, stream=f"s{i % streams}", after=after)
    return b.problem()
