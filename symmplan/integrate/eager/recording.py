"""The first iteration of an eager session, and the plan that is made of it."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen

from symmplan.capture.c10d import is_all_to_all
from symmplan.capture.eager import Recorder
from symmplan.capture.eager_problem import capture_recorded
from symmplan.capture.producers import is_allocation, out_overload
from symmplan.capture.signatures import signature
from symmplan.coordination.exchange import Exchange
from symmplan.coordination.own import in_own_work, own_work
from symmplan.errors import AgreementError
from symmplan.integrate.eager.build import Builder
from symmplan.integrate.eager.faults import public
from symmplan.integrate.eager.frozen import Frozen
from symmplan.integrate.eager.groups import OwnGroups
from symmplan.integrate.eager.scratch import ScratchMemory
from symmplan.place.algorithms import Lowerings
from symmplan.place.engines import register_known
from symmplan.place.program import place
from symmplan.registry import bind_arguments, spec_for
from symmplan.report.log import LOG
from symmplan.runtime.fitting import Fitting
from symmplan.runtime.prepare import Preparation
from symmplan.runtime.sleep import tell
from symmplan.runtime.stats import Copy
from symmplan.torch_private.ops import OpOverload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import fx

    from symmplan.capture.eager import Recorded
    from symmplan.capture.producers import Write
    from symmplan.capture.sites import Captured
    from symmplan.capture.streams import DeviceStreams
    from symmplan.coordination.groups import Group
    from symmplan.memory import Arena
    from symmplan.model import OpSpec
    from symmplan.runtime.options import Options

#: More declared calls than an iteration has.
_LONG = 10_000
#: Arguments of all-to-alls that differ from rank to rank.
_SPLITS = ("output_split_sizes", "input_split_sizes")
_UNEVEN = "its parts are not all of one size on all ranks, or the program gives their sizes"


@frozen
class Settings:
    """The options of a session.

    Attributes:
        groups: ``{name: group}`` of its ranks, one.
        device: Where declared tensors lie.
        streams: The device's streams; None if it has none.
        options: The user's options.
        own_groups: The groups whose calls are the session's.
    """

    groups: Mapping[str, Group]
    device: torch.device
    streams: DeviceStreams | None
    options: Options
    own_groups: OwnGroups = field(init=False)

    @own_groups.default
    def _own_groups(self) -> OwnGroups:
        return OwnGroups(self.group.torch_name, self.group.ranks)

    @property
    def group(self) -> Group:
        """The group of its ranks."""
        (group,) = self.groups.values()
        return group

    @property
    def process_groups(self) -> dict[str, Any]:
        """Torch's group under its name."""
        return {self.group.name: self.group.process_group}


def meet(settings: Settings, op: str, detail: str = "", more: Any = None) -> list[Any]:
    """Every rank says what it is about to do.

    Args:
        settings: Of the session.
        op: What it is.
        detail: What else must be equal on all ranks.
        more: What need not, as plain data.

    Returns:
        ``more`` of each rank.

    Raises:
        AgreementError: Somebody is about to do something else.

    Collective: yes.
    """
    group = settings.group
    with Exchange(settings.groups, settings.options.timeout) as exchange:
        note = json.dumps([op, detail, more]).encode()
        said = [json.loads(text) for text in exchange.round("call", note)[group.name]]
    other = next((i for i, given in enumerate(said) if given[:2] != said[0][:2]), None)
    if other is not None:
        texts = [said[i][:2] for i in (0, other)]
        names = [f"{what} {how}".strip() for what, how in texts]
        raise AgreementError(
            f"ranks 0 and {other} make different calls in a recorded iteration",
            expected=f"{names[0]} (rank 0)",
            got=f"{names[1]} (rank {other})",
            fix="make the same declared calls with the same shapes on every rank",
            group=group.name,
            rank=group.rank,
            ranks=(0, other),
            op=texts[0][0],
            buffer="",
        )
    return [given[2] for given in said]


class IterationRecording:
    """An iteration that is being recorded, from its construction to `freeze` or `stop`.

    Args:
        settings: Of the session.
        is_program: Whether the thread that asks is one of the program.
        telling: A context that notes what is raised in the program's calls.
    """

    def __init__(
        self,
        settings: Settings,
        is_program: Callable[[], bool],
        telling: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._settings = settings
        self._telling = telling
        self._calls = 0
        self._preparation = Preparation(settings.options, "symmplan.eager", "eager session")
        self._lowerings: Lowerings | None = None
        self._scratch = ScratchMemory(settings.device, settings.options.timeout)
        self._recorder = Recorder(
            self._lookup,
            self._elsewhere,
            self._meet_at_op,
            in_own_work,
            streams=settings.streams,
            scratch=self._scratch,
            default_group=settings.group.name,
            is_program=is_program,
        )
        self._recorder.__enter__()

    def _elsewhere(self, op: Any, args: Any, kwargs: Any) -> bool:
        """Whether a declared call is over another group. See [Note: other groups]."""
        return self._settings.own_groups.elsewhere(op)(args, kwargs)

    def _lookup(self, op: Any) -> OpSpec | None:
        """What is declared of an op. Collective: of the first that is, over the group."""
        spec = spec_for(op)
        if spec is not None and spec.wrong and not spec.requirements:
            return None  # nothing that torch's registry holds of it fits the op
        return None if spec is None else self._agreed().as_run(spec, self._settings.group.name)

    @own_work
    def _agreed(self) -> Lowerings:
        """How ops run, where all ranks were given the same options.

        Collective: the first time, over the group.
        """
        if self._lowerings is None:
            settings, preparation = self._settings, self._preparation
            with self._telling():
                memory = preparation.agree(settings.device, settings.process_groups)
            self._lowerings = Lowerings(memory, settings.options.collectives)
            self._scratch.memory = memory if preparation.refusal is None else None
        return self._lowerings

    def _meet_at_op(self, op: Any, args: Any, kwargs: Any) -> None:
        """Before a declared op is recorded: do all ranks call the same?

        How many rows go to whom is each rank's own affair.
        """
        self._calls += 1
        if self._calls == _LONG:
            LOG.warning(
                "%d declared calls were recorded and session.step() has not come: call it at the "
                "end of each iteration, or nothing is planned",
                _LONG,
            )
        given: Any = ()
        if not is_all_to_all(op):
            names = [a.name for a in op._schema.arguments]
            args = [x for name, x in zip(names, args, strict=False) if name not in _SPLITS]
            kwargs = {name: x for name, x in kwargs.items() if name not in _SPLITS}
            given = (signature(args), signature(kwargs))
        with self._telling():
            meet(self._settings, str(op.name()), repr(public(given)))

    def memory(self, kind: str, make: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Serve `symmplan.placed.empty` and `symmplan.placed.out` while recording."""
        tensor: torch.Tensor = make(*args, **kwargs)
        write: Write = "alloc" if kind == "empty" else "out"
        self._recorder.memory(tensor, kind, write, (make, *args), kwargs)
        return tensor

    def stop(self) -> None:
        """Record no more."""
        self._recorder.__exit__(None, None, None)
        self._scratch.release()

    def leave(self) -> None:
        """See `Recorder.leave`."""
        self._recorder.leave()

    def freeze(self) -> Frozen:
        """Plan what was recorded, and get its memory.

        Raises:
            AgreementError: Ranks recorded different programs; raised on every rank.

        Collective: yes.
        """
        settings, preparation = self._settings, self._preparation
        self.stop()
        lowerings = self._agreed()
        refused = self._agree_on_refused()
        frozen = preparation.attempt(
            functools.partial(self._prepared, lowerings, refused),
            settings.process_groups,
            lambda made: made.arena.give_back(),
        )
        preparation.log(frozen.plan, frozen.program.algorithms)
        frozen.schedule(frozen.arena)
        return frozen

    def _agree_on_refused(self) -> dict[fx.Node, str]:
        """The calls that are left out because of what some rank does, and why.

        Tensors that a rank uses elsewhere stay in ordinary memory on all ranks.

        Collective: yes.
        """
        calls = [c for c in self._recorder.calls if c.kind == "op"]
        storages = [storage for call in calls for storage in call.storages]
        routed = [call for call in calls if is_all_to_all(call.op)]
        elsewhere = [i for i, storage in enumerate(storages) if storage.elsewhere]
        notes = meet(
            self._settings, "session.step()", more=[elsewhere, [_parts(c) for c in routed]]
        )
        for used, _ in notes:
            for i in used:
                storages[i].elsewhere = True
        of_ranks = zip(*(parts for _, parts in notes), strict=True)
        parts_of_ranks = zip(routed, of_ranks, strict=True)
        return {c.node: _UNEVEN for c, of in parts_of_ranks if None in of or len({*of}) > 1}

    def _prepared(self, lowerings: Lowerings, refused: Mapping[fx.Node, str]) -> Frozen:
        """Choose algorithms, plan, and get memory; place nothing if that is refused.

        Args:
            lowerings: How ops run.
            refused: ``{call: why it is left out}``.

        Collective: yes.
        """
        settings, preparation = self._settings, self._preparation
        groups, device = settings.process_groups, settings.device
        capture = functools.partial(
            capture_recorded,
            self._recorder,
            producer=lowerings.producer,
            default_group=settings.group.name,
        )
        fitting = Fitting(capture, lowerings, device, preparation, refused)
        fitting.choose()
        room = None
        if preparation.refusal is None:
            room = preparation.room(lowerings.memory, device, groups).nbytes
        plan, captured = fitting.fit(room, preparation.plan)
        chosen = fitting.chosen
        dtypes = dict.fromkeys(x.dtype for x in captured.values.tensors.values())
        with torch.inference_mode(mode=False):  # they outlive the caller's mode
            # Here, where a rank that has no room for them is heard.
            elements = {dtype: torch.empty((), dtype=dtype, device=device) for dtype in dtypes}
            how = (fitting.lowerings, chosen.placed, chosen.engines)
            program = place(captured, plan, *how, plan.barriers)
        meet = register_known if chosen.engines else _nobody
        arena, rendezvous = preparation.obtain(plan, device, groups, meet)
        return Frozen(
            program,
            arena,
            rendezvous,
            functools.partial(Builder, self._recorder, program, device, elements),
            bool(chosen.engines),
            _copies(captured, self._recorder),
            chosen.choices,
            preparation.reason,
        )

    def obtain_again(self, frozen: Frozen) -> int | None:
        """Let a plan have memory again that was given back.

        Returns:
            How many rendezvous were made; None if some rank cannot have it.

        Collective: yes.
        """
        settings, preparation = self._settings, self._preparation
        meet = register_known if frozen.engines else _nobody
        given = frozen.plan, settings.device, settings.process_groups, meet
        made = preparation.obtain_together(*given)
        if made is None:
            return None
        frozen.schedule(made[0])
        tell(preparation.user, made[0].segment_bytes, asleep=False)
        return made[1]


#: What to do about a copy of what code of torch makes.
_COMPILED = (
    "code of torch makes it there: compile that with this call, by "
    'torch.compile(..., backend="symmplan")'
)


def _nobody(_: Arena) -> None:
    """No copy engines meet the segments."""


def _parts(call: Recorded) -> str | None:
    """Of an all-to-all what is equal on all ranks if all its parts are; None if they are not."""
    if call.form is None:
        return None
    given = bind_arguments(call.form.op, call.form.args, call.form.kwargs)
    if len({*given["output_split_sizes"], *given["input_split_sizes"]}) > 1:
        return None
    return repr(public((call.args, call.kwargs)))


def _copies(captured: Captured, recorder: Recorder) -> tuple[Copy, ...]:
    """Every staged tensor, with the line that would avoid the copy."""
    buffers = {b.name: b for b in captured.problem.buffers}
    found = []
    for site in captured.sites:
        if site.how != "stage" or site.buffer is None:
            continue
        producer = site.source if site.source in recorder.lines else site.node
        fix = "drop it, or what was made of it, before session.step()"
        if site.by_producer:
            target = site.source.target
            if producer in recorder.by_torch:
                fix = _COMPILED
            elif is_allocation(target):
                fix = "allocate it with symmplan.placed.empty"
            elif isinstance(target, OpOverload) and out_overload(target) is not None:
                what = target.overloadpacket.__name__
                fix = f"write symmplan.placed.out(torch.{what}, ...) where it is made"
            else:
                fix = "let an op that takes out= write it, in memory from symmplan.placed.empty"
        elif site.kind == "argument":
            fix = "make it in the iteration, in memory from symmplan.placed.empty"
        found.append(
            Copy(
                captured.specs[site.node].op,
                site.where,
                site.buffer,
                buffers[site.buffer].nbytes,
                site.reason,
                recorder.lines.get(producer, ""),
                fix,
            )
        )
    return tuple(found)
