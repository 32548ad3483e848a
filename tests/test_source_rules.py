"""Rules of the sources, each with a check that can fail: where state is, what a line does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from paths import parsed

PACKAGE = Path(__file__).parent.parent / "symmplan"
SOURCES = {
    str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}

# -- state of the process -------------------------------------------------------------------------

#: What a module may keep beside `symmplan.process.PROCESS`, and why.
MAY_KEEP = {
    "process.py: PROCESS": "it is the state",
    "registry/declare.py: store": "the op registry, an object of its own that tests isolate",
    "integrate/compile/backend.py: symmplan": "what Dynamo's entry point names; it has release()",
    "memory/ops/library.py: _LIBRARY": "ops that are defined at import, for as long as torch lives",
    "integrate/compile/ops.py: _LIBRARY": "the same",
    "integrate/compile/ops.py: _SYMM_MEM_LIBRARY": "the same",
}
#: What makes a value that nobody changes, or that says nothing of this process.
CONSTANTS = frozenset(
    (
        *("frozenset", "tuple", "getattr", "get_args", "object", "nullcontext", "compile", "dtype"),
        *("Struct", "pack", "Path", "slice", "bytes", "partial", "getLogger", "TypeVar"),
        *("comm_bases", "note", "attrgetter"),
    )
)
#: Methods that change what they are called on.
CHANGES = frozenset(
    (
        *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
        *("remove", "reverse", "setdefault", "sort", "subtract", "update"),
    )
)
DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)


def _last(node: ast.AST) -> str:
    """``z`` of ``x.y.z``."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _values(files: dict[str, str]) -> set[str]:
    """Classes without state (frozen, tuples, methods that set nothing), and partials of them."""
    found = set()
    for source in files.values():
        for node in ast.walk(parsed(source)):
            if not isinstance(node, ast.ClassDef):
                continue
            made = [ast.unparse(d) for d in node.decorator_list]
            frozen = any(d.startswith("frozen") or "frozen=True" in d for d in made)
            defined = any(d.startswith("define") for d in made)
            sets = any(
                isinstance(n, ast.Attribute)
                and isinstance(n.ctx, ast.Store)
                and ast.unparse(n.value) == "self"
                for n in ast.walk(node)
            )
            local = any(_last(base) in ("local", "NamedTuple") for base in node.bases)
            if frozen or not (defined or sets or local):
                found.add(node.name)
    for source in files.values():
        for node in parsed(source).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                call = node.value
                if _last(call.func) == "partial" and _last(call.args[0]) in found:
                    found.add(_last(node.targets[0]))
    return found


def _at_import(body: list[ast.stmt]):
    """The statements that run when a module is imported."""
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from _at_import(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _at_import(handler.body)


def _changed(files: dict[str, str]) -> set[str]:
    """Names that some file changes in place: by a method, an index, or as another module's."""
    found = set()
    for source in files.values():
        for node in ast.walk(parsed(source)):
            target = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                target = node.func.value if node.func.attr in CHANGES else None
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
                target = node.value
            elif isinstance(node, ast.AugAssign):
                target = node.target
            if target is not None:
                found.add(_last(target))
    return found


def module_state(files: dict[str, str]) -> list[str]:
    """What modules keep that is no constant, in ``{path inside the package: source}``."""
    values, changed, found = _values(files), _changed(files), []
    for path, source in sorted(files.items()):
        tree = parsed(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                found += [f"{path}: {name}" for name in node.names]
        for node in _at_import(tree.body):
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            value, states = node.value, False
            if isinstance(value, DISPLAYS):
                empty = not isinstance(value, ast.Dict) and not getattr(value, "elts", [1])
                empty = empty or (isinstance(value, ast.Dict) and not value.keys)
                states = empty or bool(changed.intersection(names))
            elif isinstance(value, ast.Call):
                states = _last(value.func) not in CONSTANTS | values
            if states:
                found += [f"{path}: {name}" for name in names if name != "__all__"]
    return sorted(set(found))


def test_state_of_the_process_is_in_one_object():
    found = module_state(SOURCES)
    assert [name for name in found if name not in MAY_KEEP] == []
    assert [name for name in MAY_KEEP if name not in found] == [], "nobody keeps that any more"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("_SEEN = {}", ["_SEEN"]),
        ("_SEEN: list[int] = []", ["_SEEN"]),
        ("_SEEN = set()", ["_SEEN"]),
        ("_SEEN = dict(a=1)", ["_SEEN"]),
        ("_OF = weakref.WeakKeyDictionary()", ["_OF"]),
        ("_ALL: WeakSet[int] = WeakSet()", ["_ALL"]),
        ("_NOW = ContextVar('now')", ["_NOW"]),
        ("_HERE = threading.local()", ["_HERE"]),
        ("_NUMBERS = itertools.count()", ["_NUMBERS"]),
        ("_LAST = collections.deque(maxlen=3)", ["_LAST"]),
        ("_SIZES = Counter()", ["_SIZES"]),
        ("_lock = threading.Lock()", ["_lock"]),
        ("_COUNT = [0]\ndef f():\n    _COUNT[0] += 1", ["_COUNT"]),
        ("_COUNT = [0]\ndef f():\n    _COUNT.append(1)", ["_COUNT"]),
        ("_BY = {'a': 1}\ndef f():\n    del _BY['a']", ["_BY"]),
        ("if x:\n    _SEEN = {}", ["_SEEN"]),
        ("try:\n    x\nexcept E:\n    _SEEN = {}", ["_SEEN"]),
        ("_now = None\ndef f():\n    global _now\n    _now = 1", ["_now"]),
        ("class Invented:\n    def f(self):\n        self.x = 1\n_KEPT = Invented()", ["_KEPT"]),
        ("@define\nclass Invented:\n    x: int = 0\n_KEPT = Invented()", ["_KEPT"]),
        ("class Invented(threading.local):\n    x = 0\n_KEPT = Invented()", ["_KEPT"]),
        ("@frozen\nclass Row:\n    x: int = 0\n_ROW = Row()", []),
        ("@frozen\nclass Row:\n    x: int\n_row = partial(Row, x=1)\n_ROW = _row()", []),
        (
            "@define\nclass Kept:\n    x: int\n_kept = partial(Kept, x=1)\n_KEPT = _kept()",
            ["_KEPT"],
        ),
        ("class Plain:\n    def f(self):\n        return 1\n_PLAIN = Plain()", []),
        ("_WORDS = {'a': 1}\n_NAMES = ['a']\n_SET = frozenset(('a',))", []),
        ("_WORD = re.compile('a')\n_LOG = logging.getLogger('a')", []),
        ("def f():\n    seen = {}\n    seen['a'] = 1", []),
        ("class Invented:\n    def __init__(self):\n        self.seen = {}", []),
    ],
)
def test_the_check_of_state_can_fail(source, names):
    found = module_state({"memory/invented.py": source})
    assert found == [f"memory/invented.py: {name}" for name in names]


def test_a_table_that_another_module_changes_is_state():
    files = {
        "memory/invented.py": "TABLE = {'a': 1}",
        "runtime/invented.py": "from symmplan.memory import invented\ninvented.TABLE['b'] = 2",
    }
    assert module_state(files) == ["memory/invented.py: TABLE"]
    assert module_state({"memory/invented.py": files["memory/invented.py"]}) == []


# -- control flow is statements -------------------------------------------------------------------

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _has(node: ast.AST, *kinds: type[ast.AST], least: int = 1) -> bool:
    """Whether such expressions are inside of this one."""
    return sum(isinstance(n, kinds) for n in ast.walk(node) if n is not node) >= least


def folded(source: str) -> list[str]:
    """Where control flow is folded into an expression: ``"line: what"``."""
    found = []
    for node in ast.walk(parsed(source)):
        what = ""
        if isinstance(node, ast.IfExp) and _has(node, ast.IfExp):
            what = "a condition inside a condition"
        elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.BoolOp, ast.IfExp)):
            what = "a condition as a statement"
        elif isinstance(node, ast.Expr) and isinstance(node.value, COMPREHENSIONS):
            what = "a comprehension as a statement"
        elif isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.iter, ast.IfExp):
            what = "a loop over a condition"
        elif isinstance(node, ast.Lambda) and _has(node, ast.BoolOp, ast.IfExp):
            what = "a condition inside a lambda"
        elif isinstance(node, ast.BoolOp) and _has(node, ast.NamedExpr, least=2):
            what = "a chain of :="
        if what:
            line = node.iter.lineno if isinstance(node, ast.comprehension) else node.lineno
            found.append(f"{line}: {what}")
    return found


def test_control_flow_is_not_folded_into_expressions():
    assert {path: lines for path, source in SOURCES.items() if (lines := folded(source))} == {}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = a if b else c if d else e", "a condition inside a condition"),
        ("x = a if b else (c if d else e)", "a condition inside a condition"),
        ("x = f(a if b else g(c if d else e))", "a condition inside a condition"),
        ("ready and run()", "a condition as a statement"),
        ("ready or run()", "a condition as a statement"),
        ("run() if ready else wait()", "a condition as a statement"),
        ("[run(x) for x in y]", "a comprehension as a statement"),
        ("{run(x) for x in y}", "a comprehension as a statement"),
        ("for x in y if z else ():\n    pass", "a loop over a condition"),
        ("x = [a for a in (b if c else d)]", "a loop over a condition"),
        ("x = lambda a: a or b", "a condition inside a lambda"),
        ("x = lambda a: a if b else c", "a condition inside a lambda"),
        ("x = (a := f()) and (b := g(a))", "a chain of :="),
    ],
)
def test_the_check_of_control_flow_can_fail(source, says):
    assert folded(source) == [f"1: {says}"]


@pytest.mark.parametrize(
    "source",
    [
        "x = a if b else c",
        "x = (a if b else c) + (d if e else f)",
        "if a and b:\n    run()",
        "x = [f(y) for y in z if y]",
        "for x in y or ():\n    pass",
        "x = lambda a: f(a)",
        "while (a := f()) and a > 1:\n    pass",
    ],
)
def test_the_check_of_control_flow_leaves_the_rest_alone(source):
    assert folded(source) == []


# -- what something is, its fields say ------------------------------------------------------------

#: Where such a text is taken apart, and why.
MAY_CUT = {
    "model/declared.py: self.where.partition('.')": "what people declare is text, read here alone",
    "registry/rows.py: self.op.partition('::')": "likewise a row of the catalogue",
    "torch_private/c10d.py: op._schema.name.partition('::')": "torch's schemas have one name",
    "runtime/watching.py: op._schema.name.partition('::')": "the same",
    "launcher/ranks.py: 'onnection' in error.text": "errors of networks have no common class",
    "bench/parts/profile.py: 'Gather' not in event.name": "kernels in a profile are names",
    "registry/check.py: 'group' in a.name": "which argument carries a group that nobody named",
}
CUTS = frozenset(
    (
        *("startswith", "endswith", "removeprefix", "removesuffix", "split", "rsplit"),
        *("partition", "rpartition"),
    )
)
SAY = frozenset(
    (
        *("op", "name", "reason", "kind", "where", "target", "what", "fix", "algorithm", "user"),
        *("note", "text"),
    )
)


def told_by_texts(files: dict[str, str]) -> list[str]:
    """Where something is told by a part of a text that an object has for people, or as a key."""
    found = []
    for path, source in sorted(files.items()):
        for node in ast.walk(parsed(source)):
            text: ast.AST | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                text = node.func.value if node.func.attr in CUTS else None
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
                literal = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
                text = node.comparators[0] if literal else None
            if isinstance(text, ast.Attribute) and text.attr in SAY:
                found.append(f"{path}: {ast.unparse(node)}")
    return sorted(set(found))


def test_nothing_is_told_by_a_part_of_a_text():
    found = told_by_texts(SOURCES)
    assert [line for line in found if line not in MAY_CUT] == []
    assert [line for line in MAY_CUT if line not in found] == [], "nobody does that any more"


@pytest.mark.parametrize(
    "text",
    [
        "spec.op.startswith('c10d::')",
        "site.where.partition('.')",
        "row.target.removesuffix('.default')",
        "instruction.kind.startswith('copy')",
        "buffer.name.endswith(':result')",
        "'producer' in site.reason",
        "'rank ' not in error.what",
    ],
)
def test_the_check_of_texts_can_fail(text):
    files = {"runtime/invented.py": f"def f():\n    if {text}:\n        pass"}
    assert told_by_texts(files) == [f"runtime/invented.py: {text}"]


@pytest.mark.parametrize("text", ["site.kind == 'argument'", "'a' in names", "text.split(',')"])
def test_the_check_of_texts_leaves_the_rest_alone(text):
    assert told_by_texts({"runtime/invented.py": f"x = {text}"}) == []


# -- a device is asked through its facade ---------------------------------------------------------

#: What may ask torch for a CUDA device: the facade, torch's private names, and benchmarks.
ASKS_TORCH = ("device/", "torch_private/", "bench/")


def told_of_cuda(files: dict[str, str]) -> list[str]:
    """Lines that name ``torch.cuda`` outside of these."""
    return [
        f"{path}:{number}"
        for path, source in sorted(files.items())
        if not path.startswith(ASKS_TORCH)
        for number, line in enumerate(source.splitlines(), 1)
        if "torch.cuda" in line or "from torch import cuda" in line
    ]


def test_a_device_is_asked_through_its_facade():
    assert told_of_cuda(SOURCES) == []


@pytest.mark.parametrize(
    "source",
    ["import torch.cuda", "from torch import cuda", "x = 1\nwait = torch.cuda.Event"],
)
def test_the_check_of_devices_can_fail(source):
    last = len(source.splitlines())
    files = {f"{folder}/x.py": source for folder in ("runtime", "device", "bench/parts")}
    assert told_of_cuda(files) == [f"runtime/x.py:{last}"]
