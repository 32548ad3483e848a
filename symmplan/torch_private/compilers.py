"""Dynamo, AOTAutograd and Inductor: what they know of the graph that they compile."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
import re
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import _guards

from symmplan.torch_private.table.compilers import AUTOGRAD_CACHE, COMPILED_CODE, OUTSIDE, STANCE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import CodeType

#: An item of a list, as Dynamo writes where a value comes from.
_ITEM = re.compile(r"(.+)\[\d+\]")

Called = TypeVar("Called", bound="Callable[..., Any]")


def outside_graphs(fn: Called) -> Called:
    """A function that compilers do not look into: a graph ends before it."""
    OUTSIDE.require()
    found: Called = torch._disable_dynamo(fn)  # type: ignore[attr-defined,assignment]
    return found


#: Where Dynamo's wrapper of a compiled function keeps the dispatcher's keys: a variable, and in
#: newer torch (2.14) a function.
_KEEPS_KEYS = {"saved_include_set", "_dynamo_save_local_dispatch_key_set"}


def in_compiled_call() -> bool:
    """Whether a call of a compiled function is under way, which ends with the modes it began in."""
    frame = inspect.currentframe() if "torch._dynamo.eval_frame" in sys.modules else None
    while frame is not None:
        code = frame.f_code
        if _KEEPS_KEYS.intersection(code.co_varnames + code.co_names):
            return True
        frame = frame.f_back
    return False


def in_compiled_code() -> bool:
    """Whether Dynamo would compile what an op is called by that a dispatch mode sees now.

    What it is told to leave out, as FSDP2's hooks, is none of that.
    """
    from torch._dynamo import eval_frame

    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == eval_frame.__file__:
            if code.co_name == "compile_wrapper":
                return True
            left_out = frame.f_locals.get("fn") if code.co_name == "_fn" else None
            # Modes are left out themselves.
            if left_out is not None and left_out.__name__ != "__torch_dispatch__":
                return False
        frame = frame.f_back
    return False


def run_op_by_op() -> Callable[[], None]:
    """From now on compiled functions run op by op when they are called, in all threads.

    Returns:
        What ends that. Where several have asked for it, the last that ends it does, unless the
        program has set another stance meanwhile.
    """
    if STANCE.missing():
        return lambda: None
    eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
    stance = eval_frame._stance
    if not hasattr(stance, "symmplan_asked"):
        stance = eval_frame.DynamoStance("force_eager")
        stance.symmplan_asked, stance.symmplan_before = 0, eval_frame._stance
        eval_frame._stance = stance
    stance.symmplan_asked += 1

    def end() -> None:
        stance.symmplan_asked -= 1
        if not stance.symmplan_asked and eval_frame._stance is stance:
            eval_frame._stance = stance.symmplan_before

    return end


def compiled_frame() -> int | None:
    """A number of the code that Dynamo is compiling, the same whenever it is compiled again."""
    context = getattr(torch._guards, "CompileContext", None)
    compile_id = None if context is None else context.current_compile_id()
    return getattr(compile_id, "frame_id", None)


def _translated() -> Any:
    """The frame that Dynamo is compiling; None outside, as in a backward that is compiled late."""
    if "torch._dynamo.symbolic_convert" not in sys.modules:
        return None
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output.root_tx
    except AttributeError:  # nothing is compiled
        return None


def compiled_code() -> CodeType | None:
    """The code that Dynamo is compiling; None outside."""
    frame = _translated()
    return None if frame is None else frame.f_code


def lists_of_numbers() -> set[tuple[int, ...]]:
    """Lists of integers that the frame which Dynamo is compiling has from elsewhere, and has read.

    They are arguments, attributes and globals. What the frame computes is none of them.
    """
    frame = _translated()
    if frame is None:
        return set()
    scope = {"L": frame.f_locals, "G": frame.f_globals}
    found = set()
    for name in {str(guard.name) for guard in frame.output.guards}:
        item = _ITEM.fullmatch(name)
        value = None
        # It may name what is not there any more.
        with contextlib.suppress(Exception):
            value = eval(item[1], dict(scope)) if item else None  # noqa: S307 (Dynamo's words)
        if isinstance(value, (list, tuple)) and all(type(n) is int for n in value):
            found.add(tuple(value))
    return found


def compile_again(code: CodeType) -> None:
    """Let nothing run any more that was compiled of some code so far: its next call compiles."""
    COMPILED_CODE.require()
    from torch._C._dynamo import eval_frame
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    for entry in eval_frame._debug_get_cache_entry_list(code):
        extra = entry.guard_manager.extra_state
        if extra is not None:
            extra.invalidate(entry, DeletedGuardManagerWrapper("ranks have agreed on another plan"))


def is_floor_division(expr: Any) -> bool:
    """Whether an expression of sizes is a quotient that is rounded down."""
    from torch.utils._sympy.functions import FloorDiv

    return isinstance(expr, FloorDiv)


@contextlib.contextmanager
def autograd_cache_off() -> Iterator[None]:
    """AOTAutograd neither takes compiled code from its cache nor puts any there.

    The setting alone is not enough: ``TORCHINDUCTOR_AUTOGRAD_CACHE=1`` overrides it.
    """
    from torch._functorch import config

    names = ("should_use_local_autograd_cache", "should_use_remote_autograd_cache")
    off = AUTOGRAD_CACHE.replaced(**dict.fromkeys(names, lambda: False))
    with config.patch(enable_autograd_cache=False), off:
        yield


def parts_together() -> AbstractContextManager[None]:
    """A backward is compiled right after its forward.

    Both share one set of segments, so both must be known before the first run.
    """
    from torch._functorch import config

    together: AbstractContextManager[None] = config.patch(force_non_lazy_backward_lowering=True)
    return together


def compile_parts(
    module: Any, example_inputs: Sequence[Any], compiler: Callable[[str], Callable[..., Any]]
) -> Callable[..., Any]:
    """Split one Dynamo graph into forward and backward, and compile both.

    Args:
        module: The graph.
        example_inputs: Its inputs, fake or real.
        compiler: What compiles the ``"forward"``, the ``"backward"`` or the ``"inference"``.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with parts_together():
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            partition_fn=min_cut_rematerialization_partition,
        )(module, example_inputs)
    return compiled


def boxed(run: Callable[..., Any]) -> Any:
    """A function that takes its arguments in one list, which it empties."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    return make_boxed_func(run)


def takes_a_list(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """``run``, which takes its arguments in one list, known for that by AOTAutograd."""
    marks = vars(boxed(run)).items()  # how torch marks such a function
    vars(run).update((name, value) for name, value in marks if not name.startswith("__"))
    return run


def values_of(mode: Any) -> AbstractContextManager[Any]:
    """A graph is compiled whose values have this fake mode."""
    from torch._inductor.virtualized import V

    values: AbstractContextManager[Any] = V.set_fake_mode(mode)
    return values


def decompose(gm: Any, mode: Any) -> None:
    """Make functionalized custom ops copies and the ops themselves, in place.

    A functionalized op that writes nothing has a tuple of its results. Where that is one tensor,
    torch leaves the ``getitem``, which would take the tensor's first row.
    """
    from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized

    with values_of(mode):
        decompose_auto_functionalized(gm.graph)
    for node in gm.graph.find_nodes(op="call_function", target=operator.getitem):
        source = node.args[0]
        schema = getattr(source.target, "_schema", None)
        if schema is not None and [str(r.type) for r in schema.returns] == ["Tensor"]:
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)


def _metadata() -> Any:
    """AOTAutograd's metadata of the graph that it compiles now, or None."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def static_inputs() -> tuple[int, ...]:
    """Which inputs of the graph that AOTAutograd compiles keep their address from call to call.

    Parameters, buffers and what is marked with ``mark_static_address``; of the forward graph.
    """
    return tuple(getattr(_metadata(), "static_input_indices", None) or ())


def saved_outputs() -> tuple[int, int] | None:
    """Which outputs of the forward that is being compiled its backward alone gets.

    Returns:
        The first of them, and how many inputs (sizes) the backward has before those; None where it
        cannot be told.
    """
    metadata = _metadata()
    first = getattr(metadata, "num_forward", None)
    sizes = getattr(metadata, "num_symints_saved_for_bw", None)
    return None if first is None or sizes is None else (int(first), int(sizes))


def keep_inputs(indices: Collection[int]) -> None:
    """Let the backward that is being compiled not write these inputs, though they end with it."""
    donated = getattr(_metadata(), "bw_donated_idxs", None)
    if donated:
        donated[:] = [i for i in donated if i not in indices]


def fake_mode_of(inputs: Sequence[Any]) -> Any:
    """The fake mode of the inputs, or a new one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return _guards.detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=True)


def tracing(fake_mode: Any) -> AbstractContextManager[Any]:
    """What compiling needs to know of where it is, outside of Dynamo."""
    context: AbstractContextManager[Any] = _guards.tracing(_guards.TracingContext(fake_mode))
    return context


def cpp_compiler() -> str:
    """The C++ compiler that Inductor will call; raises whatever Inductor would."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return str(get_cpp_compiler())
