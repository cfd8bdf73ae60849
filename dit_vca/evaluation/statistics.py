"""Mean and covariance of features, streamed in float64, and the Fréchet distance between two of them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FeatureStatistics:
    """Mean (D,) and unbiased covariance (D, D), float64, of `num` feature vectors (None where a reference does not say)."""

    mean: Tensor
    covariance: Tensor
    num: int | None


class StreamingStatistics:
    """Sums of features and of their outer products in float64; memory does not grow with the number of images."""

    def __init__(self, num_features: int):
        self.num = 0
        self._sum = torch.zeros(num_features, dtype=torch.float64)
        self._products = torch.zeros(num_features, num_features, dtype=torch.float64)

    def add(self, features: Tensor) -> None:
        """Features (B, D) of any float dtype."""
        x = features.double()
        self.num += len(x)
        self._sum += x.sum(0)
        self._products.addmm_(x.T, x)

    def result(self) -> FeatureStatistics:
        """ValueError for fewer than two images, whose covariance is not defined."""
        if self.num < 2:
            raise ValueError(f"a covariance needs at least 2 images, got {self.num}")
        mean = self._sum / self.num
        covariance = (self._products - self.num * torch.outer(mean, mean)) / (self.num - 1)
        return FeatureStatistics(mean, covariance, self.num)


def frechet_distance(a: FeatureStatistics, b: FeatureStatistics) -> float:
    """|mu_a - mu_b|^2 + tr A + tr B - 2 tr (A B)^(1/2), the squared Fréchet distance of two Gaussians (Heusel et al. 2017).

    The last trace is the nuclear norm of La' Lb with A = La La', which is exact for singular covariances too, where a
    matrix square root loses digits or becomes complex.
    """
    factor_a, factor_b = _factor(a.covariance), _factor(b.covariance)
    cross = torch.linalg.svdvals(factor_a.T @ factor_b).sum()
    mean_term = ((a.mean - b.mean) ** 2).sum()
    return float(mean_term + a.covariance.trace() + b.covariance.trace() - 2 * cross)


def _factor(covariance: Tensor) -> Tensor:
    """L (D, D) with L L' = covariance; negative eigenvalues, which are rounding, count as zero."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * torch.sqrt(values.clamp(min=0))
