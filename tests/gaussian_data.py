"""Data x_0 ~ N(MEAN, STD^2), independently for each element: everything a sampler needs has a closed form."""

import torch
from torch import Tensor

from samplers import Coefficients, Prediction
from samplers.types import expand

MEAN, STD = 0.7, 0.5


def variance_at(c: Coefficients) -> Tensor:
    """The variance of x_t."""
    return c.alpha**2 * STD**2 + c.sigma**2


class ExactDenoiser:
    """E[eps | x_t] or E[v | x_t] of a path, with its calls counted."""

    def __init__(self, path, target: str):
        self.path, self.target, self.calls = path, target, 0

    def __call__(self, x: Tensor, t: Tensor) -> Prediction:
        self.calls += 1
        c = self.path.coefficients(t)
        centred = x - expand(c.alpha * MEAN, x)
        eps = expand(c.sigma / variance_at(c), x) * centred
        if self.target == "eps":
            return Prediction(eps, "eps", x, c, self.variance_fraction(x, t))
        x_0 = MEAN + expand(c.alpha * STD**2 / variance_at(c), x) * centred
        return Prediction(expand(c.d_alpha, x) * x_0 + expand(c.d_sigma, x) * eps, "v", x, c)

    def variance_fraction(self, x: Tensor, t: Tensor) -> Tensor | None:
        return None


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
