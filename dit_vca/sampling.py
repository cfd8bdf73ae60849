"""Sampling with a trained model: labels and image indices in, uint8 images out; and a whole archive of them.

A row's last bits change with the shape of the batch it is computed in, so network and VAE always see tiles of one
size, the last one padded; then image i is a function of (seed, i, label, sampler) alone.
"""

import inspect
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from samplers import FOLLOW_VELOCITY, SAMPLERS, SDE, Schedule, autoguided, guided
from samplers.guidance import check_interval
from samplers.noise import ImageNoise, keyed_generator
from samplers.sde import DIFFUSIONS, LAST_STEPS

from .config import LatentConfig, ModelConfig, SampleConfig, differences, to_dict
from .data.archive import ImageArchive, sidecar
from .files import sha256_of_file, write_text
from .interpolants import DiscreteVP, check_positive
from .objectives import Objective
from .processes import start_processes
from .progress import progress
from .runs import RunFolder, Weights, open_model
from .vae import Codec, codec_of

DEFAULT_TILE = 64
OPTIONS_OF = {  # fields of SampleConfig that only some samplers have
    "eta": ("ddim",), "rtol": ("dopri5",), "atol": ("dopri5",), "diffusion": SDE, "diffusion_norm": SDE, "last_step": SDE,
    "last_step_size": SDE,
}  # fmt: skip
BOUNDS = {
    "eta": (0, 1), "guidance_rescale": (0, 1), "last_step_size": (1e-4, 0.5), "rtol": (1e-12, 1), "atol": (1e-12, 1),
    "diffusion_norm": (0, 100),
}  # fmt: skip
OVERLAPPING = {"cuda", "xpu"}  # device types whose work goes on while the host waits for something else


def with_settings(config: SampleConfig, settings: dict[str, Any]) -> SampleConfig:
    """The config with fields replaced; another sampler leaves the options behind that only the former one has."""
    own = {name: getattr(SampleConfig, name) for name, samplers in OPTIONS_OF.items()
           if "sampler" in settings and settings["sampler"] not in samplers}  # fmt: skip
    return replace(config, **(own | settings))


def check_sampling(config: SampleConfig, objective: Objective, model: ModelConfig, *, has_guide: bool = False) -> None:
    """ValueError if these settings cannot be used with this model; `has_guide` with a worse model to guide it."""
    if config.sampler not in SAMPLERS:
        raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {config.sampler!r}")
    if isinstance(objective.path, DiscreteVP) and config.sampler in FOLLOW_VELOCITY:
        raise ValueError(
            f"sampler {config.sampler} follows a velocity, which path ddpm does not have; use ancestral, ddim, dpmpp_2m or unipc"
        )
    if has_guide and config.guidance == 1:
        raise ValueError("guidance 1 is the model alone, which a guide does not change: give another --guidance with --guide")
    if config.guidance_channels is not None and not 1 <= config.guidance_channels <= model.in_channels:
        raise ValueError(
            f"guidance_channels must be from 1 to {model.in_channels}, the channels of the model, or null for all; got "
            f"{config.guidance_channels}"
        )
    if config.guidance != 1 and not model.num_classes and not has_guide:
        raise ValueError(
            f"guidance {config.guidance} needs a conditional model; this one was trained without classes: use --guidance 1"
        )
    for name, (low, high) in BOUNDS.items():
        if not low <= getattr(config, name) <= high:
            raise ValueError(f"{name} must be from {low} to {high}, got {getattr(config, name)}")
    for name, samplers in OPTIONS_OF.items():
        if getattr(config, name) != getattr(SampleConfig, name) and config.sampler not in samplers:
            raise ValueError(f"{name} is an option of sampler {' and '.join(samplers)}, not of {config.sampler}")
    for name, allowed in (("diffusion", DIFFUSIONS), ("last_step", LAST_STEPS)):
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(config, name)!r}")
    check_interval(config.interval)
    if config.last_step == "none" and config.last_step_size != SampleConfig.last_step_size:
        raise ValueError("last_step_size is of a last step, and last_step is none: leave it out")
    if config.time_shift is not None:
        check_positive(config.time_shift, "time_shift")
    sampling_schedule(config, objective)


def sampling_schedule(config: SampleConfig, objective: Objective) -> Schedule:
    """The grid that these settings walk down."""
    has_last_step = config.sampler in SDE and config.last_step != "none"
    return objective.schedule(
        config.num_steps, follows_velocity=config.sampler in FOLLOW_VELOCITY, shift=config.time_shift,
        from_cut=config.sampler in SDE and config.diffusion == "SBDM",
        to_cut=config.sampler in SDE and config.diffusion == "constant" and config.last_step == "none",
        last_step=config.last_step_size if has_last_step else 0.0,
    )  # fmt: skip


def balanced_labels(num: int, num_classes: int) -> Tensor:
    """Labels i mod num_classes, (num,) int64: every class equally often up to one image; zeros without classes."""
    return torch.arange(num) % max(num_classes, 1)


def random_labels(num: int, num_classes: int, seed: int) -> Tensor:
    """Uniform labels, (num,) int64; label i is a function of (seed, i)."""
    return torch.tensor([int(keyed_generator(seed, "image_label", i).integers(max(num_classes, 1))) for i in range(num)])


def sample_latents(
    network: nn.Module, objective: Objective, config: SampleConfig, labels: Tensor, noise: ImageNoise,
    guide: nn.Module | None = None,
) -> Tensor:  # fmt: skip
    """Latents (B, C, h, w) of one tile; the networks are on the device, the noise comes from the host.

    With a `guide` the model is guided by that worse version of it, instead of by its own answer without a class.
    """
    device = next(network.parameters()).device
    y = labels.to(device)

    def denoise_y(x, t, y):
        return objective.predict(network, x, t, y)

    def denoise(x, t):
        return denoise_y(x, t, y)

    if guide is not None:

        def denoise_worse(x, t):
            return objective.predict(guide, x, t, y)

        denoise = autoguided(denoise, denoise_worse, scale=config.guidance, interval=config.interval)
    elif config.guidance != 1 and network.null_class is not None:
        denoise = guided(
            denoise_y, y, null=network.null_class, scale=config.guidance, interval=config.interval,
            channels=config.guidance_channels, rescale=config.guidance_rescale,
        )  # fmt: skip
    sampler = SAMPLERS[config.sampler]
    accepted = inspect.signature(sampler).parameters
    options = {"randn_like": noise.randn_like} | {name: getattr(config, name) for name in OPTIONS_OF}
    options = {name: value for name, value in options.items() if name in accepted}
    return sampler(denoise, noise.initial().to(device), sampling_schedule(config, objective), **options)


@torch.inference_mode()
def tile_latents(
    network: nn.Module, objective: Objective, latent: LatentConfig, config: SampleConfig, *,
    indices: Sequence[int], labels: Tensor, seed: int, tile: int, guide: nn.Module | None = None,
) -> Tensor:  # fmt: skip
    """Latents (tile, C, h, w) float32 of at most `tile` indices; the rows beyond them are padding."""
    padded = [*indices, *([indices[-1]] * (tile - len(indices)))]
    padded_labels = torch.cat([labels, labels[-1:].expand(tile - len(indices))])
    noise = ImageNoise(seed, padded, (latent.channels, latent.size, latent.size))
    return sample_latents(network, objective, config, padded_labels, noise, guide).float()


def generate(
    network: nn.Module, objective: Objective, codec: Codec, config: SampleConfig, *,
    labels: Tensor, seed: int, tile: int = DEFAULT_TILE,
) -> Iterator[Tensor]:  # fmt: skip
    """Images of indices 0, 1, ... with the given labels (N,), tile by tile, uint8 (<= tile, S, S, 3)."""
    for start in range(0, len(labels), tile):
        indices = range(start, min(start + tile, len(labels)))
        latents = tile_latents(
            network, objective, codec.latent, config,
            indices=indices, labels=labels[start : start + tile], seed=seed, tile=tile,
        )  # fmt: skip
        yield codec.decode(latents)[: len(indices)]


def image_grid(images: Tensor, columns: int) -> Tensor:
    """Images uint8 (N, S, S, 3) side by side, row by row: uint8 (rows * S, columns * S, 3), missing ones black."""
    rows = -(-len(images) // columns)
    size = images.shape[1]
    grid = torch.zeros(rows * columns, size, size, 3, dtype=torch.uint8)
    grid[: len(images)] = images
    return grid.unflatten(0, (rows, columns)).transpose(1, 2).reshape(rows * size, columns * size, 3)


def label_number(label: int | str, class_names: Sequence[str]) -> int:
    """The number of a class given by name or by number; ValueError says what classes there are."""
    if label in class_names:
        return class_names.index(label)
    if str(label).isdigit() and int(label) < len(class_names):
        return int(label)
    shown = ", ".join(class_names[:12]) + (", ..." if len(class_names) > 12 else "")
    raise ValueError(f"no class {label!r}; there is a number below {len(class_names)}, or a name: {shown}")


def labels_from(text: str, num: int, class_names: Sequence[str], seed: int) -> Tensor:
    """Labels (num,) int64 from "balanced", "random", or names and numbers of classes separated by commas, taken in turn."""
    if text == "balanced":
        return balanced_labels(num, len(class_names))
    if text == "random":
        return random_labels(num, len(class_names), seed)
    if not class_names:
        raise ValueError(f"labels {text!r} were asked for, but this model was trained without classes: leave --labels out")
    try:
        given = [label_number(part.strip(), class_names) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{error}; or balanced, or random") from None
    return torch.tensor(given).repeat(-(-num // len(given)))[:num]


def sample_to_folder(
    ref: str | Path, *, num: int, labels: str = "balanced", seed: int = 0, weights: str = "ema",
    tile: int = DEFAULT_TILE, batch: int = DEFAULT_TILE, out: str | None = None, vae: str | None = None,
    device: str = "auto", settings: dict[str, Any] | None = None, guide: str | Path | None = None,
) -> Path:  # fmt: skip
    """Sample `num` images to images.npz, images.json and grid.png in a folder, and return the folder.

    `settings` replaces fields of the model's own SampleConfig; `guide` is a worse model for autoguidance. The tiles are shared among the processes there are; a
    killed call is continued by an equal one.
    """
    for name, count, low, high in (
        ("num", num, 1, 10**9),
        ("tile", tile, 1, 2**16),
        ("batch", batch, 1, 10**9),
        ("seed", seed, 0, 2**63 - 1),
    ):
        if not low <= count <= high:
            raise ValueError(f"{name} must be from {low} to {high}, got {count}")
    state = start_processes(device)
    network, objective, found = open_model(ref, weights)
    config = with_settings(found.config.sample, settings or {})
    if guide is not None:  # what the model has of guidance by its null class does not apply
        own = {"guidance_channels": None, "guidance_rescale": 0.0}
        config = replace(config, **{name: value for name, value in own.items() if name not in (settings or {})})
    check_sampling(config, objective, found.config.model, has_guide=guide is not None)
    class_names = found.config.data.class_names
    y = labels_from(labels, num, class_names, seed)
    latent = found.config.data.latent
    codec = codec_of(latent, state.device, vae=vae)
    record = _provenance(found, config, num=num, labels=labels, seed=seed, tile=tile, device=state.device)
    guide_network = None
    if guide is not None:
        guide_network, record["guide"] = _open_guide(guide, found, config, objective)
        guide_network.to(state.device)
    folder = Path(out) if out else _default_folder(ref, found, config, record)
    archive = ImageArchive(
        folder / "images.npz", num=num, size=latent.image_size, labels=y.numpy() if class_names else None,
        identity=json.dumps(record, sort_keys=True),
    )  # fmt: skip
    if archive.path.exists():
        if sidecar(archive.path).get("made_from") == record:
            return folder
        raise ValueError(f"{archive.path} exists and is of other settings or weights: choose another folder with --out")
    if state.is_main_process:
        archive.begin()
    state.wait_for_everyone()
    done = archive.finished_tiles()
    state.wait_for_everyone()  # all share out the same tiles before the first of them adds to the journal
    started = time.perf_counter()
    network.to(state.device)
    calls = _fill(archive, done, network, objective, codec, config, y, seed, tile, batch, state, guide_network)
    state.wait_for_everyone()
    if state.is_main_process:
        missing = set(range(0, num, tile)) - archive.finished_tiles()
        if missing:
            raise RuntimeError(f"tiles {sorted(missing)[:5]} were not written by any process; start the command again")
        seconds = round(time.perf_counter() - started, 2)
        write_text(
            folder / "images.json", json.dumps({"made_from": record, "network_calls": calls, "seconds": seconds}, indent=1)
        )
        columns = len(class_names) if 1 < len(class_names) <= 20 else 8
        first = torch.from_numpy(archive.first_images(8 * columns))
        Image.fromarray(image_grid(first, columns).numpy()).save(folder / "grid.png")
        archive.finish()  # last: where images.npz is, the rest is too
    state.wait_for_everyone()
    return folder


def _open_guide(ref: str | Path, found: Weights, config: SampleConfig, objective: Objective) -> tuple[nn.Module, dict[str, Any]]:
    """The guide and its record; ValueError if it does not speak of the same latents and classes in the same terms."""
    if config.guidance_channels is not None or config.guidance_rescale:
        raise ValueError("guidance_channels and guidance_rescale are of guidance by the null class, not of --guide")
    network, its_objective, its = open_model(ref)
    same = ("latent", "class_names")
    if its_objective != objective or any(getattr(its.config.data, n) != getattr(found.config.data, n) for n in same):
        changed = differences(found.config.objective, its.config.objective) | {
            f"data.{n}": (getattr(found.config.data, n), getattr(its.config.data, n))
            for n in same
            if getattr(its.config.data, n) != getattr(found.config.data, n)
        }
        shown = "; ".join(f"{name}: {ours!r}, the guide's {theirs!r}" for name, (ours, theirs) in changed.items())
        raise ValueError(
            f"the guide {its.path} was trained with another objective or on other data than the model ({shown[:300]})"
        )
    return network, {"sha256": sha256_of_file(its.path), "step": its.step, "kind": its.kind}


def _fill(archive, done, network, objective, codec, config, y, seed, tile, batch, state, guide=None) -> int:
    """Compute this process's share of the tiles that are not `done`. Returns the network calls an image takes.

    `batch` images, rounded up to tiles, are computed between two writes to disk. On an accelerator they are decoded and
    written while the next ones are sampled.
    """
    waiting = [start for start in range(0, archive.num, tile) if start not in done]
    tiles_a_write = -(-batch // tile)
    writes = [waiting[i : i + tiles_a_write] for i in range(0, len(waiting), tiles_a_write)]
    counted, tiles = _Counted(network), 0
    bar = progress(archive.num, "image", "sample", initial=min(len(done) * tile, archive.num), disable=not state.is_main_process)

    def decode_and_write(latents: dict[int, Tensor]) -> None:
        images = {}
        for start, of_tile in latents.items():
            images[start] = codec.decode(of_tile)[: archive.num - start].numpy()
            bar.update(min(len(images[start]) * state.num_processes, bar.total - bar.n))
        archive.write_tiles(images, rank=state.process_index)

    with bar, _OneBehind(threaded=state.device.type in OVERLAPPING) as behind:
        for starts in writes[state.process_index :: state.num_processes]:
            latents = {}
            for start in starts:
                indices = range(start, min(start + tile, archive.num))
                latents[start] = tile_latents(
                    counted, objective, codec.latent, config,
                    indices=indices, labels=y[start : start + tile], seed=seed, tile=tile, guide=guide,
                )  # fmt: skip
                tiles += 1
            behind(decode_and_write, latents)
    if not waiting:  # a call that was killed at its very end: one tile is computed to count
        tile_latents(counted, objective, codec.latent, config, indices=[0], labels=y[:1], seed=seed, tile=tile, guide=guide)
        tiles = 1
    return counted.calls // max(tiles, 1)


class _OneBehind:
    """Runs one task at a time, in a thread of its own if `threaded`; what a task raises is raised by the next call or the end."""

    def __init__(self, *, threaded: bool):
        self._pool = ThreadPoolExecutor(1) if threaded else None
        self._running: Future | None = None

    def __call__(self, task: Callable[[Any], None], argument: Any) -> None:
        if self._pool is None:
            task(argument)
            return
        self._wait()
        self._running = self._pool.submit(task, argument)

    def __enter__(self) -> "_OneBehind":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self._pool is None:
            return
        try:
            if kind is None:
                self._wait()
        finally:
            self._pool.shutdown()

    def _wait(self) -> None:
        if self._running is not None:
            self._running.result()


class _Counted(nn.Module):
    """A network that counts its calls."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network
        self.calls = 0

    @property
    def null_class(self) -> int | None:
        return self.network.null_class

    def forward(self, *arguments) -> Tensor:
        self.calls += 1
        return self.network(*arguments)


def _provenance(found: Weights, config: SampleConfig, *, num, labels, seed, tile, device) -> dict[str, Any]:
    """Everything the bytes of the images depend on."""
    from . import __version__

    return {
        "num": num, "labels": labels, "seed": seed, "tile": tile, "sample": json.loads(json.dumps(asdict(config))),
        "weights": {"sha256": sha256_of_file(found.path), "step": found.step, "kind": found.kind, **found.origin},
        "config": to_dict(found.config), "device": device.type,
        "versions": {"dit-vca": __version__, "torch": torch.__version__, "numpy": np.__version__},
    }  # fmt: skip


def _default_folder(ref, found: Weights, config: SampleConfig, record: dict[str, Any]) -> Path:
    labels = "" if record["labels"] == "balanced" else "-" + record["labels"].replace(",", "+").replace("/", "_")[:40]
    steps = str(config.num_steps).replace(",", "+")
    name = (
        f"{found.step:07d}-{found.kind}-{config.sampler}{steps}-cfg{config.guidance:g}-seed{record['seed']}"
        f"-n{record['num']}{labels}"
    )
    path = Path(ref)
    if path.is_dir() and RunFolder(path).exists():
        return RunFolder(path).samples / name
    if path.parent.name == "checkpoints" and RunFolder(path.parent.parent).exists():
        return RunFolder(path.parent.parent).samples / name
    return Path("samples") / f"{path.stem}-{name}"
