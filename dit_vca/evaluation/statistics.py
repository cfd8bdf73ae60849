"""Mean and covariance of features, streamed in float64, and the Fréchet distance between two of them."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from samplers.noise import keyed_generator

# FID-infinity (Chong and Forsyth 2020): distances at so many numbers of images, the smallest of which is this.
EXTRAPOLATION_POINTS, EXTRAPOLATION_START = 15, 5000


@dataclass(frozen=True)
class FeatureStatistics:
    """Mean (D,) and unbiased covariance (D, D), float64, of `num` feature vectors (None where a reference does not say)."""

    mean: Tensor
    covariance: Tensor
    num: int | None

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of the covariance, rising, (D,), and its eigenvectors in columns (D, D)."""
        return tuple(torch.linalg.eigh(self.covariance))

    @cached_property
    def factor(self) -> Tensor:
        """L (D, D) with L L' = covariance; eigenvalues within rounding of zero count as zero, for a root would enlarge them."""
        values, vectors = self.spectrum
        rounding = values[-1] * len(values) * torch.finfo(values.dtype).eps
        return vectors * torch.sqrt(torch.where(values > rounding, values, 0.0))


class StreamingStatistics:
    """Sums of features and of their outer products in float64; memory does not grow with the number of images.

    The sums of several processes add up.
    """

    def __init__(self, num_features: int):
        self._num = torch.zeros((), dtype=torch.int64)
        self._sum = torch.zeros(num_features, dtype=torch.float64)
        self._products = torch.zeros(num_features, num_features, dtype=torch.float64)

    def add(self, features: Tensor) -> None:
        """Features (B, D) of any float dtype."""
        x = features.double()
        self._num += len(x)
        self._sum += x.sum(0)
        self._products.addmm_(x.T, x)

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """What is added up over processes, in place."""
        return self._num, self._sum, self._products

    def result(self) -> FeatureStatistics:
        """ValueError for fewer than two images, whose covariance is not defined."""
        num = int(self._num)
        if num < 2:
            raise ValueError(f"a covariance needs at least 2 images, got {num}")
        mean = self._sum / num
        covariance = (self._products - num * torch.outer(mean, mean)) / (num - 1)
        return FeatureStatistics(mean, covariance, num)


class FrechetDistance(NamedTuple):
    """|mu_a - mu_b|^2 + tr A + tr B - 2 tr (A B)^(1/2), term by term."""

    mean_term: float
    trace_a: float
    trace_b: float
    trace_cross: float

    @property
    def value(self) -> float:
        """The squared Fréchet distance; rounding may make it a little negative."""
        return self.mean_term + self.trace_a + self.trace_b - 2 * self.trace_cross


def frechet_distance(a: FeatureStatistics, b: FeatureStatistics) -> FrechetDistance:
    """The squared Fréchet distance of two Gaussians (Heusel et al. 2017).

    The trace of the square root is the nuclear norm of La' Lb with A = La La', which is exact for singular covariances too, where a
    matrix square root loses digits or becomes complex.
    """
    cross = torch.linalg.svdvals(a.factor.T @ b.factor).sum()
    mean_term = ((a.mean - b.mean) ** 2).sum()
    return FrechetDistance(float(mean_term), float(a.covariance.trace()), float(b.covariance.trace()), float(cross))


class Extrapolation(NamedTuple):
    """A distance at infinitely many images: the intercept of a line through (1/N, distance of N images)."""

    value: float
    nums: list[int]
    distances: list[float]


def frechet_at_infinity(
    features: Tensor, reference: FeatureStatistics, *, points: int = EXTRAPOLATION_POINTS, start: int = EXTRAPOLATION_START
) -> Extrapolation:
    """FID-infinity (Chong and Forsyth 2020, Section 4) from features (N, D), which may be a memory map.

    The distance has a bias of about c/N, so it is fitted by least squares at `points` numbers from `start` to N. The
    sets are nested: the first so many of one random order (a function of nothing but N), which makes one pass enough.
    ValueError if N is less than 2 * start.
    """
    num = len(features)
    if num < 2 * start:
        raise ValueError(f"an extrapolation needs at least {2 * start} images, got {num}")
    order = torch.from_numpy(keyed_generator(0, "score_order").permutation(num))
    nums = [round(n) for n in np.linspace(start, num, points)]
    stream, done, distances = StreamingStatistics(features.shape[1]), 0, []
    for end in nums:
        for rows in order[done:end].split(4096):
            stream.add(features[rows.sort().values])
        done = end
        distances.append(frechet_distance(stream.result(), reference).value)
    intercept = np.polynomial.Polynomial.fit(1 / np.array(nums), distances, 1).convert().coef[0]
    return Extrapolation(float(intercept), nums, distances)
