"""Small things the tests make: images, shards, configurations, and the commands as subprocesses."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dit_vca.config import AttentionConfig, Config, DataConfig, ModelConfig, SampleConfig, TrainConfig
from dit_vca.presets import DDPM, FLOW

ROOT = Path(__file__).resolve().parents[1]


def make_images(folder: Path, *, classes: tuple[str, ...] = ("cat", "dog"), per_class: int = 20, size: int = 20) -> Path:
    """PNG files of noise, in class folders or, without classes, loose."""
    rng = np.random.default_rng(0)
    for name in classes or ("",):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(per_class):
            pixels = rng.integers(0, 256, (size, size + 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:03d}.png")
    return folder


def tiny_config(shards: Path, *, ddpm: bool = False, attention: str = "vca", **train) -> Config:
    """Seconds to train: two blocks of width 16 on 8 x 8 pixels."""
    options = {"pool": 2} if attention == "vca" else {}
    settings = {
        "steps": 4, "batch_size": 8, "lr": 1e-3, "ema_decay": 0.9, "save_every": 2, "log_every": 2, "num_threads": 1,
        "tracker": "none",
    }  # fmt: skip
    return Config(
        preset="tiny",
        model=ModelConfig(
            patch_size=2, dim=16, depth=2, num_heads=2, learn_sigma=ddpm, attention=AttentionConfig(attention, options)
        ),
        objective=DDPM if ddpm else FLOW,
        data=DataConfig(name=str(shards)),
        train=replace(TrainConfig(), **(settings | train)),
        sample=SampleConfig(sampler="ancestral" if ddpm else "euler", num_steps=2),
    )


TINY_OPTIONS = (
    "--model.patch_size 2 --model.dim 16 --model.depth 2 --model.num_heads 2 --model.attention.options.pool 2 "
    "--train.steps 4 --train.batch_size 8 --train.save_every 2 --train.log_every 2 --train.num_threads 1 --train.tracker none "
    "--sample.num_steps 2"
).split()


def environment(**extra: str) -> dict[str, str]:
    """For child processes: this checkout on the path, one thread, no terminal width to wrap by."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "500"} | extra


def python(processes: int = 1) -> list[str]:
    """The start of a command line: Python, or `accelerate launch` of several processes (--multi_gpu: gloo on a CPU)."""
    if processes == 1:
        return [sys.executable]
    launch = ["accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", str(processes)]
    return [sys.executable, "-m", *launch]


def dit_vca(*arguments, cwd: Path, timeout: float = 120, **extra: str) -> subprocess.CompletedProcess:
    """`python -m dit_vca ...` as a user would run it."""
    command = [sys.executable, "-m", "dit_vca", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment(**extra), capture_output=True, text=True, timeout=timeout)


def dit_vca_forked(commands: dict[str, list[str]], *, cwd: Path) -> dict[str, subprocess.CompletedProcess]:
    """`dit-vca ...` for each of many commands, one after the other, without the imports of each."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "forked.py")], input=json.dumps(commands), cwd=cwd, env=environment(),
        stdout=subprocess.PIPE, text=True, timeout=600, check=True,
    )  # fmt: skip
    return {name: subprocess.CompletedProcess(commands[name], *found) for name, found in json.loads(done.stdout).items()}


def tree(folder: Path) -> dict[str, bytes]:
    """Everything under a folder: files with their content, folders with none."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def equal_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
