"""The first iteration of an eager session, and the plan that is made of it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict

from symmplan.capture.c10d import is_all_to_all
from symmplan.capture.eager import Recorder
from symmplan.capture.eager_problem import (
    capture_recorded,
    declared_calls,
    name_between_calls,
)
from symmplan.capture.graphs import AGREED
from symmplan.capture.producers import is_allocation, out_overload
from symmplan.capture.signatures import signature
from symmplan.capture.streams import MARK
from symmplan.coordination.own import in_own_work, own_work
from symmplan.integrate.eager.build import Builder
from symmplan.integrate.eager.exchanged import DIFFER, UNEVEN, agreed, sizes_of
from symmplan.integrate.eager.faults import public
from symmplan.integrate.eager.frozen import Frozen
from symmplan.integrate.eager.scratch import ScratchMemory
from symmplan.integrate.eager.settings import Settings, meet
from symmplan.integrate.eager.turns import may_rest
from symmplan.place.algorithms import Lowerings
from symmplan.place.engines import again, having, register_known
from symmplan.place.program import place
from symmplan.planner import plan as plan_problem
from symmplan.planner.fingerprint import fingerprint
from symmplan.process import PROCESS
from symmplan.registry import spec_for
from symmplan.report.log import LOG
from symmplan.runtime.fitting import Fitting
from symmplan.runtime.prepare import Preparation
from symmplan.runtime.sleep import tell
from symmplan.runtime.stats import Copy
from symmplan.torch_private.compilers import in_compiled_code
from symmplan.torch_private.ops import OpOverload

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from contextlib import AbstractContextManager

    from torch import fx

    from symmplan.capture.graphs import UnequalParts
    from symmplan.capture.producers import Write
    from symmplan.capture.sites import Captured
    from symmplan.integrate.eager.exchanged import Sizes
    from symmplan.integrate.eager.turns import Turns
    from symmplan.memory import Arena
    from symmplan.model import OpSpec, Plan

#: More declared calls than an iteration has.
_LONG = 10_000
#: Arguments of all-to-alls that differ from rank to rank.
_SPLITS = ("output_split_sizes", "input_split_sizes")


class IterationRecording:
    """An iteration that is being recorded, from its construction to `freeze` or `stop`.

    Args:
        settings: Of the session.
        turns: Where the session lies.
        is_program: Whether the thread that asks is one of the program.
        telling: A context that notes what is raised in the program's calls.
        before: The `sizes` of the iteration before this one, if that was recorded, too.

    Attributes:
        sizes: Of each all-to-all, once the iteration has ended.
        op_by_op: Whether declared calls were made in compiled functions.
    """

    def __init__(
        self,
        settings: Settings,
        turns: Turns,
        is_program: Callable[[], bool],
        telling: Callable[[], AbstractContextManager[None]],
        before: Sequence[Sizes] | None = None,
    ) -> None:
        self._settings = settings
        self._before = before
        self.sizes: list[Sizes] = []
        self.op_by_op = False
        self._refused: dict[fx.Node, str] = {}
        self._unequal: dict[fx.Node, UnequalParts] = {}
        self._turns = turns
        #: How many collectives FSDP2 had run before the first call.
        self._others: int | None = None
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
        self.op_by_op = self.op_by_op or in_compiled_code()
        if self._others is None:
            self._others = PROCESS.owners_ran
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
        if self._others is None:
            self._others = PROCESS.owners_ran
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

    def end(self, *, once: bool) -> bool:
        """End the iteration; whether another one must be recorded before there can be a plan.

        See [Note: two iterations] in `symmplan.integrate.eager.exchanged`.

        Args:
            once: Whether all iterations are taken to be like this one.

        Raises:
            AgreementError: Ranks recorded different programs; raised on every rank.

        Collective: yes.
        """
        self.stop()
        self._agreed()
        first = self._before is None and not once
        self._agree_on_refused(first=first)
        if not first or UNEVEN not in self._refused.values():
            return False
        self.leave()
        return True

    def freeze(self) -> Frozen:
        """Plan what was recorded, and get its memory.

        Raises:
            AgreementError: As `end`, which comes before.

        Collective: yes.
        """
        settings, preparation = self._settings, self._preparation
        lowerings = self._agreed()
        frozen = preparation.attempt(
            functools.partial(self._prepared, lowerings),
            settings.process_groups,
            lambda made: made.arena.give_back(),
        )
        preparation.log(frozen.plan, frozen.program.algorithms)
        frozen.schedule(frozen.arena)
        self._turns.frozen = frozen
        return frozen

    def _agree_on_refused(self, *, first: bool) -> None:
        """Find the calls that are left out because of what some rank does, and why.

        Tensors that a rank uses elsewhere stay in ordinary memory on all ranks. Those that are made
        for a call to fill move to their placements if that is so on all.

        Args:
            first: Whether sizes may be others in the next iteration.

        Collective: yes.
        """
        calls = declared_calls(self._recorder)
        storages = [storage for call in calls for storage in call.storages]
        routed = [call for call in calls if is_all_to_all(call.op)]
        registered = self._agreed().registered
        elsewhere = [i for i, s in enumerate(storages) if s.elsewhere or (s.opaque and registered)]
        fills = [call.node in self._recorder.filled for call in calls]
        self.sizes = sizes_of(routed, self._recorder, self._before)
        mine = [elsewhere, fills, [asdict(sizes) for sizes in self.sizes]]
        notes = meet(self._settings, "session.step()", more=mine)
        for used, *_ in notes:
            for i in used:
                storages[i].elsewhere = True
        for call, *fill in zip(calls, *(of for _, of, _ in notes), strict=True):
            if all(fill):
                self._recorder.writes[self._recorder.filled[call.node]] = "alloc"
        told = [sizes for *_, sizes in notes]
        self._refused, self._unequal = agreed(routed, told, first=first, registered=registered)
        self._keep_ordinary(self._refused)

    def _keep_ordinary(self, nodes: Collection[fx.Node]) -> None:
        """Keep what not all ranks pass to ordinary calls in ordinary memory on all of them.

        In memory that NCCL knows, all that some rank passes to them.

        Args:
            nodes: The calls.

        Collective: yes, if there are any.
        """
        if not nodes:
            return
        calls = declared_calls(self._recorder)
        storages = [storage for call in calls for storage in call.storages]
        used = {storage for call in calls if call.node in nodes for storage in call.storages}
        mine = [i for i, storage in enumerate(storages) if storage in used]
        told = [{*note} for note in meet(self._settings, "session.step()", more=mine)]
        alike = set() if self._agreed().registered else set.intersection(*told)
        for i in set.union(*told) - alike:
            storages[i].elsewhere = True

    def _agree_on_unequal(self, fitting: Fitting, refused: dict[fx.Node, str]) -> None:
        """Place the all-to-alls of unequal parts, if the ranks then have one plan.

        Collective: yes.
        """
        name_between_calls(self._recorder)
        for node, parts in self._unequal.items():
            node.meta[AGREED] = parts
        plan = plan_problem(fitting.whole.problem)
        one_stream = all(o.op != MARK for o in plan.problem.operations)
        mine = fingerprint(plan) if one_stream else ""
        told = {*meet(self._settings, "session.step(), a plan", more=mine)}
        if len(told) > 1 or "" in told:
            for node in self._unequal:
                del node.meta[AGREED]
            refused |= dict.fromkeys(self._unequal, DIFFER)
            self._keep_ordinary(self._unequal)
            del fitting.whole

    def _prepared(self, lowerings: Lowerings) -> Frozen:
        """Choose algorithms, plan, and get memory; place nothing if that is refused.

        Args:
            lowerings: How ops run.

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
        refused = dict(self._refused)
        fitting = Fitting(capture, lowerings, device, preparation, refused)
        if self._unequal:
            self._agree_on_unequal(fitting, refused)
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
        rests = may_rest(captured, plan) and self._others == PROCESS.owners_ran
        rests = rests and not settings.options.debug
        engines = frozenset(chosen.engines.values())
        arena, rendezvous = self._obtain(plan, engines=engines, rests=rests)
        return Frozen(
            program,
            arena,
            rendezvous,
            functools.partial(Builder, self._recorder, program, device, elements),
            engines,
            _copies(captured, self._recorder),
            chosen.choices,
            rests,
            preparation.reason,
            1 if self._before is None else 2,
        )

    def _obtain(self, plan: Plan, *, engines: Collection[str], rests: bool) -> tuple[Arena, int]:
        """Memory for a plan, and how many rendezvous that took.

        Args:
            plan: The plan.
            engines: Names of the communicators over which copy engines run its calls.
            rests: Whether it can lie in segments of others.

        Collective: yes.
        """
        settings, preparation = self._settings, self._preparation
        groups, memory = settings.process_groups, preparation.memory
        again(having(groups, engines), memory, settings.device, settings.options.timeout)
        meet = register_known if engines else _nobody
        part = self._turns.place(plan, memory, may=rests)
        if part is None:
            return preparation.obtain(plan, settings.device, groups, meet)
        try:
            return part, meet(part)
        except BaseException:
            part.give_back()
            raise

    def obtain_again(self, frozen: Frozen) -> int | None:
        """Let a plan have memory again that was given back.

        Returns:
            How many rendezvous were made; None if some rank cannot have it.

        Collective: yes.
        """
        preparation = self._preparation

        def again() -> tuple[Arena, int] | None:
            if preparation.refusal is not None:
                return None
            return self._obtain(frozen.plan, engines=frozen.engines, rests=frozen.may_rest)

        groups = self._settings.process_groups
        made = preparation.attempt(again, groups, lambda made: made[0].give_back())
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


def _nobody(_: Arena) -> int:
    """No copy engines meet the segments."""
    return 0


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
