"""Every mistake: exit code 2, one line on stderr that says what was found and what to do, nothing changed on disk."""

import os
import shutil

import numpy as np
import pytest
from made import TINY_OPTIONS, dit_vca, dit_vca_forked, make_images, tree
from PIL import Image

TRAIN = ["train", "--run", "run", "--data.name", "shards", *TINY_OPTIONS]
SAMPLE = ["sample", "--ckpt", "finished", "--num", "4", "--tile", "4", "--out", "out"]

# name: (arguments, words that the line must hold)
CASES = {
    "unknown verb": (["trian"], ["unknown verb 'trian'", "train, sample, score"]),
    "unknown option": ([*TRAIN, "--model.dept", "3"], ["--model.dept", "did you mean --model.depth"]),
    "abbreviated option": ([*TRAIN, "--see", "3"], ["--see", "did you mean --seed"]),
    "unknown attention option": ([*TRAIN, "--model.attention.options.pol", "1"], ["no option 'pol'", "pool"]),
    "attention option of a wrong type": ([*TRAIN, "--model.attention.options.pool", "x"], ["pool", "int", "'x'"]),
    "unknown attention": ([*TRAIN, "--model.attention.name", "vcaa"], ["'vcaa'", "softmax, vca"]),
    "number expected": ([*TRAIN, "--train.steps", "x"], ["train.steps", "int", "x"]),
    "choice expected": ([*TRAIN, "--train.schedule", "linear"], ["train.schedule", "constant", "cosine", "linear"]),
    "misspelt YAML key": ([*TRAIN, "--config", "misspelt.yaml"], ["model.dept", "model.depth"]),
    "missing YAML file": ([*TRAIN, "--config", "nowhere.yaml"], ["nowhere.yaml"]),
    "broken YAML file": ([*TRAIN, "--config", "broken.yaml"], ["config"]),
    "unknown preset": (["train", "--preset", "dit-m2-vca"], ["'dit-m2-vca'", "{s|b|l|xl}"]),
    "stray argument": ([*TRAIN, "stray"], ["'stray'"]),
    "heads do not divide": ([*TRAIN, "--model.num_heads", "3"], ["model.dim 16", "model.num_heads 3"]),
    "patch does not divide": ([*TRAIN, "--model.patch_size", "3"], ["model.patch_size 3", "8"]),
    "other number of classes": ([*TRAIN, "--model.num_classes", "7"], ["model.num_classes is 7", "2"]),
    "variance without outputs": ([*TRAIN, "--objective.path", "ddpm", "--objective.target", "eps", "--objective.learn_variance", "true"], ["model.learn_sigma"]),
    "a weighting of the velocity": ([*TRAIN, "--objective.weighting", "velocity"], ["objective.weighting velocity", "targets eps and score"]),
    "a time shift on path ddpm": ([*TRAIN, "--objective.path", "ddpm", "--objective.time_shift", "3"], ["time_shift", "continuous paths"]),
    "an SDE on path ddpm": ([*TRAIN, "--objective.path", "ddpm", "--objective.time_law", "uniform", "--sample.sampler", "euler_maruyama"], ["euler_maruyama", "use ancestral, ddim, dpmpp_2m or unipc"]),
    "velocity sampler on a discrete path": ([*TRAIN, "--objective.path", "ddpm", "--objective.target", "eps", "--objective.time_law", "uniform"], ["euler", "ancestral"]),
    "batch not divisible": ([*TRAIN, "--train.micro_batch", "3"], ["train.micro_batch 3", "8"]),
    "fp16 on a CPU": ([*TRAIN, "--train.mixed_precision", "fp16"], ["fp16", "bf16"]),
    "folder of another kind": (["train", "--run", "images", "--data.name", "shards", *TINY_OPTIONS], ["images", "not a run folder"]),
    "another run's folder": (["train", "--run", "finished", "--model.depth", "3"], ["model.depth: 2 -> 3", "--run"]),
    "another preset for a run": (["train", "--run", "finished", "--preset", "demo-softmax"], ["of preset tiny", "--preset demo-softmax"]),
    "log interval of zero": ([*TRAIN, "--train.log_every", "0"], ["train.log_every", "at least 1"]),
    "empty batch": ([*TRAIN, "--train.batch_size", "0"], ["train.batch_size", "from 1 to"]),
    "negative steps": ([*TRAIN, "--train.steps", "-5"], ["train.steps", "at least 0", "-5"]),
    "negative warm-up": ([*TRAIN, "--train.warmup_steps", "-3"], ["train.warmup_steps", "-3"]),
    "negative learning rate": ([*TRAIN, "--train.lr", "-1"], ["train.lr", "-1"]),
    "learning rate that is no number": ([*TRAIN, "--train.lr", "nan"], ["train.lr", "nan"]),
    "empty value": (["sample", "--ckpt", ""], ["--ckpt is empty"]),
    "no MLP": ([*TRAIN, "--model.mlp_ratio", "0"], ["model.mlp_ratio", "from 0.01"]),
    "complexity of no preset": (["complexity", "demo-nonsense"], ["unknown preset 'demo-nonsense'"]),
    "complexity of tokens on no square": (["complexity", "--scale", "true", "--tokens", "100,250"], ["must be squares"]),
    "complexity of no tokens": (["complexity", "--scale", "true", "--tokens", "many"], ["--tokens must be a list"]),
    "complexity of no attention": (["complexity", "--scale", "true", "--attention", "sofmax"], ["unknown attention 'sofmax'"]),
    "complexity in no rounds": (["complexity", "--scale", "true", "--rounds", "0"], ["--rounds must be at least 1"]),
    "likelihood of too many": (["likelihood", "--ckpt", "finished", "--num", "100000"], ["num must be at most"]),
    "likelihood without probes": (["likelihood", "--ckpt", "finished", "--probes", "0"], ["probes must be at least 1"]),
    "likelihood to no folder": (["likelihood", "--ckpt", "finished", "--out", "no/folder.json"], ["no is not a folder"]),
    "likelihood over a file": (["likelihood", "--ckpt", "finished", "--out", "finished/config.json"], ["exists already"]),
    "likelihood of absent data": (["likelihood", "--ckpt", "finished", "--data", "absent"], ["absent"]),
    "tokens without scale": (["complexity", "--tokens", "16"], ["--tokens is of --scale true"]),
    "average too wide": ([*TRAIN, "--train.ema_power", "[0.5]"], ["train.ema_power", "from 0.005 to 0.28"]),
    "average twice": ([*TRAIN, "--train.ema_more", "[0.9, 0.9]"], ["train.ema_more", "different"]),
    "decay above one": ([*TRAIN, "--train.ema_decay", "1.5"], ["train.ema_decay", "from 0 to 0.9999999"]),
    "negative seed": ([*TRAIN, "--seed", "-1"], ["seed", "from 0 to"]),
    "no heads": ([*TRAIN, "--model.num_heads", "0"], ["model.num_heads"]),
    "time law of another path": ([*TRAIN, "--objective.path", "ddpm", "--objective.target", "eps", "--objective.time_law", "logit-normal"], ["objective.time_law"]),
    "other learning rate": (["train", "--run", "finished", "--train.lr", "1", "--train.steps", "9"], ["train.lr", "--allow-change"]),
    "no such data": (["train", "--run", "run", "--data.name", "nowhere"], ["'nowhere'", "fashion-mnist"]),
    "images without a VAE": (["train", "--run", "run", "--data.name", "images", "--data.image_size", "8"], ["VAE", "none"]),
    "flip without mirrored shards": (["train", "--run", "run", "--data.name", "plain", "--data.flip", "true", *TINY_OPTIONS], ["data.flip"]),
    "truncated shard": (["train", "--run", "run", "--data.name", "truncated", *TINY_OPTIONS], ["00000.safetensors", "bytes"]),
    "init_from does not fit": ([*TRAIN, "--model.depth", "1", "--train.init_from", "finished"], ["init_from", "does not fit"]),
    "no checkpoint": (["sample", "--ckpt", "nowhere"], ["nowhere does not exist"]),
    "empty run": (["sample", "--ckpt", "images"], ["holds no checkpoint"]),
    "truncated checkpoint": (["sample", "--ckpt", "short.safetensors"], ["short.safetensors", "damaged"]),
    "foreign weights": (["sample", "--ckpt", "foreign.safetensors"], ["no dit-vca configuration"]),
    "unknown sampler": ([*SAMPLE, "--sampler", "dopri"], ["euler, heun", "'dopri'"]),
    "no images": ([*SAMPLE, "--num", "0"], ["num", "0"]),
    "steps of a kind": ([*SAMPLE, "--num_steps", "many"], ["num_steps"]),
    "unknown class": ([*SAMPLE, "--labels", "bird"], ["'bird'", "cat, dog"]),
    "interval reversed": ([*SAMPLE, "--interval", "[0.9,0.1]"], ["interval"]),
    "eta of another sampler": ([*SAMPLE, "--eta", "0.5"], ["eta", "ddim"]),
    "eta out of range": ([*SAMPLE, "--sampler", "ddim", "--eta", "5"], ["eta", "from 0 to 1"]),
    "negative seed of sampling": ([*SAMPLE, "--seed", "-1"], ["seed", "from 0 to"]),
    "device": ([*SAMPLE, "--device", "abacus"], ["abacus"]),
    "guidance without classes": (["sample", "--ckpt", "unconditional", "--guidance", "2", "--out", "out"], ["trained without classes", "--guidance 1"]),
    "missing npz": (["score", "nowhere.npz", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["nowhere.npz does not exist"]),
    "truncated npz": (["score", "short.npz", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["short.npz", "truncated"]),
    "too few samples": (["score", "plain.npz", "--ref", "other.npz", "--num", "99", "--metrics", "fd-lite0"], ["99", "12"]),
    "reference of other dimensions": (["score", "plain.npz", "--ref", "small-statistics.npz", "--metrics", "fd-lite0"], ["1280", "small-statistics.npz"]),
    "reference without this metric": (["score", "plain.npz", "--ref", "adm.npz", "--metrics", "fd-lite0"], ["fd_lite0_mu", "adm.npz", "eval_fid.py ref"]),
    "reference without features": (["score", "plain.npz", "--ref", "lite0.npz", "--metrics", "pr-lite0"], ["fd_lite0_features", "pr-lite0"]),
    "reference that is not finite": (["score", "plain.npz", "--ref", "nan.npz", "--metrics", "fd-lite0"], ["nan.npz", "NaN"]),
    "covariance that is not symmetric": (["score", "plain.npz", "--ref", "skew.npz", "--metrics", "fd-lite0"], ["skew.npz", "not symmetric"]),
    "covariance that is not positive": (["score", "plain.npz", "--ref", "negative.npz", "--metrics", "fd-lite0"], ["negative.npz", "eigenvalue of -1"]),
    "the same file under another name": (["score", "plain.npz", "--ref", "./plain.npz", "--metrics", "fd-lite0"], ["against itself"]),
    "copies": (["score", "copies.npz", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["11 of 12", "--allow-duplicates"]),
    "constant images": (["score", "constant.npz", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["every pixel", "is 9"]),
    "other key in an npz": (["score", "keys.npz", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["no arr_0", "it holds images"]),
    "no npz at all": (["score", "misspelt.yaml", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["misspelt.yaml", "no npz"]),
    "folder of JPEG": (["score", "lossy", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["0.jpg", "lossy", "--allow-lossy"]),
    "folder of several sizes": (["score", "sizes", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["0.png 8x8", "1.png 6x6", "--image-size"]),
    "folder with a gap": (["score", "gap", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["number 1 is missing"]),
    "folder of too many": (["score", "named", "--ref", "plain.npz", "--metrics", "fd-lite0", "--num", "2"], ["holds 3 images", "2 were asked for"]),
    "folder without images to score": (["score", "empty", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["no images in empty"]),
    "image with alpha": (["score", "alpha", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["0.png", "RGBA"]),
    "corrupt image to score": (["score", "corrupt", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["1.png", "cannot be read"]),
    "too few images for KID": (["score", "plain.npz", "--ref", "other.npz", "--metrics", "kid-lite0"], ["at least 1000 images"]),
    "too few images for an extrapolation": (["score", "plain.npz", "--ref", "other.npz", "--metrics", "fd-lite0-infinity"], ["at least 10000 images"]),
    "batch of none": (["score", "plain.npz", "--ref", "other.npz", "--metrics", "fd-lite0", "--batch", "-1"], ["batch must be at least 1, got -1"]),
    "report that is a folder": (["score", "plain.npz", "--ref", "other.npz", "--metrics", "fd-lite0", "--out", "images"], ["--out images"]),
    "missing reference": (["score", "plain.npz", "--ref", "nowhere.npz", "--metrics", "fd-lite0"], ["nowhere.npz does not exist"]),
    "negative number of a folder": (["score", "named", "--ref", "plain.npz", "--metrics", "fd-lite0", "--num", "-5"], ["num must be at least 2"]),
    "a reference for IS": (["score", "ref", "plain.npz", "new.npz", "--metrics", "is"], ["IS needs no reference"]),
    "reference exists": (["score", "ref", "plain.npz", "other.npz", "--metrics", "fd-lite0"], ["other.npz exists already"]),
    "report of nothing": (["score", "compare", "nowhere.json"], ["nowhere.json does not exist"]),
    "report that is none": (["score", "compare", "shards/manifest.json"], ["manifest.json is no report"]),
    "format of a table": (["score", "compare", "nowhere.json", "--format", "word"], ["markdown, latex", "'word'"]),
    "protocol of a selftest": (["score", "selftest", "--protocol", "fid"], ["--protocol must be one of fd-lite0"]),
    "reference of another size": (["score", "plain.npz", "--ref", "large.npz", "--metrics", "fd-lite0"], ["16", "8"]),
    "scored against itself": (["score", "plain.npz", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["against itself"]),
    "no reference": (["score", "plain.npz", "--metrics", "fd-lite0"], ["--ref"]),
    "unknown metric": (["score", "plain.npz", "--ref", "other.npz", "--metrics", "fdd"], ["'fdd'", "fd-lite0"]),
    "float images": (["score", "float.npz", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["uint8", "float32"]),
    "images from 0 to 1": (["score", "dark.npz", "--ref", "plain.npz", "--metrics", "fd-lite0"], ["no pixel is above 1"]),
    "no Inception weights": (["score", "plain.npz", "--ref", "other.npz"], ["weights-inception-2015-12-05-6726825d.pth", "6726825d", "--inception-weights"]),
    "no DINOv2 weights": (["score", "plain.npz", "--ref", "other.npz", "--metrics", "fd-dinov2"], ["dinov2_vitl14_pretrain.pth", "--dinov2-weights"]),
    "wrong CLIP weights": (["score", "plain.npz", "--ref", "other.npz", "--metrics", "cmmd", "--clip-weights", "plain.npz"], ["plain.npz does not hold the weights of vit_large_patch14_clip"]),
    "wrong Inception weights": (["score", "plain.npz", "--ref", "other.npz", "--inception-weights", "plain.npz"], ["6726825d", "damaged"]),
    "empty folder": (["encode", "empty", "new", "--vae", "none", "--image-size", "8"], ["no images in empty"]),
    "mixed folder": (["encode", "mixed", "new", "--vae", "none", "--image-size", "8"], ["both images"]),
    "folder without a size": (["encode", "images", "new", "--vae", "none"], ["--image-size"]),
    "array as a reference": (["score", "plain.npz", "--ref", "array.npy", "--metrics", "fd-lite0"], ["array.npy", "npz"]),
    "negative number of images": (["score", "plain.npz", "--ref", "other.npz", "--metrics", "fd-lite0", "--num", "-2"], ["num", "at least 2"]),
    "more than the held-out images": (["demo", "--num", "2001"], ["--num", "2000"]),
    "odd size of an autoencoder": (["train-vae", "images", "new", "--image-size", "9"], ["even", "9"]),
    "encode without a VAE": (["encode", "images", "new", "--image-size", "8"], ["--vae", "none"]),
    "no such VAE": (["encode", "images", "new", "--image-size", "8", "--vae", "empty"], ["config.json"]),
    "size the VAE does not divide": (["encode", "images", "new", "--image-size", "9", "--vae", "embedded"], ["9", "2"]),
    "shards exist": (["encode", "images", "shards", "--vae", "none", "--image-size", "8"], ["exists already"]),
    "VAE folder exists": (["train-vae", "fashion-mnist", "images"], ["exists already"]),
}  # fmt: skip

# One of each command runs as a user starts it, from a new interpreter; the others are forked from one, for speed.
FROM_SCRATCH = ["unknown verb", "unknown option", "no checkpoint", "missing npz", "shards exist", "VAE folder exists"]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory, images, shards, run):
    """A folder with one of everything that can be wrong."""
    here = tmp_path_factory.mktemp("work shop")  # with a blank
    shutil.copytree(images, here / "images")
    shutil.copytree(shards, here / "shards")
    shutil.copytree(shards, here / "truncated")
    (here / "truncated" / "00000.safetensors").write_bytes((shards / "00000.safetensors").read_bytes()[:-1])
    shutil.copytree(run, here / "finished")
    (here / "empty").mkdir()
    make_images(here / "mixed")
    make_images(here / "mixed", classes=(), per_class=1)
    (here / "misspelt.yaml").write_text("model:\n  dept: 3\n")
    (here / "broken.yaml").write_text("model: [\n")
    whole = (run / "checkpoints" / "0000004" / "ema.safetensors").read_bytes()
    (here / "short.safetensors").write_bytes(whole[: len(whole) // 2])
    from safetensors.torch import save_file

    save_file({}, here / "foreign.safetensors")
    make_arrays(here)
    make_images(here / "loose", classes=(), per_class=8)
    for arguments in (
        ["encode", "images", "plain", "--vae", "none", "--image-size", "8"],
        [
            "train",
            "--run",
            "unconditional",
            "--data.name",
            "loose",
            "--data.image_size",
            "8",
            "--data.vae",
            "none",
            *TINY_OPTIONS,
        ],
    ):
        made = dit_vca(*arguments, cwd=here)
        assert made.returncode == 0, made.stderr
    return here


def make_arrays(here):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    np.savez(here / "plain.npz", arr_0=pixels)
    np.savez(here / "other.npz", arr_0=pixels[::-1])
    np.savez(here / "large.npz", arr_0=rng.integers(0, 256, (12, 16, 16, 3), dtype=np.uint8))
    np.save(here / "array.npy", pixels)
    np.savez(here / "float.npz", arr_0=pixels.astype(np.float32))
    np.savez(here / "dark.npz", arr_0=pixels % 2)
    np.savez(here / "small-statistics.npz", fd_lite0_mu=np.zeros(3), fd_lite0_sigma=np.eye(3))
    np.savez(here / "adm.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    for name, sigma in (
        ("nan", np.diag([np.nan, *[1.0] * 1279])), ("skew", np.triu(np.ones((1280, 1280)))), ("negative", -np.eye(1280)),
        ("lite0", np.eye(1280)),
    ):  # fmt: skip
        np.savez(here / f"{name}.npz", fd_lite0_mu=np.zeros(1280), fd_lite0_sigma=sigma)
    np.savez(here / "copies.npz", arr_0=pixels[:1].repeat(12, 0))
    np.savez(here / "constant.npz", arr_0=np.full_like(pixels, 9))
    np.savez(here / "keys.npz", images=pixels)
    for folder, sizes, names, mode in (
        ("lossy", (8, 8), ("0.jpg", "1.jpg"), "RGB"), ("sizes", (8, 6), ("0.png", "1.png"), "RGB"),
        ("gap", (8, 8), ("0.png", "2.png"), "RGB"), ("named", (8, 8, 8), ("a.png", "b.png", "c.png"), "RGB"),
        ("alpha", (8, 8), ("0.png", "1.png"), "RGBA"), ("corrupt", (8, 8), ("0.png", "1.png"), "RGB"),
    ):  # fmt: skip
        (here / folder).mkdir()
        for i, (size, name) in enumerate(zip(sizes, names, strict=True)):
            Image.fromarray(pixels[i, :size, :size]).convert(mode).save(here / folder / name)
    (here / "corrupt" / "1.png").write_bytes((here / "corrupt" / "1.png").read_bytes()[:60])
    (here / "short.npz").write_bytes((here / "plain.npz").read_bytes()[:-400])
    Image.fromarray(pixels[0]).save(here / "one.png")


@pytest.fixture(scope="module")
def outcomes(workshop):
    """All cases, each in a process of its own, and what they left on disk."""
    before = tree(workshop)
    arguments = {name: case[0] for name, case in CASES.items()}
    if hasattr(os, "fork"):
        results = dit_vca_forked(arguments, cwd=workshop)
        results |= {name: dit_vca(*arguments[name], cwd=workshop) for name in FROM_SCRATCH}
    else:
        results = {name: dit_vca(*words, cwd=workshop) for name, words in arguments.items()}
    return results, before, tree(workshop)


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_in_one_line(outcomes, name):
    result, words = outcomes[0][name], CASES[name][1]
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    said = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(said) == 1, result.stderr
    assert all(word in said[0] for word in words), said[0]


def test_mistakes_leave_nothing_behind(outcomes):
    _, before, after = outcomes
    assert sorted(after) == sorted(before)
    assert after == before


def test_a_corrupt_image_is_named_and_the_folder_of_shards_is_not_made(tmp_path):
    folder = make_images(tmp_path / "images", per_class=3)
    (folder / "cat" / "001.png").write_bytes(b"nothing")
    result = dit_vca("encode", "images", "shards", "--vae", "none", "--image-size", "8", cwd=tmp_path)
    assert result.returncode == 2 and not (tmp_path / "shards").exists()
    last = result.stderr.splitlines()[-1]
    assert "1 of 6 images cannot be read" in last and "001.png" in last and "--skip-bad" in last
    left_out = dit_vca("encode", "images", "shards", "--vae", "none", "--image-size", "8", "--skip-bad", "true", cwd=tmp_path)
    assert left_out.returncode == 0 and "5 images" in left_out.stdout and "1 bad images left out" in left_out.stdout
