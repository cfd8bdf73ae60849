"""Latent shards: a memory map per shard, and an order that is a function of (seed, position)."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from samplers.noise import keyed_generator, uniform

from ..config import LatentConfig

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class ShardEntry:
    """One shard: a safetensors file with `stored` (n, ...), `labels` (n,) and perhaps `stored_flip` (n, ...)."""

    file: str
    count: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds. Paths are not part of it: the folder may move."""

    source: str
    fingerprint: str
    crop: str
    class_names: list[str]
    latent: LatentConfig
    flip: bool
    shards: list[ShardEntry]
    bad: list[str]
    format: int = 1

    @property
    def num_images(self) -> int:
        return sum(shard.count for shard in self.shards)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @property
    def hash(self) -> str:
        """SHA-256 of the manifest, hence of every shard."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder of shards; ValueError if it has none or cannot be understood."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{folder} is not a folder of shards: it has no {MANIFEST} (make one with: dit-vca encode IMAGES {folder})"
        )
    try:
        values = json.loads(path.read_text())
        if values.get("format") != 1:
            raise ValueError(f"format {values.get('format')!r}, expected 1")
        values["latent"] = LatentConfig(**values["latent"])
        values["shards"] = [ShardEntry(**shard) for shard in values["shards"]]
        return Manifest(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): encode the images again") from error


class LatentShards:
    """Random access to the rows of a folder of shards, through memory maps."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self._shards = [self._open(entry) for entry in self.manifest.shards]
        self._ends = np.cumsum([entry.count for entry in self.manifest.shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _open(self, entry: ShardEntry) -> dict[str, Tensor]:
        path = self.folder / entry.file
        size = path.stat().st_size if path.is_file() else None
        if size != entry.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(f"{path} {found}, its manifest says {entry.bytes} bytes: encode the images again")
        try:
            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): encode the images again") from error

    def rows(self, indices: np.ndarray, flipped: np.ndarray) -> tuple[Tensor, Tensor]:
        """Stored rows (B, ...) and labels (B,) of the given images, the mirrored version where `flipped`."""
        stored, labels = [], []
        for index, flip in zip(indices, flipped, strict=True):
            number = int(np.searchsorted(self._ends, index, side="right"))
            shard = self._shards[number]
            row = int(index) - (int(self._ends[number - 1]) if number else 0)
            if not flip:
                stored.append(shard["stored"][row])
            elif "stored_flip" in shard:
                stored.append(shard["stored_flip"][row])
            else:
                stored.append(shard["stored"][row].flip(-1))
            labels.append(shard["labels"][row])
        return torch.stack(stored), torch.stack(labels)


class PositionOrder:
    """Which image stands at a position of the training stream: epoch by epoch, each a permutation of its own."""

    def __init__(self, num_images: int, seed: int):
        self.num_images = num_images
        self.seed = seed
        self._epochs: dict[int, np.ndarray] = {}

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Image indices (B,) of global positions (B,)."""
        return np.array([self._permutation(int(p) // self.num_images)[int(p) % self.num_images] for p in positions])

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            self._epochs = {e: p for e, p in self._epochs.items() if e >= epoch - 1}  # a batch spans two epochs at most
            self._epochs[epoch] = keyed_generator(self.seed, "order", epoch).permutation(self.num_images)
        return self._epochs[epoch]


def flips(seed: int, positions: np.ndarray) -> np.ndarray:
    """Whether the image at each position is mirrored, (B,) bool, with probability one half."""
    return (uniform(seed, "flip", positions) < 0.5).numpy()
