"""Seams: where symmplan leans on torch's private names, and what happens where one is gone."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import subprocess
import sys

import pytest
import torch
from torch import fx

import symmplan
from symmplan.cli import main
from symmplan.errors import BackendError, MissingSeamError
from symmplan.memory import realize
from symmplan.torch_private import devices, seams
from symmplan.torch_private.table import SEAMS, require
from symmplan.torch_private.table.compilers import KERNEL_ORDER, READERS
from symmplan.torch_private.table.simulated import FAKE_CHUNKS, FAKE_WORLD

NEEDED = [seam for seam in SEAMS if seam.carries == "correctness"]
GONE = [(seam, target) for seam in NEEDED for target in seam.targets]


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Modules import each other's names when they are first asked for."""
    for seam in SEAMS:
        seam.missing()
    for name in ("compile.inductor", "eager", "fsdp.apply", "moe.experts", "moe.dispatcher"):
        importlib.import_module(f"symmplan.integrate.{name}")
    importlib.import_module("symmplan.simulation")


#: Bits of a class's ``__flags__``: it may be changed if it is made at run time and not immutable.
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
_KIND_OF_TYPE = _HEAP_TYPE | _IMMUTABLE_TYPE


def hide(monkeypatch, target):
    """Let this torch be without a name, as if it had been renamed."""
    for one in filter(seams.has, target.split(" | ")):
        module, _, path = one.partition(":")
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        bases = owner.__mro__ if isinstance(owner, type) else [owner, *type(owner).__mro__]
        held = [base for base in bases if name in vars(base)]
        if not held or any(map(_is_fixed, held)):  # settings, which stay deleted, or a class of C
            known = seams.has
            monkeypatch.setattr(seams, "has", lambda t, o=one, k=known: t != o and k(t))
        for base in bases:
            _hide_in(monkeypatch, base, name)
        stored = seams._stored  # by a method
        monkeypatch.setattr(seams, "_stored", lambda code, n=name, s=stored: s(code) - {n})


def _is_fixed(owner):
    return isinstance(owner, type) and owner.__flags__ & _KIND_OF_TYPE != _HEAP_TYPE


def _hide_in(monkeypatch, owner, name):
    if name in vars(owner) and not _is_fixed(owner):
        monkeypatch.delattr(owner, name)
    told = vars(owner).get("__annotations__")
    if isinstance(told, dict) and name in told:
        rest = {key: value for key, value in told.items() if key != name}
        monkeypatch.setattr(owner, "__annotations__", rest)


def _graph():
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    return fx.GraphModule({}, graph)


PLAN = symmplan.plan(symmplan.Problem.from_intervals([("a", 0, 2, 64)]))
#: What starts, and asks for its seams first of all.
STARTS = {
    "capture": lambda: symmplan.plan(_graph()),
    "graphs": lambda: symmplan.backend(inner="eager", memory="local")(_graph(), []),
    "inductor": lambda: symmplan.backend(inner="inductor", memory="local")(_graph(), []),
    "sessions": lambda: symmplan.eager(memory="local"),
    "fsdp": lambda: symmplan.fsdp.apply(torch.nn.Linear(2, 2)),
    "experts": lambda: symmplan.expert_parallel(max_tokens=1),
    "segments": lambda: realize(PLAN, memory="local"),
    "simulate": lambda: symmplan.simulate(lambda: None, ranks=2),
}


def test_this_torch_has_every_seam():
    assert [(seam.name, seam.missing()) for seam in SEAMS if seam.missing()] == []


def test_rows_are_whole():
    assert len({seam.name for seam in SEAMS}) == len(SEAMS) > 30
    assert {serves for seam in SEAMS for serves in seam.serves} == set(STARTS)
    for seam in SEAMS:
        assert seam.targets, seam.name
        assert seam.carries in ("correctness", "speed", "reporting")
        assert seam.serves, seam.name


def test_a_name_that_is_gone_is_an_error_that_names_it():
    for seam, target in GONE:
        seam.require()
        with pytest.MonkeyPatch.context() as patch:
            hide(patch, target)
            with pytest.raises(BackendError, match=r"torch") as caught:
                seam.require()
        error = caught.value
        assert isinstance(error, MissingSeamError), target
        assert (error.seam, error.torch) == (seam.name, torch.__version__)
        assert target in error.missing
        first = str(error).partition("\n")[0]
        assert torch.__version__ in first
        assert target.replace(":", ".") in first
        assert seam.rests in first


def test_nothing_starts_without_what_its_numbers_rest_on():
    for serves, start in STARTS.items():  # which ask before they look at anything else
        for seam in (seam for seam in NEEDED if serves in seam.serves):
            with pytest.MonkeyPatch.context() as patch:
                hide(patch, seam.targets[-1])
                with pytest.raises(MissingSeamError) as caught:
                    start()
            assert caught.value.seam == seam.name, serves


def test_what_only_speed_or_reports_rest_on_is_done_without():
    for seam in (seam for seam in SEAMS if seam not in NEEDED):
        with pytest.MonkeyPatch.context() as patch:
            hide(patch, seam.targets[0])
            for serves in seam.serves:
                require(serves)


@pytest.mark.parametrize(
    ("seam", "name"), [(READERS, "_is_fake_dep"), (KERNEL_ORDER, "recompute_size_and_body")]
)
def test_a_patch_without_its_target_fails(seam, name, monkeypatch):
    (target,) = (t for t in seam.targets if t.endswith(name))
    hide(monkeypatch, target)
    with pytest.raises(MissingSeamError, match=name), seam.replaced(**{name: None}):
        pytest.fail("it was skipped in silence")


def test_a_patch_of_what_the_row_does_not_name_is_a_mistake():
    with pytest.raises(AssertionError, match="no target of"), READERS.replaced(_is_fake=None):
        pytest.fail("nothing was replaced")


def test_a_patch_is_put_back():
    from torch._inductor import comms

    before = comms._is_fake_dep
    with contextlib.suppress(KeyError), READERS.replaced(_is_fake_dep=len):
        assert comms._is_fake_dep is len
        raise KeyError
    assert comms._is_fake_dep is before


def test_a_patch_of_a_name_in_two_places_is_put_back_in_both():
    import torch.distributed as dist

    def replaced(*_):
        raise AssertionError

    before = dist.init_process_group
    with FAKE_WORLD.replaced(init_process_group=replaced):
        assert dist.init_process_group is replaced
        assert dist.distributed_c10d.init_process_group is replaced
    assert dist.init_process_group is dist.distributed_c10d.init_process_group is before


def test_functions_of_torch_cuda_are_followed_for_a_while(monkeypatch):
    """Without a device: what is followed is a stand-in."""
    told = []
    for owner, name in ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize")):
        monkeypatch.setattr(owner, name, lambda *args: told.append(("torch", *args)))
    before = torch.cuda.synchronize, torch.cuda.Stream.synchronize, torch.cuda.Event.record
    after = ("Event.record", "Event.wait", "Event.synchronize", "Stream.synchronize")
    names = (*after, "cuda.synchronize")
    follow = {name: lambda *args, n=name: told.append((n, *args)) for name in names}
    with devices.followed(follow):
        torch.cuda.synchronize("a device")
        torch.cuda.Stream.synchronize("a stream")
    assert told == [
        ("torch", "a device"),
        ("cuda.synchronize", "a device"),
        ("torch", "a stream"),
        ("Stream.synchronize", "a stream"),
    ]
    now = torch.cuda.synchronize, torch.cuda.Stream.synchronize, torch.cuda.Event.record
    assert now == before


def test_a_patch_for_speed_is_left_out_where_its_target_is_gone(monkeypatch):
    hide(monkeypatch, FAKE_CHUNKS.targets[0])
    with FAKE_CHUNKS.replaced(_chunk_with_empty=len):
        assert FAKE_CHUNKS.missing()


def test_one_name_of_several_is_enough(monkeypatch):
    seam = next(seam for seam in NEEDED if any(" | " in target for target in seam.targets))
    target = next(target for target in seam.targets if " | " in target)
    there = [one for one in target.split(" | ") if seams.has(one)]
    hide(monkeypatch, there[0])
    assert seam.missing() == ((target,) if len(there) == 1 else ())


@pytest.mark.parametrize(
    ("gone", "imported"),
    [
        ("torch._ops.HigherOrderOperator", "symmplan.capture"),
        ("torch._C._dispatch_keyset_full_after", "symmplan.integrate.compile.backend"),
        ("torch._C._storage_Use_Count", "symmplan.runtime.leases"),
        ("torch._disable_dynamo", "symmplan.integrate.moe.dispatcher"),
        ("torch._inductor.comms._is_fake_dep", "symmplan.integrate.compile.inductor"),
        ("torch._subclasses.fake_tensor.unset_fake_temporarily", "symmplan.simulation"),
    ],
)
@pytest.mark.further
def test_modules_ask_before_they_import(gone, imported):
    """In a process that has not imported them yet."""
    code = (
        "import torch, torch._inductor.comms, torch.distributed.fsdp\n"
        f"del {gone}\n"
        f"try: import {imported}\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.stdout.startswith("MissingSeamError"), done.stderr
    assert gone in done.stdout


def test_doctor_lists_every_seam(capsys, monkeypatch):
    main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)["seams"]
    assert [row["name"] for row in told] == [seam.name for seam in SEAMS]
    assert {row["carries"] for row in told} == {"correctness", "speed", "reporting"}
    assert all(row["rests"] and not row["missing"] for row in told)
    hide(monkeypatch, READERS.targets[0])
    hide(monkeypatch, FAKE_CHUNKS.targets[0])
    assert main(["doctor"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"fix {READERS.name} correctness: {READERS.rests}" in shown
    assert f"not in this torch: {READERS.targets[0]} fix: install torch 2.11 to 2.15" in shown
    assert f"missing {FAKE_CHUNKS.name} speed: {FAKE_CHUNKS.rests}" in shown
    assert f"ok {KERNEL_ORDER.name} correctness: {KERNEL_ORDER.rests}" in shown
