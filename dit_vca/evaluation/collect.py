"""One pass of an extractor over images: sums for Fréchet distances and the Inception Score, and features kept on disk."""

import contextlib
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

from ..files import cache_folder, fsync_file, trim_folder
from ..processes import add_up, shares, together
from ..progress import progress
from .features import Extractor
from .images import ImageSet
from .inception_score import StreamingInceptionScore
from .statistics import StreamingStatistics

FEATURE_IMAGES = 10_000  # of a reference, for precision, recall and KID; the number in ADM's files
CACHED_IMAGES = 20_000  # features of at most so many images stay in the cache, by content
CACHE_BYTES = 4 * 2**30  # of the cache; what was used longest ago goes first


@dataclass
class Collected:
    """What one pass gives: statistics by output, both Inception Scores, the features of all images."""

    statistics: dict[str, StreamingStatistics] = field(default_factory=dict)
    inception_score: StreamingInceptionScore | None = None
    inception_score_permuted: StreamingInceptionScore | None = None
    features: Tensor | None = None


def collect(
    images: ImageSet, digest: str, extractor: Extractor, state: PartialState, *, batch: int, statistics: Collection[str] = (),
    inception_score: bool = False, keep_features: bool = False, few_features: bool = False,
) -> Collected:  # fmt: skip
    """The pass over `images`, whose ordered digest of pixels is `digest`; each process takes its share of the batches.

    `statistics` names outputs of the extractor. Features alone come from the cache where the same pixels were seen
    before. Kept features are a memory map (N, D) float32; with `few_features` they are of FEATURE_IMAGES images, chosen at
    random (a function of N). The file is removed at once where it is not to be cached. RuntimeError if an image was lost.
    """
    found = Collected({name: StreamingStatistics(extractor.outputs[name]) for name in statistics})
    if inception_score:
        places = torch.from_numpy(keyed_generator(0, "score_order").permutation(len(images)).argsort())
        classes = extractor.outputs["logits"]
        found.inception_score = StreamingInceptionScore(len(images), classes=classes)
        found.inception_score_permuted = StreamingInceptionScore(len(images), classes=classes, places=places)
    scores = [s for s in (found.inception_score, found.inception_score_permuted) if s is not None]
    needs_features = keep_features or "features" in found.statistics
    cached = needs_features and len(images) <= CACHED_IMAGES
    kept = few_rows(len(images)) if few_features and not cached else torch.arange(len(images))
    file = FeatureFile(_cache_path(images, digest, extractor, batch), len(kept), extractor.outputs["features"], state)
    only_features = needs_features and not scores and set(statistics) <= {"features"}
    from_cache = _same_everywhere(cached and only_features and file.path.is_file(), state)
    writes = (keep_features or cached) and not from_cache
    seen = torch.zeros((), dtype=torch.int64)
    with file if writes else contextlib.nullcontext():
        with together(state):
            for start, stop, outputs in _outputs(images, extractor, state, batch, file if from_cache else None):
                seen += stop - start
                for name, stream in found.statistics.items():
                    stream.add(outputs[name])
                for score in scores:
                    score.add(torch.arange(start, stop), outputs["logits"])
                if writes:
                    first, last = (int(i) for i in torch.searchsorted(kept, torch.tensor([start, stop])))
                    file.write(first, outputs["features"][kept[first:last] - start])
        for sums in ((seen,), *(stream.sums for stream in (*found.statistics.values(), *scores))):
            add_up(sums, state)
        if int(seen) != len(images):
            raise RuntimeError(f"{int(seen)} of {len(images)} images passed the extractor")
    if keep_features:
        found.features = file.read()
        if few_features and cached:
            found.features = found.features[few_rows(len(images))]
    if writes and not cached:
        file.remove()  # the map stays valid until it is dropped
    if cached and state.is_main_process:
        with contextlib.suppress(FileNotFoundError):  # another process trims too
            os.utime(file.path)
            trim_folder(file.path.parent, CACHE_BYTES)
    return found


def few_rows(num: int) -> Tensor:
    """At most FEATURE_IMAGES of `num` indices, rising, int64: a random choice that is a function of the number alone."""
    if num <= FEATURE_IMAGES:
        return torch.arange(num)
    chosen = keyed_generator(0, "score_order").permutation(num)[:FEATURE_IMAGES]
    return torch.from_numpy(np.sort(chosen))


def _outputs(images, extractor, state, batch, file) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """(start, stop, outputs) of this process's batches, computed, or read from a file of features."""
    features = None if file is None else file.read()
    with progress(len(images), "image", extractor.protocol, disable=not state.is_main_process or file is not None) as bar:
        for start, stop in shares(len(images), batch, state):
            if features is not None:
                yield start, stop, {"features": features[start:stop]}
                continue
            yield start, stop, extractor(torch.from_numpy(images.read(start, stop)), first=start)
            bar.update(min((stop - start) * state.num_processes, bar.total - bar.n))


class FeatureFile:
    """Features (num, dim) float32 on disk, whose rows any process may write inside a `with` block; whole at `path`, or not there."""

    def __init__(self, path: Path, num: int, dim: int, state: PartialState):
        self.path, self._num, self._dim, self._state = path, num, dim, state
        self._partial = path

    def __enter__(self) -> "FeatureFile":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        name = [f"{self.path.name}.{os.getpid()}.tmp"]
        if self._state.num_processes > 1:
            broadcast_object_list(name)
        self._partial = self.path.with_name(name[0])
        if self._state.is_main_process:
            with open(self._partial, "wb") as file:
                file.truncate(self._num * self._dim * 4)
        self._state.wait_for_everyone()
        return self

    def write(self, start: int, features: Tensor) -> None:
        """Rows from `start` on."""
        with open(self._partial, "r+b") as file:
            file.seek(start * self._dim * 4)
            file.write(np.ascontiguousarray(features.numpy()).data)

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            if self._state.is_main_process:
                self._partial.unlink(missing_ok=True)
            return
        self._state.wait_for_everyone()
        if self._state.is_main_process:
            fsync_file(self._partial)
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


def _cache_path(images: ImageSet, digest: str, extractor: Extractor, batch: int) -> Path:
    """A name from everything the features depend on: pixels, weights, protocol, batch, device and versions."""
    key = [
        digest,
        images.size,
        len(images),
        extractor.protocol,
        extractor.weights_sha256,
        batch,
        _device_name(extractor),
        versions(),
    ]
    return cache_folder("features") / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.f32"


def _device_name(extractor: Extractor) -> str:
    device = extractor.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def versions() -> dict[str, str]:
    """Of the libraries that a score depends on, and of this one."""
    from .. import __version__

    return {"dit-vca": __version__} | {name: version(name) for name in ("torch", "timm", "torch-fidelity", "numpy")}
