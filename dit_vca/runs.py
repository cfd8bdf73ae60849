"""Every path in a run folder, the files in it, and `open_model`: from a reference to a network, an objective and a config."""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .attention import resolve_options
from .backbones import BACKBONES
from .config import Config, from_dict, to_dict, to_json
from .data.latents import Manifest
from .files import only_process, save_tensors, sha256_of_file, write_text
from .objectives import Objective, build_objective

WEIGHT_KINDS = re.compile(r"model|ema(-power)?(-[0-9.e-]+)?")  # of ema.averages
HEADER_KEY, WEIGHTS_FORMAT = "dit_vca", 1


@dataclass(frozen=True)
class RunFolder:
    """One training run on disk."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def log_file(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def history_file(self) -> Path:
        return self.path / "config.history.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"{step:07d}"

    def exists(self) -> bool:
        return self.config_file.is_file()

    def read_config(self) -> Config:
        """The config the run was started with; ValueError if it is damaged."""
        try:
            return from_dict(json.loads(self.config_file.read_text()))
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.config_file} is not JSON ({error}): the run cannot be continued without it") from error

    def write_config(self, config: Config) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.config_file, to_json(config))

    def latest_checkpoint(self) -> Path | None:
        """The newest whole checkpoint; a damaged one is named on the terminal and passed over."""
        for path in sorted(self.checkpoints.glob("[0-9]*"), reverse=True):
            problem = checkpoint_problem(path)
            if problem is None:
                return path
            print(f"warning: passing over the damaged checkpoint {path}: {problem}")
        return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in this folder; the lock dies with its process."""
        refusal = f"another process is training in {self.path}: wait for it, or choose another folder with --run"
        with only_process(self.path / ".lock", refusal):
            yield


def new_run_folder(root: Path, label: str) -> RunFolder:
    """Make the next numbered folder, root/0001-label."""
    root.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(p.name[:4]) for p in root.glob("[0-9][0-9][0-9][0-9]-*")), default=0)
    while True:
        path = root / f"{number:04d}-{label}"
        try:
            path.mkdir()
            return RunFolder(path)
        except FileExistsError:  # another run was started at the same moment
            number += 1


def checkpoint_problem(path: Path) -> str | None:
    """What is wrong with a checkpoint folder by its own list of sizes and hashes; None if nothing is."""
    try:
        listed = json.loads((path / "state.json").read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"state.json cannot be read ({error})"
    for name, entry in listed.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry["bytes"]:
            return f"{name} has {size} bytes, expected {entry['bytes']}"
        if sha256_of_file(file) != entry["sha256"]:
            return f"{name} does not have the recorded SHA-256"
    return None


def write_weights(
    path: Path, state_dict: dict[str, Tensor], config: Config, *, step: int, kind: str, source: str | None = None,
    license: str | None = None,
) -> None:  # fmt: skip
    """A weight file that is a complete model: tensors, and the config in the header.

    `source` and `license` are of weights that did not begin in this project, and of what was trained from them.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state_dict.items()}
    header = {"format": WEIGHTS_FORMAT, "step": step, "kind": kind, "config": to_dict(config)}
    header |= {name: text for name, text in (("source", source), ("license", license)) if text}
    save_tensors(tensors, path, {HEADER_KEY: json.dumps(header)})  # one key: safetensors writes several in random order


@dataclass(frozen=True)
class Weights:
    """A weight file, read."""

    path: Path
    config: Config
    tensors: dict[str, Tensor]
    step: int
    kind: str
    source: str | None = None
    license: str | None = None

    @property
    def origin(self) -> dict[str, str]:
        """Source and licence, those that are known."""
        return {name: text for name, text in (("source", self.source), ("license", self.license)) if text}


def read_weights(path: Path) -> Weights:
    """Read a weight file of this project; ValueError if it is damaged or a file of another kind."""
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get(HEADER_KEY, "{}"))
            if header.get("format") != WEIGHTS_FORMAT:
                raise ValueError(
                    f"{path} carries no dit-vca configuration in its header: it is not a weight file of this project"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged or no safetensors file ({error}): copy it again, or use another checkpoint"
        ) from error
    return Weights(
        Path(path), from_dict(header["config"]), tensors, header["step"], header["kind"], header.get("source"),
        header.get("license"),
    )  # fmt: skip


def find_weights(ref: str | Path, kind: str = "ema") -> Path:
    """The weight file behind a run folder, a checkpoint folder, or a .safetensors file; ValueError says what is missing."""
    if not WEIGHT_KINDS.fullmatch(kind):
        raise ValueError(f"weights must be ema, model, or another average of the run such as ema-0.999, got {kind!r}")
    path = Path(ref)
    if path.is_file():
        return path
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a run folder, a checkpoint folder, or a .safetensors weight file")
    folder = path
    if not (path / "state.json").is_file():
        checkpoint = RunFolder(path).latest_checkpoint()
        if checkpoint is None:
            raise ValueError(f"{path} holds no checkpoint: give a run folder after its first save, or a .safetensors weight file")
        folder = checkpoint
    file = folder / f"{kind}.safetensors"
    if not file.is_file():
        there = sorted(p.stem for p in folder.glob("*.safetensors") if WEIGHT_KINDS.fullmatch(p.stem))
        raise ValueError(f"{folder} has no weights {kind!r}; it has {', '.join(there)}")
    return file


def build_network(config: Config, *, seed: int | None = None) -> nn.Module:
    """The network of a resolved config on the CPU; initial weights are a function of `seed`, by default the config's."""
    model = config.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed if seed is None else seed)
        return BACKBONES[model.backbone](
            input_size=model.input_size, patch_size=model.patch_size, in_channels=model.in_channels,
            dim=model.dim, depth=model.depth, num_heads=model.num_heads, mlp_ratio=model.mlp_ratio,
            num_classes=model.num_classes, learn_sigma=model.learn_sigma,
            time_freqs=model.time_freqs, attention=model.attention.name, attention_options=model.attention.options,
        )  # fmt: skip


def objective_of(config: Config) -> Objective:
    """The objective of a config."""
    o = config.objective
    return build_objective(
        o.path, target=o.target, learn_variance=o.learn_variance, time_scale=o.time_scale, data_at_1=o.data_at_1,
        time_law=o.time_law, time_shift=o.time_shift, weighting=o.weighting, min_snr_gamma=o.min_snr_gamma,
        direction=o.direction,
    )  # fmt: skip


def resolve(config: Config, manifest: Manifest) -> Config:
    """Fill in what follows from the data, write out the defaults of the attention, and check what must agree."""
    model, latent = config.model, manifest.latent
    facts = {"input_size": latent.size, "in_channels": latent.channels, "num_classes": len(manifest.class_names)}
    for name, fact in facts.items():
        given = getattr(model, name)
        if given is not None and given != fact:
            raise ValueError(f"model.{name} is {given}, but the data has {fact}: leave it out to follow the data")
    if model.backbone not in BACKBONES:
        raise ValueError(f"model.backbone must be one of {', '.join(BACKBONES)}, got {model.backbone!r}")
    if config.objective.learn_variance and not model.learn_sigma:
        raise ValueError("objective.learn_variance needs a network with a variance output: set model.learn_sigma true")
    if config.data.flip and not manifest.flip:
        raise ValueError("data.flip needs shards that hold mirrored images: encode with --flip true")
    if not manifest.class_names and config.sample.guidance != 1:
        config = replace(config, sample=replace(config.sample, guidance=1.0))  # no null class to guide with
    options = resolve_options(model.attention.name, model.attention.options)
    resolved = replace(
        config,
        model=replace(model, **facts, attention=replace(model.attention, options=options)),
        data=replace(
            config.data, latent=latent, class_names=list(manifest.class_names), manifest_hash=manifest.hash,
            num_images=manifest.num_images, image_size=latent.image_size, vae=latent.vae,
        ),
    )  # fmt: skip
    objective_of(resolved)
    with torch.device("meta"):
        build_network(resolved)  # every complaint about sizes comes now, not after the run folder is made
    return resolved


def open_model(ref: str | Path, kind: str = "ema") -> tuple[nn.Module, Objective, Weights]:
    """The network with its trained weights, in eval mode on the CPU, its objective, and the file they came from."""
    weights = read_weights(find_weights(ref, kind))
    network = build_network(weights.config)
    try:
        network.load_state_dict(weights.tensors)
    except RuntimeError as error:
        raise ValueError(
            f"{weights.path}: the tensors do not fit the config in the header ({' '.join(str(error).split())[:200]})"
        ) from error
    return network.eval().requires_grad_(False), objective_of(weights.config), weights
