"""Images to latents and back. The only file that knows uint8, [-1, 1] and VAE scale factors.

Three forms: images are uint8 (B, S, S, 3); *stored* rows are what shards hold, the VAE's moments (mean and log
variance, 2C channels, float16) or, without a VAE, uint8 pixels (3 channels); latents are what a network sees, float32
(B, C, h, w), near unit variance.
"""

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .config import LatentConfig

EMBEDDED = "embedded"
PIXELS = "none"
DEFAULT_SCALING_FACTOR = 0.18215  # Stable Diffusion's; for configs written before diffusers recorded the factor


class Codec(Protocol):
    """Images to stored rows, latents to images. `latent` says how, and travels with shards and weights."""

    latent: LatentConfig

    def encode(self, images: Tensor) -> Tensor:
        """uint8 (B, S, S, 3) -> stored rows on the host."""

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, C, h, w) -> uint8 (B, S, S, 3) on the host."""


class PixelCodec:
    """No VAE: stored rows are the pixels, latents are pixels in [-1, 1]."""

    def __init__(self, image_size: int):
        self.latent = LatentConfig(PIXELS, "", 1.0, 0.0, channels=3, size=image_size, image_size=image_size)

    def encode(self, images: Tensor) -> Tensor:
        return images.permute(0, 3, 1, 2).contiguous()

    def decode(self, latents: Tensor) -> Tensor:
        return to_uint8(latents)


class VAECodec:
    """A diffusers AutoencoderKL in float32, outside autocast: half precision overflows in these decoders."""

    def __init__(self, vae: torch.nn.Module, name: str, image_size: int, device: torch.device):
        config = vae.config
        factor = 2 ** (len(config.block_out_channels) - 1)
        if image_size % factor:
            raise ValueError(f"image size {image_size} is not divisible by {factor}, the VAE's downsampling")
        self.device = device
        self._vae = vae.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)
        self.latent = LatentConfig(
            vae=name,
            vae_hash=_hash_of_weights(vae),
            scaling_factor=float(config.get("scaling_factor") or DEFAULT_SCALING_FACTOR),
            shift_factor=float(config.get("shift_factor") or 0.0),
            channels=config.latent_channels,
            size=image_size // factor,
            image_size=image_size,
        )

    @torch.inference_mode()
    def encode(self, images: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            x = images.to(self.device).permute(0, 3, 1, 2).float() / 127.5 - 1
            moments = self._vae.encode(x).latent_dist.parameters
        return moments.cpu().to(torch.float16, memory_format=torch.contiguous_format)

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            z = latents.to(self.device, torch.float32) / self.latent.scaling_factor + self.latent.shift_factor
            return to_uint8(self._vae.decode(z).sample)


def to_uint8(x: Tensor) -> Tensor:
    """(B, 3, S, S) in [-1, 1] -> uint8 (B, S, S, 3) on the host, rounded to nearest as DiT does; refuses NaN."""
    if not bool(torch.isfinite(x).all()):
        raise FloatingPointError("the images hold NaN or infinity: the samples diverged")
    return (127.5 * x + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()


def latent_from_stored(stored: Tensor, noise: Tensor, latent: LatentConfig) -> Tensor:
    """Stored rows and standard normal noise -> latents (B, C, h, w) float32; pixels use no noise."""
    if stored.dtype == torch.uint8:
        return stored.float() / 127.5 - 1
    mean, log_variance = stored.float().chunk(2, dim=1)
    z = mean + torch.exp(log_variance.clamp(-30, 20) / 2) * noise
    return (z - latent.shift_factor) * latent.scaling_factor


def open_codec(vae: str, image_size: int, device: torch.device | str = "cpu", *, expected_hash: str = "") -> Codec:
    """A codec by name: "none", "embedded", a folder in diffusers' format, or a hub name.

    ValueError if the VAE cannot be loaded, or if its weights are not those of `expected_hash`.
    """
    if vae == PIXELS:
        return PixelCodec(image_size)
    codec = VAECodec(_load(vae), vae, image_size, torch.device(device))
    if expected_hash and codec.latent.vae_hash != expected_hash:
        raise ValueError(
            f"the VAE {vae!r} has weights {codec.latent.vae_hash[:12]}, but the model was trained with "
            f"{expected_hash[:12]}: give the right one with --vae"
        )
    return codec


def codec_of(latent: LatentConfig, device: torch.device | str = "cpu", *, vae: str | None = None) -> Codec:
    """The codec a model was trained with; `vae` says where that VAE is now, if it has moved."""
    codec = open_codec(vae or latent.vae, latent.image_size, device, expected_hash=latent.vae_hash)
    found = codec.latent
    if (found.channels, found.size) != (latent.channels, latent.size):
        raise ValueError(
            f"the model was trained on {latent.channels}x{latent.size}x{latent.size} latents of VAE {latent.vae!r}, "
            f"{vae!r} has {found.channels}x{found.size}x{found.size}: give the right one with --vae, or leave it out"
        )
    return codec


def _load(vae: str):
    from diffusers import AutoencoderKL

    folder = files("dit_vca") / "assets" / "vae" if vae == EMBEDDED else Path(vae)
    if vae != EMBEDDED and folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(f"{vae} is not a VAE in diffusers' format: it has no config.json")
    try:
        if (folder / "config.json").is_file():
            return _with_recorded_factor(AutoencoderKL.from_pretrained(str(folder), torch_dtype=torch.float32), folder)
        return AutoencoderKL.from_pretrained(vae, torch_dtype=torch.float32)
    except Exception as error:  # diffusers, the hub client and safetensors raise a dozen unrelated types here
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"cannot load the VAE {vae!r}: expected a folder in diffusers' format or a hub name ({reason})"
        ) from error


def _with_recorded_factor(vae, folder):
    """Diffusers fills in a default factor silently; say nothing of the kind for a config that has none."""
    if "scaling_factor" not in json.loads((folder / "config.json").read_text()):
        vae.register_to_config(scaling_factor=DEFAULT_SCALING_FACTOR)
    return vae


def _hash_of_weights(vae: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(vae.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().float().contiguous().numpy().tobytes())
    return digest.hexdigest()
