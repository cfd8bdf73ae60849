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

from samplers import SAMPLERS, guided
from samplers.noise import ImageNoise, keyed_generator

from .config import LatentConfig, SampleConfig, to_dict
from .data.archive import ImageArchive, sidecar
from .files import sha256_of_file, write_text
from .objectives import Objective
from .processes import start_processes
from .progress import progress
from .runs import RunFolder, Weights, open_model
from .vae import Codec, codec_of

DEFAULT_TILE = 64
OVERLAPPING = {"cuda", "xpu"}  # device types whose work goes on while the host waits for something else


def check_sampling(config: SampleConfig, objective: Objective, num_classes: int) -> None:
    """ValueError if these settings cannot be used with this model."""
    if config.sampler not in SAMPLERS:
        raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {config.sampler!r}")
    if not objective.path.schedule(1).continuous and config.sampler in ("euler", "heun"):
        raise ValueError(f"sampler {config.sampler} follows a velocity, which path ddpm does not have; use ancestral or ddim")
    if config.guidance != 1 and not num_classes:
        raise ValueError(
            f"guidance {config.guidance} needs a conditional model; this one was trained without classes: use --guidance 1"
        )
    if not 0 <= config.eta <= 1:
        raise ValueError(f"eta must be from 0 to 1, got {config.eta}")
    if config.eta and config.sampler != "ddim":
        raise ValueError(f"eta is an option of sampler ddim, not of {config.sampler}")
    low, high = config.interval
    if not 0 <= low <= high <= 1:
        raise ValueError(f"interval must satisfy 0 <= low <= high <= 1, got {list(config.interval)}")
    objective.path.schedule(config.num_steps)


def balanced_labels(num: int, num_classes: int) -> Tensor:
    """Labels i mod num_classes, (num,) int64: every class equally often up to one image; zeros without classes."""
    return torch.arange(num) % max(num_classes, 1)


def random_labels(num: int, num_classes: int, seed: int) -> Tensor:
    """Uniform labels, (num,) int64; label i is a function of (seed, i)."""
    return torch.tensor([int(keyed_generator(seed, "image_label", i).integers(max(num_classes, 1))) for i in range(num)])


def sample_latents(network: nn.Module, objective: Objective, config: SampleConfig, labels: Tensor, noise: ImageNoise) -> Tensor:
    """Latents (B, C, h, w) of one tile; the network is on the device, the noise comes from the host."""
    device = next(network.parameters()).device
    y = labels.to(device)

    def denoise_y(x, t, y):
        return objective.predict(network, x, t, y)

    if config.guidance == 1 or network.null_class is None:

        def denoise(x, t):
            return denoise_y(x, t, y)

    else:
        denoise = guided(
            denoise_y, y, null=network.null_class, scale=config.guidance, interval=config.interval,
            channels=config.guidance_channels,
        )  # fmt: skip
    sampler = SAMPLERS[config.sampler]
    accepted = inspect.signature(sampler).parameters
    options = {"randn_like": noise.randn_like, "eta": config.eta}
    options = {name: value for name, value in options.items() if name in accepted}
    return sampler(denoise, noise.initial().to(device), objective.path.schedule(config.num_steps), **options)


@torch.inference_mode()
def tile_latents(
    network: nn.Module, objective: Objective, latent: LatentConfig, config: SampleConfig, *,
    indices: Sequence[int], labels: Tensor, seed: int, tile: int,
) -> Tensor:  # fmt: skip
    """Latents (tile, C, h, w) float32 of at most `tile` indices; the rows beyond them are padding."""
    padded = [*indices, *([indices[-1]] * (tile - len(indices)))]
    padded_labels = torch.cat([labels, labels[-1:].expand(tile - len(indices))])
    noise = ImageNoise(seed, padded, (latent.channels, latent.size, latent.size))
    return sample_latents(network, objective, config, padded_labels, noise).float()


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
    device: str = "auto", settings: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Sample `num` images to images.npz, images.json and grid.png in a folder, and return the folder.

    `settings` replaces fields of the model's own SampleConfig. The tiles are shared among the processes there are; a
    killed call is continued by an equal one.
    """
    for name, count in (("num", num), ("tile", tile), ("batch", batch)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    state = start_processes(device)
    network, objective, found = open_model(ref, weights)
    config = replace(found.config.sample, **(settings or {}))
    check_sampling(config, objective, found.config.model.num_classes)
    class_names = found.config.data.class_names
    y = labels_from(labels, num, class_names, seed)
    latent = found.config.data.latent
    codec = codec_of(latent, state.device, vae=vae)
    record = _provenance(found, config, num=num, labels=labels, seed=seed, tile=tile, device=state.device)
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
    calls = _fill(archive, done, network, objective, codec, config, y, seed, tile, batch, state)
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


def _fill(archive, done, network, objective, codec, config, y, seed, tile, batch, state) -> int:
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
                    indices=indices, labels=y[start : start + tile], seed=seed, tile=tile,
                )  # fmt: skip
                tiles += 1
            behind(decode_and_write, latents)
    if not waiting:  # a call that was killed at its very end: one tile is computed to count
        tile_latents(counted, objective, codec.latent, config, indices=[0], labels=y[:1], seed=seed, tile=tile)
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
        "weights": {"sha256": sha256_of_file(found.path), "step": found.step, "kind": found.kind},
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
