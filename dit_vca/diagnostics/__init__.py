"""Looking inside a trained model: what the two streams of its attentions are to each other, layer by layer and over t."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.streams import check_streams
from ..config import to_dict
from ..data.latents import LatentShards
from ..data.prepare import shards_of
from ..files import sha256_of_file, whole, write_text
from ..objectives import Objective
from ..processes import start_processes
from ..runs import Weights, open_model
from ..vae import Codec, codec_of
from .figures import EPS, TOP_K, Intruders
from .measure import Measurement, Request, measure, report_of
from .plots import PLOTS, draw_maps, plot_histograms, plot_over_layers, plot_weights

TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)


def diagnose(
    ckpt: str | Path, out: str | Path, *, num: int = 32, times: Sequence[float] = TIMES, data: str | None = None,
    labels: str = "own", weights: str = "ema", seed: int = 0, k: int = TOP_K, eps: float = EPS, against: str = "top",
    pictures: int = 2, batch: int = 4, vae: str | None = None, device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Measure the attentions of a trained model on noised latents of its data; returns what OUT/diagnose.json holds.

    `data` is other data than the run's, encoded alike. `labels` are the images' own, or "null" (guidance's unconditional
    branch). The first `pictures` images get pictures of their maps, beside the images as the model's VAE decodes them;
    `vae` says where that is now, if it has moved. OUT is written whole or not at all, and must not exist.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already: choose another folder with --out, or remove it")
    if labels not in ("own", "null"):
        raise ValueError(f"labels must be own or null, got {labels!r}")
    request = Request(num, tuple(sorted(times)), labels == "null", seed, Intruders(k, eps, against), pictures, batch)
    state = start_processes(device)
    if state.num_processes > 1:
        raise ValueError(f"diagnose runs in one process, got {state.num_processes}: start it without a launcher")
    network, objective, found = open_model(ckpt, weights)
    model_times = _check(request, network, objective)
    shards = shards_of(found.config.data, data, state.device)
    if num > len(shards):
        raise ValueError(f"num must be at most {len(shards)}, the number of images in the data; got {num}")
    codec = codec_of(shards.manifest.latent, state.device, vae=vae or found.config.data.latent.vae) if pictures else None
    measurement = measure(network.to(state.device), objective, shards, request)
    made_from = _made_from(found, shards, request) | {"model_times": model_times.tolist(), "device": state.device.type}
    report = {"made_from": made_from} | report_of(measurement, request)
    _write(out, report, measurement, network.grid, codec)
    return report


def _check(request: Request, network: nn.Module, objective: Objective) -> Tensor:
    """What the network is fed at each time; ValueError if it cannot be diagnosed, or not at these times."""
    for block in network.blocks:
        check_streams(block.attn)
    if request.null_labels and network.null_class is None:
        raise ValueError("labels null need a conditional model; this one was trained without classes: leave --labels out")
    model_times = objective.path.model_time(torch.tensor(request.times, dtype=torch.float64))
    if bool((model_times < 0).any()):
        least = 1 / objective.path.num_timesteps
        raise ValueError(
            f"times must be at least {least:g} on path ddpm, whose network never sees the data itself; got {list(request.times)}"
        )
    return model_times


def _made_from(found: Weights, shards: LatentShards, request: Request) -> dict[str, Any]:
    """Everything the figures depend on."""
    from .. import __version__

    rule = request.rule
    return {
        "num": request.num, "times": list(request.times), "labels": "null" if request.null_labels else "own",
        "seed": request.seed, "batch": request.batch, "k": rule.k, "eps": rule.eps, "against": rule.against,
        "data": {"folder": str(shards.folder), "manifest_hash": shards.manifest.hash},
        "weights": {"sha256": sha256_of_file(found.path), "step": found.step, "kind": found.kind},
        "config": to_dict(found.config), "versions": {"dit-vca": __version__, "torch": torch.__version__},
    }  # fmt: skip


def _write(out: Path, report: dict[str, Any], measurement: Measurement, grid: tuple[int, int], codec: Codec | None) -> None:
    """The folder, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole(out) as folder:
        folder.mkdir()
        for name, (figures, label) in PLOTS.items():
            plot_over_layers(report, figures, label, folder / f"{name}.png")
        if report["weights"]:
            plot_weights(report["weights"], folder / "weight.png")
        if any("intruder_histogram" in row for row in report["layers"]):
            plot_histograms(report, folder / "intruder_histogram.png")
        draw_maps(measurement, grid, codec, folder)
        write_text(folder / "diagnose.json", json.dumps(report, indent=1))
