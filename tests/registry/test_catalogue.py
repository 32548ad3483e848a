"""The built-in catalogue against the ops of this torch, and the command that shows it."""

from __future__ import annotations

import json
import re
import sys

import attrs
import pytest
import torch

import symmplan
from symmplan import registry
from symmplan.cli import main
from symmplan.cli import ops as command
from symmplan.errors import DeclarationError
from symmplan.registry import catalogue, inventory
from symmplan.registry.rows import COLLECTIVES, NAMESPACES, NOT_SYMMETRIC, SYMM_MEM, CatalogueRow
from symmplan.registry.schema import is_defined, resolve, schema_of
from symmplan.torch_private import torch_registry

ROWS = {row.op: row for row in (*COLLECTIVES, *SYMM_MEM)}
torch_registry.define_distributed_ops()
NAMES = {name.partition(".")[0] for name in torch_registry.op_names()}
LIVE = sorted(name for name in NAMES if name.partition("::")[0] in NAMESPACES)
LIB = torch.library.Library("symmtest_catalogue", "FRAGMENT")
LIB.define("mine(Tensor x, str g) -> Tensor")


def test_no_op_is_listed_twice():
    assert len(ROWS) == len(COLLECTIVES) + len(SYMM_MEM)
    assert not set(ROWS) & set(NOT_SYMMETRIC)


def test_every_communication_op_is_decided_about():
    new = {op: schema_of(resolve(op)[0]).text for op in {*LIVE} - ROWS.keys() - {*NOT_SYMMETRIC}}
    assert new == {}, (
        f"new in torch {torch.__version__}: give them rows in symmplan/registry/rows*.py, or "
        f"reasons in rows.py"
    )


def test_every_row_fits_the_live_schema():
    for op in ROWS.keys() & {*LIVE}:
        row, spec = ROWS[op], symmplan.requirements(op)
        assert spec is not None, catalogue.entry_of(schema_of(resolve(op)[0]))
        assert spec.origin == "catalogue", op
        assert {r.where for r in spec.requirements} == set(row.where), op
        assert {r.where for r in spec.requirements if r.signal_pad} == set(row.pads), op
        for fact in ("group", "handshake", "release", "asynchronous"):
            assert getattr(spec, fact) == getattr(row, fact), op
        if row.out_name is not None:
            assert is_defined(row.out_name), op
            assert spec.out == f"{row.out_name}.default"


def test_live_ops_with_an_out_variant_name_it():
    """By the names of the live ops, not by the rows."""
    have = [op for op in LIVE if op in ROWS and f"{op}_out" in LIVE]
    assert have
    for op in have:
        assert symmplan.requirements(op).out == f"{op}_out.default"


def test_what_an_op_writes_for_others_is_declared():
    """In-place collectives and out-variants that peers write declare what they write."""
    for op in ROWS.keys() & {*LIVE}:
        written = {a.name for a in schema_of(resolve(op)[0]).arguments if a.written and a.tensor}
        declared = {r.where for r in symmplan.requirements(op).requirements}
        local = "may be ordinary memory" in ROWS[op].note or op.endswith(
            ("one_shot_all_reduce_out", "one_shot_reduce_out")
        )
        assert written <= declared or local, op


def test_asynchronous_ops_are_those_that_something_waits_for():
    for op, row in ROWS.items():
        namespace = op.partition("::")[0]
        if namespace in ("_c10d_functional", "_c10d_functional_autograd", "c10d", "symmplan"):
            assert row.asynchronous
        else:
            assert row.asynchronous == ("_low_contention" in op and "multicast" not in op)


def test_known_facts():
    """A few rows spelt out: what people look up most."""
    spec = symmplan.requirements
    gather = spec("_c10d_functional::all_gather_into_tensor")
    assert [r.where for r in gather.requirements] == ["input", "return"]
    assert gather.out == "_c10d_functional::all_gather_into_tensor_out.default"
    assert gather.asynchronous
    one_shot = spec("symm_mem::one_shot_all_reduce")
    assert [(r.where, r.signal_pad) for r in one_shot.requirements] == [("input", True)]
    assert not one_shot.asynchronous
    copying = spec("symm_mem::one_shot_all_reduce_copy")
    assert [r.where for r in copying.requirements] == ["symm_buffer"]
    assert spec("symm_mem::fused_all_gather_matmul").requirements == ()
    assert spec("c10d::_allgather_base_").group == "process_group"
    assert spec("c10d_functional::all_reduce") is None


_PAIRWISE = ("broadcast", "broadcast_", "all_to_all_single", "alltoall_base_")
_OWN_FIRST = ("one_shot_all_reduce_copy", "one_shot_all_reduce_copy_out")
_ONE_SIDED = (
    *("memcpy_to_multicast_", "nvshmem_broadcast", "nvshmem_all_to_all", "all_to_all_vdev"),
    *("all_to_all_vdev_2d", "all_to_all_vdev_2d_offset", "tile_reduce", "multi_root_tile_reduce"),
)


def test_what_orders_ranks():
    """Every fact of every row, from what the op does; see the notes of the rows' modules."""
    for op in (op for op in LIVE if op in ROWS and ROWS[op].where):
        namespace, _, name = op.partition("::")
        spec = symmplan.requirements(op)
        bounded = {(r.enters, r.releases) for r in spec.requirements}
        facts = spec.handshake, spec.release, spec.synchronizes
        if namespace != "symm_mem":
            assert facts == (False, False, name not in _PAIRWISE), op
            assert bounded == {(True, True)}, op
        elif name in _ONE_SIDED:
            assert facts == (False, False, False), op
            assert bounded == {(False, False)}, op
        elif name in _OWN_FIRST:
            assert facts == (False, True, True), op
            assert bounded == {(True, True)}, op
        else:
            assert facts == (True, True, True), op


def test_ops_that_this_torch_lacks_are_passed_over(monkeypatch):
    future = CatalogueRow("symm_mem::symmtest_of_the_future", "all-reduce", "input")
    monkeypatch.setattr(catalogue, "_ROWS", {**ROWS, future.op: future})
    lacking = [op for op in (*ROWS, future.op) if not is_defined(op)]
    assert future.op in lacking
    for op in lacking:
        assert op not in {s.op.partition(".")[0] for s in registry.all_specs()}
        with pytest.raises(DeclarationError, match="is defined"):
            symmplan.requirements(op)


# -- a torch of the future ---------------------------------------------------------------------


@pytest.fixture
def new_ops():
    lib = torch.library.Library("symm_mem", "FRAGMENT")
    lib.define("symmtest_new_op(Tensor x, str group_name) -> Tensor")
    yield
    lib._destroy()


def test_a_new_op_breaks_nothing_and_is_shown(new_ops, capsys):
    op = "symm_mem::symmtest_new_op"
    assert symmplan.requirements(op) is None
    assert main(["ops"]) == 0
    assert re.search(rf"Not declared: not catalogued.*\n +{op}", capsys.readouterr().out)
    with registry.isolated():
        symmplan.register_symm_mem_args(op, ["x"])
        assert op in {s.op.partition(".")[0] for s in registry.all_specs()}


def test_a_changed_op_breaks_nothing_and_is_shown(monkeypatch):
    schema = schema_of(torch.ops._c10d_functional.all_reduce_.default)
    changed = attrs.evolve(schema, arguments=schema.arguments[1:])
    assert catalogue.spec_of(changed) is None
    entry = catalogue.entry_of(changed)
    assert not entry.known
    assert "changed in this torch" in entry.note
    assert "'input'" in entry.note


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main(["ops", *words])
        return code, capsys.readouterr()

    with registry.isolated():
        yield call


def test_the_list_has_every_row(run):
    code, out = run()
    assert code == 0
    for op in LIVE:
        if op in ROWS:
            assert re.search(rf"^{op.partition('::')[2]} .*catalogue", out.out, re.MULTILINE)
    assert "communication ops are left out: --all says why" in out.out
    assert "Not declared" not in out.out


def test_the_list_has_the_notes_of_all_rows(run):
    _, out = run("--all")
    assert all(line == line.rstrip() for line in out.out.splitlines())
    for op in LIVE:
        if op in ROWS:
            assert ROWS[op].note.split(";")[0].split(" ")[0] in out.out


def test_all_says_why_ops_are_left_out(run):
    _, out = run("--all")
    for op, reason in NOT_SYMMETRIC.items():
        if op in LIVE:
            assert op in out.out
            assert f"Left out: {reason}" in out.out


def test_json_is_complete(run):
    code, out = run("--json")
    assert code == 0
    result = json.loads(out.out)
    assert [o["op"] for o in result["ops"]] == [s.op for s in registry.all_specs()]
    assert result["not_catalogued"] == []
    row = next(o for o in result["ops"] if o["op"] == "symm_mem::one_shot_all_reduce.default")
    assert row == {
        "op": "symm_mem::one_shot_all_reduce.default",
        "symmetric": [
            {
                "where": "input",
                "align": 256,
                "signal_pad": True,
                "enters": True,
                "releases": True,
            }
        ],
        "group": "group_name",
        "signal_pad": True,
        "handshake": True,
        "release": True,
        "synchronizes": True,
        "asynchronous": False,
        "out": "symm_mem::one_shot_all_reduce_out.default",
        "fills": [],
        "origin": "catalogue",
        "note": "",
    }
    names = {o["op"].removesuffix(".default") for o in result["ops"] + result["left_out"]}
    assert names >= set(LIVE)


def test_names_select(run):
    def listed(*words):
        result = json.loads(run(*words, "--json")[1].out)
        return {o["op"].removesuffix(".default") for o in result["ops"]}

    assert listed("c10d") == {op for op in ROWS if op.startswith("c10d::")} & set(LIVE)
    assert listed("symm_mem::", "c10d") == {
        op for op in ROWS if op.startswith(("c10d::", "symm_mem::"))
    } & set(LIVE)
    assert listed("_c10d_functional::all_reduce.default") == {"_c10d_functional::all_reduce"}
    assert listed("all_reduce_") == {"_c10d_functional::all_reduce_"}
    assert listed("*one_shot*") == {op for op in LIVE if "one_shot" in op}


def test_an_op_that_nobody_declared_is_shown_as_such(run):
    code, out = run("aten::relu")
    assert code == 0
    assert out.out.splitlines()[0] == "Not declared: nobody declared it"
    assert "aten::relu" in out.out


@pytest.mark.parametrize("name", ["all_redcue", "symm_mm::*", "aten::rleu"])
def test_a_name_that_matches_nothing_is_an_error(run, name):
    code, out = run(name)
    assert code == 1
    assert name.strip("*") in out.err
    assert "fix:" in out.err


def test_import_shows_what_a_module_declares(run, tmp_path, monkeypatch):
    (tmp_path / "symmtest_declares.py").write_text(
        "import symmplan\n"
        "symmplan.register_symm_mem_args('symmtest_catalogue::mine', ['x', 'return'],\n"
        "    group='g', align=16)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, out = run("--import", "symmtest_declares", "symmtest_catalogue")
    sys.modules.pop("symmtest_declares")
    assert code == 0
    heading, line = out.out.splitlines()[:2]
    assert heading == "symmtest_catalogue::"
    assert line == "mine  x@16, return@16; group g; user"


@pytest.mark.parametrize("body", [None, "1 / 0", "import symmtest_nothing_here"])
def test_a_module_that_cannot_be_imported_is_named(run, tmp_path, monkeypatch, body):
    if body is not None:
        (tmp_path / "symmtest_broken.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, out = run("--import", "symmtest_broken")
    assert code == 1
    assert "module 'symmtest_broken' cannot be imported" in out.err


def test_overruled_upstream_declarations_are_noted(run, monkeypatch):
    monkeypatch.setattr(
        torch_registry, "declared_arguments", lambda op: ("x", "y") if op is MINE else ()
    )
    symmplan.register_symm_mem_args(MINE, ["x"], group="g")
    with pytest.warns(UserWarning, match="also names y"):
        entry = inventory.describe_op(MINE)
    assert entry.note == "torch's registry also names y; the user's declaration wins"


MINE = torch.ops.symmtest_catalogue.mine.default


def test_render_of_nothing():
    empty = {"ops": [], "left_out": [], "not_catalogued": [], "all": False}
    assert command.render(empty) == ""


def test_the_catalogue_knows_what_runs_on_process_groups():
    assert all(catalogue.runs_on_groups(f"{row.op}.default") for row in COLLECTIVES)
    assert not any(catalogue.runs_on_groups(row.op) for row in SYMM_MEM)
    assert not catalogue.runs_on_groups("c10d::all_gather_of_mine")
