import json

import numpy as np
import pytest
from made import dit_vca, tiny_config

from dit_vca.data.prepare import prepare_shards
from dit_vca.likelihood import likelihood
from dit_vca.training import train


def test_a_model_that_learned_nothing_holds_pixels_to_be_standard_normal(tmp_path, shards):
    run = train(tiny_config(shards, steps=0), tmp_path / "run")  # its velocity is 0, so that x_1 = x_0
    report = likelihood(run.path, num=5, num_steps=2, weights="model", batch=2)
    stored = prepare_shards(tiny_config(shards).data).rows([int(i) for i in report["bits_per_dim_by_image"]], [False] * 5)[0]
    x = stored.double() / 127.5 - 1
    expected = (0.5 * (x**2).mean((1, 2, 3)) + 0.5 * np.log(2 * np.pi)) / np.log(2) - np.log2(2 / 255)
    assert report["space"] == "pixels" and report["dims"] == 3 * 8 * 8 and report["network_calls"] == 4
    assert list(report["bits_per_dim_by_image"].values()) == pytest.approx(expected.tolist(), abs=2e-3)  # of dequantisation
    assert report["bits_per_dim"] == pytest.approx(float(np.mean(list(report["bits_per_dim_by_image"].values()))))


def test_an_image_does_not_depend_on_its_batch_and_probes_are_averaged(run):
    one, other = (likelihood(run, num=4, num_steps=2, batch=b)["bits_per_dim_by_image"] for b in (1, 4))
    assert one == pytest.approx(other, abs=1e-6)
    two = likelihood(run, num=4, num_steps=2, probes=2)
    assert two["network_calls"] == 8 and two["bits_per_dim_by_image"] != one


def test_the_command_writes_its_report_and_says_the_mean(tmp_path, run):
    done = dit_vca("likelihood", "--ckpt", run, "--num", "3", "--num_steps", "2", "--device", "cpu", cwd=tmp_path)
    report = json.loads((tmp_path / "likelihood.json").read_text())
    assert done.returncode == 0 and done.stdout.startswith(f"{report['bits_per_dim']:.4f} +- "), done.stderr


def test_a_chain_has_no_likelihood(tmp_path, shards):
    run = train(tiny_config(shards, ddpm=True, steps=0), tmp_path / "run")
    with pytest.raises(ValueError, match="path ddpm is defined at discrete times"):
        likelihood(run.path)
