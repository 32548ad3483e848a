"""What one rank sees never changes what runs: each input of a decision to launch is agreed.

Walks the code of the FSDP2 integration, and of who holds which bytes, from what launches a
collective back to whoever calls that, and looks at each branch on the way: a name there is a
function of this code, whose inputs count then, or stands in `AGREED` with the reason why it is the
same on all ranks, or in `LOCAL`, with what the branch does instead of launching otherwise.
"""

from __future__ import annotations

import ast
import builtins
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
    "integrate/fsdp/memory.py",
    "integrate/fsdp/push.py",
    "integrate/fsdp/runtime.py",
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
    "_everywhere": "asks all ranks",
    "_all_fit": "asks all ranks, which meet",
}
#: Why a name is the same on all ranks.
AGREED = {
    "the plan, and what was agreed with it": """
        Pushes _arenas _bounds storage layout _one_sided
        _outputs _peers _plain _pushes _run begin bisect_left call carried end
        chosen collectives counts zero_copy unshards get groups
        index live meeting memory offset offsets other p
        place reason received schedule segment segments site take_shared
        tensor view algorithm parts
    """,
    "types and sizes of parameters, and of what their own tensors give to a gather": """
        dtypes has_own_gather itemsize orig_dtype outputs_of param_dtype ranks size uint8
    """,
    "the program's calls, and what was counted of them": """
        Key _arrived _last _unmet again to flat _lacking _modules _next _reduced _seen
        _site _slot _tries _waiting _was_backward base buffer
        dtype element_size exchanges factor_of gathers group_name in_backward
        _kind kind log numel of_backward pop prod ran removeprefix
        scatters served shape target async_op op output_tensor values
    """,
    "FSDP2's own state, which its calls alone change": """
        Asked Gathered fsdp_params shard_of result_of state_name group_of
        _group is_sharded is_unsharded unshard_in_backward
    """,
    "where the program runs": "_device _stream device_of is_accelerator is_cpu serves",
    "methods that the program gave FSDP2's class": "unchanged",
}
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
        "alone": "the same",
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
    "dtype_of_gradients": {"allocate": "the type in which sums are written"},
    "is_capturing": {"arrive": "raises, or plans later"},
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


def names(expression):
    """Names in an expression, of dotted ones the last part."""
    inner = {id(n.value) for n in ast.walk(expression) if isinstance(n, ast.Attribute)}
    bound = {
        name.id
        for n in ast.walk(expression)
        if isinstance(n, ast.comprehension)
        for name in ast.walk(n.target)
        if isinstance(name, ast.Name)
    }
    found = {last(n) for n in ast.walk(expression) if id(n) not in inner or not last(n)}
    return found - bound - {None}


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


class Walk:
    """All that can change what is launched, in some source files."""

    def __init__(self, sources):
        self.known = functions(sources)
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


def test_each_input_of_a_decision_to_launch_is_agreed():
    agreed = {name for listed in AGREED.values() for name in listed.split()}
    found = Walk(texts().values()).found
    unknown = {name: where for name, where in found.items() if name not in agreed | LOCAL.keys()}
    assert unknown == {}, "say why it is the same on all ranks, or do not let it decide"
    elsewhere = {name: found.get(name, set()) - of.keys() for name, of in LOCAL.items()}
    assert not any(elsewhere.values()), f"may it delay, copy or raise there? {elsewhere}"


def test_the_tables_have_nothing_else():
    found = Walk(texts().values()).found
    agreed = [name for listed in AGREED.values() for name in listed.split()]
    assert sorted(agreed) == sorted(set(agreed) & found.keys())
    assert {n: of.keys() for n, of in LOCAL.items()} == {n: found.get(n) for n in LOCAL}


@pytest.mark.further
@pytest.mark.parametrize(
    ("file", "line", "added", "name"),
    [
        (
            "integrate/fsdp/zero_copy.py",
            "        self._runtime.arrive(key, group.device, outside=self.outside)\n",
            "        if self.parameters[0].sharded_param._version == 1:\n            return\n",
            "_version",
        ),
        (
            "integrate/fsdp/zero_copy.py",
            "        self._runtime.gathering(",
            "        fresh = optimizer_steps()\n        while not fresh:\n            return\n",
            "optimizer_steps",
        ),
        (
            "integrate/fsdp/runtime.py",
            "        mine = unshard.storage\n",
            "        if not self.alive:\n            return False\n",
            "alive",
        ),
        (
            "integrate/fsdp/runtime.py",
            "        if self.schedule is None:\n            return None\n        scheduled, in_",
            "        if self.memory.users(key.site).holders(0, 1):\n            return None\n",
            "holders",
        ),
    ],
)
def test_a_local_input_is_seen(file, line, added, name):
    """Also one that a condition gets through a variable, a property, or an argument."""
    sources = texts()
    text = sources[file].replace("runtime.gathering(", "self._runtime.gathering(")
    assert text.count(line) == 1, file
    before = Walk(texts().values()).found.get(name, set())
    sources[file] = text.replace(line, added + line)
    assert Walk(sources.values()).found.get(name, set()) > before
