"""From what was read to a configuration: sizes from shapes, and what is left open from the user."""

import math
from dataclasses import replace
from typing import Any

import torch

from ..attention import resolve_options
from ..config import AttentionConfig, Config, DataConfig, LatentConfig, ModelConfig, ObjectiveConfig
from ..presets import DDPM, SIZES, preset
from ..runs import build_network
from ..vae import DEFAULT_SCALING_FACTOR, PIXELS, PixelCodec, open_codec
from .diffusers import block_numbers
from .read import SD_VAE, Found, need

OBJECTIVES = ("ddpm", "flow")
SD_CHANNELS, SD_DOWNSAMPLING = 4, 8  # of Stable Diffusion's VAE


def config_of(found: Found, *, objective: str | None, num_heads: int | None, vae: str | None) -> Config:
    """The config of foreign weights: sizes from shapes, the rest from the file, the options, or DiT's table of widths."""
    objective = _objective(found, objective)
    sizes = _sizes(found)
    model = ModelConfig(
        **sizes, num_heads=_heads(found, num_heads, sizes["dim"]), time_freqs=found.time_freqs,
        attention=AttentionConfig("softmax", resolve_options("softmax", {})),
    )  # fmt: skip
    latent = latent_of(vae or found.vae or f"{SD_VAE}ema", model.input_size, model.in_channels)
    recipe = preset(f"{'dit' if objective == 'ddpm' else 'sit'}-s2-softmax")
    return replace(
        recipe, preset="", model=model,
        objective=replace(DDPM, learn_variance=model.learn_sigma) if objective == "ddpm" else found.flow,
        data=DataConfig(
            name=None, image_size=latent.image_size, vae=latent.vae, flip=recipe.data.flip, latent=latent,
            class_names=[str(i) for i in range(model.num_classes)],
        ),
        sample=replace(recipe.sample, guidance_channels=found.guided_channels),
    )  # fmt: skip


def _objective(found: Found, given: str | None) -> str:
    if given is not None and given not in OBJECTIVES:
        raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {given!r}")
    if given and found.objective and given != found.objective:
        raise ValueError(f"{found.place} says of itself that its objective is {found.objective}, --objective says {given}")
    if objective := given or found.objective:
        return objective
    raise ValueError(
        f"{found.place} does not say what it was trained for: files of DiT (ddpm: predicts noise) and of SiT (flow: predicts a "
        "velocity) have the same tensors; give --objective ddpm or --objective flow"
    )


def _heads(found: Found, given: int | None, dim: int) -> int:
    """Heads as the file says, as asked for, or as DiT's table has them for this width: shapes do not tell."""
    if given is not None and found.num_heads is not None and given != found.num_heads:
        raise ValueError(f"{found.place} says of itself that it has {found.num_heads} heads, --num_heads says {given}")
    given = given if found.num_heads is None else found.num_heads
    heads = given if given is not None else {size["dim"]: size["num_heads"] for size in SIZES.values()}.get(dim)
    if heads is None:
        raise ValueError(
            f"{found.place} has width {dim}, whose number of heads cannot be read from the tensors: give --num_heads"
        )
    if heads < 1 or dim % heads:
        raise ValueError(f"the width {dim} of {found.place} is not divisible into {heads} heads: give another --num_heads")
    return heads


def _sizes(found: Found) -> dict[str, Any]:
    """The fields of ModelConfig that the shapes tell."""
    if any(name.startswith("transformer_blocks.") for name in found.tensors):
        raise ValueError(f"{found.place} has the names of diffusers: give the folder it is in, whose config.json is needed too")
    names = ("x_embedder.proj.weight", "pos_embed", "y_embedder.embedding_table.weight", "blocks.0.mlp.fc1.weight",
             "final_layer.linear.weight")  # fmt: skip
    patches, position, table, hidden, last = (tuple(need(found.tensors, name, found.place).shape) for name in names)
    if len(patches) != 4 or len(position) != 3 or patches[2] != patches[3]:
        raise ValueError(f"{found.place} is no DiT: patches are embedded by {patches}, positions are {position}")
    dim, channels, patch, _ = patches
    tokens, outputs = math.isqrt(position[1]), last[0] / patch**2
    if tokens**2 != position[1] or outputs not in (channels, 2 * channels):
        raise ValueError(
            f"{found.place} is no DiT: {position[1]} tokens must be a square, {outputs:g} outputs be {channels} or {2 * channels}"
        )
    numbers = block_numbers(found.tensors)
    return {
        "dim": dim, "depth": max(numbers) + 1, "patch_size": patch, "mlp_ratio": hidden[0] / dim,
        "learn_sigma": outputs != channels, "input_size": tokens * patch, "in_channels": channels, "num_classes": table[0] - 1,
    }  # fmt: skip


def latent_of(vae: str, size: int, channels: int) -> LatentConfig:
    """How latents (channels, size, size) become images; the Stable Diffusion VAEs are known, others are opened."""
    if vae == PIXELS:
        latent = PixelCodec(size).latent
    elif vae.startswith(SD_VAE):
        latent = LatentConfig(vae, "", DEFAULT_SCALING_FACTOR, 0.0, SD_CHANNELS, size, SD_DOWNSAMPLING * size)
    else:
        large = 64 * size  # divisible by any VAE's downsampling
        latent = open_codec(vae, large).latent
        latent = replace(latent, size=size, image_size=size * (large // latent.size))
    if latent.channels != channels:
        raise ValueError(
            f"the network has {channels} channels, the VAE {vae!r} {latent.channels}: give the network's own with --vae "
            "(none: pixels)"
        )
    return latent


def agreeing(found: Found, given: dict[str, Any]) -> Config:
    """The config that a file of this project, or of an export of it, has; ValueError if an option says otherwise."""
    config = found.config
    own = {
        "objective": "ddpm" if config.objective.path == "ddpm" else "flow", "num_heads": config.model.num_heads,
        "vae": config.data.latent.vae if config.data.latent else None, "time_freqs": config.model.time_freqs,
    }  # fmt: skip
    for name, value in given.items():
        if value is not None and value != own[name]:
            raise ValueError(
                f"{found.place} was written by this project and has {name} {own[name]}, --{name} says {value}: leave it out"
            )
    return config


def check_tensors(found: Found, config: Config) -> None:
    """ValueError names tensors that are missing, not known, or of another shape than the network's."""
    with torch.device("meta"):
        expected = build_network(config).state_dict()
    missing = [name for name in expected if name not in found.tensors]
    unknown = [name for name in found.tensors if name not in expected]
    shapes = [n for n in expected if n in found.tensors and found.tensors[n].shape != expected[n].shape]
    problems = [f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
                for what, names in (("missing", missing), ("not known", unknown)) if names]  # fmt: skip
    problems += [f"{n} is {tuple(found.tensors[n].shape)}, expected {tuple(expected[n].shape)}" for n in shapes[:2]]
    problems += [f"{n} is not finite" for n in expected if n in found.tensors and not bool(found.tensors[n].isfinite().all())][:2]
    if problems:
        raise ValueError(f"{found.place} does not hold the tensors of a DiT: {'; '.join(problems)}")


def in_words(objective: ObjectiveConfig) -> str:
    """What the network is fed for a time and what it predicts."""
    learned = " and a variance" if objective.learn_variance else ""
    if objective.path == "ddpm":
        return f"path ddpm: fed the index 0 to 999, predicts {objective.target}{learned}"
    time = "1 - t" if objective.data_at_1 else "t"
    fed = time if objective.time_scale == 1 else f"{objective.time_scale:g} ({time})"
    direction = ", from noise to data" if objective.data_at_1 and objective.target == "v" else ""
    return f"path {objective.path}: fed {fed} with t = 0 at the data, predicts {objective.target}{direction}"
