"""`SymmplanCallback` in Hugging Face's `Trainer`: what it logs and where, begins and ends."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
from paths import HELPERS
from trainer_runs import check_engaged, run

from symmplan.errors import OptionError

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="needs transformers: python -m pip install '.[trainers]'",
    ),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]


@pytest.mark.ranks
def test_the_numbers_reach_the_log_and_tensorboard(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    printed = run(HELPERS / "reported_trainer.py", 2, tmp_path)
    said = json.loads(re.search(r"^said (.*)$", printed, re.MULTILINE)[1])

    # A training that fails leaves its handle; the next one begins with another.
    assert said["error"] == "the disk is full"
    assert said["failed"].endswith("planned>")
    assert said["first"].endswith("removed>")
    assert said["again"]
    assert said["ended"].endswith("removed>")

    steps = [entry for entry in said["entries"] if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4]
    assert steps[0]["symmplan/recorded"] == steps[-1]["symmplan/recorded"] > 0
    assert steps[0]["symmplan/segment_bytes"] == 0 < steps[-1]["symmplan/segment_bytes"]
    check_engaged(steps[-1])
    assert steps[-1]["symmplan/algorithms/push"] == said["algorithms"]["push"] > 0
    assert not any("symmplan" in name for entry in said["entries"][4:] for name in entry)

    # Those of `report_to` come after it, and get the same numbers.
    assert said["order"].index("SymmplanCallback") < said["order"].index("TensorBoardCallback")
    found = {}
    for folder in sorted({path.parent for path in tmp_path.rglob("events.out.tfevents.*")}):
        log = events.EventAccumulator(str(folder)).Reload()
        for name in log.Tags()["scalars"]:
            found.setdefault(name, []).extend(event.value for event in log.Scalars(name))
    assert found["train/symmplan/served"][-1] == steps[-1]["symmplan/served"]
    assert found["train/symmplan/algorithms/push"][-1] == said["algorithms"]["push"]


def test_options_are_refused_where_the_callback_is_made():
    from symmplan.trainers import SymmplanCallback

    assert SymmplanCallback(choose="push", unsharded_modules=2).handle is None
    with pytest.raises(OptionError, match="unknown algorithm"):
        SymmplanCallback(choose="quickest")
    with pytest.raises(OptionError, match="unsharded_modules is 0"):
        SymmplanCallback(unsharded_modules=0)
    with pytest.raises(TypeError, match="debug"):
        SymmplanCallback(debug=True)


def test_a_trainer_without_fsdp2_is_told_its_option():
    import torch

    from symmplan.errors import CaptureError
    from symmplan.trainers import SymmplanCallback

    with pytest.raises(CaptureError, match=r"TrainingArguments\(fsdp=True\)"):
        SymmplanCallback().on_train_begin(None, None, None, model=torch.nn.Linear(2, 2))
