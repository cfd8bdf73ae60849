"""What samples are compared with: statistics and features of a reference, from its npz or from its images."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from ..data.archive import read_array, read_images
from ..data.images import NAMED
from ..files import sha256_of_file
from .collect import Collected, collect, versions
from .features import Extractor
from .images import ImageSet, Pixels, look_at, open_image_set
from .metrics import METRICS, check_numbers
from .protocols import CLIP, DINOV2, INCEPTION, LITE0
from .statistics import FeatureStatistics

# Where a reference npz keeps mean and covariance of an output: mu, sigma, mu_s, sigma_s are ADM's names.
STATISTICS_KEYS = {
    (INCEPTION, "features"): ("mu", "sigma"),
    (INCEPTION, "spatial"): ("mu_s", "sigma_s"),
    (LITE0, "features"): ("fd_lite0_mu", "fd_lite0_sigma"),
    (DINOV2, "features"): ("dinov2_mu", "dinov2_sigma"),
}
FEATURE_KEYS = {INCEPTION: "inception_features", LITE0: "fd_lite0_features", CLIP: "clip_features"}


class Reference:
    """The reference of one scoring, looked up metric by metric; every process asks for the same in the same order."""

    def __init__(
        self, ref: str | Path | np.ndarray, *, image_size: int | None, allow_lossy: bool, batch: int, state: PartialState
    ):
        self._ref, self._image_size, self._allow_lossy, self._batch, self._state = ref, image_size, allow_lossy, batch, state
        self._path = Path(ref) if not isinstance(ref, np.ndarray) and Path(ref).is_file() else None
        check_reference(ref)
        self._images: ImageSet | None = None
        self._pixels: Pixels | None = None
        self._used: dict[str, str] = {}

    @property
    def pixels(self) -> Pixels | None:
        """Of the reference's images, where they were needed."""
        return self._pixels

    def prepare(self, metrics: Sequence[str], extractor: Extractor, size: int) -> "PreparedReference":
        """What the metrics of one extractor need; `size` is that of the samples' images."""
        wanted = [METRICS[m] for m in metrics]
        outputs = list(dict.fromkeys(m.output for m in wanted if m.needs_statistics))
        statistics = {o: found for o in outputs if (found := self._stored_statistics(o, extractor)) is not None}
        features = self._stored_features(extractor) if any(m.needs_features for m in wanted) else None
        if features is not None:
            check_numbers(metrics, reference=len(features))
        missing = [o for o in outputs if o not in statistics]
        need_features = features is None and any(m.needs_features for m in wanted)
        if missing or need_features:
            collected = self._collect(missing, need_features, metrics, extractor, size)
            statistics |= {o: s.result() for o, s in collected.statistics.items()}
            features = collected.features if need_features else features
        for output in outputs:
            keys = " and ".join(STATISTICS_KEYS[extractor.protocol, output])
            self._used[f"{extractor.protocol} {output}"] = "images" if output in missing else f"{keys} of the file"
        if features is not None:
            self._used[f"{extractor.protocol} single features"] = (
                f"{len(features)} {'images' if need_features else 'of the file'}"
            )
        return PreparedReference(statistics, features)

    def describe(self) -> dict[str, Any]:
        """Name, and what identifies it: the file's hash, or the digest of its images."""
        described: dict[str, Any] = {"name": "array" if isinstance(self._ref, np.ndarray) else str(self._ref)}
        if self._images is not None:
            described |= {"images": len(self._images), "kind": self._images.kind, "digest_ordered": self._pixels.digest_ordered}
        if self._path is not None:
            described["sha256"] = sha256_of_file(self._path)
            described["made_from"] = _provenance(self._path)
        return described | {"used": self._used}

    def _stored_statistics(self, output: str, extractor: Extractor) -> FeatureStatistics | None:
        if self._path is None:
            return None
        mean, covariance = (read_array(self._path, key) for key in STATISTICS_KEYS[extractor.protocol, output])
        if mean is None or covariance is None:
            return None
        self._check_weights(extractor)
        return _checked(self._path, mean, covariance, extractor, output)

    def _stored_features(self, extractor: Extractor) -> Tensor | None:
        features = None if self._path is None else read_array(self._path, FEATURE_KEYS[extractor.protocol])
        if features is None:
            return None
        self._check_weights(extractor)
        if features.ndim != 2 or features.shape[1] != extractor.outputs["features"] or not np.isfinite(features).all():
            raise ValueError(
                f"{self._path}: {FEATURE_KEYS[extractor.protocol]} must be finite (N, {extractor.outputs['features']}), "
                f"got {features.shape}"
            )
        return torch.from_numpy(features.astype(np.float32))

    def _check_weights(self, extractor: Extractor) -> None:
        found = _provenance(self._path).get("weights_sha256", {})
        if found.get(extractor.protocol, extractor.weights_sha256) != extractor.weights_sha256:
            raise ValueError(
                f"{self._path} was made with other weights of {extractor.protocol}: make it again with eval_fid.py ref"
            )

    def _collect(self, statistics, keep_features, metrics, extractor: Extractor, size: int) -> Collected:
        if self._path is not None and not self._holds_images(statistics):
            keys = [key for o in statistics for key in STATISTICS_KEYS[extractor.protocol, o]]
            keys += [FEATURE_KEYS[extractor.protocol]] if keep_features else []
            raise ValueError(
                f"{self._path} lacks {', '.join(keys)}, which {', '.join(metrics)} would need: make a reference with: "
                f"eval_fid.py ref DATA OUT --metrics {','.join(metrics)}"
            )
        if self._images is None:
            images = open_image_set(self._ref, image_size=self._image_size, allow_lossy=self._allow_lossy)
            if images.size != size:
                raise ValueError(
                    f"the samples are of {size} pixels and the reference {images.name} of {images.size}: both must be of one size"
                )
            check_numbers(metrics, reference=len(images))
            # Real data sets hold copies; their number is not ours to judge.
            self._pixels = look_at(images, self._state, allow_duplicates=True)
            self._images = images
        return collect(
            self._images, self._pixels.digest_ordered, extractor, self._state,
            batch=self._batch, statistics=statistics, keep_features=keep_features, few_features=True,
        )  # fmt: skip

    def _holds_images(self, statistics: Sequence[str]) -> bool:
        """Whether the npz holds images that may serve: beside stored statistics they are a part of the data only."""
        stored = any(read_array(self._path, key) is not None for keys in STATISTICS_KEYS.values() for key in keys)
        if stored and statistics:
            return False
        try:
            read_images(self._path)
        except ValueError:
            if stored:
                return False
            raise
        return True


def check_reference(ref: str | Path | np.ndarray) -> None:
    """ValueError if there is nothing of that name."""
    if not isinstance(ref, np.ndarray) and str(ref).partition(":")[0] not in NAMED and not Path(ref).exists():
        raise ValueError(f"the reference {ref} does not exist: give an npz, a folder or a named data set")


@dataclass(frozen=True)
class PreparedReference:
    """Statistics by output, and features (N, D) where they were needed."""

    statistics: dict[str, FeatureStatistics]
    features: Tensor | None


def _provenance(path: Path) -> dict[str, Any]:
    """What a reference file says of itself; empty for other tools' files."""
    stored = read_array(path, "provenance")
    try:
        found = {} if stored is None else json.loads(str(stored))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _checked(path: Path, mean, covariance, extractor: Extractor, output: str) -> FeatureStatistics:
    mean, covariance = (torch.from_numpy(np.asarray(a, dtype=np.float64)) for a in (mean, covariance))
    mean, dims = mean.reshape(-1), extractor.outputs[output]
    if mean.shape != (dims,) or covariance.shape != (dims, dims):
        raise ValueError(
            f"{path}: the statistics have {len(mean)} and {tuple(covariance.shape)} entries, {extractor.protocol} has {dims} {output}"
        )
    if not bool(torch.isfinite(mean).all() and torch.isfinite(covariance).all()):
        raise ValueError(f"{path}: the statistics hold NaN or infinity")
    scale = float(covariance.abs().max())
    if float((covariance - covariance.T).abs().max()) > 1e-6 * scale:
        raise ValueError(f"{path}: the covariance is not symmetric")
    found = FeatureStatistics(mean, covariance, None)
    smallest = float(found.spectrum[0][0])  # decomposed once: the distance needs it as well
    if smallest < -1e-4 * scale:
        raise ValueError(f"{path}: the covariance has an eigenvalue of {smallest:.3g}, and can have none below 0")
    return found


def write_reference(
    data: str, path: Path, *, metrics: Sequence[str], extractors: dict[str, Extractor], state: PartialState, batch: int,
    num: int | None = None, image_size: int | None = None, allow_lossy: bool = False,
) -> None:  # fmt: skip
    """Write an npz with what the metrics need of `data`, under ADM's names where it has them, and where it came from."""
    if path.exists():
        raise ValueError(f"{path} exists already: choose another name, or remove it")
    images = open_image_set(data, num=num, image_size=image_size, allow_lossy=allow_lossy)
    check_numbers(metrics, reference=len(images))
    pixels = look_at(images, state, allow_duplicates=True)
    arrays: dict[str, np.ndarray] = {"num": np.array(len(images))}
    for protocol, extractor in extractors.items():
        wanted = [METRICS[m] for m in metrics if METRICS[m].protocol == protocol]
        outputs = list(dict.fromkeys(m.output for m in wanted if m.needs_statistics))
        keep = any(m.needs_features for m in wanted)
        found = collect(
            images, pixels.digest_ordered, extractor, state, batch=batch, statistics=outputs, keep_features=keep, few_features=True,
        )  # fmt: skip
        for output, stream in found.statistics.items():
            statistics = stream.result()
            mean_key, covariance_key = STATISTICS_KEYS[protocol, output]
            arrays[mean_key], arrays[covariance_key] = statistics.mean.numpy(), statistics.covariance.numpy()
        if keep:
            arrays[FEATURE_KEYS[protocol]] = found.features.numpy()
    if not state.is_main_process:
        return
    provenance = {
        "data": images.name, "kind": images.kind, "num": len(images), "size": images.size, "versions": versions(),
        "digest_ordered": pixels.digest_ordered, "weights_sha256": {p: e.weights_sha256 for p, e in extractors.items()},
    }  # fmt: skip
    arrays["provenance"] = np.array(json.dumps(provenance))
    temporary = path.with_name(f".{path.name}.tmp.npz")
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(temporary, **arrays)
    temporary.replace(path)
