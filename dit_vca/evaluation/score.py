"""Score a set of images against a reference: one pass an extractor, and a report of what made the numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from ..processes import start_processes
from . import DEFAULT_BATCH, SCHEMA
from .collect import Collected, collect, versions
from .features import Extractor, open_extractor, pinned_numerics
from .images import ImageSet, Pixels, look_at, open_image_set
from .kernel_distance import clip_discrepancy, kernel_distance
from .metrics import METRICS, Metric, check_metrics, check_numbers
from .precision_recall import DISTANCES, NEIGHBOURS, precision_recall
from .reference import PreparedReference, Reference, write_reference
from .statistics import frechet_at_infinity, frechet_distance

SMALL_SAMPLE, PUBLISHED_SAMPLE = 2048, 50_000
ORDER_MATTERS = 0.05  # relative difference of the two Inception Scores that only sorted images have


def score(
    images: str | Path | np.ndarray, ref: str | Path | np.ndarray | None, *, metrics: Sequence[str] = ("fid", "is"),
    num: int | None = None, image_size: int | None = None, weights: Mapping[str, str | Path] | None = None, batch: int = DEFAULT_BATCH,
    device: str = "auto", allow_lossy: bool = False, allow_duplicates: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The report: {"metrics": {"fid@N": ...}, "samples": ..., "reference": ..., "extractors": ..., ...}.

    `ref` is an npz with statistics (ADM's, pytorch-fid's, or one of `make_reference`), or images as in `open_image_set`;
    only IS needs none. `weights` maps protocols to weight files that are not in torch's hub cache. Under `accelerate launch` every process takes its share, and all return the same report.
    """
    metrics = check_metrics(metrics)
    _check_batch(batch)
    needs_reference = [m for m in metrics if METRICS[m].needs_reference]
    if needs_reference and ref is None:
        raise ValueError(f"{needs_reference[0]} needs a reference: give it with --ref")
    _refuse_self(images, ref)
    state = start_processes(device)
    extractors = _open_extractors(metrics, weights, state.device)  # a missing file is told before any work
    samples = open_image_set(images, num=num, image_size=image_size, allow_lossy=allow_lossy)
    check_numbers(metrics, samples=len(samples))
    reference, prepared = None, {}
    if ref is not None:
        reference = Reference(ref, image_size=image_size, allow_lossy=allow_lossy, batch=batch, state=state)
    pixels = look_at(samples, state, allow_duplicates=allow_duplicates)
    if reference is not None:
        for protocol, extractor in extractors.items():
            compared = [m for m in needs_reference if METRICS[m].protocol == protocol]
            prepared[protocol] = reference.prepare(compared, extractor, samples.size)
    if reference is not None and reference.pixels is not None and reference.pixels.digest_sorted == pixels.digest_sorted:
        raise ValueError(f"{samples.name} and the reference hold the same images: give another reference")
    values: dict[str, float] = {}
    details: dict[str, Any] = {}
    for protocol, extractor in extractors.items():
        of_protocol = [m for m in metrics if METRICS[m].protocol == protocol]
        kinds = [METRICS[m] for m in of_protocol]
        found = collect(
            samples, pixels.digest_ordered, extractor, state, batch=batch,
            statistics=list(dict.fromkeys(m.output for m in kinds if m.kind == "frechet")),
            inception_score=any(m.kind == "inception-score" for m in kinds),
            keep_features=any(m.needs_features or m.kind == "frechet-infinity" for m in kinds),
        )  # fmt: skip
        if state.is_main_process:
            for name in of_protocol:
                with pinned_numerics(state.device):
                    numbers, detail = _evaluate(name, METRICS[name], found, prepared.get(protocol), len(samples), state.device)
                values |= numbers
                details |= detail
    if state.num_processes > 1:
        values, details = broadcast_object_list([values, details])
    return {
        "schema": SCHEMA,
        "metrics": values,
        "details": details,
        "samples": _describe_samples(samples, pixels),
        "reference": None if reference is None else reference.describe(),
        "extractors": {p: {"weights_sha256": e.weights_sha256} for p, e in extractors.items()},
        "numerics": {
            "features": "float32", "statistics": "float64", "tf32": False, "autocast": False, "deterministic": state.device.type in ("cpu", "cuda"),
            "batch": batch, "device": state.device.type, "processes": state.num_processes,
        },
        "warnings": _warnings(values, samples),
        "versions": versions(),
    }  # fmt: skip


def make_reference(
    data: str, path: Path, *, metrics: Sequence[str], num: int | None = None, image_size: int | None = None,
    weights: Mapping[str, str | Path] | None = None, batch: int = DEFAULT_BATCH, device: str = "auto", allow_lossy: bool = False,
) -> None:  # fmt: skip
    """Write an npz with what `metrics` need of `data`; see `write_reference`."""
    metrics = [m for m in check_metrics(metrics) if METRICS[m].needs_reference]
    if not metrics:
        raise ValueError("IS needs no reference: give --metrics one that does (fid, sfid, pr, kid, fd-lite0)")
    _check_batch(batch)
    state = start_processes(device)
    write_reference(
        data, Path(path), metrics=metrics, extractors=_open_extractors(metrics, weights, state.device), state=state,
        batch=batch, num=num, image_size=image_size, allow_lossy=allow_lossy,
    )  # fmt: skip


def features_of(images: ImageSet, extractor: Extractor, batch: int = DEFAULT_BATCH) -> Tensor:
    """All features (N, D) float32."""
    state = start_processes(extractor.device.type)
    digest = look_at(images, state, allow_duplicates=True).digest_ordered
    return collect(images, digest, extractor, state, batch=batch, keep_features=True).features


def _evaluate(
    name: str, metric: Metric, found: Collected, reference: PreparedReference | None, num: int, device: torch.device
) -> tuple[dict[str, float], dict[str, Any]]:
    """Numbers by key, every key with its N; and what else is to know of them."""
    if metric.kind == "frechet":
        distance = frechet_distance(found.statistics[metric.output].result(), reference.statistics[metric.output])
        return {f"{name}@{num}": distance.value}, {f"{name}@{num}": distance._asdict()}
    if metric.kind == "inception-score":
        in_order, permuted = found.inception_score.result(), found.inception_score_permuted.result()
        return {f"is@{num}": in_order, f"is-permuted@{num}": permuted}, {}
    if metric.kind == "frechet-infinity":
        fitted = frechet_at_infinity(found.features, reference.statistics[metric.output])
        return {f"{name}@{num}": fitted.value}, {f"{name}@{num}": fitted._asdict()}
    if metric.kind == "kernel":
        kid = kernel_distance(found.features, reference.features)
        key = f"{name}@{num}/{len(reference.features)}"
        return {key: kid.mean, key.replace("@", "-all-pairs@"): kid.all_pairs}, {key: {"std": kid.std}}
    if metric.kind == "clip-discrepancy":
        return {f"{name}@{num}/{len(reference.features)}": clip_discrepancy(found.features, reference.features)}, {}
    numbers = {}
    suffix = name.removeprefix("pr")
    for mode, distance in DISTANCES.items():
        both = precision_recall(reference.features, found.features, distance=distance, device=device)
        key = f"{suffix}-{mode},k{NEIGHBOURS}@{num}/{len(reference.features)}"
        numbers |= {f"precision{key}": both.precision, f"recall{key}": both.recall}
    return numbers, {}


def _check_batch(batch: int) -> None:
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")


def _open_extractors(
    metrics: Sequence[str], weights: Mapping[str, str | Path] | None, device: torch.device
) -> dict[str, Extractor]:
    protocols = dict.fromkeys(METRICS[m].protocol for m in metrics)
    return {p: open_extractor(p, device, weights=weights) for p in protocols}


def _refuse_self(images, ref) -> None:
    if isinstance(images, np.ndarray) or isinstance(ref, np.ndarray) or ref is None:
        return
    if str(images) == str(ref) or (Path(images).exists() and Path(ref).exists() and Path(images).samefile(ref)):
        raise ValueError(f"{images} is scored against itself: give another reference")


def _describe_samples(samples: ImageSet, pixels: Pixels) -> dict[str, Any]:
    described = {
        "name": samples.name, "kind": samples.kind, "num": len(samples), "size": samples.size, "pixels": asdict(pixels),
        "made_from": samples.made_from,
    }  # fmt: skip
    if samples.labels is not None:
        data = ((samples.made_from or {}).get("config") or {}).get("data") or {}
        counts = np.bincount(samples.labels, minlength=len(data.get("class_names") or []))
        low, high = int(counts.min()), int(counts.max())
        described["labels"] = {"classes": len(counts), "min": low, "max": high, "balanced": high - low <= 1}
    return described


def _warnings(values: dict[str, float], samples: ImageSet) -> list[str]:
    found, num = [], len(samples)
    if num < SMALL_SAMPLE:
        found.append(f"{num} images: Fréchet distances are biased upwards; compare only with the same number of images")
    elif num != PUBLISHED_SAMPLE:
        found.append(f"{num} images: published figures are of {PUBLISHED_SAMPLE}; compare only with the same number of images")
    for key, value in values.items():
        name = key.partition("@")[0]
        if value < 0 and name in METRICS and METRICS[name].kind == "frechet":
            found.append(f"{key} is {value:.2e}: a distance below 0 is rounding")
    in_order, permuted = values.get(f"is@{num}"), values.get(f"is-permuted@{num}")
    if in_order is not None and abs(in_order - permuted) > ORDER_MATTERS * permuted:
        found.append(
            f"the Inception Score is {in_order:.2f} in file order and {permuted:.2f} in a random one: the images are sorted by "
            "class, and the first is not comparable"
        )
    return found
