"""Checkpoints: written as a temporary folder, synced, then renamed, so that each is whole or absent."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..config import Config
from ..files import fsync_file, fsync_folder, save_tensors, sha256_of_file
from ..runs import RunFolder, read_weights, write_weights

TEMPORARY_PREFIX = ".writing-"


@dataclass(frozen=True)
class TrainState:
    """Where a run stands. Everything else (learning rate, order, noise) is a function of these and of the config.

    step: optimizer steps taken; position: images consumed. The rest is what rounding depends on, kept to say so when
    it changes on resume.
    """

    step: int
    position: int
    loss_scale: float | None
    num_processes: int
    micro_batch: int
    num_threads: int
    precision: str
    device: str


def save_checkpoint(
    run: RunFolder, config: Config, state: TrainState, *, network: nn.Module, averages: dict[str, nn.Module],
    optimizer: torch.optim.Optimizer,
) -> Path:  # fmt: skip
    """Write checkpoints/STEP with model, averages by name, optimizer and state.json (which lists sizes and hashes).

    Source and licence of weights the training began with stand in `network.origin`, and in the header of each file.
    """
    origin = getattr(network, "origin", {})
    target = run.checkpoint(state.step)
    temporary = target.with_name(TEMPORARY_PREFIX + target.name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_weights(temporary / "model.safetensors", network.state_dict(), config, step=state.step, kind="model", **origin)
    for kind, average in averages.items():
        write_weights(temporary / f"{kind}.safetensors", average.state_dict(), config, step=state.step, kind=kind, **origin)
    save_tensors(_optimizer_tensors(network, optimizer), temporary / "optimizer.safetensors")
    listed = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)} for path in sorted(temporary.iterdir())}
    (temporary / "state.json").write_text(json.dumps({**asdict(state), "files": listed}, indent=1))
    for path in temporary.iterdir():
        fsync_file(path)
    fsync_folder(temporary)
    if target.exists():  # a damaged one of this step, passed over on resume
        shutil.rmtree(target)
    temporary.rename(target)
    fsync_folder(target.parent)
    return target


def load_checkpoint(
    path: Path, *, network: nn.Module, averages: dict[str, nn.Module], optimizer: torch.optim.Optimizer
) -> TrainState:
    """Restore a checkpoint in place, bit for bit."""
    saved = read_weights(path / "model.safetensors")
    network.load_state_dict(saved.tensors)
    network.origin = saved.origin
    for kind, average in averages.items():
        average.load_state_dict(read_weights(path / f"{kind}.safetensors").tensors)
    try:
        _load_optimizer(network, optimizer, load_file(path / "optimizer.safetensors"))
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path}/optimizer.safetensors is damaged ({error})") from error
    values = json.loads((path / "state.json").read_text())
    values.pop("files")
    return TrainState(**values)


def remove_unfinished(run: RunFolder) -> None:
    """Remove what a killed save left behind; call it with the run locked."""
    for path in run.checkpoints.glob(TEMPORARY_PREFIX + "*"):
        shutil.rmtree(path)


def _optimizer_tensors(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """{parameter.key: tensor} of the optimizer's state."""
    return {
        f"{name}.{key}": value.detach().cpu().contiguous()
        for name, parameter in network.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _load_optimizer(network: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            optimizer.state[parameter] = {
                key: tensors[f"{name}.{key}"].to(parameter.device) for key in ("step", "exp_avg", "exp_avg_sq")
            }
