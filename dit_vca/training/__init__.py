"""Training: tasks, the loop, checkpoints, EMA. `train` is what the command and the Python API call."""

import json
import time
from dataclasses import replace
from pathlib import Path

from accelerate.utils import broadcast_object_list

from ..config import Config, check_bounds, differences
from ..data.prepare import prepare_shards
from ..errors import Interrupted, NonFinite
from ..runs import RunFolder, new_run_folder, resolve
from .loop import check_config, start_accelerator
from .loop import train as run_loop

RUNS = Path("runs")

# What a run may change when it is resumed; everything else must be equal.
FREE = {
    "preset", "data.name", "data.cache", "train.steps", "train.micro_batch", "train.compile", "train.num_threads",
    "train.init_from", "train.save_every", "train.log_every", "train.sample_every", "train.tracker",
}  # fmt: skip
WITH_PERMISSION = {
    "train.batch_size", "train.lr", "train.betas", "train.weight_decay", "train.warmup_steps", "train.schedule",
    "train.clip_grad", "train.ema_decay", "train.label_dropout", "train.mixed_precision",
}  # fmt: skip


def train(config: Config, run: str | Path | None = None, *, allow_change: bool = False) -> RunFolder:
    """Train, or go on training, in the folder `run` (by default a new numbered one under runs/), and return it.

    `allow_change` permits another learning rate, batch size and the like on resume. Raises ValueError for a mistake in
    the config or the data, NonFinite if the loss diverges, Interrupted after a signal.
    """
    check_bounds(config)
    accelerator = start_accelerator(config.train)
    config = _with(config, "train.mixed_precision", accelerator.mixed_precision)  # what the launcher chose is recorded too
    if run is not None and accelerator.is_main_process:
        _check_folder(RunFolder(Path(run)))
    with accelerator.main_process_first():
        shards = prepare_shards(config.data, accelerator.device)
    config = resolve(config, shards.manifest)
    check_config(config, accelerator.num_processes, begins=run is None or not RunFolder(Path(run)).exists())
    if run is None:
        made = [new_run_folder(RUNS, config.preset or "run").path if accelerator.is_main_process else None]
        run = broadcast_object_list(made)[0]
    folder = RunFolder(Path(run))
    if accelerator.is_main_process:
        folder.path.mkdir(parents=True, exist_ok=True)
        with folder.locked():
            _record(folder, config, allow_change)
            _train_in(folder, config, shards, accelerator)
    else:
        accelerator.wait_for_everyone()
        run_loop(config, folder, shards, accelerator)
    return folder


def _train_in(folder, config, shards, accelerator) -> None:
    accelerator.wait_for_everyone()  # the others start once the folder is ours
    accelerator.project_configuration.set_directories(str(folder.path))
    run_loop(config, folder, shards, accelerator)


def current_config(folder: RunFolder) -> Config:
    """The config a run would continue with: the one it was started with, and the changes recorded since."""
    config = folder.read_config()
    if folder.history_file.is_file():
        for line in folder.history_file.read_text().splitlines():
            for name, (_, value) in json.loads(line)["changes"].items():
                config = _with(config, name, value)
    return config


def _check_folder(folder: RunFolder) -> None:
    """ValueError for a folder that holds something else than a run."""
    if folder.path.exists() and not folder.path.is_dir():
        raise ValueError(f"{folder.path} is a file: give a folder with --run")
    occupied = [] if folder.exists() or not folder.path.exists() else [p for p in folder.path.iterdir() if p.name != ".lock"]
    if occupied:
        raise ValueError(
            f"{folder.path} is not a run folder and not empty (it holds {occupied[0].name}): choose another with --run"
        )


def _record(folder: RunFolder, config: Config, allow_change: bool) -> None:
    """Write config.json, or check against it and append what changed to config.history.jsonl."""
    if not folder.exists():
        _check_folder(folder)
        folder.write_config(config)
        return
    changes = differences(current_config(folder), config)
    fixed = [n for n in changes if n not in FREE and n not in WITH_PERMISSION and not n.startswith("sample.")]
    asking = [n for n in changes if n in WITH_PERMISSION]
    if fixed:
        shown = "; ".join(f"{name}: {changes[name][0]!r} -> {changes[name][1]!r}" for name in fixed[:3])
        raise ValueError(f"{folder.path} holds another run ({shown}): continue it as it is, or choose another folder with --run")
    if asking and not allow_change:
        shown = "; ".join(f"{name}: {changes[name][0]!r} -> {changes[name][1]!r}" for name in asking)
        raise ValueError(f"{folder.path} was started otherwise ({shown}): pass --allow-change true to go on with the new value")
    if changes:
        checkpoint = folder.latest_checkpoint()
        entry = {
            "step": int(checkpoint.name) if checkpoint else 0,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "changes": changes,
        }
        with open(folder.history_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _with(config, name: str, value):
    """A config with one dotted field replaced."""
    head, _, rest = name.partition(".")
    if isinstance(config, dict):
        return {**config, head: _with(config.get(head, {}), rest, value) if rest else value}
    if rest:
        return replace(config, **{head: _with(getattr(config, head), rest, value)})
    if isinstance(getattr(config, head), tuple):
        value = tuple(value)
    return replace(config, **{head: value})


__all__ = ["Interrupted", "NonFinite", "current_config", "train"]
