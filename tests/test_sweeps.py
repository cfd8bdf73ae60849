import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from made import dit_vca, environment, python
from PIL import Image

from dit_vca.sweeps import sweep

GRID = {"sampler": ["euler", "heun"], "num_steps": [1, 2], "guidance": [1.0, 300.0]}


@pytest.fixture
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "real.npz"
    np.savez(path, arr_0=np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8))
    return path


def test_every_point_is_sampled_and_scored_and_stands_in_table_and_plot(tmp_path, run, reference):
    points = sweep(run, tmp_path, grid=GRID, num=6, ref=reference, metrics=["fd-lite0"], tile=6)
    assert [tuple(p.settings.values()) for p in points] == [
        (sampler, steps, scale) for sampler in ("euler", "heun") for steps in (1, 2) for scale in (1.0, 300.0)
    ]
    assert [p.network_calls for p in points] == [1, 1, 2, 2, 2, 2, 4, 4]
    assert len({p.scores["fd-lite0@6"] for p in points}) > 1
    rows = (tmp_path / "table.csv").read_text().splitlines()
    assert rows[0] == "sampler,num_steps,guidance,network_calls,fd-lite0@6" and len(rows) == 9
    assert rows[1] == f"euler,1,1.0,1,{points[0].scores['fd-lite0@6']:.6g}"
    assert (tmp_path / "table.md").read_text().count("\n") == 10
    assert Image.open(tmp_path / "fd-lite0@6.png").size == (1200, 480)
    point = tmp_path / "sampler-heun_num_steps-2_guidance-300.0"
    assert sorted(p.name for p in point.iterdir()) == ["grid.png", "images.json", "metrics.json"]
    made_from = json.loads((point / "metrics.json").read_text())["samples"]["made_from"]
    assert made_from["sample"]["sampler"] == "heun" and made_from["sample"]["guidance"] == 300


def test_points_that_are_there_are_not_made_again_and_other_requests_refused(tmp_path, run, reference):
    options = {"grid": {"num_steps": [1, 2]}, "ref": reference, "metrics": ["fd-lite0"], "tile": 6}
    first = sweep(run, tmp_path, num=6, **options)
    written = (tmp_path / "num_steps-1" / "metrics.json").stat().st_mtime_ns
    assert sweep(run, tmp_path, num=6, **options) == first
    assert (tmp_path / "num_steps-1" / "metrics.json").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match="num_steps-1 holds a point of another sweep"):
        sweep(run, tmp_path, num=5, **options)
    np.savez(reference, arr_0=np.random.default_rng(1).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8))
    with pytest.raises(ValueError, match="num_steps-1 holds a point of another sweep"):
        sweep(run, tmp_path, num=6, **options)


def test_weights_and_seed_are_those_asked_for(tmp_path, run, reference):
    sweep(run, tmp_path, grid={"weights": ["ema", "model"]}, num=6, ref=reference, metrics=["fd-lite0"], tile=6, seed=3)
    made = [json.loads((tmp_path / f"weights-{kind}" / "images.json").read_text())["made_from"] for kind in ("ema", "model")]
    assert [m["weights"]["kind"] for m in made] == ["ema", "model"] and {m["seed"] for m in made} == {3}


def test_a_point_that_diverges_is_named(tmp_path, run, reference, monkeypatch):
    def diverges(*arguments, **options):
        raise FloatingPointError("the images hold NaN or infinity: the samples diverged")

    monkeypatch.setattr("dit_vca.sweeps.sample_to_folder", diverges)
    with pytest.raises(FloatingPointError, match=r"guidance-9\.0: .* leave this point out"):
        sweep(run, tmp_path, grid={"guidance": [9.0]}, num=6, ref=reference, metrics=["fd-lite0"])


@pytest.mark.parametrize(
    ("change", "message"),
    [({"ref": None}, "need a reference"), ({"metrics": ["fd"]}, "unknown metric 'fd'"), ({"ref": "nowhere.npz"}, "does not exist"),
     ({"metrics": ["kid-lite0"]}, "at least 1000 images"), ({"metrics": ["fid"]}, "weights-inception"),
     ({"grid": {"sampler": ["euler", "ancestral"], "guidance": []}}, "guidance must be at least one"),
     ({"grid": {"eta": [1]}}, "cannot vary eta")],
)  # fmt: skip
def test_mistakes_are_told_before_the_first_point(tmp_path, run, reference, change, message):
    options = {"grid": {"num_steps": [1]}, "num": 6, "ref": reference, "metrics": ["fd-lite0"]}
    with pytest.raises(ValueError, match=message):
        sweep(run, tmp_path / "out", **(options | change))
    assert not (tmp_path / "out").exists()


def test_a_killed_sweep_goes_on(tmp_path, run, reference):
    command = [
        sys.executable, "-m", "dit_vca", "sweep", "--ckpt", str(run), "--out", "out", "--num_steps", "1,2,3", "--num", "40",
        "--tile", "4", "--batch", "4", "--ref", str(reference), "--metrics", "fd-lite0", "--device", "cpu",
    ]  # fmt: skip
    started = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not (tmp_path / "out" / "num_steps-2").exists() and time.time() < deadline:
        time.sleep(0.01)
    started.kill()
    started.wait()
    assert (tmp_path / "out" / "num_steps-1" / "metrics.json").is_file() and not (tmp_path / "out" / "table.md").exists()
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    whole = sweep(
        run, tmp_path / "whole", grid={"num_steps": [1, 2, 3]}, num=40, tile=4, ref=reference, metrics=["fd-lite0"], device="cpu"
    )
    assert (tmp_path / "out" / "table.md").read_text().count("| ") and len(whole) == 3
    assert (tmp_path / "out" / "table.csv").read_text() == (tmp_path / "whole" / "table.csv").read_text()


def test_two_processes_make_the_table_of_one(tmp_path, run, reference):
    for processes in (1, 2):
        command = [
            *python(processes), "-m", "dit_vca", "sweep", "--ckpt", str(run), "--out", str(processes), "--num_steps", "2",
            "--weights", "ema,model", "--num", "6", "--tile", "2", "--batch", "2", "--ref", str(reference),
            "--metrics", "fd-lite0", "--device", "cpu",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("| network_calls |") == 1  # one process speaks
        report = json.loads((tmp_path / str(processes) / "weights-model_num_steps-2" / "metrics.json").read_text())
        assert report["numerics"]["processes"] == processes
    one, two = (
        [float(row.split(",")[-1]) for row in (tmp_path / str(n) / "table.csv").read_text().splitlines()[1:]] for n in (1, 2)
    )
    assert len(one) == 2 and two == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--guidance", "1,two"], "--guidance must be a list like 1,2,3"), (["--num_steps", "2,2"], "all different"),
     (["--sampler", "eulr"], "sampler must be one of")],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(tmp_path, run, reference, options, words):
    done = dit_vca(
        "sweep", "--ckpt", run, "--out", "out", "--ref", reference, "--metrics", "fd-lite0", "--num", "4", *options, cwd=tmp_path
    )
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not os.listdir(tmp_path)
