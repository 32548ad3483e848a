"""What a simulated rank has on its device, with symmplan and without."""

from __future__ import annotations

import functools
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulate_programs import Config, program

import symmplan


@st.composite
def configs(draw):
    """Small programs of two steps or one."""
    kind = draw(st.sampled_from(("fsdp", "hsdp", "fsdp x tp", "tp", "experts")))
    return Config(
        kind=kind,
        ranks=4,
        dim=4 * draw(st.integers(2, 6)),
        widths=tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))),
        steps=draw(st.integers(1, 2)),
        reshard=draw(st.booleans()),
        inner="eager",
    )


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(configs())
def test_what_a_device_has_without_is_what_it_has_where_all_is_ordinary(config):
    run = functools.partial(program, config)
    report = symmplan.simulate(run, ranks=config.ranks, memory="shm")
    with_nothing = symmplan.simulate(
        functools.partial(ordinary, run), ranks=config.ranks, memory="shm"
    )
    assert with_nothing.peak_bytes == 0
    assert report.device_bytes_without == with_nothing.device_bytes
    assert with_nothing.device_bytes_without == with_nothing.device_bytes
    assert report.device_bytes == report.ordinary_bytes.total + report.peak_bytes
    # What is placed is nowhere else.
    assert report.ordinary_bytes.total <= report.device_bytes_without
    facts = json.loads(report.to_json())
    assert facts["device_bytes"] == report.device_bytes
    assert facts["device_bytes_without"] == report.device_bytes_without
    assert "without symmplan" in report.summary()


def ordinary(run):
    """A program in which no collective is placed."""
    before = symmplan.fsdp.apply, symmplan.backend, symmplan.expert_parallel
    names = ("apply", "backend", "expert_parallel")
    owners = (symmplan.fsdp, symmplan, symmplan)
    for owner, name, own in zip(owners, names, before, strict=True):
        setattr(owner, name, functools.partial(own, choose="ordinary"))
    try:
        return run()
    finally:
        for owner, name, own in zip(owners, names, before, strict=True):
            setattr(owner, name, own)
