"""`symmplan bench fsdp --room`: what is started, and what is said of it; devices run it.

A head's logits are what fills a device most.
"""

from __future__ import annotations

import pytest

from symmplan.bench import fsdp as bench_fsdp
from symmplan.bench.parts import fsdp_ranks
from symmplan.cli.shell import parser_of
from symmplan.errors import RanksFailedError


def options(*words):
    return parser_of("symmplan bench fsdp", bench_fsdp).parse_args(words)


def test_a_swept_room_is_a_row_with_both_sides_and_with_who_did_not_fit(monkeypatch):
    """Ranks are made up: where little room is left, and for symmplan in the least, one fails."""
    asked = []

    def measured(act, settings, args, *, connect):
        (side,), left = settings["sides"], settings["left"]
        asked.append((side, left))
        if left is not None and left < (2.0 if side == "plain" else 3.0):
            raise RanksFailedError(f"{side} is out of memory\nmore", fix="more room")
        times = {kind: [0.1, 0.1] for kind in ("step", "wall", "issue", "host")}
        # Steps diverge only in symmplan's, where 3 or 5 GiB are left.
        loss = {3.0: float("nan"), 5.0: 1.017}.get(left, 1.0) if side == "symmplan" else 1.0
        row = {"times": times, "collectives": 3, "losses": [1.0, loss]}
        ranks = [
            {
                "runs": [{"sides": {side: row}}],
                "retries": rank,
                "memory": {side: {"device": 1 << 30, "peak_device": (2 + rank) << 30}},
            }
            for rank in range(2)
        ]
        return {}, ranks

    monkeypatch.setattr(bench_fsdp.command, "measured", measured)
    result = bench_fsdp.run(options("--device", "cuda", "--room", "1", "2", "4"))
    assert asked[:2] == [("plain", None), ("symmplan", None)]
    assert [each["room"] for each in result["rooms"]] == [None, 1.0, 2.0, 4.0]
    found = {each["room"]: each["sides"] for each in result["rooms"]}
    row = {"step_ms": 100.0, "retries": 1, "device": 1 << 30, "peak_device": 3 << 30}
    assert found[4.0]["symmplan"] == row | {"difference": 0.0, "losses": [[1.0, 1.0]] * 2}
    assert "error" in found[1.0]["plain"]
    assert not result["ok"]  # plain runs in 2 GiB, and symmplan does not
    text = bench_fsdp.render(result)
    assert "4 GiB" in text
    assert text.count("3 GiB") == 5  # what was in use at most, of each side that ran
    assert "symmplan in 2 GiB: local ranks failed: symmplan is out of memory" in text
    assert bench_fsdp.run(options("--device", "cuda", "--room", "4"))["ok"]
    wrong = bench_fsdp.run(options("--device", "cuda", "--room", "3"))
    assert not wrong["ok"]
    bfloat16 = ("--dtype", "bfloat16", "--reduce", "bfloat16", "--room", "5")
    assert not bench_fsdp.run(options("--device", "cuda", *bfloat16))["ok"]
    assert "nan" in bench_fsdp.render(wrong)


@pytest.mark.further
@pytest.mark.ranks
def test_a_llama_has_an_embedding_and_a_head_if_it_has_a_vocabulary():
    words = ("--model", "llama", "--layers", "1", "--dim", "32", "--steps", "2", "--tokens", "8")
    words += ("--vocabulary", "64", "--sides", "plain", "symmplan")
    result = bench_fsdp.run(options(*words))
    assert result["ok"]
    (run,) = result["runs"]
    planned = run["sides"]["symmplan"]
    # An embedding, a layer and a head, and the root's last norm, which is gathered once.
    assert planned["collectives"] == 3 * 3 + 2
    assert planned["difference"] == 0.0
    assert planned["losses_equal"]


GiB = 1 << 30


@pytest.mark.parametrize(
    ("free", "left_out"),
    [
        (79, {}),
        (60, {"kept, pool"}),  # symmplan's side needs room, too
        (45, {"kept", "kept, pool"}),
        (None, {}),  # the CPU
    ],
)
def test_a_side_for_which_there_is_no_room_is_left_out_before_it_takes_any(
    free, left_out, monkeypatch
):
    peaks = {"plain": 29 * GiB, "kept": 34 * GiB, "kept, pool": 34 * GiB, "symmplan": 29 * GiB}
    built = []

    class Side:
        handle, how = None, ""

    def build(name, rank, options):
        built.append(name)
        return Side(), {"peak_device": peaks[name], "between_steps": 8 * GiB}

    def room(device, needs):
        return None if free is None else free * GiB - 8 * GiB * len(built) - needs

    monkeypatch.setattr(fsdp_ranks, "_built", build)
    monkeypatch.setattr(fsdp_ranks, "least_free", room)
    monkeypatch.setattr(fsdp_ranks, "_run", lambda sides, tokens, options: [*sides])
    device = "cpu" if free is None else "cuda"
    found = fsdp_ranks.measure(0, {"sides": [*peaks], "tokens": [64], "device": device})
    assert built == [side for side in peaks if side not in left_out] == found["runs"][0]
    assert found["left_out"].keys() == set(left_out)
    assert all("GiB of the device are missing" in w for w in found["left_out"].values())
