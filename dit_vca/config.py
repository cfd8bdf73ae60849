"""The configuration of a run: frozen data, strict, and nothing of the project imported.

A field that is None is resolved from the data before a run starts, and written out in the run's config.json.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class AttentionConfig:
    """Which attention, and its options.

    Args:
        name: a key of the attention table.
        options: keyword arguments of that kind; what is not given is written out with its default.
    """

    name: str = "vca"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """The network.

    Args:
        backbone: a key of the backbone table.
        patch_size: side of a patch in latent pixels; must divide the latent size.
        dim: width of the tokens.
        depth: number of blocks.
        num_heads: attention heads; must divide dim.
        mlp_ratio: hidden width of the MLP over dim.
        learn_sigma: twice the output channels (DDPM's learned variance; SiT's published weights).
        time_freqs: the frequencies of the time embedding: 10000^(-k/128) in dit, 10000^(-k/127) in diffusers.
        attention: the kind of attention and its options.
        input_size: side of the latent; from the data.
        in_channels: channels of the latent; from the data.
        num_classes: number of classes, 0 for an unconditional model; from the data.
    """

    backbone: str = "dit"
    patch_size: int = 2
    dim: int = 384
    depth: int = 12
    num_heads: int = 6
    mlp_ratio: float = 4.0
    learn_sigma: bool = False
    time_freqs: Literal["dit", "diffusers"] = "dit"
    attention: AttentionConfig = AttentionConfig()
    input_size: int | None = None
    in_channels: int | None = None
    num_classes: int | None = None


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is learned.

    Args:
        path: linear (rectified flow), gvp or vp (SiT's other paths), or ddpm (1000 discrete steps).
        target: what the network predicts: v (the velocity), eps (the noise), x_0 (the data) or score.
        learn_variance: DDPM's hybrid loss with a learned-range variance; needs model.learn_sigma.
        time_scale: factor on the time the network is fed, continuous paths; 1 is SiT's.
        data_at_1: feed 1 - t and predict the velocity that way, continuous paths: the direction of SiT's published weights.
        time_law: how training times are drawn, continuous paths: uniform, or logit-normal (more of them in the middle).
        time_shift: s moves training times and sampling grid to s t / (1 + (s - 1) t), continuous paths; above 1 for large images.
        weighting: of the square error: none, velocity or likelihood (targets eps and score), min-snr (path ddpm).
        min_snr_gamma: the cap of weighting min-snr.
        direction: weight of the loss of direction, 1 less the cosine over channels; 0 leaves it out.
    """

    path: Literal["linear", "gvp", "vp", "ddpm"] = "linear"
    target: Literal["v", "eps", "x_0", "score"] = "v"
    learn_variance: bool = False
    time_scale: float = 1000.0
    data_at_1: bool = False
    time_law: Literal["uniform", "logit-normal"] = "uniform"
    time_shift: float = 1.0
    weighting: Literal["none", "velocity", "likelihood", "min-snr"] = "none"
    min_snr_gamma: float = 5.0
    direction: float = 0.0


@dataclass(frozen=True)
class LatentConfig:
    """How images became latents: what a weight file needs to turn samples back into images. Resolved from the data.

    Args:
        vae: "embedded", "none" (pixels), a folder in diffusers' format, or a hub name.
        vae_hash: SHA-256 of the VAE's weights; empty for pixels.
        scaling_factor: latents are (z - shift_factor) * scaling_factor.
        shift_factor: see scaling_factor.
        channels: channels of a latent.
        size: side of a latent.
        image_size: side of an image in pixels.
    """

    vae: str
    vae_hash: str
    scaling_factor: float
    shift_factor: float
    channels: int
    size: int
    image_size: int


@dataclass(frozen=True)
class DataConfig:
    """What is trained on.

    Args:
        name: fashion-mnist (embedded), fashion-mnist-full, a folder of images, or a folder of shards made by encode.
        image_size: side of the square crop in pixels; null means the data's own size (embedded data and shards only).
        vae: embedded (the embedded data only), none (pixels), a folder in diffusers' format or a hub name;
            null means embedded for the embedded data; it must be given for other images.
        flip: mirror half of the training images.
        cache: where images are encoded to when `name` is not a folder of shards already.
        latent: how images became latents; resolved.
        class_names: the classes in the order of their labels; resolved.
        manifest_hash: SHA-256 of the shards' manifest; resolved.
        num_images: number of training images; resolved.
    """

    name: str | None = "fashion-mnist"
    image_size: int | None = None
    vae: str | None = None
    flip: bool = False
    cache: str = "shards"
    latent: LatentConfig | None = None
    class_names: list[str] | None = None
    manifest_hash: str | None = None
    num_images: int | None = None


@dataclass(frozen=True)
class TrainConfig:
    """How it is trained. Batch sizes count images, durations count optimizer steps.

    Args:
        steps: optimizer steps in all.
        batch_size: images of one optimizer step, over all processes and micro-steps.
        micro_batch: images of one forward pass of one process; null means batch_size over the processes.
        lr: peak learning rate of AdamW.
        betas: AdamW's betas.
        weight_decay: AdamW's decay, of the matrices of linear layers and convolutions.
        warmup_steps: linear warm-up of the learning rate.
        schedule: constant, or cosine to zero at the last step.
        clip_grad: largest gradient norm; 0 turns clipping off.
        ema_decay: decay of the exponential moving average of the weights, kept as "ema".
        ema_more: further decays, each kept as "ema-DECAY" beside it.
        ema_power: widths of power-function averages (Karras et al. 2024: 0.05, 0.1), each kept as "ema-power-WIDTH".
        label_dropout: fraction of labels replaced by the null class (classifier-free guidance).
        mixed_precision: no, bf16 or fp16 (fp16 needs an accelerator); null leaves it to accelerate launch.
        compile: torch.compile the network.
        num_threads: CPU threads when training on a single CPU process; null means all cores.
        init_from: a weight file of this project to start from; ignored when a run is resumed.
        save_every: steps between checkpoints; the last step is always saved.
        log_every: steps between log lines; losses are read from the device only then.
        sample_every: steps between preview grids from the EMA weights; 0 means only at the end.
        tracker: a tracker known to accelerate (tensorboard, wandb, ...), or none.
    """

    steps: int = 400_000
    batch_size: int = 256
    micro_batch: int | None = None
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    clip_grad: float = 1.0
    ema_decay: float = 0.9999
    ema_more: tuple[float, ...] = ()
    ema_power: tuple[float, ...] = ()
    label_dropout: float = 0.1
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    compile: bool = False
    num_threads: int | None = None
    init_from: str | None = None
    save_every: int = 50_000
    log_every: int = 100
    sample_every: int = 0
    tracker: str = "tensorboard"


@dataclass(frozen=True)
class SampleConfig:
    """How images are sampled, unless sample.py is told otherwise.

    Args:
        sampler: ancestral, ddim, dpmpp_2m or unipc (any path); euler, heun, midpoint, rk4, dopri5 (adaptive), euler_maruyama
            or stochastic_heun (continuous paths).
        num_steps: steps of the sampler; path ddpm also takes a,b,c (sections) and ddimN.
        guidance: scale of classifier-free guidance; 1 is the conditional model alone.
        interval: times between which guidance acts, 0 = data and 1 = noise.
        guidance_channels: guide only the first channels (3 in DiT's and SiT's published numbers); null guides all.
        guidance_rescale: 0 to 1, how far guidance keeps the deviation of the conditional output.
        eta: DDIM's noise, 0 to 1.
        time_shift: of the grid, continuous paths; null is that of training.
        diffusion: of the SDE samplers: sigma, SBDM, constant, linear, decreasing or increasing-decreasing.
        diffusion_norm: factor on it (not on decreasing).
        last_step: of the SDE samplers, without noise: mean, tweedie or euler; or none, a step like the others.
        last_step_size: its length in t.
        rtol: relative tolerance of dopri5.
        atol: absolute tolerance of dopri5.
    """

    sampler: str = "euler"
    num_steps: int | str = 50
    guidance: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)
    guidance_channels: int | None = None
    guidance_rescale: float = 0.0
    eta: float = 0.0
    time_shift: float | None = None
    diffusion: str = "sigma"
    diffusion_norm: float = 1.0
    last_step: str = "mean"
    last_step_size: float = 0.04
    rtol: float = 1e-3
    atol: float = 1e-6


@dataclass(frozen=True)
class Config:
    """A run, complete. `preset` is the name of the recipe it began with, for the record."""

    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    sample: SampleConfig = SampleConfig()
    seed: int = 0
    preset: str = ""


# Smallest and largest value of every number that has one; None where there is none.
BOUNDS = {
    "seed": (0, 2**63 - 1), "model.patch_size": (1, None), "model.dim": (1, None), "model.depth": (1, None),
    "model.num_heads": (1, None), "train.steps": (0, None), "train.batch_size": (1, 2**24), "train.micro_batch": (1, None),
    "train.lr": (0, None), "train.weight_decay": (0, None), "train.warmup_steps": (0, None), "train.clip_grad": (0, None),
    "train.ema_decay": (0, 0.9999999), "train.ema_more": (0, 0.9999999), "train.betas": (0, 0.9999999), "model.mlp_ratio": (0.01, 64), "train.ema_power": (0.005, 0.28), "train.label_dropout": (0, 0.99), "train.num_threads": (1, None), "train.save_every": (1, None),
    "train.log_every": (1, None), "train.sample_every": (0, None), "sample.guidance_channels": (1, None),
}  # fmt: skip


def check_bounds(config) -> None:
    """ValueError for a number of a Config that is out of its bounds, or not a number."""
    for name, (low, high) in BOUNDS.items():
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        if not all(low <= v and (high is None or v <= high) and v != float("inf") for v in values):
            allowed = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"{name} must be {allowed}, got {value}")
        if name != "train.betas" and len(set(values)) < len(values):
            raise ValueError(f"{name} must hold different values, got {value}")


SECTIONS = {"model": ModelConfig, "objective": ObjectiveConfig, "data": DataConfig, "train": TrainConfig, "sample": SampleConfig}


def to_dict(config) -> dict[str, Any]:
    """A config as plain data (tuples become lists), ready for JSON."""
    return json.loads(to_json(config))


def to_json(config) -> str:
    """A config as JSON: the content of config.json and of the header of a weight file."""
    return json.dumps(dataclasses.asdict(config), indent=1)


def add_config_arguments(parser, base: Config) -> None:
    """Give a jsonargparse parser one argument for every field of a Config, with the values of `base` as defaults."""
    for name, section in SECTIONS.items():
        parser.add_argument(f"--{name}", type=section, default=getattr(base, name))
    parser.add_argument("--seed", type=int, default=base.seed, help="key of all randomness of the run")


def config_from_namespace(namespace, preset: str) -> Config:
    """The Config of an instantiated jsonargparse namespace."""
    return Config(**{name: getattr(namespace, name) for name in SECTIONS}, seed=namespace.seed, preset=preset)


def from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `to_dict`; ValueError names an unknown key or a wrong type."""
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    add_config_arguments(parser, Config())
    values = dict(values)
    preset = values.pop("preset", "")
    try:
        return config_from_namespace(parser.instantiate(parser.parse_object(values)), preset)
    except ArgumentError as error:
        raise ValueError(f"this is not a configuration of this version: {' '.join(str(error).split())}") from error


def differences(old, new, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """{dotted name: (old, new)} of every leaf in which two configs, or two plain dicts, differ."""
    if dataclasses.is_dataclass(old):
        old = to_dict(old)
    if dataclasses.is_dataclass(new):
        new = to_dict(new)
    found = {}
    for key in {**old, **new}:
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = (a, b)
    return found
