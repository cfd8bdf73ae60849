"""Named recipes: a grammar over tables, `demo[-ddpm][-ATTENTION]` and `{dit|sit}-{s|b|l|xl}{2|4|8}[-512]-ATTENTION`.

An attention is a kind, or a row of the VCA paper's Tables 3 and 4.
"""

import re
from dataclasses import replace

from .attention import ATTENTION, VCA_ROWS
from .config import AttentionConfig, Config, DataConfig, ModelConfig, ObjectiveConfig, SampleConfig, TrainConfig

# DiT, Table 1 (Peebles and Xie 2023): width, depth, heads; xs is for 16 tokens on a CPU.
SIZES = {
    "xs": {"dim": 320, "depth": 3, "num_heads": 5},
    "s": {"dim": 384, "depth": 12, "num_heads": 6},
    "b": {"dim": 768, "depth": 12, "num_heads": 12},
    "l": {"dim": 1024, "depth": 24, "num_heads": 16},
    "xl": {"dim": 1152, "depth": 28, "num_heads": 16},
}

DDPM = ObjectiveConfig(path="ddpm", target="eps", learn_variance=True)
DDPM_V = replace(DDPM, target="v")  # learns what is far from the data sooner: docs/demo.md has the difference
FLOW = ObjectiveConfig(path="linear", target="v", time_law="logit-normal")
SIT = ObjectiveConfig(path="linear", target="v", time_scale=1.0, data_at_1=True)

DEMO_OPTIONS = {  # sizes for 16 tokens, where the defaults would be as many as there are tokens, or more
    "vca": {"pool": 4}, "nystromformer": {"landmarks": 4}, "linformer": {"rank": 8},
}  # fmt: skip

_NAMES = (*ATTENTION, *VCA_ROWS)
_ATTENTION = "|".join(_NAMES)
_DEMO = re.compile(rf"demo(?P<ddpm>-ddpm)?(-(?P<attention>{_ATTENTION}))?")
_IMAGENET = re.compile(rf"(?P<family>dit|sit)-(?P<size>s|b|l|xl)(?P<patch>2|4|8)(?P<large>-512)?-(?P<attention>{_ATTENTION})")


def preset(name: str) -> Config:
    """The recipe of that name; ValueError says what names there are."""
    if match := _DEMO.fullmatch(name):
        return _demo(name, ddpm=match["ddpm"] is not None, attention=match["attention"] or "vca")
    if match := _IMAGENET.fullmatch(name):
        return _imagenet(name, **match.groupdict())
    raise ValueError(
        f"unknown preset {name!r}; there is demo[-ddpm][-ATTENTION] and {{dit|sit}}-{{s|b|l|xl}}{{2|4|8}}[-512]-ATTENTION "
        f"with ATTENTION one of {', '.join(_NAMES)}"
    )


def _attention(name: str) -> AttentionConfig:
    return AttentionConfig("vca", VCA_ROWS[name]) if name in VCA_ROWS else AttentionConfig(name)


def _demo(name: str, *, ddpm: bool, attention: str) -> Config:
    """Fashion-MNIST in the latents of the embedded VAE, on a CPU; docs/demo.md has the time and the scores measured."""
    chosen = _attention(attention)
    chosen = replace(chosen, options=DEMO_OPTIONS.get(chosen.name, {}) | chosen.options)
    return Config(
        preset=name,
        model=ModelConfig(
            **SIZES["xs"], patch_size=4, learn_sigma=ddpm, attention=chosen
        ),
        objective=DDPM_V if ddpm else FLOW,
        train=TrainConfig(
            steps=1700, batch_size=32, lr=3e-3, betas=(0.9, 0.99), warmup_steps=50, schedule="cosine", ema_decay=0.995,
            save_every=850, log_every=20,
        ),
        sample=SampleConfig(sampler="ddim" if ddpm else "euler", num_steps=8, guidance=3.0),
    )  # fmt: skip


def _imagenet(name: str, *, family: str, size: str, patch: str, large: str | None, attention: str) -> Config:
    """The training recipe of DiT and SiT: AdamW, constant learning rate 1e-4, batch 256, EMA 0.9999, horizontal flips.

    Networks have 2C outputs in both families, as the published weights do. Not verified here: these runs need GPUs.
    """
    ddpm = family == "dit"
    return Config(
        preset=name,
        model=ModelConfig(**SIZES[size], patch_size=int(patch), learn_sigma=True, attention=_attention(attention)),
        objective=DDPM if ddpm else SIT,
        data=DataConfig(name=None, image_size=512 if large else 256, flip=True),
        train=replace(TrainConfig(), clip_grad=0.0),
        sample=SampleConfig(sampler="ancestral" if ddpm else "euler", num_steps=250, guidance=1.0, guidance_channels=3),
    )
