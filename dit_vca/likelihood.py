"""How likely a flow model holds its data to be: bits per dimension by the probability-flow ODE."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samplers.likelihood import log_likelihood
from samplers.noise import keyed_generator, normal

from .data.latents import LatentShards, PositionOrder
from .data.prepare import draw_latents, shards_of
from .files import sha256_of_file
from .interpolants import DiscreteVP
from .processes import start_processes
from .progress import progress
from .runs import open_model
from .vae import PIXELS

PIXEL = 2 / 255  # the width of a pixel's bin where pixels are from -1 to 1


def likelihood(
    ckpt: str | Path, *, num: int = 64, data: str | None = None, probes: int = 1, num_steps: int = 50, weights: str = "ema",
    seed: int = 0, batch: int = 16, device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """The mean of -log2 p over dimensions of `num` images of the model's data (or of `data`), with its standard error.

    In latents it is that of the density of latents drawn from their moments, scaled as in training, which compares with
    models of the same VAE alone; it may be negative. In pixels it is of 8-bit images: pixels are spread over their bins
    (uniform dequantisation), and the width of a bin counts. Each image, its noise and its probes are functions of the seed.
    Labels are the images' own, without guidance, of which an ODE has no likelihood.
    """
    for name, value in (("num", num), ("probes", probes), ("num_steps", num_steps), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    state = start_processes(device)
    if state.num_processes > 1:
        raise ValueError(f"likelihood runs in one process, got {state.num_processes}: start it without a launcher")
    network, objective, found = open_model(ckpt, weights)
    if isinstance(objective.path, DiscreteVP):
        raise ValueError("path ddpm is defined at discrete times and has no ODE: its likelihood is not defined here")
    shards = shards_of(found.config.data, data, state.device)
    if num > len(shards):
        raise ValueError(f"num must be at most {len(shards)}, the number of images in the data; got {num}")
    network.to(state.device)
    schedule = objective.schedule(num_steps, follows_velocity=True)
    indices = PositionOrder(len(shards), seed).indices(range(num))
    nats = []
    with progress(num, "image", "likelihood") as bar:
        for start in range(0, num, batch):
            chosen = indices[start : start + batch]
            x_0, y = _draw(shards, chosen, seed)
            y = y.to(state.device)

            def denoise(x, t, y=y):
                return objective.predict(network, x, t, y)

            estimates = [
                log_likelihood(denoise, x_0.to(state.device), schedule, probe_like=_Probes(seed, chosen, k))
                for k in range(probes)
            ]
            nats.append(torch.stack(estimates).mean(0))
            bar.update(len(chosen))
    latent = shards.manifest.latent
    dims = latent.channels * latent.size**2
    pixels = latent.vae == PIXELS
    bits = -torch.cat(nats) / (dims * math.log(2)) - (math.log2(PIXEL) if pixels else 0.0)
    if not bool(bits.isfinite().all()):
        raise FloatingPointError(f"{found.path} gives likelihoods that are NaN or infinite: the model diverged")
    return {
        "bits_per_dim": float(bits.mean()), "standard_error": float(bits.std()) / math.sqrt(num) if num > 1 else None,
        "space": "pixels" if pixels else "latents", "dims": dims, "num": num, "probes": probes, "num_steps": num_steps,
        "network_calls": 2 * num_steps * probes, "seed": seed, "data": str(shards.folder),
        "weights": {"sha256": sha256_of_file(found.path), "step": found.step, "kind": found.kind},
        "bits_per_dim_by_image": {int(i): float(b) for i, b in zip(indices, bits, strict=True)},
    }  # fmt: skip


class _Probes:
    """Random signs for Hutchinson's estimate: probe k of each image, a function of (seed, image, k)."""

    def __init__(self, seed: int, indices: Sequence[int], k: int):
        self.seed, self.positions = seed, [(k << 32) + int(i) for i in indices]

    def __call__(self, x: Tensor) -> Tensor:
        drawn = normal(self.seed, "probe", self.positions, tuple(x.shape[1:]))
        return torch.where(drawn < 0, -1.0, 1.0).to(x.device, x.dtype)


def _draw(shards: LatentShards, indices: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    """Latents and labels; pixels are moved to a place within their bins."""
    x_0, y = draw_latents(shards, indices, seed)
    if shards.manifest.latent.vae == PIXELS:
        places = np.stack([keyed_generator(seed, "dequantization", int(i)).random(x_0.shape[1:]) for i in indices])
        x_0 = x_0 + PIXEL * (torch.from_numpy(places) - 0.5).float()
    return x_0, y
