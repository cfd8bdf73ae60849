"""From a data config to shards: those named, or those that the named images are encoded to, once."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from samplers.noise import normal

from ..config import DataConfig
from ..vae import EMBEDDED, Codec, latent_from_stored, open_codec
from .encode import encode
from .images import NAMED, ImageSource, open_images
from .latents import MANIFEST, LatentShards


def prepare_shards(data: DataConfig, device: torch.device | str = "cpu") -> LatentShards:
    """The shards of `data.name`; images are encoded to a folder of `data.cache` named after content and VAE."""
    if data.name is None:
        raise ValueError("data.name must be given: a folder of images, or a folder of shards made with: dit-vca encode")
    if (Path(data.name) / MANIFEST).is_file():
        return _shards_as_asked(data)
    source, codec = open_source(data.name, data.image_size, data.vae, device)
    identity = json.dumps([source.fingerprint, asdict(codec.latent), data.flip])
    slug = re.sub(r"[^A-Za-z0-9-]+", "-", Path(data.name).name)
    folder = Path(data.cache) / f"{slug}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if not folder.exists():
        encode(source, codec, folder, flip=data.flip, wait=True)
    return LatentShards(folder)


def shards_of(trained_on: DataConfig, name: str | None, device: torch.device | str) -> LatentShards:
    """The shards a model was trained on, or others by name; ValueError if these are not encoded alike, or of other classes."""
    own = trained_on if name is None else replace(trained_on, name=name, flip=False)
    shards = prepare_shards(own, device)
    latent, expected = (replace(x, vae="") for x in (shards.manifest.latent, trained_on.latent))  # its folder may have moved
    if latent != expected:
        raise ValueError(f"{own.name} holds other latents than the model was trained on: {latent}, expected {expected}")
    if shards.manifest.class_names != trained_on.class_names:
        raise ValueError(
            f"{own.name} has the classes {', '.join(shards.manifest.class_names)}, the model was trained on "
            f"{', '.join(trained_on.class_names)}: give data of the same classes with --data"
        )
    return shards


def draw_latents(shards: LatentShards, indices: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    """Latents (B, C, h, w) float32 and labels (B,) of these images; each drawn from its moments by (seed, index)."""
    latent = shards.manifest.latent
    stored, y = shards.rows(indices, [False] * len(indices))
    noise = normal(seed, "latent", indices, (latent.channels, latent.size, latent.size))
    return latent_from_stored(stored, noise, latent), y


def open_source(name: str, image_size: int | None, vae: str | None, device: torch.device | str) -> tuple[ImageSource, Codec]:
    """Images by name and the codec for them; the embedded VAE is the default for the embedded data alone."""
    source = open_images(name, image_size)
    if vae is None:
        if name not in NAMED:
            raise ValueError(
                f"the VAE must be given for {name} (--vae, or --data.vae in training): none for pixels, a folder in "
                "diffusers' format, or a hub name such as stabilityai/sd-vae-ft-ema"
            )
        vae = EMBEDDED
    return source, open_codec(vae, source.image_size, device)


def _shards_as_asked(data: DataConfig) -> LatentShards:
    shards = LatentShards(Path(data.name))
    latent = shards.manifest.latent
    for name, asked, found in (("vae", data.vae, latent.vae), ("image_size", data.image_size, latent.image_size)):
        if asked is not None and asked != found:
            raise ValueError(f"data.{name} is {asked}, but the shards in {data.name} were encoded with {found}")
    return shards
