"""The metrics by name: of which extractor, from which of its outputs, and what each needs."""

from collections.abc import Sequence
from dataclasses import dataclass

from .kernel_distance import SUBSET_SIZE
from .precision_recall import NEIGHBOURS
from .protocols import CLIP, DINOV2, INCEPTION, LITE0
from .statistics import EXTRAPOLATION_START

# The fewest samples, and the fewest reference images, that a kind is defined for.
FEWEST = {
    "precision-recall": (NEIGHBOURS + 1,) * 2,
    "kernel": (SUBSET_SIZE,) * 2,
    "frechet-infinity": (2 * EXTRAPOLATION_START, 2),
}


@dataclass(frozen=True)
class Metric:
    """`kind`: frechet, inception-score, precision-recall, kernel, clip-discrepancy or frechet-infinity."""

    protocol: str
    kind: str
    output: str = "features"

    @property
    def needs_reference(self) -> bool:
        return self.kind != "inception-score"

    @property
    def needs_statistics(self) -> bool:
        """Mean and covariance, of samples and reference (an extrapolation makes its own of the samples)."""
        return self.kind in ("frechet", "frechet-infinity")

    @property
    def needs_features(self) -> bool:
        """All features, of samples and reference."""
        return self.kind in ("precision-recall", "kernel", "clip-discrepancy")


METRICS = {
    "fid": Metric(INCEPTION, "frechet"),
    "sfid": Metric(INCEPTION, "frechet", "spatial"),
    "is": Metric(INCEPTION, "inception-score", "logits"),
    "pr": Metric(INCEPTION, "precision-recall"),
    "kid": Metric(INCEPTION, "kernel"),
    "fid-infinity": Metric(INCEPTION, "frechet-infinity"),
    "fd-dinov2": Metric(DINOV2, "frechet"),
    "cmmd": Metric(CLIP, "clip-discrepancy"),
    "fd-lite0": Metric(LITE0, "frechet"),
    "pr-lite0": Metric(LITE0, "precision-recall"),
    "kid-lite0": Metric(LITE0, "kernel"),
    "fd-lite0-infinity": Metric(LITE0, "frechet-infinity"),
}


def check_metrics(metrics: Sequence[str]) -> list[str]:
    """The metrics, each once; ValueError names an unknown one."""
    for metric in metrics:
        if metric not in METRICS:
            raise ValueError(f"unknown metric {metric!r}; there is {', '.join(METRICS)}")
    return list(dict.fromkeys(metrics))


def check_numbers(metrics: Sequence[str], *, samples: int | None = None, reference: int | None = None) -> None:
    """ValueError if there are too few images for one of the metrics: said before any network sees them."""
    for metric in metrics:
        for name, num, fewest in zip(
            ("samples", "reference"), (samples, reference), FEWEST.get(METRICS[metric].kind, (2, 2)), strict=True
        ):
            if num is not None and num < fewest:
                raise ValueError(f"{metric} needs at least {fewest} images in the {name}, got {num}")
