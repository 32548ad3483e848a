"""A recorded iteration -> its `Problem`.

[Note: held tensors]
    A graph knows the last *use* of a tensor; a running program may hold one longer, and could use
    it at any time, even in ways that are not seen. So the release of a storage is recorded. If
    other operations lie between the last use and the release, the buffer gets one more access,
    ``<buffer>:drop``, on the stream on which it was made. A program that uses the buffer on another
    stream must make the first stream wait before the release; otherwise the memory would not be
    safe without a plan, either. With ``record_stream`` the buffer gets such an access on each of
    those streams, too. A program that drops each tensor right after its last use has no such
    accesses, and gives exactly the problem of FX.

[Note: unequal parts]
    What an all-to-all of unequal parts brings has another size on each rank, and each rank may do
    other things with it: who gets no rows does nothing. The ranks must plan the same, though. So
    such a buffer is as large as any rank needs it. In place of what the program does with it
    between declared calls, and waits for them, it has an access when the first rank has asked for
    its memory, and one when the last rank has dropped it. If nothing else of the plan is used
    between the same two, such moments are in the order that they have on each rank; where ranks
    differ, a buffer is in use for longer. Otherwise requests come first and drops last. What the
    program does there with other buffers is numbered, and nodes are named anew behind each declared
    call.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from attrs import evolve

from symmplan.capture.fx import capture_fx
from symmplan.capture.graphs import LiveRange, is_wait
from symmplan.capture.sites import Captured, Step
from symmplan.capture.streams import MAIN, unordered, with_streams
from symmplan.model import Access, Operation, Unplanned
from symmplan.registry import spec_for

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any

    from torch import fx

    from symmplan.capture.eager import Recorder
    from symmplan.capture.graphs import Value
    from symmplan.capture.producers import Write
    from symmplan.capture.recorded import Recorded, Storage

    #: How a node writes, given what says it of nodes of the program's own.
    _Producer: TypeAlias = Callable[[fx.Node, Callable[[fx.Node], Write | None]], Write | None]

#: Why a collective over a group that is not the session's is ordinary.
OTHER_GROUP = "its group has other ranks than the session"

#: When something ran, and on which stream.
_Moment: TypeAlias = tuple[int, str]


def capture_recorded(
    recorder: Recorder,
    *,
    producer: _Producer,
    refused: Mapping[fx.Node, str],
    ordinary: Collection[Value] = (),
    **others: Any,
) -> Captured:
    """End a recording, if that was not done, and capture it.

    Args:
        recorder: The recording.
        producer: As for `capture_fx`; its second argument asks for what the program says of a node.
        refused: As for `capture_fx`.
        ordinary: As for `capture_fx`.
        others: More arguments of `capture_fx`.

    Collective: no.
    """
    recorder.close()
    served = {call.node for call in recorder.calls}
    others_calls = [n for n in recorder.graph.nodes if n not in served]
    refused = {**dict.fromkeys(others_calls, OTHER_GROUP), **refused}
    apart = {value for value, storage in recorder.made.items() if storage.elsewhere}
    writes = dict(recorder.writes)
    while True:
        captured = capture_fx(
            recorder.graph,
            producer=functools.partial(_asked, producer, writes),
            refused=refused,
            ordinary=apart.union(ordinary),
            **others,
        )
        if not_filled := _not_filled(recorder, captured):
            writes = {node: how for node, how in writes.items() if node not in not_filled}
            continue
        captured = _in_time(recorder, _with_opaque(recorder, captured, refused))
        reasons = unordered(captured.problem)
        more = {s.node: reasons[s.buffer] for s in captured.sites if s.buffer in reasons}
        if not more.keys() - refused.keys():
            return captured
        refused = {**more, **refused}


def _asked(producer: _Producer, writes: Mapping[fx.Node, Write], node: fx.Node) -> Write | None:
    """How a node can write into given memory, where the program says so much of it."""
    return producer(node, writes.get)


def _not_filled(recorder: Recorder, captured: Captured) -> set[fx.Node]:
    """What makes a tensor in a placement for a call that is not to overwrite it there."""
    buffers = {storage.node: storage.buffer for storage in captured.placed_storages}
    bound = {(s.node, s.buffer) for s in captured.sites if s.how == "bind"}
    return {
        node
        for call, node in recorder.filled.items()
        if node in buffers and (call, buffers[node]) not in bound
    }


def _with_opaque(
    recorder: Recorder, captured: Captured, refused: Mapping[fx.Node, str]
) -> Captured:
    """A captured recording that also says what is left out of calls without a functional form."""
    unplanned = [
        Unplanned(call.node.name, spec.op, requirement.where, refused[call.node])
        for call in recorder.calls
        if call.op is not None and call.form is None and call.node in refused
        if (spec := spec_for(call.op)) is not None
        for requirement in spec.requirements
    ]
    problem = captured.problem
    return evolve(captured, problem=evolve(problem, unplanned=(*problem.unplanned, *unplanned)))


def _in_time(recorder: Recorder, captured: Captured) -> Captured:
    """The operations of a captured recording, each at its moment and on its stream, and drops."""
    problem, steps = captured.problem, dict(captured.steps)
    moments: list[_Moment] = []
    for operation in problem.operations:
        at, stream = _moment(recorder, captured, steps[operation.name])
        # A copy out follows the wait, which may be that of another result.
        moments.append((max(at, moments[-1][0]) if moments else at, stream))
    position = {o.name: i for i, o in enumerate(problem.operations)}
    last: dict[str, int] = {}
    for access in problem.accesses:
        last[access.buffer] = max(last.get(access.buffer, -1), position[access.operation])
    # By their position; drops before the operation there, in an order that is the same on all
    # ranks, whenever their collectors run.
    operations: list[tuple[tuple[int, int, int, str], Operation, _Moment]] = [
        ((i, 1, 0, ""), operation, moments[i]) for i, operation in enumerate(problem.operations)
    ]
    accesses = list(problem.accesses)
    times = [at for at, _ in moments]
    marks = [at for at, _ in recorder.timeline.marks]
    for placed in captured.placed_storages:
        storage = recorder.made.get((placed.node, placed.path))
        if storage is None or not storage.dropped:
            continue
        end = bisect_right(times, storage.dropped)
        for name, stream in _drops(
            placed.buffer, storage, moments[:end], moments[last[placed.buffer]]
        ):
            key = (end, 0, bisect_right(marks, storage.dropped), name)
            operations.append((key, Operation(name, stream=stream), (storage.dropped, stream)))
            accesses.append(Access(name, placed.buffer))
            steps[name] = Step("release", buffer=placed.buffer)
    operations.sort(key=itemgetter(0))
    ordered, accesses = _alike(recorder, captured, steps, [o[1:] for o in operations], accesses)
    problem = evolve(problem, operations=[o for o, _ in ordered], accesses=accesses)
    declared = {call.stream for call in recorder.calls} | {MAIN}
    placed_at = [moment for _, moment in ordered]
    problem = with_streams(problem, recorder.timeline, placed_at, declared)
    return evolve(captured, problem=problem, steps=steps)


def declared_calls(recorder: Recorder) -> list[Recorded]:
    """The recorded calls of declared ops; others ask for memory."""
    return [call for call in recorder.calls if call.kind == "op"]


def on_all_ranks(recorder: Recorder) -> list[fx.Node]:
    """The nodes that all ranks have in one order: declared calls, and waits for them."""
    calls = {call.node for call in declared_calls(recorder)}
    return [n for n in recorder.graph.nodes if n in calls or (is_wait(n) and n.args[0] in calls)]


def name_between_calls(recorder: Recorder) -> None:
    """Let nodes have equal names on all ranks. See [Note: unequal parts]."""
    timeline, declared = recorder.timeline, 0
    calls = {call.node for call in declared_calls(recorder)}
    named = {*calls, *recorder.filled.values()}
    told = {call.node for call in recorder.calls} - calls  # ranks make these alike
    for node in list(recorder.graph.nodes):
        declared += node in calls
        if node.op != "call_function" or is_wait(node) or node in named:
            continue
        before = node.name
        where = "placed" if node in told else "between"
        node._rename(f"{before.rstrip('_0123456789')}_{where}{declared}")
        if before in timeline.at:
            timeline.at[node.name] = timeline.at.pop(before)
            timeline.streams[node.name] = timeline.streams.pop(before)


def _alike(
    recorder: Recorder,
    captured: Captured,
    steps: dict[str, Step],
    operations: list[tuple[Operation, _Moment]],
    accesses: list[Access],
) -> tuple[list[tuple[Operation, _Moment]], list[Access]]:
    """What all ranks have in common. See [Note: unequal parts]; adds to ``steps``."""
    unequal = _live_ranges(captured)
    if not unequal:
        return operations, accesses
    own: set[str] = set()
    for o, _ in operations:
        if steps[o.name].kind in ("use", "release") and own.issuperset(o.ends):
            own.add(o.name)
    accesses = [a for a in accesses if not (a.buffer in unequal and a.operation in own)]
    left = {a.operation for a in accesses}
    operations = [o for o in operations if o[0].name in left or o[0].name not in own]
    names = [o.name for o, _ in operations if o.name in own]
    new = {name: f"between:{i}" for i, name in enumerate(names)}
    steps.update({new[name]: steps.pop(name) for name in names})
    operations = [
        (evolve(o, name=new.get(o.name, o.name), ends=tuple(new.get(n, n) for n in o.ends)), at)
        for o, at in operations
    ]
    accesses = [evolve(a, operation=new.get(a.operation, a.operation)) for a in accesses]
    _insert(recorder, unequal, steps, operations, accesses)
    return operations, accesses


def _insert(
    recorder: Recorder,
    unequal: Mapping[str, LiveRange],
    steps: dict[str, Step],
    operations: list[tuple[Operation, _Moment]],
    accesses: list[Access],
) -> None:
    """Add the accesses with which live ranges begin and end to operations, accesses and steps."""
    number: dict[fx.Node | None, int] = {n: i for i, n in enumerate(on_all_ranks(recorder))}
    numbers = [number.get(steps[o.name].node, -1) for o, _ in operations]
    inserted: list[tuple[int, int, int, bool, str]] = []
    for buffer, of in unequal.items():
        assert of.until is not None
        _, end = _between(numbers, of.until)
        inserted.append((end, of.until, of.dropped, False, buffer))
        if of.since is not None:
            start, _ = _between(numbers, of.since)
            inserted.append((start, of.since, of.asked, True, buffer))
    for place, *_, made, buffer in sorted(inserted, reverse=True):
        added = Operation(f"{buffer}:{'made' if made else 'held'}")
        operations.insert(place, (added, operations[min(place, len(operations) - 1)][1]))
        accesses.append(Access(added.name, buffer, write=made))
        steps[added.name] = Step("release", buffer=buffer)


def _between(numbers: Sequence[int], number: int) -> tuple[int, int]:
    """Where what the program does between one node of `on_all_ranks` and the next begins and ends.

    Args:
        numbers: The number of the node to which each operation belongs, -1 if it is none of these.
        number: Of the next one.
    """
    end = next((i for i, n in enumerate(numbers) if n >= number), len(numbers))
    return max((i + 1 for i in range(end) if numbers[i] >= 0), default=0), end


def _live_ranges(captured: Captured) -> dict[str, LiveRange]:
    """Of the buffers that all-to-alls of unequal parts use, but for copies."""
    found: dict[str, LiveRange] = {}
    for site in captured.sites:
        of = site.live_range
        if site.buffer is None or of is None or of.until is None:
            continue
        other = found.setdefault(site.buffer, of)
        assert other.until is not None
        by_program = of.since is not None and other.since is not None
        asked = min(of.since or 0, other.since or 0) if by_program else None
        first, last = min(of.asked, other.asked), max(of.dropped, other.dropped)
        until = max(of.until, other.until)
        found[site.buffer] = evolve(of, since=asked, until=until, asked=first, dropped=last)
    return found


def _moment(recorder: Recorder, captured: Captured, step: Step) -> _Moment:
    assert step.node is not None
    timeline, name = recorder.timeline, step.node.name
    if step.kind in ("copy out", "copy back"):
        waits = captured.waits.get(step.node, {}).values()
        name = max((wait.name for wait in waits), key=timeline.at.__getitem__, default=name)
    return timeline.at.get(name, 0), timeline.streams.get(name, MAIN)


def _drops(
    buffer: str, storage: Storage, before: Sequence[_Moment], last: _Moment
) -> list[tuple[str, str]]:
    """Name and stream of the accesses that stand for a release. See [Note: held tensors].

    The operations ``before`` it ran at those moments, the last that uses the buffer at ``last``.
    """
    held = before and before[-1][0] > last[0]
    names = [(f"{buffer}:drop", storage.stream)] if held or last[1] != storage.stream else []
    users = enumerate(dict.fromkeys(storage.users), start=1)
    return names + [(f"{buffer}:drop{i}", stream) for i, stream in users]
