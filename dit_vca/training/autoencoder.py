"""Training of a small AutoencoderKL (Kingma and Welling 2014; Rombach et al. 2022) for small images."""

import math
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from samplers.noise import normal

from ..data.images import ImageSource
from ..data.latents import PositionOrder
from ..progress import progress

L1_WEIGHT = 0.1  # beside the squared error: keeps edges
MAX_GRAD_NORM = 1.0
MEASURED_IMAGES = 2000  # of the training set, for the scale of the latents


def build_autoencoder(image_size: int, channels: int = 24, latent_channels: int = 4) -> AutoencoderKL:
    """Two resolutions, so latents of half the image's side; about 0.35 million parameters at 24 channels."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(channels, 2 * channels),
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=8,
        sample_size=image_size,
        mid_block_add_attention=False,
    )


def train_autoencoder(
    source: ImageSource, *, steps: int, batch_size: int = 64, lr: float = 2e-3, kl_weight: float = 5e-3, seed: int = 0
) -> AutoencoderKL:
    """Squared error + 0.1 absolute error + kl_weight * KL per latent element, all means; pixels in [-1, 1].

    The weight of the KL is large: the decoder then ignores small errors of a latent, which a diffusion model makes.

    The learning rate warms up over 100 steps and falls to zero as a cosine. `scaling_factor` is set to one over the
    standard deviation of the latents.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # diffusers draws its initial weights from the global generator
        vae = build_autoencoder(source.image_size).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=lr, weight_decay=0.0, fused=True)
    order = PositionOrder(len(source), seed)
    grey = torch.ones((), dtype=torch.bool)  # whether red, green and blue were equal in every image seen
    bar = progress(steps, "step", "train-vae")
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        positions = range(step * batch_size, (step + 1) * batch_size)
        x = _batch(source, order.indices(positions))
        grey &= (x == x[:, :1]).all()
        posterior = vae.encode(x).latent_dist
        noise = normal(seed, "latent", positions, posterior.mean.shape[1:])
        reconstruction = vae.decode(posterior.mean + posterior.std * noise).sample
        error = _error(reconstruction, x)
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        loss = (error**2).mean() + L1_WEIGHT * error.abs().mean() + kl_weight * kl
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(vae.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        bar.update(1)
    bar.close()
    if grey:
        _tie_output_channels(vae)
    vae.register_to_config(scaling_factor=round(1 / _latent_std(vae.eval(), source), 5))
    return vae


def _error(reconstruction: Tensor, x: Tensor) -> Tensor:
    """The difference, but none where the decoder overshoots black or white: those are clipped, so a background is clean."""
    overshoot = ((x <= -1) & (reconstruction < -1)) | ((x >= 1) & (reconstruction > 1))
    return torch.where(overshoot, 0.0, reconstruction - x)


@torch.no_grad()
def _tie_output_channels(vae: AutoencoderKL) -> None:
    """Average the last convolution over the three colours: grey images decode to exactly grey ones, with less error."""
    last = vae.decoder.conv_out
    last.weight.copy_(last.weight.mean(0, keepdim=True).expand_as(last.weight))
    last.bias.copy_(last.bias.mean().expand_as(last.bias))


def save_autoencoder(vae: AutoencoderKL, folder: Path) -> None:
    """In diffusers' folder format, weights in float16."""
    nn.Module.to(vae, torch.float16, memory_format=torch.contiguous_format).save_pretrained(folder)


@torch.inference_mode()
def reconstruction_psnr(vae: AutoencoderKL, source: ImageSource) -> float:
    """Mean over the images of the peak signal-to-noise ratio in dB, from the posterior means."""
    values = []
    for start in range(0, len(source), 64):
        x = _batch(source, range(start, min(start + 64, len(source))))
        reconstruction = vae.decode(vae.encode(x).latent_dist.mean).sample.clamp(-1, 1)
        values.append(10 * torch.log10(4 / ((reconstruction - x) ** 2).mean((1, 2, 3))))
    return float(torch.cat(values).mean())


@torch.inference_mode()
def _latent_std(vae: AutoencoderKL, source: ImageSource) -> float:
    count = min(MEASURED_IMAGES, len(source))
    moments = [vae.encode(_batch(source, range(s, min(s + 64, count)))).latent_dist for s in range(0, count, 64)]
    mean_variance = torch.cat([m.mean for m in moments]).var()
    return float(torch.sqrt(mean_variance + torch.cat([m.var for m in moments]).mean()))


def _batch(source: ImageSource, indices) -> Tensor:
    images = torch.stack([torch.from_numpy(source.load(int(i))) for i in indices])
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1  # channels-last memory
