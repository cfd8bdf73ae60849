"""What makes sense trains and samples: every path with every target, and each weighting."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from made import tiny_config

from dit_vca.config import ObjectiveConfig, SampleConfig
from dit_vca.sampling import sample_to_folder
from dit_vca.training import train

TARGETS = ("v", "eps", "x_0", "score")
CASES = {
    **{f"{p} {t}": {"path": p, "target": t} for p, t in itertools.product(("linear", "gvp", "vp", "ddpm"), TARGETS)},
    "weighting velocity": {"path": "gvp", "target": "eps", "weighting": "velocity"},
    "weighting likelihood": {"path": "vp", "target": "score", "weighting": "likelihood"},
    "min-snr": {"path": "ddpm", "target": "eps", "weighting": "min-snr"},
    "direction": {"path": "linear", "target": "v", "direction": 0.5},
    "shifted, logit-normal": {"path": "gvp", "target": "v", "time_shift": 3.0, "time_law": "logit-normal"},
    "the direction of SiT": {"path": "vp", "target": "v", "data_at_1": True, "time_scale": 1.0},
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_and_samples(tmp_path, shards, name):
    case = CASES[name]
    sampler = "ancestral" if case["path"] == "ddpm" else "heun"
    config = replace(
        tiny_config(shards, steps=3), objective=ObjectiveConfig(**case), sample=SampleConfig(sampler=sampler, num_steps=4)
    )
    run = train(config, tmp_path / "run")
    logged = [json.loads(line) for line in run.log_file.read_text().splitlines()]
    assert all(np.isfinite(line["loss"]) for line in logged)
    assert ("direction" in logged[0]) == ("direction" in case)
    folder = sample_to_folder(run.path, num=3, tile=3, out=str(tmp_path / "out"), device="cpu")
    images = np.load(folder / "images.npz")["arr_0"]
    assert images.shape == (3, 8, 8, 3) and images.std() > 0
