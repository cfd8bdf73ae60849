"""Data x_0 ~ N(MEAN, STD^2), independently for each element: everything a sampler needs has a closed form."""

import math

import torch
from torch import Tensor

from samplers import Coefficients, Prediction
from samplers.types import expand

MEAN, STD = 0.7, 0.5


def variance_at(c: Coefficients) -> Tensor:
    """The variance of x_t."""
    return c.alpha**2 * STD**2 + c.sigma**2


class ExactDenoiser:
    """The exact prediction of a target on a path, with its calls counted."""

    def __init__(self, path, target: str):
        self.path, self.target, self.calls = path, target, 0

    def __call__(self, x: Tensor, t: Tensor) -> Prediction:
        self.calls += 1
        c = self.path.coefficients(t)
        centred = x - expand(c.alpha * MEAN, x)
        eps = expand(c.sigma / variance_at(c), x) * centred
        if self.target == "eps":
            return Prediction(eps, "eps", x, c, self.variance_fraction(x, t))
        if self.target == "score":
            return Prediction(-centred / expand(variance_at(c), x), "score", x, c)
        x_0 = MEAN + expand(c.alpha * STD**2 / variance_at(c), x) * centred
        if self.target == "x_0":
            return Prediction(x_0, "x_0", x, c)
        return Prediction(expand(c.d_alpha, x) * x_0 + expand(c.d_sigma, x) * eps, "v", x, c)

    def variance_fraction(self, x: Tensor, t: Tensor) -> Tensor | None:
        return None


class Mixture:
    """Data x_0 ~ sum of w N(m, s^2) in each element alone; its exact prediction of a target on a path."""

    WEIGHTS, MEANS, STDS = (0.3, 0.7), (-1.5, 1.0), (0.3, 0.5)

    def __init__(self, path, target: str):
        self.path, self.target = path, target

    def moments(self) -> tuple[float, float]:
        """Mean and variance of the data."""
        mean = sum(w * m for w, m in zip(self.WEIGHTS, self.MEANS, strict=True))
        second = sum(w * (m**2 + s**2) for w, m, s in zip(self.WEIGHTS, self.MEANS, self.STDS, strict=True))
        return mean, second - mean**2

    def __call__(self, x: Tensor, t: Tensor) -> Prediction:
        c = self.path.coefficients(t)
        alpha, sigma, d_alpha, d_sigma = (expand(part, x) for part in c)
        logs, ofs = [], []
        for w, m, s in zip(self.WEIGHTS, self.MEANS, self.STDS, strict=True):
            variance = alpha**2 * s**2 + sigma**2
            logs.append(math.log(w) - (x - alpha * m) ** 2 / (2 * variance) - variance.log() / 2)
            ofs.append(m + alpha * s**2 / variance * (x - alpha * m))
        x_0 = (torch.stack(logs).softmax(0) * torch.stack(ofs)).sum(0)
        if self.target == "x_0":
            return Prediction(x_0, "x_0", x, c)
        eps = (x - alpha * x_0) / torch.where(sigma == 0, 1.0, sigma)  # x_0 is x there
        value = {"eps": eps, "score": -eps / sigma, "v": d_alpha * x_0 + d_sigma * eps}[self.target]
        return Prediction(value, self.target, x, c)


def impulses(num_draws: int) -> tuple[Tensor, "OneHotNoise"]:
    """A batch that reads the law of an affine sampler off its output, without sampling error.

    Row 0 has no noise, row 1 a starting noise of 1, row 2 + i a noise of 1 at draw i: see `mean_and_variance`.
    """
    x_T = torch.zeros(num_draws + 2, 1, 1, 1, dtype=torch.float64)
    x_T[1] = 1
    return x_T, OneHotNoise()


class OneHotNoise:
    """`randn_like` of the batch that `impulses` makes."""

    def __init__(self):
        self.draws = 0

    def __call__(self, x: Tensor) -> Tensor:
        noise = torch.zeros_like(x)
        noise[2 + self.draws] = 1
        self.draws += 1
        return noise


def mean_and_variance(out: Tensor) -> tuple[float, float]:
    """Of one output element of an affine sampler, from its response to `impulses`."""
    return float(out[0]), float(((out[1:] - out[0]) ** 2).sum())
