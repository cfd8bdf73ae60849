"""Paths from data to noise: x_t = alpha(t) x_0 + sigma(t) eps, with t = 0 data and t = 1 noise.

A path says its coefficients, the law of the training times, what the network is fed for a time, and the sampling grid.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from samplers.posterior import posterior
from samplers.types import Coefficients, Schedule


class Interpolant(Protocol):
    """What objectives and samplers ask of a path. Times are float64 in [0, 1]."""

    def coefficients(self, t: Tensor) -> Coefficients:
        """alpha, sigma and their derivatives along the path at t, of its shape and device."""

    def sample_t(self, u: Tensor) -> Tensor:
        """Training times from uniform draws u in [0, 1): the inverse distribution function of the time law."""

    def model_time(self, t: Tensor) -> Tensor:
        """What the network is fed."""

    def schedule(self, num_steps: int | str) -> Schedule:
        """The sampling grid of num_steps steps."""


@dataclass(frozen=True)
class Linear:
    """Rectified flow (Liu et al. 2023; SiT's Linear): alpha = 1 - t, sigma = t, so v = eps - x_0.

    `time_scale` multiplies what the network is fed; SiT feeds t itself (time_scale 1), which leaves most of the
    sinusoids of the time embedding nearly constant. `data_at_1` feeds 1 - t: the direction of SiT's published code.
    `time_law` of the training times: uniform, or logit-normal, t = sigmoid(z) with z ~ N(0, 1) (Esser et al. 2024,
    Section 3.1), which spends more of the training where the velocity is hardest to tell.
    """

    time_scale: float = 1000.0
    data_at_1: bool = False
    time_law: str = "uniform"

    def __post_init__(self):
        if self.time_law not in ("uniform", "logit-normal"):
            raise ValueError(f"objective.time_law must be uniform or logit-normal, got {self.time_law!r}")

    def coefficients(self, t: Tensor) -> Coefficients:
        one = torch.ones_like(t)
        return Coefficients(1 - t, t, -one, one)

    def sample_t(self, u: Tensor) -> Tensor:
        return u if self.time_law == "uniform" else torch.sigmoid(torch.special.ndtri(u))

    def model_time(self, t: Tensor) -> Tensor:
        return self.time_scale * (1 - t if self.data_at_1 else t)

    def schedule(self, num_steps: int | str) -> Schedule:
        num = _positive_count(num_steps)
        t = torch.arange(num, -1, -1, dtype=torch.float64) / num  # linspace misses round times by a last bit
        return Schedule(t, self.coefficients(t))


@dataclass(frozen=True)
class DiscreteVP:
    """DDPM's chain (Ho et al. 2020): beta linear from 1e-4 to 0.02 over 1000 steps, alpha^2 = prod(1 - beta).

    Index i of the chain is t = (i + 1) / 1000; t = 0 is data. The network is fed i. Coefficients exist at these
    times only; their derivatives are with respect to the angle, alpha = cos(phi) and sigma = sin(phi).
    """

    num_timesteps: int = 1000

    @cached_property
    def _alphas_cumprod(self) -> Tensor:
        """(num_timesteps + 1,) float64; entry 0 is data (1.0), entry i + 1 is index i of the chain."""
        scale = 1000 / self.num_timesteps
        betas = torch.linspace(scale * 1e-4, scale * 0.02, self.num_timesteps, dtype=torch.float64)
        return torch.cat([torch.ones(1, dtype=torch.float64), torch.cumprod(1 - betas, dim=0)])

    def coefficients(self, t: Tensor) -> Coefficients:
        a = self._alphas_cumprod.to(t.device)[self._grid_index(t)]
        alpha, sigma = torch.sqrt(a), torch.sqrt(1 - a)
        return Coefficients(alpha, sigma, -sigma, alpha)

    def sample_t(self, u: Tensor) -> Tensor:
        return (torch.floor(u * self.num_timesteps) + 1) / self.num_timesteps

    def model_time(self, t: Tensor) -> Tensor:
        return (self._grid_index(t) - 1).to(t.dtype)

    def previous(self, t: Tensor) -> Tensor:
        """The neighbouring time of the full chain, one index nearer to the data."""
        return (self._grid_index(t) - 1).to(t.dtype) / self.num_timesteps

    @cached_property
    def min_log_variance(self) -> float:
        """The full chain's log posterior variance at index 1, which also stands in for index 0, where it is -inf."""
        return self._log_variance_at_index_1(torch.arange(self.num_timesteps))

    def schedule(self, num_steps: int | str) -> Schedule:
        kept = respaced_timesteps(num_steps, self.num_timesteps)
        t = torch.cat([(kept.flip(0) + 1).double() / self.num_timesteps, torch.zeros(1, dtype=torch.float64)])
        floor = self._log_variance_at_index_1(kept) if len(kept) > 1 else None
        return Schedule(t, self.coefficients(t), min_log_variance=floor, continuous=False)

    def _log_variance_at_index_1(self, kept: Tensor) -> float:
        both = self.coefficients((kept[:2] + 1).double() / self.num_timesteps)
        then, now = (Coefficients(*(c[i] for c in both)) for i in (0, 1))
        return float(posterior(now, then).log_variance)

    def _grid_index(self, t: Tensor) -> Tensor:
        return torch.round(t * self.num_timesteps).long()


def respaced_timesteps(spacing: int | str, num_timesteps: int) -> Tensor:
    """The indices of the full chain that a shorter one keeps, rising, int64 (Nichol and Dhariwal 2021, Section 4).

    "N" or N: N indices evenly spread from first to last. "a,b,c": consecutive sections of the chain (the first ones
    longer by one where it does not divide) with a, b, c indices. "ddimN": multiples of the smallest stride that gives N.
    """
    text = str(spacing)
    if text.startswith("ddim") and text[4:].isdigit():
        wanted = int(text[4:])
        for stride in range(1, num_timesteps + 1):
            if len(range(0, num_timesteps, stride)) == wanted:
                return torch.arange(0, num_timesteps, stride)
        raise ValueError(f"no integer stride keeps exactly {wanted} of {num_timesteps} steps: use {wanted} instead of {text}")
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"num_steps must be a count, a list like 10,15,20 or ddimN, got {text!r}")
    counts = [int(part) for part in parts]
    length, longer = divmod(num_timesteps, len(counts))
    kept, start = [], 0
    for section, count in enumerate(counts):
        size = length + (section < longer)
        if count > size:
            raise ValueError(f"cannot keep {count} steps of a section of {size}: num_steps may be at most {num_timesteps} in all")
        stride = 1.0 if count == 1 else (size - 1) / (count - 1)
        position = 0.0
        for _ in range(count):  # accumulated, not multiplied: the recorded chains round this way
            kept.append(start + round(position))
            position += stride
        start += size
    return torch.tensor(kept)


def _positive_count(num_steps: int | str) -> int:
    if not str(num_steps).isdigit() or int(num_steps) < 1:
        raise ValueError(f"num_steps must be a positive count for this path, got {num_steps!r}")
    return int(num_steps)


PATHS = {"linear": Linear, "ddpm": DiscreteVP}
