"""Does this machine compute the features that were recorded? Golden values, batch invariance and speed of an extractor."""

import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from .features import Extractor
from .protocols import LITE0

SIZES = (32, 256)  # of the golden images: one is enlarged by every extractor, the other reduced by Lite0
TOLERANCE = 1e-3  # of the largest feature; a CPU's float32 is within 1e-5, TF32 is not within 1e-3
_PER_SIZE = 4
_TIMED = 64


@dataclass(frozen=True)
class Selftest:
    """`golden`: largest difference from the recorded features over the largest of them, None if none are recorded.
    `batch`: the same between images one by one and together. `images_per_second` of 32 x 32 pixels."""

    golden: float | None
    batch: float
    images_per_second: float

    @property
    def passed(self) -> bool:
        """Whether both are within the tolerance."""
        return max(self.golden or 0.0, self.batch) <= TOLERANCE


def selftest(extractor: Extractor) -> Selftest:
    """Compare and time an extractor on made images."""
    together = golden_features(extractor)
    one_by_one = torch.cat([extractor(image)["features"] for s in SIZES for image in golden_images(s).split(1)])
    recorded = _recorded(extractor)
    timed = golden_images(SIZES[0]).repeat(_TIMED // _PER_SIZE, 1, 1, 1)
    extractor(timed)
    started = time.perf_counter()
    extractor(timed)
    seconds = time.perf_counter() - started
    golden = None if recorded is None else _difference(together, recorded)
    return Selftest(golden, _difference(one_by_one, together), len(timed) / seconds)


def golden_images(size: int) -> Tensor:
    """Images uint8 (4, size, size, 3): waves of several lengths and directions, and discs; in integers, equal everywhere."""
    y, x = np.mgrid[:size, :size]
    images = np.empty((_PER_SIZE, size, size, 3), np.uint8)
    for i in range(_PER_SIZE):
        for c in range(3):
            wave = np.abs((256 * ((i + 1) * x + (c + 1) * y) // size + 25 * i * c) % 256 - 128)
            disc = (10 * x - (3 + c) * size) ** 2 + (10 * y - 6 * size) ** 2 < 2 * (i + 1) * size**2
            images[i, ..., c] = 40 + wave + 60 * disc
    return torch.from_numpy(images)


def golden_features(extractor: Extractor) -> Tensor:
    """Features (8, D) of the golden images."""
    return torch.cat([extractor(golden_images(size))["features"] for size in SIZES])


def _recorded(extractor: Extractor) -> Tensor | None:
    if extractor.protocol != LITE0:
        return None
    return load_file(Path(str(files("dit_vca") / "assets" / "golden" / "fd-lite0.safetensors")))["features"]


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())
