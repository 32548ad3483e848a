"""What one rank sees never changes what runs: each input of a decision to launch is agreed.

Walks the code of the FSDP2 integration, and of who holds which bytes, from what launches a
collective back to whoever calls that, and looks at each branch on the way: a name there is a
function of this code, whose inputs count then, or stands in `AGREED` with the reason why it is the
same on all ranks, or in `LOCAL`, with what the branch does instead of launching otherwise.
"""

from __future__ import annotations

import ast
import builtins
import functools
from pathlib import Path

import pytest
from paths import parsed

import symmplan

ROOT = Path(symmplan.__file__).parent
#: The files whose branches decide.
FILES = [
    "integrate/fsdp/comms.py",
    "integrate/fsdp/zero_copy.py",
    "integrate/fsdp/parameter_storage.py",
    "integrate/fsdp/layout.py",
    "integrate/fsdp/segments.py",
    "integrate/fsdp/push.py",
    "integrate/fsdp/serve.py",
    "integrate/fsdp/schedule.py",
    "memory/leased.py",
    "runtime/leases.py",
]
#: What launches a collective, as it is called in those files.
LAUNCHES = {
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_parts_",
    "exchanges",
    "gathers",
    "in_place",
    "plain",
    "barrier",
    "enter",
    "otherwise",
    "call_own",  # FSDP2's own method
    "scatters",
}
#: What decides besides, and asks the ranks itself.
ASKED = {
    "make": "`Planning.make` agrees the plan with all ranks",
    "meet": "a step of that",
    "prepare": "a step of that",
    "can_move": "asks all ranks whether parameters can move",
    "everywhere": "asks all ranks",
    "_all_fit": "asks all ranks, which meet",
}
#: Why a name is the same on all ranks. An attribute goes by its class if that is `self`'s, else by
#: the name that it is reached by, and by the text that indexes it.
AGREED = {
    "the plan, and what was agreed with it": """
        .view options.timeout _pushes.values _arenas.memory _arenas.segments _places.get _views.get
        algorithm.reason
        BACKENDS.collectives bisect_left c.carried engines.get groups.rank
        layout.counts Layout.counts layout.offsets layout.parts Memory._arenas
        Memory._pushes Memory.groups Memory.turns memory.turns other.begin other.end other.storage p
        ParameterStorage._one_sided ParameterStorage._outputs ParameterStorage._run
        ParameterStorage.begin ParameterStorage.end storage.begin storage.end
        place.end place.offset place.segment
        PlannedAllGather._plain PlannedReduceScatter._plain planning.live
        planning.unshards Pushes Pushes._peers Runtime.asleep Runtime.counts.replans _runtime.idle
        Runtime.idle Runtime.memory Runtime.schedule Schedule._bounds
        Schedule.collectives schedule.places_nothing scheduled.algorithm scheduled.call
        scheduled.place scheduled.zero_copy
        segment.begin segment.meeting segment.peers segment.tensor slot.index
        scheduled.pushed slot.pushed _slot.pushed slot.offset slot.scheduled
        slot.take_shared unshard.site unshard.storage
        ZeroCopyUnshard.layout ZeroCopyUnshard.site ZeroCopyUnshard.storage
    """,
    "types and sizes of parameters, and of what their own tensors give to a gather": """
        .itemsize _dtype_of _shape_of fsdp2_in_place.has_own_gather
        fsdp2_in_place.outputs_of group_of.size
        storage.layout layout.dtypes Layout.dtypes Layout.ranks parameter.orig_dtype
        parameter.param_dtype torch.uint8
    """,
    "the program's calls, and what was counted of them": """
        .dtype .element_size .numel .shape _keys.get _ends.before _ends.trained _Planned._kind
        _Planned._plain_buffer _Planned._site recorder.log _unsharded.pop
        _unsharded.values again async_op autograd.graph_task autograd.in_backward c.buffer
        c10d.group_name
        factor_of g.to gathers input_tensor Key key.kind log.ran math.prod
        op output_tensor PlannedAllGather._site PlannedAllGather._slot
        PlannedReduceScatter._plain_buffer PlannedReduceScatter._site
        PlannedReduceScatter._slot Pushes._last Pushes.unmet pushes.unmet Runtime._arrived
        note _calls.get Runtime._lacking Runtime._modules Runtime._tries Runtime._waiting
        scatters
        Schedule._next slot.base slot.flat slot.log slot.served str.removeprefix target
    """,
    "FSDP2's own state, which its calls alone change": """
        Asked asked.shards fsdp2_in_place.group_of
        fsdp2_in_place.flat_shards fsdp2_in_place.result_of fsdp2_in_place.shard_of
        fsdp2_in_place.state_name Gathered group.fsdp_params group.is_sharded
        group.is_unsharded group.unshard_in_backward PlannedReduceScatter._group
        ZeroCopyUnshard._group ZeroCopyUnshard._looked ZeroCopyUnshard._named
    """,
    "where the program runs": """
        _device.is_accelerator fsdp2_in_place.gather_streams executor.serves Memory._device
        Pushes._stream tensor.is_cpu
    """,
    "methods and modes that the program gave FSDP2": "_methods.why_own",
}
#: What tensors and their types have, whoever holds them.
OF_TENSORS = {"dtype", "element_size", "itemsize", "numel", "shape", "view"}
#: What a rank sees by itself: in which functions, and what these do besides launching.
LOCAL = {
    "viewed": {
        "can_leave": "asked of all ranks",
    },
    "inputs_of": {"shards_of": "raises"},
    "holders": {"give_room": "who is there copies aside, or what is gathered is copied"},
    "owner": {"step_aside": "the same"},
    "current": {"__init__": "watches this thread's ops"},
    "debug": {"__init__": "the same"},
    "placements": {"prepare": "names the buffers of a race"},
    "bound": {"step_aside": "copies, where the parameters lie in the placement"},
    "all_gather_event": {"step_aside": "waits"},
    "held": {
        "allocate": "FSDP2 holds its buffer until the collective ran; else the step has failed",
    },
    "lease": {
        "run": "copies: the collective is staged",
        "open": "the same",
        "give_room": "who is there copies aside, or stays",
        "_fill": "waits",
    },
    "Ledger": {
        "hold": "copies: who is there, and a run's arguments",
        "users": "whoever takes the bytes waits, or copies",
    },
    "leases": {"hold": "the same", "users": "the same"},
    "leased": {"run": "a buffer that the program put in the place of FSDP2's"},
    "data_ptr": {
        "_part": "reads a part of a buffer",
    },
    "_added": {"allocate": "writes sums where gradients are"},
    "added": {"reduced": "the same", "__call__": "the same", "otherwise": "the same"},
    "fits": {
        "send": "casts, or leaves gradients as they are",
        "push": "a rank that pushes nothing meets its peers as they do",
    },
    "new_empty": {"otherwise": "the same"},
    "dtype_of_gradients": dict.fromkeys(
        ("allocate", "_allocate_output"), "the type in which sums are written"
    ),
    "gradients_move": dict.fromkeys(
        ("allocate", "_turn"), "on which stream ordinary memory is allocated"
    ),
    "become_gradients": {"_allocate_output": "the same"},
    "output": {"allocate": "the same"},
    "readable": {"_start": "lets accesses be errors"},
    "Runtime.counts": dict.fromkeys(("open", "runs_plainly"), "what came out of order is counted"),
    "checking": {"runs_plainly": "the same collective, observed or not"},
    "PROCESS.launched": dict.fromkeys(("open", "_fill"), "the same"),
    "looks": dict.fromkeys(("arrive", "open", "to_sharded"), "writes down what the device has"),
    "is_capturing": {"arrive": "raises, or plans later"},
    "exc_info": {"remove": "an error has ended the step; peers' gathers time out"},
}


def functions(sources):
    """``{name: [function, ...]}`` of all files; a method goes by its own name."""
    found = {}
    for text in sources:
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(node)
    return found


def own(function):
    """What a function does itself: not what functions inside it do, nor annotations."""
    todo = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef):
            continue
        yield node
        skip = node.annotation if isinstance(node, ast.AnnAssign) else None
        todo += [child for child in ast.iter_child_nodes(node) if child is not skip]


def mentioned(function):
    """Names of the functions that it calls, or hands to somebody."""
    return {n for node in own(function) for n in [last(node)] if n is not None}


def last(node):
    """The last part of a dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def owned(node):
    """A dotted name by its last two parts, with the text by which it is indexed.

    Of ``self.memory.counts["copies"]`` that is ``memory.counts.copies``.
    """
    key = ""
    if isinstance(node, ast.Subscript):
        text = getattr(node.slice, "value", None)
        if not isinstance(text, str):
            return None
        node, key = node.value, f".{text}"
    if not isinstance(node, ast.Attribute):
        return None
    owner = node.value
    while isinstance(owner, ast.Subscript | ast.Call):
        owner = owner.value if isinstance(owner, ast.Subscript) else owner.func
    return f"{last(owner) or '?'}.{node.attr}{key}"


def names(expression):
    """Names in an expression, of dotted ones the last two parts."""
    inner, found, bound = set(), set(), set()
    for node in ast.walk(expression):  # what is outside comes first
        if isinstance(node, ast.comprehension):
            bound |= {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
        name = node.id if isinstance(node, ast.Name) else owned(node)
        if name is None or id(node) in inner:
            continue
        found.add(name)
        if isinstance(node, ast.Subscript):
            inner.add(id(node.value))
            node = node.value  # noqa: PLW2901
        while isinstance(node, ast.Attribute):
            node = node.value  # noqa: PLW2901
            inner.add(id(node))
    return found - bound


def branches(function):
    """The expressions that decide where a function goes."""
    for node in own(function):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.test
        elif isinstance(node, ast.BoolOp):
            yield from node.values[:-1]
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.For):
            yield node.iter


def assigned(function):
    """``{variable: [what it is given, ...]}``."""
    found = {}
    for node in own(function):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.NamedExpr):
            value = node.iter if isinstance(node, ast.For) else node.value
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets if value is not None else ():
                for one in ast.walk(target):
                    if isinstance(one, ast.Name):
                        found.setdefault(one.id, []).append(value)
    return found


def classes(sources):
    """``{method: name of its class}`` of all files."""
    return {
        method: node.name
        for text in sources
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.ClassDef)
        for method in ast.walk(node)
        if isinstance(method, ast.FunctionDef)
    }


class Walk:
    """All that can change what is launched, in some source files."""

    def __init__(self, sources):
        sources = list(sources)
        self.known = functions(sources)
        self.class_of = classes(sources)
        self.found = {}
        self._seen = set()
        for name in sorted(self._deciders()):
            for function in self.known[name]:
                for test in branches(function):
                    self._look(test, function)

    def _deciders(self):
        """The functions from which a launch can be reached."""
        reached = set(LAUNCHES)
        while True:
            more = {
                name
                for name, of in self.known.items()
                if name not in reached | ASKED.keys() and any(mentioned(f) & reached for f in of)
            }
            if not more:
                return reached & self.known.keys()
            reached |= more

    def _look(self, expression, function):
        for name in names(expression):
            self._input(name, function)

    def _input(self, name, function):
        if (name, function) in self._seen:
            return
        self._seen.add((name, function))
        given = assigned(function)
        arguments = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
        owner, dot, attribute = name.partition(".")
        if dot:
            bare = attribute.partition(".")[0]
            if owner in ("self", "cls"):
                owner = self.class_of[function]
            if bare.isupper():
                return
            if bare in LOCAL or bare in ASKED or bare in self.known:
                name = bare
            else:
                whose = "" if bare in OF_TENSORS else owner
                self.found.setdefault(f"{whose}.{attribute}", set()).add(function.name)
                return
        if name == "self" or name.isupper() or hasattr(builtins, name) or name in ASKED:
            return
        if name in LOCAL:
            self.found.setdefault(name, set()).add(function.name)
        elif name in given:
            for value in given[name]:
                self._look(value, function)
        elif name in arguments:
            self._argument(name, arguments, function)
        elif name in self.known:
            for f in self.known[name]:
                results = [n.value for n in own(f) if isinstance(n, ast.Return) and n.value]
                for expression in (*results, *branches(f)):
                    self._look(expression, f)
        else:
            self.found.setdefault(name, set()).add(function.name)

    def _argument(self, name, arguments, function):
        """What callers pass; where nobody here calls it, that is FSDP2's own argument."""
        place = arguments.index(name) - (arguments[0] == "self")
        for caller in (f for of in self.known.values() for f in of):
            for node in own(caller):
                if isinstance(node, ast.Call) and last(node.func) == function.name:
                    passed = {k.arg: k.value for k in node.keywords}
                    if name in passed:
                        self._look(passed[name], caller)
                    elif 0 <= place < len(node.args):
                        self._look(node.args[place], caller)


def texts():
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in FILES}


@functools.cache
def found_here():
    return Walk(texts().values()).found


def test_each_input_of_a_decision_to_launch_is_agreed():
    agreed = {name for listed in AGREED.values() for name in listed.split()}
    found = found_here()
    unknown = {name: where for name, where in found.items() if name not in agreed | LOCAL.keys()}
    assert unknown == {}, "say why it is the same on all ranks, or do not let it decide"
    elsewhere = {name: found.get(name, set()) - of.keys() for name, of in LOCAL.items()}
    assert not any(elsewhere.values()), f"may it delay, copy or raise there? {elsewhere}"


def test_the_tables_have_nothing_else():
    found = found_here()
    agreed = [name for listed in AGREED.values() for name in listed.split()]
    assert sorted(agreed) == sorted(set(agreed) & found.keys())
    assert {n: of.keys() for n, of in LOCAL.items()} == {n: found.get(n) for n in LOCAL}


@pytest.mark.further
@pytest.mark.parametrize(
    ("file", "line", "added", "name"),
    [
        (
            "integrate/fsdp/zero_copy.py",
            "        self._runtime.arrive(key, group.device, outside=outside)\n",
            "        if self.parameters[0].sharded_param._version == 1:\n            return\n",
            "sharded_param._version",
        ),
        (
            "integrate/fsdp/zero_copy.py",
            "        outside = runtime.gathering(",
            "        fresh = optimizer_steps()\n        while not fresh:\n            return\n",
            "optimizer_steps",
        ),
        (
            "integrate/fsdp/serve.py",
            "        mine = unshard.storage\n",
            "        if not self.alive:\n            return False\n",
            "Runtime.alive",
        ),
        (
            "integrate/fsdp/serve.py",
            "        scheduled, memory = slot.scheduled, self.memory\n",
            '        if self.counts["copies"]:\n            return "", None\n',
            "Runtime.counts.copies",
        ),
        (
            "integrate/fsdp/serve.py",
            "        scheduled, memory = slot.scheduled, self.memory\n",
            (
                "        counts = self.counts\n"
                '        if counts["copies"]:\n            return "", None\n'
            ),
            "Runtime.counts",
        ),
        (
            "integrate/fsdp/serve.py",
            "        known = self.schedule\n        scheduled",
            "        if self.memory.users(key.site).holders(0, 1):\n            return None\n",
            "holders",
        ),
    ],
)
def test_a_local_input_is_seen(file, line, added, name):
    """Also one that a condition gets through a variable, a property, or an argument."""
    sources = texts()
    text = sources[file]
    assert text.count(line) == 1, file
    before = found_here().get(name, set())
    sources[file] = text.replace(line, added + line)
    assert Walk(sources.values()).found.get(name, set()) > before
