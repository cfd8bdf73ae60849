"""One pass of an extractor over images: sums for Fréchet distances and the Inception Score, and features kept on disk."""

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor

from samplers.noise import keyed_generator

from ..files import cache_folder
from ..processes import add_up, shares
from ..progress import progress
from .features import Extractor
from .images import ImageSet
from .inception_score import StreamingInceptionScore
from .statistics import StreamingStatistics

CACHED_IMAGES = 20_000  # features of at most so many images stay in the cache, by content


@dataclass
class Collected:
    """What one pass gives: statistics by output, both Inception Scores, the features of all images."""

    statistics: dict[str, StreamingStatistics] = field(default_factory=dict)
    inception_score: StreamingInceptionScore | None = None
    inception_score_permuted: StreamingInceptionScore | None = None
    features: Tensor | None = None


def collect(
    images: ImageSet, digest: str, extractor: Extractor, state: PartialState, *, batch: int, statistics: Collection[str] = (),
    inception_score: bool = False, keep_features: bool = False,
) -> Collected:  # fmt: skip
    """The pass over `images`, whose ordered digest of pixels is `digest`; each process takes its share of the batches.

    `statistics` names outputs of the extractor. Features alone come from the cache where the same pixels were seen
    before. Kept features are a memory map (N, D) float32; the file is removed at once where it is not to be cached.
    """
    found = Collected({name: StreamingStatistics(extractor.outputs[name]) for name in statistics})
    if inception_score:
        places = torch.from_numpy(keyed_generator(0, "score_order").permutation(len(images)).argsort())
        classes = extractor.outputs["logits"]
        found.inception_score = StreamingInceptionScore(len(images), classes=classes)
        found.inception_score_permuted = StreamingInceptionScore(len(images), classes=classes, places=places)
    scores = [s for s in (found.inception_score, found.inception_score_permuted) if s is not None]
    cached = len(images) <= CACHED_IMAGES
    file = FeatureFile(_cache_path(images, digest, extractor), len(images), extractor.outputs["features"], state)
    only_features = not scores and set(statistics) <= {"features"}
    from_cache = _same_everywhere(only_features and file.path.is_file(), state)
    writes = (keep_features or cached) and not from_cache
    if writes:
        file.begin()
    for start, stop, outputs in _outputs(images, extractor, state, batch, file if from_cache else None):
        for name, stream in found.statistics.items():
            stream.add(outputs[name])
        for score in scores:
            score.add(torch.arange(start, stop), outputs["logits"])
        if writes:
            file.write(start, outputs["features"])
    for stream in (*found.statistics.values(), *scores):
        add_up(stream.sums, state)
    if writes:
        file.finish()
    if keep_features:
        found.features = file.read()
    if writes and not cached:
        file.remove()  # the map stays valid until it is dropped
    return found


def _outputs(images, extractor, state, batch, file) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """(start, stop, outputs) of this process's batches, computed, or read from a file of features."""
    features = None if file is None else file.read()
    with progress(len(images), "image", extractor.protocol, disable=not state.is_main_process or file is not None) as bar:
        for start, stop in shares(len(images), batch, state):
            if features is not None:
                yield start, stop, {"features": features[start:stop]}
                continue
            yield start, stop, extractor(torch.from_numpy(images.read(start, stop)))
            bar.update(min((stop - start) * state.num_processes, bar.total - bar.n))


class FeatureFile:
    """Features (num, dim) float32 on disk, whose rows any process may write; whole at `path`, or not there."""

    def __init__(self, path: Path, num: int, dim: int, state: PartialState):
        self.path, self._num, self._dim, self._state = path, num, dim, state
        self._partial = path

    def begin(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        name = [f"{self.path.name}.{os.getpid()}.tmp"]
        if self._state.num_processes > 1:
            broadcast_object_list(name)
        self._partial = self.path.with_name(name[0])
        if self._state.is_main_process:
            with open(self._partial, "wb") as file:
                file.truncate(self._num * self._dim * 4)
        self._state.wait_for_everyone()

    def write(self, start: int, features: Tensor) -> None:
        """Rows from `start` on."""
        with open(self._partial, "r+b") as file:
            file.seek(start * self._dim * 4)
            file.write(np.ascontiguousarray(features.numpy()).data)

    def finish(self) -> None:
        self._state.wait_for_everyone()
        if self._state.is_main_process:
            os.replace(self._partial, self.path)
        self._state.wait_for_everyone()

    def read(self) -> Tensor:
        """A memory map."""
        return torch.from_file(str(self.path), shared=False, size=self._num * self._dim).view(self._num, self._dim)

    def remove(self) -> None:
        self._state.wait_for_everyone()
        if self._state.is_main_process:
            self.path.unlink()


def _same_everywhere(found: bool, state: PartialState) -> bool:
    """Whether all processes found the same file: they must do the same."""
    count = torch.tensor(int(found))
    add_up((count,), state)
    return int(count) == state.num_processes


def _cache_path(images: ImageSet, digest: str, extractor: Extractor) -> Path:
    """A name from everything the features depend on: pixels, weights, protocol, device and versions."""
    key = [digest, images.size, len(images), extractor.protocol, extractor.weights_sha256, extractor.device.type, versions()]
    return cache_folder("features") / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.f32"


def versions() -> dict[str, str]:
    """Of the libraries that a score depends on."""
    return {name: version(name) for name in ("torch", "timm", "torch-fidelity", "numpy")}
