"""Score a set of images against a reference: open both, compute features once, and write what made the numbers."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..data.archive import batches, read_array, read_images, sidecar
from ..data.images import NAMED, open_images
from ..files import cache_folder, sha256_of_file
from ..progress import progress
from . import DEFAULT_BATCH
from .features import Extractor, open_extractor
from .inception_score import StreamingInceptionScore
from .statistics import FeatureStatistics, StreamingStatistics, frechet_distance

PROTOCOL_OF_METRIC = {"fid": "inception-v3-compat", "is": "inception-v3-compat", "fd-lite0": "fd-lite0"}
# Where a reference npz keeps the statistics of a metric; ADM's files have mu and sigma.
STATISTICS_KEYS = {"fid": ("mu", "sigma"), "fd-lite0": ("fd_lite0_mu", "fd_lite0_sigma")}
CACHED_IMAGES = 20_000  # features of at most so many images are kept on disk, by content
SMALL_SAMPLE = 2048


@dataclass(frozen=True)
class ImageSet:
    """Images uint8 (N, S, S, 3) and what is known of them."""

    name: str
    images: np.ndarray
    labels: np.ndarray | None
    made_from: dict[str, Any]

    def __len__(self) -> int:
        return len(self.images)


def open_image_set(ref: str | Path | np.ndarray, *, num: int | None = None, image_size: int | None = None) -> ImageSet:
    """The first `num` images of an npz, a folder, a named data set (NAME or NAME:test), or an array.

    ValueError if there are fewer, or if they cannot be what is to be scored (see `check_pixels`).
    """
    if isinstance(ref, np.ndarray):
        found = ImageSet("array", ref, None, {})
    elif str(ref).partition(":")[0] in NAMED:
        name, _, split = str(ref).partition(":")
        if split not in ("", "train", "test"):
            raise ValueError(f"{ref!r}: the splits of {name} are train and test")
        source = open_images(name, None, split=split or "train")
        found = ImageSet(source.name, source.arrays, source.labels, {})
    elif Path(ref).is_dir():
        source = open_images(str(ref), image_size)
        wanted = len(source) if num is None else min(num, len(source))
        images = np.stack([source.load(i) for i in range(wanted)])
        found = ImageSet(source.name, images, source.labels[:wanted] if source.class_names else None, {})
    else:
        path = Path(ref)
        found = ImageSet(str(ref), read_images(path), read_array(path, "arr_1"), sidecar(path).get("made_from", {}))
    if found.images.dtype != np.uint8 or found.images.ndim != 4 or found.images.shape[3] != 3:
        raise ValueError(f"{found.name}: images must be uint8 (N, S, S, 3), got {found.images.dtype} {found.images.shape}")
    if num is not None:
        if num < 2:
            raise ValueError(f"num must be at least 2, got {num}")
        if num > len(found):
            raise ValueError(f"{found.name} holds {len(found)} images, {num} were asked for")
        labels = None if found.labels is None else found.labels[:num]
        found = ImageSet(found.name, found.images[:num], labels, found.made_from)
    if len(found) < 2:
        raise ValueError(f"{found.name} holds {len(found)} images; at least 2 are needed")
    return found


def score(
    images: str | Path | np.ndarray, ref: str | Path | np.ndarray | None, *, metrics: Sequence[str] = ("fid", "is"),
    num: int | None = None, image_size: int | None = None, inception_weights: str | None = None, batch: int = DEFAULT_BATCH,
    device: str | torch.device = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """The report: {"metrics": {"fid@N": ...}, "samples": ..., "reference": ..., "extractors": ..., ...}.

    `ref` is an npz with statistics (ADM's, or one of `write_reference`), or images as in `open_image_set`; only IS
    needs none.
    """
    metrics = check_metrics(metrics)
    device = torch.device(device)
    needs_reference = [m for m in metrics if m in STATISTICS_KEYS]
    if needs_reference and ref is None:
        raise ValueError(f"{needs_reference[0]} needs a reference: give it with --ref")
    if not isinstance(images, np.ndarray) and not isinstance(ref, np.ndarray) and ref is not None and str(images) == str(ref):
        raise ValueError(f"{images} is scored against itself: give another reference")
    extractors = _open_extractors(metrics, inception_weights, device)  # before the images: a missing file is told at once
    samples = open_image_set(images, num=num, image_size=image_size)
    check_pixels(samples)
    references = {
        m: reference_statistics(ref, m, extractors[PROTOCOL_OF_METRIC[m]], samples, image_size, batch) for m in needs_reference
    }
    values: dict[str, float] = {}
    for protocol, extractor in extractors.items():
        wanted = [m for m in metrics if PROTOCOL_OF_METRIC[m] == protocol]
        inception_score = StreamingInceptionScore() if "is" in wanted else None
        statistics = statistics_of(samples, extractor, batch, inception_score)
        for metric in wanted:
            key = f"{metric}@{len(samples)}"
            values[key] = inception_score.result() if metric == "is" else frechet_distance(references[metric], statistics)
    return {
        "metrics": values,
        "samples": {"name": samples.name, "num": len(samples), "size": samples.images.shape[1], "made_from": samples.made_from},
        "reference": None if ref is None else _describe_reference(ref, references),
        "extractors": {p: {"weights_sha256": e.weights_sha256} for p, e in extractors.items()},
        "numerics": {"features": "float32", "statistics": "float64", "tf32": False, "batch": batch, "device": device.type},
        "warnings": _warnings(values, samples),
        "versions": _versions(),
    }


def check_metrics(metrics: Sequence[str]) -> list[str]:
    """The metrics, each once; ValueError names an unknown one."""
    for metric in metrics:
        if metric not in PROTOCOL_OF_METRIC:
            raise ValueError(f"unknown metric {metric!r}; there is {', '.join(PROTOCOL_OF_METRIC)}")
    return list(dict.fromkeys(metrics))


def check_pixels(samples: ImageSet) -> None:
    """ValueError for images that are constant, or that hold 0 and 1 only: wrongly scaled before they became uint8."""
    first = samples.images[: min(len(samples), 256)]
    low, high = int(first.min()), int(first.max())
    if high == low:
        raise ValueError(f"{samples.name}: every pixel of the first {len(first)} images is {low}")
    if high <= 1:
        raise ValueError(f"{samples.name}: no pixel is above 1; images are uint8 from 0 to 255, not floats from 0 to 1")


def reference_statistics(
    ref, metric: str, extractor: Extractor, samples: ImageSet, image_size: int | None, batch: int
) -> FeatureStatistics:
    """From the statistics of a reference npz where it has them, else from its images."""
    if not isinstance(ref, np.ndarray) and Path(ref).is_file():
        mean, covariance = (read_array(Path(ref), key) for key in STATISTICS_KEYS[metric])
        if mean is not None and covariance is not None:
            found = read_array(Path(ref), "num")
            return _checked_statistics(Path(ref), mean, covariance, extractor, None if found is None else int(found))
        if read_array(Path(ref), "provenance") is not None or read_array(Path(ref), "mu") is not None:
            keys = " and ".join(STATISTICS_KEYS[metric])
            raise ValueError(
                f"{ref} holds no statistics for {metric} ({keys}): make one with: eval_fid.py ref DATA {ref} --metrics {metric}"
            )
    reference = open_image_set(ref, image_size=image_size or samples.images.shape[1])
    if reference.images.shape[1:] != samples.images.shape[1:]:
        raise ValueError(
            f"the samples are of {samples.images.shape[1]} pixels and the reference {reference.name} of "
            f"{reference.images.shape[1]}: both must be of one size"
        )
    return statistics_of(reference, extractor, batch)


def _checked_statistics(path: Path, mean, covariance, extractor: Extractor, num: int | None) -> FeatureStatistics:
    mean, covariance = (torch.from_numpy(np.asarray(a, dtype=np.float64)) for a in (mean, covariance))
    mean, dims = mean.reshape(-1), extractor.num_features
    if mean.shape != (dims,) or covariance.shape != (dims, dims):
        raise ValueError(
            f"{path}: the statistics have {len(mean)} and {tuple(covariance.shape)} entries, {extractor.protocol} has {dims} features"
        )
    if not bool(torch.isfinite(mean).all() and torch.isfinite(covariance).all()):
        raise ValueError(f"{path}: the statistics hold NaN or infinity")
    if float((covariance - covariance.T).abs().max()) > 1e-6 * float(covariance.abs().max()):
        raise ValueError(f"{path}: the covariance is not symmetric")
    return FeatureStatistics(mean, covariance, num)


def statistics_of(
    image_set: ImageSet, extractor: Extractor, batch: int, inception_score: StreamingInceptionScore | None = None
) -> FeatureStatistics:
    """Mean and covariance of the features; logits go to `inception_score`, in file order."""
    stream = StreamingStatistics(extractor.num_features)
    for features, logits in _features(image_set, extractor, batch, need_logits=inception_score is not None):
        stream.add(features)
        if inception_score is not None:
            inception_score.add(logits)
    return stream.result()


def features_of(image_set: ImageSet, extractor: Extractor, batch: int = DEFAULT_BATCH) -> Tensor:
    """All features (N, D) float32."""
    return torch.cat([features for features, _ in _features(image_set, extractor, batch, need_logits=False)])


def _features(image_set: ImageSet, extractor: Extractor, batch: int, *, need_logits: bool):
    """(features, logits) batch by batch, from the cache where the same pixels were seen before."""
    cached = _cache_file(image_set, extractor) if len(image_set) <= CACHED_IMAGES and not need_logits else None
    if cached is not None and cached.is_file():
        features = load_file(cached)["features"]
        yield from ((part, None) for part in features.split(batch))
        return
    kept = []
    with progress(len(image_set), "image", extractor.protocol) as bar:
        for images in batches(image_set.images, batch):
            features, logits = extractor(torch.from_numpy(images))
            if cached is not None:
                kept.append(features)
            bar.update(len(images))
            yield features, logits
    if cached is not None:
        _write_cache(cached, torch.cat(kept))


def _cache_file(image_set: ImageSet, extractor: Extractor) -> Path:
    """A name from everything the features depend on: pixels, weights, protocol, device and versions."""
    digest = hashlib.sha256()
    key = [extractor.protocol, extractor.weights_sha256, extractor.device.type, list(image_set.images.shape), _versions()]
    digest.update(json.dumps(key).encode())
    for images in batches(image_set.images, 1024):
        digest.update(images.data)
    return cache_folder("features") / f"{digest.hexdigest()}.safetensors"


def _write_cache(path: Path, features: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{id(features)}.tmp")
    save_file({"features": features}, temporary)
    temporary.replace(path)


def write_reference(
    data: str, path: Path, *, metrics: Sequence[str], num: int | None = None, image_size: int | None = None,
    inception_weights: str | None = None, batch: int = DEFAULT_BATCH, device: str | torch.device = "cpu",
) -> None:  # fmt: skip
    """Write an npz with the statistics of `data` for each metric, and where they came from."""
    metrics = [m for m in check_metrics(metrics) if m in STATISTICS_KEYS]
    if not metrics:
        raise ValueError("a reference is made for fid or fd-lite0; IS needs none")
    if path.exists():
        raise ValueError(f"{path} exists already: choose another name, or remove it")
    extractors = _open_extractors(metrics, inception_weights, torch.device(device))
    images = open_image_set(data, num=num, image_size=image_size)
    check_pixels(images)
    arrays: dict[str, np.ndarray] = {"num": np.array(len(images))}
    for metric in metrics:
        statistics = statistics_of(images, extractors[PROTOCOL_OF_METRIC[metric]], batch)
        mean_key, covariance_key = STATISTICS_KEYS[metric]
        arrays[mean_key], arrays[covariance_key] = statistics.mean.numpy(), statistics.covariance.numpy()
    provenance = {"data": images.name, "num": len(images), "size": images.images.shape[1], "versions": _versions()}
    arrays["provenance"] = np.array(json.dumps(provenance))
    temporary = path.with_name(f".{path.name}.tmp.npz")
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(temporary, **arrays)
    temporary.replace(path)


def _open_extractors(metrics, inception_weights, device) -> dict[str, Extractor]:
    protocols = dict.fromkeys(PROTOCOL_OF_METRIC[m] for m in metrics)
    return {p: open_extractor(p, device, inception_weights=inception_weights) for p in protocols}


def _describe_reference(ref, references: dict[str, FeatureStatistics]) -> dict[str, Any]:
    described: dict[str, Any] = {"name": "array" if isinstance(ref, np.ndarray) else str(ref)}
    if references:
        described["num"] = next(iter(references.values())).num
    if not isinstance(ref, np.ndarray) and Path(ref).is_file():
        described["sha256"] = sha256_of_file(Path(ref))
        provenance = read_array(Path(ref), "provenance")
        if provenance is not None:
            described["made_from"] = json.loads(str(provenance))
    return described


def _warnings(values: dict[str, float], samples: ImageSet) -> list[str]:
    found = []
    if len(samples) < SMALL_SAMPLE:
        found.append(f"{len(samples)} images: Fréchet distances are biased upwards; compare only with the same number of images")
    found += [f"{key} is {value:.2e}: a distance below 0 is rounding" for key, value in values.items() if value < 0]
    return found


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "timm", "torch-fidelity", "numpy")}
