import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from made import dit_vca, environment, python, tiny_config, tree
from PIL import Image

import dit_vca as product
from dit_vca import sampling
from dit_vca.data.archive import ImageArchive, read_images
from dit_vca.runs import RunFolder, open_model
from dit_vca.sampling import balanced_labels, generate, image_grid, labels_from, random_labels, sample_to_folder
from dit_vca.training import train
from dit_vca.vae import open_codec

STOCHASTIC = {"sampler": "ddim", "num_steps": 3, "eta": 1.0}


def sampled(run, out, *, num=30, tile=4, **options):
    folder = sample_to_folder(run, num=num, tile=tile, out=str(out), device="cpu", **options)
    return (folder / "images.npz").read_bytes()


def test_bytes_do_not_depend_on_the_batch(tmp_path, run):
    made = {b: sampled(run, tmp_path / str(b), batch=b, settings={"guidance": 2.0}) for b in (1, 5, 7, 64)}
    assert len(set(made.values())) == 1


def test_the_first_images_do_not_depend_on_how_many_are_asked_for(tmp_path, run):
    sampled(run, tmp_path / "few", num=5)
    sampled(run, tmp_path / "many", num=11)
    few, many = (read_images(tmp_path / n / "images.npz") for n in ("few", "many"))
    assert np.array_equal(few, many[:5])


def test_images_depend_on_seed_and_label(tmp_path, run):
    strong = {"settings": {"guidance": 300.0}, "weights": "model"}  # four steps of training make little of a label
    base = sampled(run, tmp_path / "a", num=4, **strong)
    assert sampled(run, tmp_path / "b", num=4, **strong) == base
    assert sampled(run, tmp_path / "c", num=4, seed=1, **strong) != base
    ones = sampled(run, tmp_path / "d", num=4, labels="dog", **strong)
    assert not np.array_equal(read_images(tmp_path / "d" / "images.npz")[0], read_images(tmp_path / "a" / "images.npz")[0])
    assert ones != base


def launched(run, out, processes, *options):
    """The command, over several processes; each leaves a file that says how many there are."""
    said = out.parent / f"said-{processes}"
    said.mkdir()
    script = (
        "import pathlib, sys; from accelerate import PartialState; from dit_vca.__main__ import main; code = main(sys.argv[1:]); "
        f"state = PartialState(); (pathlib.Path({str(said)!r}) / str(state.process_index)).write_text(str(state.num_processes)); "
        "sys.exit(code)"
    )
    runner = said / "runner.py"
    runner.write_text(script)
    command = [
        *python(processes), str(runner), "sample", "--ckpt", str(run), "--num", "30", "--tile", "4", "--batch", "4",
        "--out", str(out), "--device", "cpu", *options,
    ]  # fmt: skip
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert {int(f.name): int(f.read_text()) for f in said.glob("[0-9]")} == dict.fromkeys(range(processes), processes)
    return (out / "images.npz").read_bytes()


def test_one_two_and_three_processes_write_the_same_bytes(tmp_path, run):
    options = ["--sampler", "ddim", "--num_steps", "3", "--eta", "1"]
    made = [launched(run, tmp_path / str(n), n, *options) for n in (1, 2, 3)]
    assert made[0] == made[1] == made[2]
    assert made[0] == sampled(run, tmp_path / "here", settings=STOCHASTIC)


def test_a_killed_call_goes_on_and_writes_the_same_bytes(tmp_path, run):
    whole = sampled(run, tmp_path / "whole", num=200, settings={"num_steps": 20})
    command = [
        sys.executable, "-m", "dit_vca", "sample", "--ckpt", str(run), "--num", "200", "--tile", "4", "--batch", "4",
        "--num_steps", "20", "--out", "killed", "--device", "cpu",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = tmp_path / "killed" / "images.npz.partial.tiles-0"
    while not (journal.is_file() and journal.read_text().count("\n") >= 2):
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "images.npz").exists()
    finished = journal.read_text().count("\n")
    assert 2 <= finished < 50
    assert subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, check=False).returncode == 0
    assert (tmp_path / "killed" / "images.npz").read_bytes() == whole
    assert {p.name for p in (tmp_path / "killed").iterdir()} == {"images.npz", "images.json", "grid.png"}


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_no_byte(tmp_path, run):
    whole = sampled(run, tmp_path / "whole", num=2000, settings=STOCHASTIC)
    command = [
        sys.executable, "-m", "dit_vca", "sample", "--ckpt", str(run), "--num", "2000", "--tile", "4", "--batch", "4", "--sampler",
        "ddim", "--num_steps", "3", "--eta", "1", "--out", "killed", "--device", "cpu",
    ]  # fmt: skip
    archive, journal = tmp_path / "killed" / "images.npz", tmp_path / "killed" / "images.npz.partial.tiles-0"
    finished = [0]

    def written() -> int:
        return journal.read_text().count("\n") if journal.exists() else 0

    for moment in np.random.default_rng(0).uniform(0, 0.1, 20):
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while written() == finished[-1]:  # until its first tile
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(moment)
        process.kill()
        process.wait()
        assert not archive.exists()
        finished.append(written())
    assert finished == sorted(set(finished)) and finished[-1] < 500
    assert subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, check=False).returncode == 0
    assert archive.read_bytes() == whole


def test_a_call_killed_at_its_very_end_still_counts_its_network_calls(tmp_path, run, monkeypatch):
    whole = sampled(run, tmp_path / "whole", settings={"num_steps": 3})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ImageArchive, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        sampled(run, tmp_path / "killed", settings={"num_steps": 3})
    assert sampled(run, tmp_path / "killed", settings={"num_steps": 3}) == whole
    assert json.loads((tmp_path / "killed" / "images.json").read_text())["network_calls"] == 3


def test_decoding_behind_the_sampling_changes_no_byte(tmp_path, run, monkeypatch):
    at_once = sampled(run, tmp_path / "at once", batch=8)
    monkeypatch.setattr(sampling, "OVERLAPPING", {"cpu"})
    assert sampled(run, tmp_path / "behind", batch=8) == at_once


@pytest.mark.parametrize("devices", [set(), {"cpu"}], ids=["at once", "behind"])
@pytest.mark.parametrize("failing", [1, 4], ids=["first", "last"])
def test_a_disk_that_is_full_is_told_and_leaves_no_archive(tmp_path, run, monkeypatch, devices, failing):
    calls, write = [], ImageArchive.write_tiles

    def fails(self, tiles, *, rank=0):
        calls.append(tiles)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")
        write(self, tiles, rank=rank)

    monkeypatch.setattr(sampling, "OVERLAPPING", devices)
    monkeypatch.setattr(ImageArchive, "write_tiles", fails)
    with pytest.raises(OSError, match="No space left"):
        sampled(run, tmp_path / "out", batch=8)
    assert not (tmp_path / "out" / "images.npz").exists()


def test_an_equal_call_does_nothing_and_another_one_is_refused(tmp_path, run):
    sampled(run, tmp_path / "out", num=4)
    before = tree(tmp_path / "out")
    sampled(run, tmp_path / "out", num=4)
    assert tree(tmp_path / "out") == before
    with pytest.raises(ValueError, match="other settings or weights.*--out"):
        sampled(run, tmp_path / "out", num=4, seed=1)
    assert tree(tmp_path / "out") == before


def test_what_made_the_images_is_written_beside_them(tmp_path, run):
    sampled(run, tmp_path / "out", num=4, settings={"sampler": "heun", "num_steps": 3, "guidance": 2.0, "interval": (0.1, 0.6)})
    record = json.loads((tmp_path / "out" / "images.json").read_text())
    made_from = record["made_from"]
    assert record["network_calls"] == 6  # two a step; guidance doubles the batch, not the calls
    assert made_from["sample"]["interval"] == [0.1, 0.6] and made_from["num"] == 4 and made_from["tile"] == 4
    assert made_from["weights"]["kind"] == "ema" and len(made_from["weights"]["sha256"]) == 64
    assert made_from["config"]["model"]["depth"] == 2
    with zipfile.ZipFile(tmp_path / "out" / "images.npz") as archive:
        assert archive.testzip() is None
    with np.load(tmp_path / "out" / "images.npz") as archive:
        assert archive["arr_0"].shape == (4, 8, 8, 3) and archive["arr_1"].tolist() == [0, 1, 0, 1]
    assert Image.open(tmp_path / "out" / "grid.png").size == (16, 16)


def test_the_default_folder_says_what_is_in_it(tmp_path, run):
    import shutil

    moved = shutil.copytree(run, tmp_path / "run with blanks")
    folder = sample_to_folder(moved, num=4, tile=4, device="cpu", settings={"guidance": 1.5})
    assert folder == moved / "samples" / "0000004-ema-euler2-cfg1.5-seed0-n4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("balanced", [0, 1, 2, 0, 1, 2, 0]), ("2", [2] * 7), ("dog,0", [1, 0, 1, 0, 1, 0, 1])],
)
def test_labels_are_balanced_or_taken_in_turn(text, expected):
    assert labels_from(text, 7, ["cat", "dog", "cow"], seed=0).tolist() == expected


def test_random_labels_are_keyed_by_index_and_cover_the_classes():
    labels = random_labels(3000, 10, seed=0)
    assert torch.equal(labels[:7], random_labels(7, 10, seed=0))
    assert torch.bincount(labels, minlength=10).min() > 200
    assert not torch.equal(labels, random_labels(3000, 10, seed=1))


def test_a_grid_is_filled_row_by_row():
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 2, 2, 3)
    grid = image_grid(images, columns=3)
    assert grid.shape == (4, 6, 3)
    assert grid[::2, ::2, 0].tolist() == [[0, 1, 2], [3, 4, 0]]


def test_the_api_gives_what_the_command_gives(tmp_path, run):
    sampled(run, tmp_path / "out", num=6, labels="dog,cat", settings={"guidance": 2.0})
    model = product.load(run)
    assert model.class_names == ["cat", "dog"]
    images = model.sample(["dog", "cat"] * 3, seed=0, tile=4, guidance=2.0)
    assert images.dtype == torch.uint8
    assert np.array_equal(images.numpy(), read_images(tmp_path / "out" / "images.npz"))
    with pytest.raises(ValueError, match="no class 'cow'"):
        model.sample(["cow"])
    with pytest.raises(ValueError, match="unknown sampling setting"):
        model.sample([0], steps=3)


@pytest.mark.parametrize("sampler", ["ancestral", "ddim"])
def test_a_ddpm_run_trains_and_samples(tmp_path, shards, sampler):
    folder = train(tiny_config(shards, ddpm=True, attention="softmax"), tmp_path / "run")
    log = [json.loads(line) for line in folder.log_file.read_text().splitlines()]
    assert {"mse", "vb"} <= set(log[-1]) and log[-1]["loss"] == pytest.approx(log[-1]["mse"] + log[-1]["vb"])
    sampled(folder.path, tmp_path / "out", num=4, settings={"sampler": sampler, "num_steps": "3,2", "guidance": 1.5})
    assert read_images(tmp_path / "out" / "images.npz").std() > 0


def test_a_weight_file_alone_is_a_complete_model(tmp_path, run):
    import shutil

    file = shutil.copy(run / "checkpoints" / "0000004" / "ema.safetensors", tmp_path / "model.safetensors")
    by_file, by_run = sampled(file, tmp_path / "a", num=4), sampled(run, tmp_path / "b", num=4)
    assert by_file == by_run


def test_a_tile_is_padded_not_cut(run):
    network, objective, weights = open_model(run)
    codec = open_codec("none", 8)
    y = balanced_labels(10, 2)
    config = replace(weights.config.sample, num_steps=2)
    images = list(generate(network, objective, codec, config, labels=y, seed=0, tile=4))
    assert [len(i) for i in images] == [4, 4, 2]


def test_seventy_thousand_images_need_no_memory_for_the_archive(tmp_path):
    """The layout is written, not the images: the file is sparse until tiles come."""
    archive = ImageArchive(tmp_path / "images.npz", num=70_000, size=256, labels=np.zeros(70_000), identity="x")
    archive.begin()
    assert archive.partial.stat().st_size > 70_000 * 256 * 256 * 3
    assert archive.partial.stat().st_blocks * 512 < 10_000_000


def test_sampling_needs_no_accelerator_flag_and_prints_the_archive(tmp_path, run):
    result = dit_vca("sample", "--ckpt", run, "--num", "2", "--tile", "2", "--out", "out", cwd=tmp_path)
    assert result.returncode == 0 and result.stdout.strip().endswith("out/images.npz")


@pytest.mark.parametrize(
    ("sampler", "calls"),
    [
        ("midpoint", 6),
        ("rk4", 12),
        ("euler_maruyama", 3),
        ("stochastic_heun", 5),
        ("dpmpp_2m", 3),
        ("unipc", 3),
        ("ancestral", 3),
    ],
)
def test_every_sampler_of_a_flow_writes_the_same_bytes_again_and_counts_its_calls(tmp_path, run, sampler, calls):
    first = sampled(run, tmp_path / "a", num=5, settings={"sampler": sampler, "num_steps": 3})
    assert sampled(run, tmp_path / "b", num=5, settings={"sampler": sampler, "num_steps": 3}, batch=1) == first
    assert json.loads((tmp_path / "a" / "images.json").read_text())["network_calls"] == calls


def test_an_image_of_the_adaptive_solver_does_not_depend_on_what_it_is_sampled_with(tmp_path, run):
    few, many = (
        sampled(run, tmp_path / str(n), num=n, settings={"sampler": "dopri5", "rtol": 0.01, "atol": 0.01}) for n in (3, 11)
    )
    images = [np.load(tmp_path / str(n) / "images.npz")["arr_0"] for n in (3, 11)]
    assert np.array_equal(images[0], images[1][:3]) and few != many
    assert json.loads((tmp_path / "3" / "images.json").read_text())["network_calls"] >= 8


def test_a_model_is_guided_by_a_worse_one_which_is_recorded(tmp_path, run):
    worse = RunFolder(run).checkpoint(2) / "ema.safetensors"
    plain, guided = (
        sampled(run, tmp_path / name, settings={"num_steps": 3, "guidance": 2.0}, **options)
        for name, options in (("plain", {}), ("guided", {"guide": worse}))
    )
    assert plain != guided
    record = json.loads((tmp_path / "guided" / "images.json").read_text())["made_from"]
    assert record["guide"]["step"] == 2 and record["weights"]["step"] == 4
    with pytest.raises(ValueError, match="guidance 1 is the model alone"):
        sampled(run, tmp_path / "one", settings={"num_steps": 3, "guidance": 1.0}, guide=worse)
    with pytest.raises(ValueError, match="guidance_channels and guidance_rescale are of guidance by the null class"):
        sampled(run, tmp_path / "three", settings={"guidance": 2.0, "guidance_channels": 3}, guide=worse)


def test_a_guide_of_another_objective_is_refused(tmp_path, run, shards):
    other = train(tiny_config(shards, ddpm=True, steps=0), tmp_path / "other")
    with pytest.raises(ValueError, match="was trained with another objective or on other data"):
        sampled(run, tmp_path / "out", settings={"guidance": 2.0}, guide=other.path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"sampler": "euler", "diffusion": "linear"}, "diffusion is an option of sampler euler_maruyama and stochastic_heun, not of euler"),
     ({"sampler": "heun", "rtol": 0.1}, "rtol is an option of sampler dopri5, not of heun"),
     ({"sampler": "euler_maruyama", "diffusion": "sqrt"}, "diffusion must be one of sigma, SBDM"),
     ({"sampler": "euler_maruyama", "last_step": "last"}, "last_step must be one of mean"),
     ({"sampler": "euler_maruyama", "last_step_size": 0.9}, "last_step_size must be from 0.0001 to 0.5"),
     ({"guidance_rescale": 2.0}, "guidance_rescale must be from 0 to 1"), ({"time_shift": 0.0}, "time_shift must be a positive number")],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(tmp_path, run, settings, message):
    with pytest.raises(ValueError, match=message):
        sampled(run, tmp_path / "out", settings=settings)
    assert not (tmp_path / "out").exists()


def test_the_grid_is_that_of_training_unless_another_shift_is_given(tmp_path, run):
    made = {
        shift: sampled(run, tmp_path / str(shift), settings={"num_steps": 3} | ({} if shift is None else {"time_shift": shift}))
        for shift in (None, 1.0, 4.0)
    }
    assert made[None] == made[1.0] != made[4.0]
    guided, inside = (
        sampled(run, tmp_path / name, settings={"num_steps": 4, "guidance": 3.0, "interval": interval},
                guide=RunFolder(run).checkpoint(2) / "ema.safetensors")
        for name, interval in (("all", (0.0, 1.0)), ("some", (0.4, 0.6)))
    )  # fmt: skip
    assert guided != inside


def test_another_sampler_leaves_the_options_of_the_former_one_behind(tmp_path, shards):
    config = tiny_config(shards, steps=0)
    sample = replace(config.sample, sampler="euler_maruyama", diffusion="linear", guidance_channels=1)
    run = train(replace(config, sample=sample), tmp_path / "run").path
    plain = sampled(run, tmp_path / "a", settings={"sampler": "euler"}, weights="model")
    assert json.loads((tmp_path / "a" / "images.json").read_text())["made_from"]["sample"]["diffusion"] == "sigma"
    done = dit_vca("sample", "--ckpt", run, "--num", "30", "--tile", "4", "--sampler", "euler", "--guidance_channels", "null",
                   "--weights", "model", "--out", "b", "--device", "cpu", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "b" / "images.json").read_text())["made_from"]["sample"]
    assert record["guidance_channels"] is None and (tmp_path / "b" / "images.npz").read_bytes() == plain
    with pytest.raises(ValueError, match="guidance_channels must be from 1 to 3"):
        sampled(run, tmp_path / "c", settings={"guidance_channels": 0})


def test_a_guide_serves_models_with_channels_of_their_own_and_models_without_classes(tmp_path, shards, images):
    config = tiny_config(shards, steps=2, save_every=1)
    run = train(replace(config, sample=replace(config.sample, guidance_channels=3)), tmp_path / "run")
    worse = run.checkpoint(1) / "ema.safetensors"
    sampled(run.path, tmp_path / "out", num=4, settings={"guidance": 2.0}, guide=worse)
    record = json.loads((tmp_path / "out" / "images.json").read_text())["made_from"]
    assert record["sample"]["guidance_channels"] is None and record["guide"]["step"] == 1
