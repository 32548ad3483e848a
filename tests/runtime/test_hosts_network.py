"""The network between two hosts stops for a while, inside a step: on cables of their own."""

from __future__ import annotations

import time

import fault_programs
import pytest
from hosts import HostPool, Network, why_no_hosts, why_no_network

_WHY = why_no_hosts() or why_no_network()
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(bool(_WHY), reason=f"no network between hosts: {_WHY}"),
]

#: Seconds for which it stops.
_STOPPED = 5.0


def _until(path, seconds=60.0):
    """Wait until a rank has said that it is where it should be."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, "no rank came there"
        time.sleep(0.01)


def _stopped(rank, size, integration, timeout, folder):
    """A program of which the first rank waits in the middle until the network has stopped."""
    from pathlib import Path

    inside = fault_programs.Fault.inside

    def waits(fault, step, number):
        if rank == 0 and (step, number) == (3, 1) and not (Path(folder) / "there").exists():
            (Path(folder) / "there").touch()
            _until(Path(folder) / "stopped")
        inside(fault, step, number)

    fault_programs.Fault.inside = waits
    try:
        return fault_programs.run(rank, size, integration, "", "", timeout)
    finally:
        fault_programs.Fault.inside = inside


def _outcomes(tmp_path, integration, timeout):
    """What becomes of each rank, and after how many seconds."""
    with Network() as network, HostPool((2, 2), network=network, timeout=90.0) as ranks:
        ranks.start(_stopped, integration, timeout, str(tmp_path))
        _until(tmp_path / "there")
        network.stop(1)
        (tmp_path / "stopped").touch()
        time.sleep(_STOPPED)
        network.go_on(1)
        return ranks.collect()


@pytest.mark.further
@pytest.mark.parametrize("integration", ["FSDP2", "compile", "eager"])
def test_a_network_that_stops_for_five_seconds_only_delays(tmp_path, integration):
    for outcome in _outcomes(tmp_path, integration, 30.0):
        assert outcome.error is None, outcome.describe()
        assert outcome.value[0] > 0
        assert outcome.seconds > _STOPPED


@pytest.mark.further
@pytest.mark.parametrize("integration", ["FSDP2", "compile", "eager"])
def test_who_waits_no_longer_than_the_network_stops_gets_an_error_on_all_hosts(
    tmp_path, integration
):
    for outcome in _outcomes(tmp_path, integration, 2.0):
        assert outcome.error is not None, outcome.describe()
        assert outcome.error.root.kind in ("PeerTimeoutError", "PeerLostError"), outcome.describe()
        assert outcome.seconds < 30
